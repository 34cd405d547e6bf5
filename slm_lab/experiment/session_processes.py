"""Running sessions: one in this process, or several side by side in processes of their own."""

import logging
import traceback
from dataclasses import dataclass
from multiprocessing import reduction
from pathlib import Path

from slm_lab.experiment import hogwild, resume
from slm_lab.experiment.child_processes import ChildProcesses
from slm_lab.experiment.session import Session
from slm_lab.experiment.trained_nets import load_net, load_statistics
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
    if restored is None:
        load_statistics(session)
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
        self.limit = max(1, int(count_cpus() / spec['meta'].get('num_cpus', 1)))
        if spec['meta'].get('distributed'):
            self.limit = spec['meta'].get('max_session', 1)

    def run(self, specs):
        """Returns: {session index: SessionResult}"""
        logger.info('Running %d sessions, up to %d at a time', len(specs), self.limit)
        results = {spec['meta']['session']: SessionResult() for spec in specs}
        jobs = [(f'session {index}', self._arguments(spec)) for index, spec in zip(results, specs, strict=True)]
        for place, result, death in ChildProcesses(self.limit, self.stop).run(_run_child, jobs):
            index = specs[place]['meta']['session']
            if death:
                log = f'{self.spec["meta"]["log_prepath"]}_s{index}.log'
                result = SessionResult(error=f'its process died ({death}); its log is {log}', crashed=True)
            if result.error:
                logger.error('Session %d failed: %s', index, result.error)
            results[index] = result
        return results

    def _arguments(self, spec):
        return spec, self.mode, self.resumes, self.shared, _Lock(self.lock.descriptor)


def _run_child(spec, mode, resumes, shared, lock, stop):
    """Holds the lock of the run, by having been given it."""
    return run_guarded(spec, mode, stop, resumes, shared)


class _Lock:
    """Hands the run's lock on to a session process, which may outlive its parent until it has saved."""

    def __init__(self, descriptor):
        self.descriptor = descriptor

    def __reduce__(self):
        return reduction.DupFd(self.descriptor).detach, ()
