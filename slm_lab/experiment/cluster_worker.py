"""One session of a trial on a node of a cluster, in a process of its own below a Ray worker.

    Ray worker -> keeper -> session

The session is what it would be on one machine: it has a main thread to take signals in, and stops with a checkpoint
when what is above it is gone. Ray kills the children of a worker that it ends; the keeper is there to take that.
Worker and keeper import neither torch nor the lab's training code.

What passes between driver and session lies in the run folder, on the file system that all nodes share, so that both
know of it even where the network between them is cut:

    driver -> session   cluster/<session>.json: the number of the attempt that may write, and whether it shall stop
    session -> driver   cluster/<session>_place.json: on which node an attempt has begun

Only the result comes back through Ray.
"""

import contextlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from slm_lab.experiment.search_worker import python_path
from slm_lab.experiment.stop import SIGNALS, StopRequest

FOLDER = 'cluster'
PATIENCE = 15  # seconds until a node has to see what the driver has written, and a file that is being replaced is back
_LOOK = 1  # seconds between two looks at what the driver says
_WATCH = 0.2  # seconds between two looks at what has died


class Ticket:
    """The right of one attempt at a session to write into the run folder. It ends when the next attempt gets one.

    Args:
        path: of the file that the driver writes
        attempt: number of the attempt, larger than those of all earlier ones
        token: drawn for this attempt
    """

    def __init__(self, path, attempt, token):
        self.path, self.attempt, self.token = Path(path), attempt, token

    def is_newest(self):
        state = self._read()
        return (state['attempt'], state['token']) == (self.attempt, self.token)

    def may_go_on(self):
        """False as well where the driver has told the session to stop."""
        state = self._read()
        return (state['attempt'], state['token'], state['stop']) == (self.attempt, self.token, False)

    def is_seen(self):
        """Waits for the file, since a network file system may show it late. Returns: whether it came"""
        return self._read()['token'] is not None

    def _read(self):
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return json.loads(self.path.read_bytes())
            except (OSError, ValueError):  # on NFS a file may be gone for a moment while it is replaced
                if time.monotonic() > until:
                    return {'attempt': None, 'token': None, 'stop': True}
            time.sleep(_WATCH)


class AttemptStop(StopRequest):
    """A StopRequest that looks, once a second, at what the driver says.

    Args:
        ticket: Ticket
        parent: pid of the keeper
    """

    def __init__(self, ticket, parent):
        super().__init__(parent=parent)
        self.ticket, self.told = ticket, False
        self._next_look = 0

    def __call__(self):
        if self.told or super().__call__():
            return True
        now = time.monotonic()
        if now >= self._next_look:
            self.told = not self.ticket.may_go_on()
            self._next_look = now + _LOOK
        return self.told


# --- in the Ray worker


def attempt(details):
    """Runs one attempt at a session: what Ray calls on a node.

    Args:
        details: {'spec', 'mode', 'resumes', 'ticket': [path, attempt, token], 'place_path', 'output_path', 'cwd',
            'environment': {name: value or None}}
    Returns: {'node': its name, 'result': pickled SessionResult, or None; 'status': of the process, negative after a
        signal; 'error': what is wrong with the node, or None}
    """
    report = {'node': node_name(), 'result': None, 'status': None, 'error': None}
    ticket = Ticket(*details['ticket'])
    folder = ticket.path.parents[1]
    if not ticket.is_seen() or not os.access(folder, os.W_OK):
        why = f'does not see {folder}' if not folder.is_dir() else f'does not see what is written to {folder}'
        why = f'may not write to {folder}' if ticket.path.is_file() else why
        report['error'] = f'node {report["node"]} {why}; set LAB_DATA_DIR to a folder that all nodes share'
        return report
    from slm_lab.lib.files import write_json

    write_json({'attempt': ticket.attempt, 'node': report['node']}, details['place_path'])
    report['result'], report['status'] = _run_keeper(details)
    return report


def node_name():
    """Of the node that this is a worker of."""
    import ray

    return f'{socket.gethostname()} (Ray node {ray.get_runtime_context().get_node_id()[:8]})'


def _run_keeper(details):
    """Returns: (what the session has sent, or None; status)"""
    output = Path(details['output_path'])
    output.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **details['environment'], 'PYTHONPATH': python_path()}
    with open(output, 'wb') as f:
        keeper = subprocess.Popen(
            [sys.executable, '-m', 'slm_lab.experiment.cluster_worker'],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=f,
            env={name: value for name, value in environment.items() if value is not None},
            cwd=details['cwd'] if os.path.isdir(details['cwd']) else None,
            start_new_session=True,  # what ends the worker's group shall let the session save
            bufsize=0,
        )
    with contextlib.suppress(BrokenPipeError):
        keeper.stdin.write(json.dumps({**details, 'worker': os.getpid()}).encode() + b'\n')
    received = bytearray()
    while True:
        # the driver may cancel what it believes not to have begun: what has begun is told to stop by its ticket
        with contextlib.suppress(KeyboardInterrupt):
            has_ended = keeper.poll() is not None
            while select.select([keeper.stdout], [], [], 0 if has_ended else _WATCH)[0]:
                read = os.read(keeper.stdout.fileno(), 65536)
                if not read:
                    has_ended = True
                    break
                received += read
            if has_ended:
                status = keeper.wait()
                break
    keeper.stdin.close()
    keeper.stdout.close()
    if not output.stat().st_size:
        output.unlink(missing_ok=True)
    return bytes(received) or None, 128 - status if status > 128 else status


# --- in the keeper, and in the session's process below it


def main():
    line = sys.stdin.readline()
    if not line:
        sys.exit('no session came')
    details, keeper = json.loads(line), os.getpid()
    session = os.fork()
    if session == 0:
        _be_session(details, keeper)
        return 0
    os.close(1)
    for number in SIGNALS:  # sent to all processes of a node: the session saves
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == details['worker']:
        pid, status = os.waitpid(session, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        time.sleep(_WATCH)
    return 1  # the worker is gone; so is, for the session, its parent


def _be_session(details, keeper):
    results = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what it logs is in its log file
    stop = AttemptStop(Ticket(*details['ticket']), keeper).install(ignore_interrupt=True)
    from slm_lab.experiment import cluster

    result = cluster.run_attempt(details, stop)
    with contextlib.suppress(BrokenPipeError):  # the worker is gone
        os.write(results, pickle.dumps(result))


if __name__ == '__main__':
    sys.exit(main())
