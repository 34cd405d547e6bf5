"""Trial: the sessions of one spec, side by side in processes of their own."""

import logging
import multiprocessing
import os
import secrets
import signal
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

from slm_lab.experiment import analysis, model_files, resume, retro_analysis
from slm_lab.experiment.run_lock import RunLock
from slm_lab.experiment.session import Session
from slm_lab.experiment.stop import SIGNALS, StopRequest
from slm_lab.lib import logger as lab_logger
from slm_lab.lib.errors import LabError
from slm_lab.spec import spec_util

logger = logging.getLogger('slm_lab.experiment')


@dataclass
class SessionResult:
    """How a session ended. `error` is a line for the user, None when all went well."""

    finished: bool = False
    metrics: dict = None
    error: str = None
    crashed: bool = False  # by a fault of the lab or the machine, not of the input


@dataclass
class Outcome:
    """How a trial ended: `metrics` {name: value} are there when every session is finished."""

    finished: bool
    metrics: dict = field(default_factory=dict)


class Trial:
    """Runs the sessions of a spec, and averages them.

    Args:
        spec: a checked spec (`spec_util.get`)
        mode: `train` or `dev`
        stop: StopRequest that sessions heed
        resumes: whether the run folder may hold sessions to go on from
        changes: the changes of the spec since, for the history
    """

    def __init__(self, spec, mode='train', stop=None, resumes=False, changes=()):
        self.spec, self.mode, self.resumes, self.changes = spec, mode, resumes, changes
        self.stop = stop or StopRequest()
        meta = spec['meta']
        if meta.get('random_seed') is None:
            meta['random_seed'] = secrets.randbelow(2**31)
        spec_util.set_paths(spec)
        self.folder = Path(meta['prepath']).parent
        self.experiment_spec = spec_util.copy_of(spec)
        spec_util.tick(spec, 'trial')

    def run(self):
        """Returns: Outcome. Raises: LabError when a session failed; the work of the others is kept."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with RunLock(self.folder):
            lab_logger.setup(f'{self.spec["meta"]["log_prepath"]}.log')
            self._write_specs()
            specs = [spec_util.session_spec(self.spec, i) for i in range(self.spec['meta'].get('max_session', 1))]
            todo = [s for s in specs if not (self.resumes and resume.is_finished(s))]
            self._announce(specs, todo)
            results = self._run_sessions(todo)
            self._raise_failures(results)
            finished = all(result.finished for result in results.values())
            self._add_history('finish' if finished else 'stop')
            metrics = self._analyze(specs, results) if finished and self.stop.signal is None else {}
        return Outcome(finished, metrics)

    def _write_specs(self):
        spec_util.save(self.experiment_spec)
        spec_util.save(self.spec)
        self._add_history('resume' if self.resumes else 'start', changes=[list(row) for row in self.changes])

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

    def _run_sessions(self, specs):
        """{session index: SessionResult}"""
        if len(specs) == 1:
            spec = specs[0]
            return {spec['meta']['session']: run_guarded(spec, self.mode, self.stop, self.resumes)}
        return _Processes(self).run(specs)

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
            session_metrics.append(result.metrics if result else analyze_finished(spec))
        metrics = analysis.analyze_trial(self.spec, session_metrics, plot=not self.stop())
        logger.info('Trial %d done', self.spec['meta']['trial'])
        return metrics['scalar']


class SessionFailure(LabError):
    """A session crashed: not the user's input; its traceback is in its log."""

    exit_status = 1


def run_guarded(spec, mode, stop, resumes):
    """`run_session`, with what went wrong in the log and in the result."""
    try:
        return run_session(spec, mode, stop, resumes)
    except LabError as e:
        logger.error('%s', e)
        return SessionResult(error=str(e))
    except Exception as e:
        logger.error('Session crashed\n%s', traceback.format_exc())
        log = f'{spec["meta"]["log_prepath"]}.log'
        return SessionResult(error=f'{type(e).__name__}: {e}; the traceback is in {log}', crashed=True)


def run_session(spec, mode, stop, resumes):
    """Runs one session from start or checkpoint to finish or stop, in this process. Returns: SessionResult"""
    lab_logger.setup(f'{spec["meta"]["log_prepath"]}.log')
    spec_util.save(spec)
    session = Session(spec, mode, stop)
    restored = resume.restore_session(session) if resumes else None
    if restored is None:
        _load_net(session)
    logger.info('Running RL loop for trial %d session %d', spec['meta']['trial'], session.index)
    finished = session.run()
    metrics = session.analyze(plot=not stop()) if finished else None
    session.close()
    return SessionResult(finished, metrics)


def _load_net(session):
    source = session.resolved['agent']['load_net']
    if not source:
        return
    paths = model_files.find_trained(source, retro_analysis.find_run, retro_analysis.find_sessions)
    missing = model_files.load_models(session.agent.algorithm, paths, with_optim=False)
    session.agent.algorithm.sync_targets(missing)
    logger.info('Starting from trained nets: %s', ', '.join(str(model) for model, _ in paths.values()))


def analyze_finished(spec):
    """Metrics and graphs anew from the data frame of a session that has nothing left to train."""
    folder = Path(spec['meta']['prepath']).parent
    name = Path(spec['meta']['prepath']).name
    session = next(s for s in retro_analysis.find_sessions(folder) if s.name == name)
    train_df, eval_df = retro_analysis.load_session_data(session)
    return analysis.analyze_session(spec, train_df if eval_df is None else eval_df, 'eval', True)


class _Processes:
    """Sessions in processes, as many at a time as the CPUs carry."""

    def __init__(self, trial):
        self.trial, self.stop = trial, trial.stop
        self.context = multiprocessing.get_context('spawn')
        cpus = trial.spec['meta'].get('num_cpus', 1)
        self.limit = max(1, int((os.cpu_count() or 1) / cpus))
        self.running = {}  # sentinel -> (session index, process, connection)
        self.results = {}
        self.forwarded = False

    def run(self, specs):
        waiting = list(specs)
        logger.info('Running %d sessions, up to %d at a time', len(waiting), self.limit)
        while self.running or (waiting and not self.stop()):
            while waiting and len(self.running) < self.limit and not self.stop():
                self._start(waiting.pop(0))
            if self.stop() and not self.forwarded:
                self._forward()
            for sentinel in wait(list(self.running), timeout=0.5):
                self._collect(sentinel)
        for spec in waiting:
            self.results[spec['meta']['session']] = SessionResult()
        return self.results

    def _start(self, spec):
        receiver, sender = self.context.Pipe(duplex=False)
        args = (spec, self.trial.mode, self.stop.deadline, self.trial.resumes, sender, os.getpid())
        process = self.context.Process(target=_session_process, args=args, name=f'session {spec["meta"]["session"]}')
        # a signal that comes before the child can take it waits until it can
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        sender.close()
        self.stop.children.append(process)
        self.running[process.sentinel] = (spec['meta']['session'], process, receiver)

    def _forward(self):
        self.forwarded = True
        logger.info('Stopping for %s: every session saves a checkpoint', self.stop.reason)
        for _, process, _ in self.running.values():
            process.terminate()

    def _collect(self, sentinel):
        index, process, receiver = self.running.pop(sentinel)
        process.join()
        try:
            result = receiver.recv() if receiver.poll() else None
        except EOFError:
            result = None
        if result is None:
            log = f'{self.trial.spec["meta"]["log_prepath"]}_s{index}.log'
            died = f'killed by signal {-process.exitcode}' if process.exitcode < 0 else f'exit {process.exitcode}'
            result = SessionResult(error=f'its process died ({died}); its log is {log}', crashed=True)
        if result.error:
            logger.error('Session %d failed: %s', index, result.error)
        self.results[index] = result


def _session_process(spec, mode, deadline, resumes, sender, parent):
    stop = StopRequest(deadline, parent).install(ignore_interrupt=True)
    sender.send(run_guarded(spec, mode, stop, resumes))
    sender.close()
