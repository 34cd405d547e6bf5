"""Work side by side in processes of its own, each of which sends back how its work ended."""

import contextlib
import logging
import multiprocessing
import os
import signal
from multiprocessing import resource_tracker
from multiprocessing.connection import wait

from slm_lab.experiment.stop import SIGNALS, StopRequest

logger = logging.getLogger('slm_lab.experiment')


class ChildProcesses:
    """Runs one function on many arguments, each in a process of its own, some at a time.

    Args:
        limit: how many at a time
        stop: StopRequest. When it says so, nothing more begins, and the processes that run are told.
    """

    def __init__(self, limit, stop):
        self.limit, self.stop = limit, stop
        self.context = multiprocessing.get_context('spawn')
        self.running = {}  # connection to a process -> (place of its job, the process)

    def run(self, work, jobs):
        """Those that a stop keeps from beginning have no result.

        Args:
            work: function that can be pickled, called with a job's arguments and the StopRequest of its process; its
                result has a `signal`: the number of the one that stopped it, or None
            jobs: [(name of the process, arguments)]
        Yields: (place in `jobs`, result, None) as each ends, or (place, None, how its process died)
        """
        waiting, told = list(enumerate(jobs)), False
        while self.running or (waiting and not self.stop()):
            while waiting and len(self.running) < self.limit and not self.stop():
                place, (name, args) = waiting.pop(0)
                self._start(place, name, work, args)
            if self.stop() and not told:
                told = True
                self._tell()
            # a connection is ready when a result has come, and when its process has died without one
            for receiver in wait(list(self.running), timeout=0.05):  # a signal waits for it
                yield self._collect(receiver)

    def _start(self, place, name, work, args):
        receiver, sender = self.context.Pipe(duplex=False)
        args = (work, args, self.stop.deadline, os.getpid(), sender)
        process = self.context.Process(target=_child, args=args, name=name)
        self.stop.children.append(process)
        _start_process(process)
        sender.close()
        self.running[receiver] = (place, process)

    def _tell(self):
        logger.info('Stopping for %s: every session saves a checkpoint', self.stop.reason)
        for _, process in self.running.values():
            process.terminate()

    def _collect(self, receiver):
        place, process = self.running.pop(receiver)
        try:
            result, death = receiver.recv(), None
        except (EOFError, OSError):
            result = None
        receiver.close()
        process.join()
        if result is None:
            death = f'killed by signal {-process.exitcode}' if process.exitcode < 0 else f'exit {process.exitcode}'
        elif result.signal is not None and not self.stop():  # one that was sent to that process alone
            self.stop.signal = result.signal
        return place, result, death


def _child(work, args, deadline, parent, sender):
    stop = StopRequest(deadline, parent).install(ignore_interrupt=True)
    result = work(*args, stop)
    with contextlib.suppress(BrokenPipeError):  # its parent is gone
        sender.send(result)
    sender.close()


def _start_process(process):
    """Starts a process in which a signal that comes before it can take it waits until it can."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        resource_tracker.ensure_running()  # which `start` would do, and which lets some of the signals through
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
