"""Running sessions: one in this process, or several side by side in processes of their own."""

import contextlib
import logging
import multiprocessing
import os
import signal
import traceback
from dataclasses import dataclass
from multiprocessing import reduction, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path

from slm_lab.experiment import hogwild, model_files, resume
from slm_lab.experiment.session import Session
from slm_lab.experiment.stop import SIGNALS, StopRequest
from slm_lab.lib import logger as lab_logger
from slm_lab.lib.errors import LabError, MachineError
from slm_lab.lib.machine import count_cpus
from slm_lab.spec import spec_util

logger = logging.getLogger('slm_lab.experiment')


@dataclass
class SessionResult:
    """How a session ended. `error` is a line for the user, None when all went well."""

    finished: bool = False
    metrics: dict = None
    error: str = None
    crashed: bool = False  # by a fault of the lab or the machine, not of the input
    frame: int = None  # of its newest checkpoint; None when it did not begin
    signal: int = None  # that stopped it


def run_guarded(spec, mode, stop, resumes, shared=None, store=None):
    """`run_session`, with what went wrong in the log and in the result."""
    try:
        return run_session(spec, mode, stop, resumes, shared, store)
    except LabError as e:
        logger.error('%s', e)
        return SessionResult(error=str(e), crashed=isinstance(e, MachineError))
    except Exception as e:
        logger.error('Session crashed\n%s', traceback.format_exc())
        log = f'{spec["meta"]["log_prepath"]}.log'
        return SessionResult(error=f'{type(e).__name__}: {e}; the traceback is in {log}', crashed=True)


def run_session(spec, mode, stop, resumes, shared=None, store=None):
    """Runs one session from start or checkpoint to finish or stop, in this process. Returns: SessionResult

    Args:
        shared: global nets, for a worker of a Hogwild trial (`hogwild.build`)
        store: of the checkpoints, as of Session; not for a Hogwild worker
    """
    lab_logger.setup(f'{spec["meta"]["log_prepath"]}.log')
    spec_util.save(spec)
    session = Session(spec, mode, stop, store) if shared is None else hogwild.Worker(spec, mode, stop, shared)
    restored = resume.restore_session(session) if resumes else None
    if shared is not None:
        session.join(restored is not None)
    if restored is None and shared is None:
        for path in load_net(session):
            logger.info('Starting from the trained nets of %s', path)
    if restored is not None:
        resume.add_history(
            Path(spec['meta']['prepath']).parent,
            spec['name'],
            'session resumed',
            session=session.index,
            frame=session.clock.frame,
            source=restored.source,
        )
    logger.info('Running RL loop for trial %d session %d', spec['meta']['trial'], session.index)
    finished = session.run()
    metrics = session.analyze(plot=not stop()) if finished else None
    session.close()
    logger.info('Session %d %s', session.index, 'done' if finished else f'stopped at frame {session.clock.frame}')
    return SessionResult(finished, metrics, frame=session.clock.frame, signal=stop.signal)


def load_net(session):
    """Starts a session from the trained nets that its spec names, if any. Returns: [path of each]"""
    source = session.resolved['agent']['load_net']
    if not source:
        return []
    paths = model_files.find_trained(source)
    missing = model_files.load_models(session.agent.algorithm, paths, with_optim=False)
    session.agent.algorithm.sync_targets(missing)
    return [model for model, _ in paths.values()]


def start_process(process):
    """Starts a process in which a signal that comes before it can take it waits until it can."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        resource_tracker.ensure_running()  # which `start` would do, and which lets some of the signals through
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def how_it_died(process):
    code = process.exitcode
    return f'killed by signal {-code}' if code < 0 else f'exit {code}'


class SessionProcesses:
    """Sessions in processes, as many at a time as the CPUs carry.

    Args:
        spec: the trial's
        mode, stop, resumes: as of Trial
        lock: the RunLock of the run folder, which each process holds too
        shared: as of `run_session`. The workers of a Hogwild trial all run at a time, whatever the CPUs.
    """

    def __init__(self, spec, mode, stop, resumes, lock, shared=None):
        self.spec, self.mode, self.stop, self.resumes, self.lock = spec, mode, stop, resumes, lock
        self.shared = shared
        self.context = multiprocessing.get_context('spawn')
        self.limit = max(1, int(count_cpus() / spec['meta'].get('num_cpus', 1)))
        if spec['meta'].get('distributed'):
            self.limit = spec['meta'].get('max_session', 1)
        self.running = {}  # connection to the session -> (its index, its process)
        self.results = {}
        self.forwarded = False

    def run(self, specs):
        """Returns: {session index: SessionResult}"""
        waiting = list(specs)
        logger.info('Running %d sessions, up to %d at a time', len(waiting), self.limit)
        while self.running or (waiting and not self.stop()):
            while waiting and len(self.running) < self.limit and not self.stop():
                self._start(waiting.pop(0))
            if self.stop() and not self.forwarded:
                self._forward()
            # a connection is ready when a result has come, and when its process has died without one
            for receiver in wait(list(self.running), timeout=0.05):  # a signal waits for it
                self._collect(receiver)
        for spec in waiting:
            self.results[spec['meta']['session']] = SessionResult()
        return self.results

    def _start(self, spec):
        receiver, sender = self.context.Pipe(duplex=False)
        lock = _Lock(self.lock.descriptor)
        args = (spec, self.mode, self.stop.deadline, self.resumes, sender, os.getpid(), lock, self.shared)
        process = self.context.Process(target=_session_process, args=args, name=f'session {spec["meta"]["session"]}')
        self.stop.children.append(process)
        start_process(process)
        sender.close()
        self.running[receiver] = (spec['meta']['session'], process)

    def _forward(self):
        self.forwarded = True
        logger.info('Stopping for %s: every session saves a checkpoint', self.stop.reason)
        for _, process in self.running.values():
            process.terminate()

    def _collect(self, receiver):
        index, process = self.running.pop(receiver)
        try:
            result = receiver.recv()
        except (EOFError, OSError):
            result = None
        receiver.close()
        process.join()
        if result is None:
            log = f'{self.spec["meta"]["log_prepath"]}_s{index}.log'
            result = SessionResult(error=f'its process died ({how_it_died(process)}); its log is {log}', crashed=True)
        if result.error:
            logger.error('Session %d failed: %s', index, result.error)
        if result.signal is not None and not self.stop():  # one that was sent to the session alone
            self.stop.signal = result.signal
        self.results[index] = result


class _Lock:
    """Hands the run's lock on to a session process, which may outlive its parent until it has saved."""

    def __init__(self, descriptor):
        self.descriptor = descriptor

    def __reduce__(self):
        return reduction.DupFd(self.descriptor).detach, ()


def _session_process(spec, mode, deadline, resumes, sender, parent, lock, shared):
    stop = StopRequest(deadline, parent).install(ignore_interrupt=True)
    result = run_guarded(spec, mode, stop, resumes, shared)
    with contextlib.suppress(BrokenPipeError):  # its parent is gone
        sender.send(result)
    sender.close()
