"""One process trains into a run folder at a time.

The lock is the kernel's (`flock`), so that it goes when its holder does, however that dies. The file's content only
tells who holds it. Reading a run folder needs no lock.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from slm_lab.lib.errors import LabError

# what flock answers on file systems (some network ones) that have no locks
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class Locked(LabError):
    """Another holds the lock.

    Args:
        elsewhere: whether that is a process on another host, of which this one cannot say whether it lives
    """

    def __init__(self, line, elsewhere=False):
        super().__init__(line)
        self.elsewhere = elsewhere


class RunLock:
    """Holds `<run folder>/lock` while a `with` block trains into the folder.

    A lock left behind by a process that died on this host is taken over. Processes forked inside the block share the
    lock and keep it until they end too; programs started inside it do not.

    Args:
        trial: index, of a trial that a search runs: the search holds the folder, each of its trials one of these
    Raises: Locked when another living process, or one on another host, holds it; LabError where there can be no lock.
    """

    def __init__(self, folder, trial=None):
        self.path = Path(folder) / ('lock' if trial is None else f'lock_t{trial}')
        self.holds = str(self.path.parent) if trial is None else f'trial {trial} of {self.path.parent}'
        self._descriptor = self._pid = None

    def __enter__(self):
        try:
            self._descriptor = self._take()
            self._pid = os.getpid()
            holder = {'pid': self._pid, 'host': _host(), 'since': time.strftime('%Y-%m-%dT%H:%M:%S%z')}
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)
        except OSError as e:
            self._close()
            raise LabError(f'{self.path}: cannot be locked: {e.strerror}') from None
        return self

    @property
    def descriptor(self):
        """Whoever holds a copy of it, e.g. a process that was handed it, holds the lock."""
        return self._descriptor

    def __exit__(self, *_):
        if os.getpid() == self._pid:  # in a forked child the lock is still its parent's
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._close()

    def _close(self):
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = self._pid = None

    def _take(self):
        """Returns the descriptor of the locked file."""
        while True:
            # Python opens descriptors close-on-exec
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                self._lock(descriptor)
                # the file may have been deleted between opening and locking: then a newer one is the lock
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), os.stat(self.path)):
                        return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _lock(self, descriptor):
        kernel_locks = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Locked(self._refusal(_holder(descriptor))) from None
        except OSError as e:
            if e.errno not in _NO_LOCKS:
                raise
            kernel_locks = False
        holder = _holder(descriptor)
        if holder is None:
            return
        if holder['host'] != _host():
            # Locks do not reach across hosts on every file system, and its pid says nothing here.
            raise Locked(f'{self._held_by(holder)}; if that process is gone, delete {self.path}', elsewhere=True)
        if not kernel_locks and holder['pid'] != os.getpid() and is_alive(holder['pid']):
            raise Locked(f'{self._held_by(holder)}; if that is another program by now, delete {self.path}')

    def _refusal(self, holder):
        if holder and holder['host'] == _host() and not is_alive(holder['pid']):
            return (
                f'{self.holds}: process {holder["pid"]} has died, and session processes that it started still '
                'save what they have; try again in a moment'
            )
        return f'{self._held_by(holder)}; wait for it or stop it'

    def _held_by(self, holder):
        who = f'process {holder["pid"]} on {holder["host"]} (since {holder["since"]})' if holder else 'another process'
        return f'{self.holds} is being trained by {who}'


def _holder(descriptor):
    """What the file says, or None where it says nothing (clean exit) or was cut short (a crash while writing it)."""
    try:
        content = json.loads(os.pread(descriptor, 4096, 0))
        return {'pid': int(content['pid']), 'host': str(content['host']), 'since': content.get('since')}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it is there, but is not ours
        return True
    return True


def _host():
    return socket.gethostname()
