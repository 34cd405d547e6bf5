"""Trial: the sessions of one spec, side by side in processes of their own, or on the nodes of a cluster."""

import contextlib
import logging
import re
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

from slm_lab.experiment import analysis, cluster, hogwild, memory_estimate, resume, retro_analysis, search
from slm_lab.experiment.run_lock import RunLock, is_alive
from slm_lab.experiment.session import Session
from slm_lab.experiment.session_processes import SessionProcesses, run_guarded
from slm_lab.experiment.stop import StopRequest
from slm_lab.experiment.trained_nets import load_net
from slm_lab.lib import logger as lab_logger
from slm_lab.lib.errors import LabError, MachineError
from slm_lab.spec import spec_util

logger = logging.getLogger('slm_lab.experiment')

_SECONDS_TO_TRY = 1000  # one run of a job array begins in each


@dataclass
class Outcome:
    """How a trial ended.

    Args:
        finished: whether every session is
        frames: {session index: frame of the checkpoint it has left} of those that ran
        metrics: {name: value}, once every session is finished and analysed
    """

    finished: bool
    frames: dict
    metrics: dict = field(default_factory=dict)


class Trial:
    """Runs the sessions of a spec, and averages them.

    Args:
        spec: a checked spec (`spec_util.get`)
        mode: `train` or `dev`
        stop: StopRequest that sessions heed
        resumes: whether the run folder may hold sessions to go on from
        changes: the changes of the spec since, for the history
        force: start also where memory will not do
        index: of a trial of a search, to which the run folder belongs; None: of the one trial of a run
    """

    def __init__(self, spec, mode='train', stop=None, resumes=False, changes=(), force=False, index=None):
        self.spec, self.mode, self.resumes, self.changes, self.force = spec, mode, resumes, changes, force
        self.stop, self.index = stop or StopRequest(), index
        self.on_cluster = cluster.is_wanted(spec, mode, self.stop)
        meta = spec['meta']
        if meta.get('random_seed') is None:
            meta['random_seed'] = secrets.randbelow(2**31)
        spec_util.set_paths(spec)
        self.folder = Path(meta['prepath']).parent
        self.experiment_spec = spec_util.copy_of(spec)
        if index is not None:
            meta['trial'] = index - 1
        spec_util.tick(spec, 'trial')

    def run(self):
        """Returns: Outcome. Raises: LabError when a session failed; the work of the others is kept."""
        if self.on_cluster:
            search.require_ray('RAY_ADDRESS' if search.joins_cluster() else 'meta.ray', 'ray')
        if not self.resumes:
            memory_line = self._check_memory(self.spec['meta'].get('max_session', 1))
            self._try_to_build()
        self._make_folder()
        with RunLock(self.folder, self.index) as self.lock:
            if self.index is None:
                sweep(self.folder)
            lab_logger.setup(f'{self.spec["meta"]["log_prepath"]}.log')
            specs = [spec_util.session_spec(self.spec, i) for i in range(self.spec['meta'].get('max_session', 1))]
            todo = [s for s in specs if not (self.resumes and is_complete(s))]
            if self.resumes:
                for spec in todo:
                    resume.check_resumable(spec)
                cluster.revoke(todo)
                memory_line = self._check_memory(len(todo)) if todo else None
            self._write_specs()
            self._announce(specs, todo)
            if memory_line:
                logger.info('%s', memory_line)
            results = self._run_sessions(todo, specs)
            self._raise_failures(results)
            finished = all(result.finished for result in results.values())
            frames = {index: result.frame for index, result in results.items() if result.frame is not None}
            self._add_history('finish' if finished else 'stop', frames={str(i): f for i, f in frames.items()})
            metrics = self._analyze(specs, results) if finished and self.stop.signal is None else {}
        return Outcome(finished, frames, metrics)

    def _check_memory(self, num_sessions):
        """Returns: a line on what the sessions take and what is there. Raises: NotEnoughMemory, unless it is forced"""
        limit = SessionProcesses(self.spec, self.mode, self.stop, self.resumes, None).limit
        if self.on_cluster and search.joins_cluster():  # of this machine it takes what building one takes
            limit = 1
        self.needed = memory_estimate.estimate(self.spec, min(num_sessions, limit))
        return memory_estimate.check(self.needed, self.force)

    def _try_to_build(self):
        """Builds a session and lets it go: a new run that cannot start says so before it leaves anything on disk."""
        try:
            session = Session(spec_util.session_spec(self.spec, 0), store=False)
        except MemoryError:  # the system does not even promise it
            raise memory_estimate.refusal(self.needed, forced=self.force, reserves=True) from None
        load_net(session)
        session.close()

    def _make_folder(self):
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            if self.resumes or self.spec['meta'].get('predir'):
                self.folder.mkdir(exist_ok=True)
            else:
                self._claim_folder()
        except OSError as e:
            raise LabError(f'{self.folder}: the run folder cannot be made: {e.strerror}') from None

    def _claim_folder(self):
        """A new run takes the next second when another, e.g. of the same job array, has begun in this one."""
        for _ in range(_SECONDS_TO_TRY):
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir()
                return
            time.sleep(1)
            now = time.strftime('%Y_%m_%d_%H%M%S')
            for spec in (self.spec, self.experiment_spec):
                spec['meta']['experiment_ts'] = now
                spec_util.set_paths(spec)
            self.folder = Path(self.spec['meta']['prepath']).parent
        raise LabError(f'{self.folder}: for {_SECONDS_TO_TRY} seconds each new run folder was there already; try later')

    def _write_specs(self):
        if self.index is None:
            spec_util.save(self.experiment_spec)
        spec_util.save(self.spec)
        if self.resumes:
            self._add_history('resume', changes=[list(row) for row in self.changes])
        else:
            self._add_history('start', spec=spec_util.record_of(self.spec))

    def _add_history(self, event, **details):
        seed = self.spec['meta']['random_seed']
        resume.add_history(self.folder, self.spec['name'], event, random_seed=seed, **details)

    def _announce(self, specs, todo):
        if not self.resumes:
            return
        for place, was, now in self.changes:
            logger.info('The spec has changed since, without altering the past: %s was %s, is %s', place, was, now)
        if not self.changes:
            logger.info('The spec is as it was')
        if len(todo) < len(specs):
            logger.info('%d of %d sessions have nothing left to train', len(specs) - len(todo), len(specs))

    # --- sessions

    def _run_sessions(self, specs, all_specs):
        """{session index: SessionResult}"""
        if not specs:
            return {}
        if self.on_cluster:
            return cluster.ClusterSessions(self.spec, self.mode, self.stop, self.resumes).run(specs)
        is_hogwild = bool(self.spec['meta'].get('distributed'))
        if len(specs) == 1 and not is_hogwild:
            spec = specs[0]
            return {spec['meta']['session']: run_guarded(spec, self.mode, self.stop, self.resumes)}
        shared = hogwild.build(all_specs, self.resumes, load_net) if is_hogwild else None
        return SessionProcesses(self.spec, self.mode, self.stop, self.resumes, self.lock, shared).run(specs)

    def _raise_failures(self, results):
        failed = {index: result for index, result in results.items() if result.error}
        if not failed:
            return
        self._add_history('failure', sessions=sorted(failed))
        lines = '; '.join(f'session {index}: {result.error}' for index, result in sorted(failed.items()))
        if not any(result.crashed for result in failed.values()):
            raise LabError(lines)
        raise SessionFailure(f"{len(failed)} of the trial's sessions failed; what the others did is kept. {lines}")

    def _analyze(self, specs, results):
        session_metrics = []
        for spec in specs:
            result = results.get(spec['meta']['session'])
            session_metrics.append(result.metrics if result else analyze_finished(spec, not self.stop()))
        metrics = analysis.analyze_trial(self.spec, session_metrics, plot=not self.stop())
        logger.info('Trial %d done', self.spec['meta']['trial'])
        return metrics['scalar']


class SessionFailure(MachineError):
    """A session crashed: its traceback is in its log."""


_TEMPORARY = re.compile(r'\..+\.(\d+)\.tmp')


def sweep(folder):
    """Removes the temporary files that killed processes have left in a run folder (checkpoints see to theirs)."""
    for path in folder.rglob('.*.tmp'):
        match = _TEMPORARY.fullmatch(path.name)
        if match and 'checkpoint' not in path.relative_to(folder).parts and not is_alive(int(match[1])):
            path.unlink(missing_ok=True)


def is_complete(spec):
    """Whether a session is finished and its classic files, which are written after the checkpoint, say so too."""
    if not resume.is_finished(spec):
        return False
    files_of = resume.classic_files(spec)
    if files_of is None:
        return False
    _, eval_df = retro_analysis.load_session_data(files_of)
    frame = resume.store_of(spec).find().generation.frame
    return eval_df is not None and len(eval_df) > 0 and int(eval_df['frame'].iloc[-1]) == frame  # the last one written


def analyze_finished(spec, plot=True):
    """Metrics and graphs anew from the data frame of a session that has nothing left to train."""
    _, eval_df = retro_analysis.load_session_data(resume.classic_files(spec))
    return analysis.analyze_session(spec, eval_df, 'eval', plot)
