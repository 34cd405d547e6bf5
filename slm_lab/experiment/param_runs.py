"""The runs of a template: one trial per combination of its `spec_params`, each in a run folder of its own.

All of them bear one timestamp. `data/<template>_<timestamp>/runs.json` says which runs belong together; all else is in
their own folders, so that a driver that was killed at any moment finds out from them what is left to do.
"""

import contextlib
import functools
import logging
import os
import re
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

from slm_lab.experiment import memory_estimate, resume, retro_analysis
from slm_lab.experiment.child_processes import ChildProcesses
from slm_lab.experiment.run_lock import RunLock
from slm_lab.experiment.trial import Outcome, Trial, is_complete
from slm_lab.lib import files, paths
from slm_lab.lib.errors import LabError, ResumeError
from slm_lab.lib.machine import count_cpus
from slm_lab.spec import spec_util

logger = logging.getLogger('slm_lab.experiment')

RECORD = 'runs.json'
_TIMESTAMP = r'\d{4}_\d{2}_\d{2}_\d{6}'


@dataclass
class RunResult:
    """How one of the runs ended.

    Args:
        outcome: of its trial; None where it was skipped, failed, or never began
        skipped: whether nothing was left to do
        error: a line for the user, with the exit status that it stands for
        signal: that stopped it
    """

    name: str
    folder: Path
    outcome: Outcome = None
    skipped: bool = False
    error: str = None
    exit_status: int = 0
    signal: int = None

    @property
    def finished(self):
        return self.skipped or (self.outcome is not None and self.outcome.finished)


# --- places


def claim(name, run_names=()):
    """Makes the folder `<name>_<timestamp>`, of a second in which neither it nor a run of `run_names` has begun.

    Raises: LabError when it cannot be made.
    """
    data = paths.data_dir()
    try:
        data.mkdir(parents=True, exist_ok=True)
        while True:
            now = time.strftime('%Y_%m_%d_%H%M%S')
            if not any((data / f'{each}_{now}').exists() for each in (name, *run_names)):
                with contextlib.suppress(FileExistsError):  # another took it just now
                    (data / f'{name}_{now}').mkdir()
                    return data / f'{name}_{now}'
            time.sleep(0.1)
    except OSError as e:
        raise LabError(f'{data / name}: the run folder cannot be made: {e.strerror}') from None


def timestamp_of(folder):
    return folder.name[-len('2026_01_31_120000') :]


def holds_run(folder):
    return any(folder.glob('*_spec.json'))


def find_place(prename, template, names):
    """The folder of a template's runs.

    Args:
        prename: that folder, or the folder of any of the runs, in any form that `retro_analysis.find_run` takes; or
            `latest`, the newest that were started together
        names: of the specs that the template stands for
    Returns: `<data>/<template>_<timestamp>`; made when runs of an older lab lack it.
    Raises: ResumeError
    """
    place = _latest_place(template, names) if prename == 'latest' else _place_of(prename, template, names)
    place.mkdir(exist_ok=True)
    return place


def _latest_place(template, names):
    data = paths.data_dir()
    pattern = re.compile(rf'{re.escape(template)}_{_TIMESTAMP}')
    places = [p.parent for p in data.glob(f'*/{RECORD}') if pattern.fullmatch(p.parent.name)]
    if not places:  # runs of an older lab have no record of what belongs together but their timestamp
        runs = [run for name in names if (run := _find(lambda name=name: retro_analysis.find_run('latest', name)))]
        places = [run.parent / f'{template}_{timestamp_of(run)}' for run in runs]
    if not places:
        raise ResumeError(f"no run of template '{template}' in {data}, nor of any of its {len(names)} specs")
    return max(places, key=timestamp_of)


def _place_of(prename, template, names):
    path = Path(os.path.normpath(prename)) if prename.strip('/ ') else Path()
    if re.fullmatch(rf'{re.escape(template)}_{_TIMESTAMP}', path.name):
        for place in (path.absolute(), paths.data_dir() / path.name):
            if (place / RECORD).is_file():
                return place
        candidates = [path.with_name(f'{name}_{timestamp_of(path)}') for name in names]
    elif any(re.fullmatch(rf'{re.escape(name)}_{_TIMESTAMP}', path.name) for name in names):
        candidates = [path]
    else:
        raise ResumeError(
            f"'{prename}' is no run of template '{template}': give {template}_<timestamp>, the folder of one of its "
            "runs, or 'latest'"
        )
    for candidate in candidates:
        run = _find(lambda candidate=candidate: retro_analysis.find_run(str(candidate)))
        if run:
            return run.parent / f'{template}_{timestamp_of(run)}'
    raise ResumeError(f"'{prename}': there is no run of template '{template}' of that time")


def _find(find):
    try:
        return find()
    except ResumeError:
        return None


# --- running


class ParamRuns:
    """Runs every spec of a template, as many at a time as the CPUs and GPUs carry.

    Args:
        spec_file: where the template stands
        template: its name
        specs: `spec_util.get_all` of it
        place: `<data>/<template>_<timestamp>`, a folder; runs that are there already go on, finished ones stay as they
            are, missing ones start
        mode: `train` or `dev`
        stop: StopRequest that they heed
        force: start also where memory will not do
    """

    def __init__(self, spec_file, template, specs, place, mode, stop, force=False):
        self.spec_file, self.template, self.specs, self.place = spec_file, template, specs, Path(place)
        self.mode, self.stop, self.force = mode, stop, force
        self.limit = 1 if mode == 'dev' else side_by_side(specs)

    def run(self):
        """Yields: a RunResult as each run ends; runs that a stop kept from beginning have none."""
        self.place.mkdir(parents=True, exist_ok=True)
        with RunLock(self.place):
            record = {'template': self.template, 'runs': [self.folder_of(spec).name for spec in self.specs]}
            files.write_json(record, self.place / RECORD, durable=True)
            results = self._run_in_turn() if self.limit == 1 else self._run_side_by_side()
            yield from results
        if not self.stop():
            self._tidy()

    def folder_of(self, spec):
        return self.place.parent / f'{spec["name"]}_{timestamp_of(self.place)}'

    def _tidy(self):
        """Leaves no folder where no run could begin."""
        if not any(self.folder_of(spec).is_dir() for spec in self.specs):
            (self.place / RECORD).unlink(missing_ok=True)
            (self.place / 'lock').unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.place.rmdir()

    def _run_in_turn(self):
        for spec in self.specs:
            if self.stop():
                return
            yield run_one(self.spec_file, spec, self.folder_of(spec), self.mode, self.stop, self.force)

    def _run_side_by_side(self):
        logger.info('Running %d specs of %s, up to %d at a time', len(self.specs), self.template, self.limit)
        jobs = [(spec['name'], (self.spec_file, spec, self.folder_of(spec), self.mode)) for spec in self.specs]
        work = functools.partial(run_one, force=self.force)
        for place, result, death in ChildProcesses(self.limit, self.stop).run(work, jobs):
            if death:
                spec, error = self.specs[place], f'its process died ({death})'
                result = RunResult(spec['name'], self.folder_of(spec), error=error, exit_status=1)
            yield result


def side_by_side(specs):
    """How many runs the machine carries at a time, each with all of its sessions; by the needs of the first spec."""
    resolved = spec_util.resolve(specs[0])
    meta = resolved['meta']
    limits = [len(specs), count_cpus() / (meta['num_cpus'] * meta['max_session'])]
    if resolved['agent']['net'].get('gpu') and torch.cuda.is_available() and meta['num_gpus']:
        limits.append(torch.cuda.device_count() / (meta['num_gpus'] * meta['max_session']))
    if min(limits) >= 2:
        with contextlib.suppress(LabError):  # a spec that cannot be built says so when its turn comes
            needed = memory_estimate.estimate(specs[0], meta['max_session']).total
            limits.append(memory_estimate.available().num_bytes / needed)
    return max(1, int(min(limits)))


def run_one(spec_file, spec, folder, mode, stop, force=False):
    """Runs one spec in a folder: from where it stopped if it has begun there, not at all if it is finished.

    Returns: RunResult; what went wrong is in it.
    """
    name = spec['name']
    try:
        trial = open_trial(spec_file, spec, folder, mode, stop, force)
        if trial.resumes and is_done(trial.spec):
            logger.info('%s is finished, nothing is left to train', name)
            return RunResult(name, folder, skipped=True)
        return RunResult(name, folder, trial.run(), signal=stop.signal)
    except LabError as e:
        return RunResult(name, folder, error=str(e), exit_status=e.exit_status, signal=stop.signal)
    except OSError as e:
        return RunResult(name, folder, error=f'{e.filename or ""}: {e.strerror or e}', exit_status=1)
    except Exception as e:
        logger.error('%s crashed\n%s', name, traceback.format_exc())
        return RunResult(name, folder, error=f'{type(e).__name__}: {e}', exit_status=1)


def open_trial(spec_file, spec, folder, mode, stop, force=False):
    """The trial of a spec in a folder, which goes on where there is a run, and else starts.

    Raises: ResumeError when the spec has changed in a way that would have altered the run's past.
    """
    offset = spec['meta']['cuda_offset']
    if not holds_run(folder):
        spec['meta'].update(predir=str(folder), experiment_ts=timestamp_of(folder))
        return Trial(spec_util.override_spec(spec, mode), mode, stop, force=force)
    spec, _, changes = resume.open_run(str(folder), spec_file, spec['name'], mode)
    spec['meta']['cuda_offset'] = offset
    return Trial(spec, mode, stop, resumes=True, changes=changes, force=force)


def is_done(trial_spec):
    """Whether every session of a trial is finished, and the trial analysed."""
    sessions = [spec_util.session_spec(trial_spec, i) for i in range(trial_spec['meta'].get('max_session', 1))]
    analysed = Path(f'{trial_spec["meta"]["info_prepath"]}_trial_metrics.json')
    return all(map(is_complete, sessions)) and analysed.is_file()
