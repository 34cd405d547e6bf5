"""Slots in worker processes, several in each, with the results of the same slots in this process.

Observations, rewards, flags and actions lie in memory that all of them share; a step is one byte to every worker and
one byte back, through pipes, which also tell when a process at the other end is gone. All else (states, errors) is
pickled through the same pipes.

- `Workers`: N slots that step together.
"""

import contextlib
import ctypes
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from multiprocessing import util

import numpy as np
from gymnasium import spaces

from slm_lab.env.registration import describe_error
from slm_lab.env.slot import Outcome, Slot, SlotGroup
from slm_lab.lib.errors import LabError, MachineError
from slm_lab.lib.rng import GlobalStreams, generator

logger = logging.getLogger('slm_lab.env')

STEP, CALL, QUIT = b's', b'c', b'q'  # to a worker
NOTHING_ENDED, ENDED, RESULT, ERROR = b'.', b'e', b'=', b'!'  # from it; the last two are followed by an object

# the parent decides about these
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

# forked where that is safe: it takes no time, and what the main script has registered is there
START_METHOD = 'spawn' if sys.platform == 'darwin' else 'fork'

ALIGNMENT = 64  # bytes, a cache line
PARENT_CHECK_SECONDS = 0.5
CLOSE_SECONDS = 2.0  # that workers get to close their environments

_all_workers = weakref.WeakSet()


def _close_in_fork():
    """Another forked process would keep the pipes of our workers open, which then never learn that we are gone."""
    for workers in list(_all_workers):
        for link in workers.links:
            link.close()


os.register_at_fork(after_in_child=_close_in_fork)


def worker_shares(num_envs, cpus):
    """The slots of each worker: [range, ...], as even as can be, the larger first."""
    num_workers = min(num_envs, cpus)
    sizes = [num_envs // num_workers + (i < num_envs % num_workers) for i in range(num_workers)]
    starts = [sum(sizes[:i]) for i in range(num_workers)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


class SharedArrays:
    """Arrays in memory that workers share. It has no name, so that nothing of it is left, however processes end.

    Args:
        layout: [(shape, dtype), ...]
    """

    def __init__(self, context, layout):
        self.layout, self._starts, size = layout, [], 0
        for shape, dtype in layout:
            self._starts.append(size)
            size += -(-math.prod(shape) * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
        self._memory = context.RawArray(ctypes.c_byte, size)

    def views(self):
        return [
            np.frombuffer(self._memory, dtype, math.prod(shape), start).reshape(shape)
            for (shape, dtype), start in zip(self.layout, self._starts, strict=True)
        ]


class Link:
    """The parent's end of what connects it to one worker.

    Attributes:
        process: the worker; None until it is started.
        slots: range of those that it holds.
    """

    def __init__(self, slots, commands, answers):
        self.process, self.slots = None, slots
        self._commands, self._answers = commands, answers
        self.command_fd, self.answer_fd = commands.fileno(), answers.fileno()

    def call(self, method, *args):
        os.write(self.command_fd, CALL)
        self._commands.send((method, args))

    def receive(self):
        return self._answers.recv()

    def close(self):
        self._commands.close()
        self._answers.close()


class Workers:
    """N slots in worker processes. They end with `close`, with this object, and with this process.

    Args:
        name, build, num_envs, seed: as of VectorEnv.
        cpus: the largest number of workers.
        shape, dtype: of the observations of all slots, (N, *shape).
        action_space: of one slot.
    Raises: LabError, also from every method, when an environment cannot be built, raises an error, or its process
        dies; all workers are ended then.
    """

    def __init__(self, name, build, num_envs, seed, cpus, shape, dtype, action_space):
        self.name = name
        context = multiprocessing.get_context(START_METHOD)
        action_dtype = np.int64 if isinstance(action_space, spaces.Discrete) else action_space.dtype
        n, flag = (num_envs,), np.bool_
        outcome = [(shape, dtype), (n, np.float64), (n, flag), (n, flag), (shape, dtype), (n, flag)]
        arrays = SharedArrays(context, [((num_envs, *action_space.shape), action_dtype), *outcome])
        self._actions, *views = arrays.views()
        self._outcome = Outcome(*views)
        self.links, self._error = [], None
        _all_workers.add(self)
        # also when this process ends: before multiprocessing ends its children by a signal that ours ignore
        self._finalizer = util.Finalize(self, _end, (self.links,), exitpriority=10)
        try:
            for slots in worker_shares(num_envs, cpus):
                self._start(context, slots, build, seed, arrays)
        except BaseException:
            self.close()
            raise
        self._answers_of_all()

    def _start(self, context, slots, build, seed, arrays):
        command_reader, commands = context.Pipe(duplex=False)
        answers, answer_writer = context.Pipe(duplex=False)
        # already now, so that a forked worker closes our ends of its pipes too
        link = Link(slots, commands, answers)
        self.links.append(link)
        args = (slots, build, seed, arrays, command_reader, answer_writer, os.getpid())
        process = context.Process(target=_work, args=args, name=f'env {_slots_text(slots)}', daemon=True)
        # a signal that comes before the worker ignores it waits until it does
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        try:
            process.start()
            link.process = process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            command_reader.close()
            answer_writer.close()

    def reset(self, resume):
        """Returns: the first observations (N, *shape)."""
        self._call_all('reset', resume)
        return self._outcome.next_state.copy()

    def step(self, actions):
        """Returns: (Outcome of N slots, whether any episode ended). What is meant only at an end is overwritten by
        the next step, the rest is the caller's own."""
        if self._error is not None:
            raise self._error
        self._actions[...] = np.asarray(actions).reshape(self._actions.shape)
        links = self.links
        for link in links:
            try:
                os.write(link.command_fd, STEP)
            except OSError:
                self._fail(link)
        ended = False
        for link in links:
            answer = os.read(link.answer_fd, 1)
            if answer == ENDED:
                ended = True
            elif answer != NOTHING_ENDED:
                self._fail(link, answer)
        shared = self._outcome
        copies = [array.copy() for array in shared[:4]]
        return Outcome(*copies, shared.first, shared.lives_on), ended

    def load_state_dict(self, states, resume):
        """Returns: (where the episodes stand (N, *shape), the slots that were restarted)."""
        shares = [[states[i] for i in link.slots] for link in self.links]
        restarted = self._call_each('load_state_dict', [(share, resume) for share in shares])
        indices = [link.slots[i] for link, share in zip(self.links, restarted, strict=True) for i in share]
        return self._outcome.next_state.copy(), indices

    def state_dict(self):
        return [state for share in self._call_all('state_dict') for state in share]

    def forget_episodes(self):
        self._call_all('forget_episodes')

    def close(self):
        if self._error is None:
            self._error = LabError(f"env '{self.name}' is closed")
        self._finalizer()

    def _call_all(self, method, *args):
        return self._call_each(method, [args] * len(self.links))

    def _call_each(self, method, arguments):
        if self._error is not None:
            raise self._error
        for link, args in zip(self.links, arguments, strict=True):
            try:
                link.call(method, *args)
            except OSError:
                self._fail(link)
        return self._answers_of_all()

    def _answers_of_all(self):
        results = []
        for link in self.links:
            answer = os.read(link.answer_fd, 1)
            if answer != RESULT:
                self._fail(link, answer)
            try:
                results.append(link.receive())
            except (EOFError, OSError):
                self._fail(link)
        return results

    def _fail(self, link, answer=b''):
        """A worker has answered by an error, or not at all: ends them all and raises what is to be told."""
        error = None
        if answer == ERROR:
            with contextlib.suppress(EOFError, OSError):
                error, trace = link.receive()
                logger.error("env '%s': error in a worker process\n%s", self.name, trace)
        if isinstance(error, LabError):
            self._error = error
        elif error is not None:
            slot, what = error
            self._error = MachineError(f"env '{self.name}', slot {slot}: {what}")
        else:
            link.process.join(CLOSE_SECONDS)
            self._error = MachineError(
                f"env '{self.name}', {_slots_text(link.slots)}: the worker process {_death(link.process)}"
            )
        self.close()
        raise self._error


def _slots_text(slots):
    return f'slot {slots[0]}' if len(slots) == 1 else f'slots {slots[0]} to {slots[-1]}'


def _death(process):
    code = process.exitcode
    if code is None:
        return 'does not answer'
    return f'was killed by signal {-code}' if code < 0 else f'ended with exit status {code}'


def _end(links):
    """Asks workers to end, and ends those that do not."""
    for link in links:
        with contextlib.suppress(OSError):  # it has ended already
            os.write(link.command_fd, QUIT)
    deadline = time.monotonic() + CLOSE_SECONDS
    for link in links:
        link.close()
        if link.process is None:
            continue
        link.process.join(max(0, deadline - time.monotonic()))
        if link.process.is_alive():
            link.process.kill()
            link.process.join()
        link.process.close()
    links.clear()


def _work(slots, build, seed, arrays, commands, answers, parent):
    """What a worker process does."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.register_at_fork(after_in_child=lambda: (commands.close(), answers.close()))
    # an environment that draws from the process's generators does so apart from the run's
    GlobalStreams(seed, 'env', 'worker', slots[0]).install()
    rows = slice(slots[0], slots[-1] + 1)
    actions, *outcome = (view[rows] for view in arrays.views())
    group = None
    try:
        group = SlotGroup([Slot(build, generator(seed, 'env', i)) for i in slots])
        _answer(answers, RESULT, None)
        _serve(group, actions, Outcome(*outcome), commands, answers)
        group.close()
    except _ParentGone:
        group.close()
    except Exception as e:
        at = slots[0] + (group.at if group else 0)
        error = e if isinstance(e, LabError) else (at, describe_error(e))
        with contextlib.suppress(_ParentGone):
            _answer(answers, ERROR, (error, traceback.format_exc()))


class _ParentGone(Exception):
    """The other end of the pipes is closed."""


def _serve(group, actions, outcome, commands, answers):
    command_fd, answer_fd = commands.fileno(), answers.fileno()
    while True:
        command = os.read(command_fd, 1)
        if command == STEP:
            ended = group.step(actions, outcome)
            try:
                os.write(answer_fd, ENDED if ended else NOTHING_ENDED)
            except OSError as e:
                raise _ParentGone from e
        elif command == CALL:
            try:
                method, args = commands.recv()
            except (EOFError, OSError) as e:
                raise _ParentGone from e
            if method in ('reset', 'load_state_dict'):  # these tell where the episodes stand
                args = (*args, outcome.next_state)
            _answer(answers, RESULT, getattr(group, method)(*args))
        else:  # to quit, or the parent is gone
            return


def _answer(answers, kind, value):
    try:
        os.write(answers.fileno(), kind)
        answers.send(value)
    except OSError as e:
        raise _ParentGone from e


def _end_with(parent):
    """Ends this process when its parent is gone, should the pipe not tell: whoever was forked may hold its end."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os._exit(1)
