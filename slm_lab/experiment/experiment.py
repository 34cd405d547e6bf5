"""Experiment: a search, which is many trials in one run folder. What it goes on from: `search_records`."""

import logging
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from slm_lab.experiment import analysis, experiment_analysis, resume, retro_analysis, search
from slm_lab.experiment.run_lock import Locked, RunLock
from slm_lab.experiment.search_records import (
    FAILED,
    FINISHED,
    GIVEN_UP,
    INTERRUPTED,
    MISSING,
    SearchRecords,
    reached_frame,
)
from slm_lab.experiment.stop import StopRequest
from slm_lab.experiment.trial import Trial, analyze_finished, is_complete, sweep
from slm_lab.lib import files
from slm_lab.lib import logger as lab_logger
from slm_lab.lib.errors import LabError, ResumeError, SpecError
from slm_lab.lib.machine import count_cpus
from slm_lab.spec import resume_rules, search_space, spec_util

logger = logging.getLogger('slm_lab.experiment')

_NUM_CHECKED = 20  # trials whose specs are checked beforehand where their values are not known yet
_PATIENCE = 60  # seconds that trials of a search which was killed may take to save


@dataclass
class SearchOutcome:
    """How a search ended.

    Args:
        finished: whether every trial has a result, failures included
        table: data frame, as of `experiment_analysis.make_table`
    """

    finished: bool
    table: pd.DataFrame

    def count(self, status):
        return int((self.table['status'] == status).sum())

    def count_ended(self):
        return len(self.table) - self.count(INTERRUPTED) - self.count(MISSING)

    @property
    def best(self):
        """The row of the strongest trial, or None."""
        has_strength = len(self.table) and pd.notna(self.table['strength'].iloc[0])
        return self.table.iloc[0] if has_strength else None


class Experiment:
    """Runs the trials of a search, and compares them.

    Args:
        spec: a checked spec (`spec_util.get`) with a `search`
        stop: StopRequest
        resumes: whether the run folder, which `meta.predir` then says, holds trials to go on from
        changes: the changes of the spec since, for the history
        run_trial: 'module:function' that runs a trial in a process of its own, as `run_trial` below
    """

    def __init__(self, spec, stop=None, resumes=False, changes=(), run_trial=f'{__name__}:run_trial'):
        self.spec, self.stop, self.resumes, self.changes = spec, stop or StopRequest(), resumes, changes
        self.run_trial = run_trial
        meta, self.name = spec['meta'], spec['name']
        if meta.get('random_seed') is None:
            meta['random_seed'] = secrets.randbelow(2**31)
        self.seed = meta['random_seed']
        self.resolved = spec_util.resolve(spec)
        self.spaces = search_space.parse(spec)
        self.by_optuna = self.resolved['meta']['search_alg'] == 'optuna'
        if not resumes and not meta.get('predir'):
            spec_util.tick(spec, 'experiment')
        spec_util.set_paths(spec)
        self.folder = Path(meta['prepath']).parent
        self.records = SearchRecords(spec)
        self.total = self.records.total

    # --- the run

    def run(self):
        """Returns: SearchOutcome. Raises: LabError before anything starts that cannot end well."""
        search.require_ray()
        self.check()
        self._make_folder()
        with RunLock(self.folder):
            held = await_trials(self.folder)
            if held:
                raise LabError('; '.join(held.values()))
            sweep(self.folder)
            lab_logger.setup(f'{self.spec["meta"]["log_prepath"]}.log')
            spec_util.save(self.spec)
            todo = [trial for trial in range(self.total) if not self.is_done(trial)]
            self._announce(todo)
            if todo:
                search.run(TrialQueue(self, todo), len(todo), self.stop, self._asha(), self.seed)
                held = await_trials(self.folder)
                for line in held.values():  # of a node that has died, say: what the others have done counts
                    logger.warning('%s', line)
            return self._end(held)

    def check(self):
        """Raises: LabError when a trial's spec, or what it takes, is wrong."""
        if self.by_optuna:
            search.check_for_optuna(self.name, self.spaces)
            search.require_optuna()
        if self.resumes:
            self._check_past()
        if self._asha() is not None and self.resolved['meta']['max_session'] > 1:
            logger.warning(
                'With a search_scheduler each trial runs one session, not %d', self.spec['meta']['max_session']
            )
        for trial in range(min(self.total, _NUM_CHECKED) if self.by_optuna else self.total):
            values = search_space.draw(self.spaces, self.seed, trial)
            search_space.check(self.spec, self.spaces, values)
            if trial == 0:
                spec_util.check(search_space.apply(self.spec, values))  # says which keys nothing reads
            self._check_resources(trial, values)

    def _check_resources(self, trial, values):
        if search.joins_cluster():
            return
        for what, wanted, there in zip(
            ('CPUs', 'GPUs'),
            resources(self.records.trial_spec(trial, values)),
            (count_cpus(), torch.cuda.device_count()),
            strict=True,
        ):
            if wanted > there:
                raise SpecError(
                    f'{self.name} > meta.search_resources: a trial takes {wanted:g} {what}, and there are {there} here'
                )

    def _check_past(self):
        was, now = (s.get('search') or {} for s in (resume.read_saved_spec(self.folder), self.spec))
        old, new = (_flatten_search(part) for part in (was, now))
        rows = [(key, old.get(key), new.get(key)) for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
        if rows:
            raise ResumeError(
                'this search cannot go on with what it searches over changed\n'
                f'{resume_rules.table(rows)}\nrestore the values, or start a new search'
            )

    def _make_folder(self):
        try:
            while True:
                try:
                    self.folder.mkdir(parents=True, exist_ok=self.resumes or bool(self.spec['meta'].get('predir')))
                    return
                except FileExistsError:  # another run has begun in this second
                    time.sleep(1)
                    spec_util.tick(self.spec, 'experiment')
                    self.folder = Path(self.spec['meta']['prepath']).parent
        except OSError as e:
            raise LabError(f'{self.folder}: the run folder cannot be made: {e.strerror}') from None

    def _announce(self, todo):
        event = {'changes': [list(row) for row in self.changes]} if self.resumes else {}
        self._add_history('search resumed' if self.resumes else 'search', trials=self.total, **event)
        for place, was, now in self.changes:
            logger.info('The spec has changed since, without altering the past: %s was %s, is %s', place, was, now)
        places = ', '.join(f'{place} ({space.kind})' for place, space in self.spaces.items())
        logger.info('Searching over %s: %d trials, random_seed %d', places, self.total, self.seed)
        if len(todo) < self.total:
            logger.info('%d of %d trials are done', self.total - len(todo), self.total)

    def _end(self, held):
        results = [self.records.result(trial) for trial in range(self.total)]
        finished = all(result is not None for result in results)
        rows = self.records.rows()
        df = experiment_analysis.write_table(self.spec, rows)
        if self.stop.signal is None and any(row['metrics'] for row in rows):
            experiment_analysis.draw(self.spec, df, rows)
        for trial, path in lock_paths(self.folder).items():
            if trial not in held:
                path.unlink(missing_ok=True)
        for path in self.folder.glob('log/*_output.txt'):  # empty ones of workers that were killed
            if not path.stat().st_size:
                path.unlink()
        self._add_history('search finished' if finished else 'search stopped')
        logger.info('Experiment %s', 'done' if finished else 'stopped')
        return SearchOutcome(finished, df)

    def _add_history(self, event, **details):
        resume.add_history(self.folder, self.name, event, random_seed=self.seed, **details)

    def _asha(self):
        """Keyword arguments of ASHA, or None."""
        options = self.resolved['meta']['search_scheduler']
        if options is None:
            return None
        defaults = {'grace_period': self.resolved['meta']['log_frequency'], 'max_t': self.resolved['env']['max_frame']}
        options = {key: defaults.get(key) if value is None else value for key, value in options.items()}
        if options['grace_period'] > options['max_t']:
            raise SpecError(
                f'{self.name} > meta.search_scheduler: grace_period {options["grace_period"]} is above '
                f'max_t {options["max_t"]}, so that nothing would ever be stopped'
            )
        return options

    def is_done(self, trial):
        """Whether nothing is left to do: it has ended well, and its sessions have nothing left to train."""
        result = self.records.result(trial)
        if result is None or self.records.sample(trial) is None or result['status'] == FAILED:
            return False
        specs = self.records.session_specs(trial)
        if result['frame'] != reached_frame(specs):  # it was gone on with by itself
            return False
        return result['status'] == GIVEN_UP or all(is_complete(spec) for spec in specs)


class TrialQueue:
    """The trials that are left of an experiment, for Ray to take (see `search.run`).

    Optuna's values for a trial are drawn from the results of all trials that lie at least so many before it as run side
    by side, and only once these are there: then they do not depend on which trial was the faster.
    """

    def __init__(self, experiment, todo):
        self.experiment, self.records, self.waiting = experiment, experiment.records, list(todo)
        self.open = set(todo)
        first = self.records.sample(0)
        self.concurrent = first['concurrent'] if first else self._count_concurrent()

    def _count_concurrent(self):
        experiment = self.experiment
        cpu, gpu = resources(self.records.trial_spec(0, search_space.draw(experiment.spaces, experiment.seed, 0)))
        limits = [count_cpus() // cpu] + ([torch.cuda.device_count() // gpu] if gpu else [])
        return max(1, int(min(limits)))

    def next(self):
        """Returns: Job, its values on disk; None while it has to wait. Raises: StopIteration"""
        if not self.waiting:
            raise StopIteration
        trial = self.waiting[0]
        sample = self.records.sample(trial)
        if sample is None:
            values = self._draw(trial)
            if values is None:
                return None
            self.records.write_sample(trial, values, self.concurrent)
        else:
            values = sample['values']
        self.waiting.pop(0)
        self.records.path(trial, 'result').unlink(missing_ok=True)
        return self._job(trial, values)

    def _draw(self, trial):
        experiment = self.experiment
        if not experiment.by_optuna:
            return search_space.draw(experiment.spaces, experiment.seed, trial)
        known = range(max(0, trial - self.concurrent + 1))
        if self.open.intersection(known):
            return None
        told = []
        for earlier in known:
            metrics = (self.records.result(earlier) or {}).get('metrics') or {}
            told.append((self.records.sample(earlier)['values'], metrics.get('strength')))
        return search.suggest_by_optuna(experiment.spaces, experiment.seed, trial, told)

    def _job(self, trial, values):
        spec = self.records.trial_spec(trial, values)
        details = {
            'run_trial': self.experiment.run_trial,
            'arguments': {'spec': spec, 'index': trial},
            'result_path': str(self.records.path(trial, 'result')),
            'verdict_path': str(self.records.path(trial, 'given_up')),
            'log_path': f'{spec["meta"]["log_prepath"]}.log',
            'output_path': f'{spec["meta"]["log_prepath"]}_output.txt',
        }
        logger.info('Trial %d is next: %s', trial, ', '.join(f'{place} = {value}' for place, value in values.items()))
        return search.Job(trial, details, *resources(spec))

    def ended(self, trial, died):
        result = self.records.result(trial)
        if result is None and died and not self.experiment.stop():
            result = {'status': FAILED, 'error': died}
            self.records.write_result(trial, result)
        self.open.discard(trial)
        if result is None:
            return
        strength = (result.get('metrics') or {}).get('strength')
        detail = result.get('error') or ('no strength' if strength is None else f'strength {strength:g}')
        logger.info('Trial %d %s (%s); %d to go', trial, result['status'], detail, len(self.open))
        experiment_analysis.write_table(self.experiment.spec, self.records.rows())

    def give_up(self, trial, frame):
        self.records.write_given_up(trial, frame)

    def reports(self, trial):
        return self.records.reports(trial)

    def others(self):
        return [trial for trial in range(self.experiment.total) if trial not in self.open]


def _flatten_search(part, path=''):
    """{place: text of its value}"""
    if isinstance(part, list):
        part = dict(enumerate(part))
    if not isinstance(part, dict):
        return {path: files.dump_json(part, indent=0)}
    flat = {}
    for key, value in part.items():
        place = f'{path}.{key}' if path else str(key)
        flat.update({place: value} if '__' in str(key) else _flatten_search(value, place))
    return flat


def resources(spec):
    """(CPUs, GPUs) of a trial: what its spec says, or what its sessions take together, as far as the machine has it."""
    resolved = spec_util.resolve(spec)
    meta = resolved['meta']
    if meta['search_resources'] is not None:
        return meta['search_resources']['cpu'], meta['search_resources']['gpu']
    cpu = min(count_cpus(), meta['num_cpus'] * meta['max_session'])
    nets = [resolved['agent'].get(key) or {} for key in ('net', 'critic_net')]
    gpu = (
        min(torch.cuda.device_count(), meta['num_gpus'] * meta['max_session']) if any(n.get('gpu') for n in nets) else 0
    )
    return cpu, gpu


def find_trial(prename, spec_name):
    """(run folder, index) of the trial of a search that a prename means, by its `{name}_t{i}_spec.json`; else None."""
    path = Path(prename)
    match = re.fullmatch(r'(.+)_t(\d+)_spec\.json', path.name)
    if not match or match[1] != spec_name:
        return None
    folder = retro_analysis.find_run(str(path.parent), spec_name)
    index = int(match[2])
    return (folder, index) if _sample_path(folder, spec_name, index).is_file() else None


def open_trial(folder, index, spec_file, spec_name, mode):
    """The spec that a trial of a search goes on with by itself: the file's as it is now, with the trial's values.

    Returns: (spec, changes), as of `resume.open_run`. Raises: ResumeError
    """
    spec, _, changes = resume.open_run(str(folder), spec_file, spec_name, mode)
    spec = search_space.apply(spec, files.read_json(_sample_path(folder, spec_name, index))['values'])
    if spec['meta'].get('search_scheduler'):
        spec['meta']['max_session'] = 1
    return spec, changes


def _sample_path(folder, name, index):
    return folder / 'info' / f'{name}_t{index}_sample.json'


def await_trials(folder):
    """Waits for the trials that outlived the search which started them: they save, then end.

    A lock of another host is waited for on a cluster alone: else the trials of a search run where it does.

    Returns: {trial: line on who holds it} of those that do not end.
    """
    until, is_told = time.monotonic() + _PATIENCE, False
    while True:
        held = {}
        for trial in lock_paths(folder):
            try:
                with RunLock(folder, trial):
                    pass
            except Locked as e:
                held[trial] = e
        may_end = any(search.joins_cluster() or not e.elsewhere for e in held.values())
        if not may_end or time.monotonic() > until:
            return {trial: str(e) for trial, e in held.items()}
        if not is_told:
            is_told = True
            logger.info('Waiting up to %d s for what still holds trials: %s', _PATIENCE, ', '.join(map(str, held)))
        time.sleep(0.1)


def lock_paths(folder):
    """{trial: path of its lock}, in the order of trials"""
    paths = {int(path.name.removeprefix('lock_t')): path for path in folder.glob('lock_t*')}
    return dict(sorted(paths.items()))


def run_trial(spec, index, stop):
    """Runs a trial of a search from wherever it is to its end, in this process.

    Args:
        spec: the trial's, with `meta.predir`
        stop: StopRequest; `given_up` once the scheduler stops the trial
    Returns: what the table says of it: {'status', 'frame', 'metrics'}; None when it was interrupted.
    Raises: LabError when it failed.
    """
    prepath = Path(spec['meta']['prepath'])
    trial = Trial(spec, 'train', stop, resumes=Path(f'{prepath}_spec.json').is_file(), index=index)
    outcome = trial.run()
    specs = [spec_util.session_spec(trial.spec, i) for i in range(trial.spec['meta'].get('max_session', 1))]
    if outcome.finished and outcome.metrics:
        if stop() and not stop.given_up:  # its graphs were left out: whoever goes on with the search has them drawn
            return None
        return {'status': FINISHED, 'frame': reached_frame(specs), 'metrics': outcome.metrics}
    if not outcome.finished and stop.given_up:
        metrics = analysis.analyze_trial(trial.spec, [analyze_finished(spec) for spec in specs])
        return {'status': GIVEN_UP, 'frame': reached_frame(specs), 'metrics': metrics['scalar']}
    return None
