"""Why a run should stop: a signal, a time limit, or the death of its parent. Asked once per step, so cheap."""

import os
import re
import signal
import threading
import time

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# `timeout` and some queues send one signal twice, to the process and to its group: that is no second Ctrl-C
_SAME_PRESS = 0.3  # seconds


class StopRequest:
    """A flag that signals set and the training loop reads between two transitions.

    Args:
        deadline: `time.time()` at which to stop, or None (`--stop-after`)
        parent: pid of the process whose death is a reason to stop, or None
    """

    def __init__(self, deadline=None, parent=None):
        self.deadline, self.parent = deadline, parent
        self.signal = None  # the first signal received
        self._signalled_at = None
        self.timed_out = False
        self.orphaned = False
        self.given_up = False
        self.children = []  # processes to end when the user insists

    def __call__(self):
        """Whether to stop now."""
        if self.signal is not None or self.given_up:
            return True
        if self._is_late():
            self.timed_out = True
            return True
        if self.parent is not None and os.getppid() != self.parent:
            self.orphaned = True
            return True
        return False

    def row_logged(self, row):
        """Told of each row of training, once its checkpoint is on disk: who watches may give the run up."""

    def _is_late(self):
        return self.deadline is not None and time.time() >= self.deadline

    @property
    def exit_status(self):
        """128 + the signal, as shells count; 0 for a time limit that was asked for."""
        return 128 + self.signal if self.signal is not None else 0

    @property
    def reason(self):
        if self.signal is not None:
            return signal.Signals(self.signal).name
        if self.given_up:
            return 'the scheduler'
        # sessions keep the time themselves: they may have stopped before anybody asked here
        return 'the time limit' if self.timed_out or self._is_late() else 'the end of its parent process'

    def install(self, ignore_interrupt=False):
        """Takes the signals over. Only the main thread can; elsewhere (notebooks, tests) they stay as they are.

        Args:
            ignore_interrupt: leave Ctrl-C, which a terminal sends to every process of a run, to the parent.
        """
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in SIGNALS:
            signal.signal(number, self._receive)
        if ignore_interrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return self

    def _receive(self, number, frame):
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._signalled_at = int(number), now
        elif number == signal.SIGINT and now - self._signalled_at > _SAME_PRESS:
            self._leave_at_once()

    def _leave_at_once(self):
        """Ctrl-C while it is stopping already: what is on disk is the last complete checkpoint, even amid a save."""
        for child in self.children:
            if child.pid and child.is_alive():
                child.kill()
        os.write(2, b'\nleft at once; the last checkpoint is complete\n')  # sys.stderr may be in use just now
        os._exit(128 + signal.SIGINT)


def parse_duration(text):
    """Seconds of e.g. `5h50m`, `90s`, `1h`, `20` (seconds). Raises: ValueError"""
    match = re.fullmatch(r'(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?', text.strip())
    if not text.strip() or not match or not any(match.groups()):
        raise ValueError(f"'{text}' is no duration; write e.g. 5h50m, 90s or 20")
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
