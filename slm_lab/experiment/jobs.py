"""Running the entries of a job file one after another, with a record from which an interrupted job goes on.

The record is `data/<job>_<timestamp>/job.json`. An entry's run folder is made, and named in the record, before the run
begins in it; so whenever the process dies, the record names the run that was under way.
"""

import contextlib
import logging
import re
from pathlib import Path

from slm_lab.experiment import experiment, param_runs, retro_analysis
from slm_lab.experiment.run_lock import RunLock
from slm_lab.lib import files, paths
from slm_lab.lib.errors import LabError, ResumeError
from slm_lab.spec import spec_util

logger = logging.getLogger('slm_lab.experiment')

RECORD = 'job.json'
_TIMESTAMP = r'\d{4}_\d{2}_\d{2}_\d{6}'
_TRAINS = ('train', 'dev', 'search')


class Job:
    """A job file under way.

    Args:
        folder: of its record
        job_file: path of the job file
        entries: [{spec_file, spec_name, mode, status, run}]; status is waiting, begun, done or failed; run names the
            run folder, or a search's trial by its spec, relative to the data folder where it lies there
    """

    def __init__(self, folder, job_file, entries):
        self.folder, self.job_file, self.entries = folder, job_file, entries

    @classmethod
    def start(cls, job_file, jobs):
        """A job of which nothing has run. Raises: LabError when its folder cannot be made."""
        job = cls(param_runs.claim(job_file.stem), job_file, [_new_entry(job) for job in jobs])
        job.save()
        return job

    @classmethod
    def resume(cls, job_file, jobs):
        """The newest job of a file, as far as it has come; entries that are new in the file wait.

        Raises: ResumeError
        """
        pattern = re.compile(rf'{re.escape(job_file.stem)}_{_TIMESTAMP}')
        folders = [p.parent for p in paths.data_dir().glob(f'*/{RECORD}') if pattern.fullmatch(p.parent.name)]
        for folder in sorted(folders, reverse=True):
            record = files.read_json(folder / RECORD)
            if record.get('job_file') == _identity(job_file):
                known = {_key(entry): entry for entry in record['entries']}
                return cls(folder, job_file, [known.get(tuple(job), _new_entry(job)) for job in jobs])
        raise ResumeError(f'no job of {job_file} is recorded in {paths.data_dir()}, so there is none to go on with')

    def save(self):
        record = {'job_file': _identity(self.job_file), 'entries': self.entries}
        files.write_json(record, self.folder / RECORD, durable=True)

    def run(self, run_entry, stop, report_error):
        """Runs what is left to do, each entry whatever became of those before it.

        Args:
            run_entry: (spec file, spec name, mode, run folder or None) -> exit status; raises LabError, OSError
            stop: StopRequest
            report_error: tells the user of such an error -> exit status
        Returns: exit status of the last entry that failed, else 0.
        """
        status = 0
        with RunLock(self.folder):
            for entry in self.entries:
                if stop():
                    break
                if entry['status'] == 'done':
                    logger.info('%s %s: done before, skipped', entry['spec_name'], entry['mode'])
                    continue
                status = self._run_entry(entry, run_entry, stop, report_error) or status
        return status

    def _run_entry(self, entry, run_entry, stop, report_error):
        folder = None
        try:
            mode, folder = self._begin(entry)
            status = run_entry(entry['spec_file'], entry['spec_name'], mode, folder)
        except (LabError, OSError) as e:
            status = report_error(e)
        if folder is not None:
            with contextlib.suppress(OSError):  # it holds a run
                folder.rmdir()
            if not folder.exists():
                entry['run'] = None
        if not stop():
            entry['status'] = 'failed' if status else 'done'
        self.save()
        return status

    def _begin(self, entry):
        """Sees to it that the record names the entry's run. Returns: (its mode, run folder to start or go on in)."""
        mode, _, prename = entry['mode'].partition('@')
        if entry['run'] is None and mode in _TRAINS:
            entry['run'] = self._name(_find_run(entry, prename) if prename else _claim_run(entry))
        entry['status'] = 'begun'
        self.save()
        if entry['run'] is None:
            return entry['mode'], None
        folder = self.folder.parent / entry['run']
        return (f'{mode}@{folder}', None) if prename else (mode, folder)

    def _name(self, folder):
        data = self.folder.parent
        return str(folder.relative_to(data) if folder.is_relative_to(data) else folder)

    def failed(self):
        """The entries that failed, as a line names them."""
        return [f'{entry["spec_name"]} {entry["mode"]}' for entry in self.entries if entry['status'] == 'failed']


def _new_entry(job):
    spec_file, spec_name, mode = job
    return {'spec_file': spec_file, 'spec_name': spec_name, 'mode': mode, 'status': 'waiting', 'run': None}


def _key(entry):
    return entry['spec_file'], entry['spec_name'], entry['mode']


def _identity(job_file):
    """A checkout may be moved together with its data."""
    path = job_file.resolve()
    if paths.CHECKOUT and path.is_relative_to(paths.CHECKOUT):
        return str(path.relative_to(paths.CHECKOUT))
    return str(path)


def _names_of(entry):
    """The names of the specs that a template stands for; none for another spec."""
    spec_file, spec_name = entry['spec_file'], entry['spec_name']
    return spec_util.template_names(spec_file, spec_name)


def _claim_run(entry):
    return param_runs.claim(entry['spec_name'], _names_of(entry))


def _find_run(entry, prename):
    names = _names_of(entry)
    if names:
        return param_runs.find_place(prename, entry['spec_name'], names)
    of_search = experiment.find_trial(prename, entry['spec_name'])
    if of_search:
        return of_search[0] / Path(prename).name
    return retro_analysis.find_run(prename, entry['spec_name'])
