"""One trial of a search, in a process of its own below a Ray worker.

The trial's process is what `train` would be: it has a main thread to take signals in, owns its sessions' processes, and
stops with a checkpoint when the worker above it is gone. The worker imports neither torch nor the lab's training code:
it only starts that process, hands on the rows it tells of, and ends it.

    worker -> process   one line of JSON: the job; then a line for each row it was told of; or SIGTERM
    process -> worker   one line of JSON for each row, where a scheduler wants them

A trial that the scheduler gives up finds a verdict on disk, so that a search which is killed just then still knows.
"""

import contextlib
import importlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import traceback
from pathlib import Path

from slm_lab.experiment.stop import StopRequest

GO_ON = b'go on\n'
_POLL = 0.5  # seconds that a worker waits for news before it looks whether Ray wants something else of it


# --- in the trial's process


class WatchedStop(StopRequest):
    """A StopRequest that tells of every row and waits for what the scheduler says to it.

    Args:
        parent: pid of the worker
        reports: descriptor to write rows to; None: nobody wants them
        verdict: path of a file that is there once the scheduler has given the trial up
    """

    def __init__(self, parent, reports=None, verdict=None):
        super().__init__(parent=parent)
        self.reports, self.verdict = reports, verdict
        self.look()

    def row_logged(self, row):
        metric = row['total_reward_ma']
        if self.reports is None or not math.isfinite(metric) or self():
            return
        line = json.dumps({'frame': int(row['frame']), 'total_reward_ma': float(metric)}) + '\n'
        with contextlib.suppress(BrokenPipeError):  # the worker is gone, which the next step finds out
            os.write(self.reports, line.encode())
            self._await_answer()
        self.look()

    def look(self):
        self.given_up = self.verdict is not None and os.path.exists(self.verdict)

    def _await_answer(self):
        answer = b''
        while not answer.endswith(b'\n') and self.signal is None:
            if select.select([0], [], [], _POLL)[0]:
                read = os.read(0, 1)
                if not read:  # the worker is gone
                    break
                answer += read


def run_job(job, stop):
    """Runs a job's trial and leaves its result on disk, unless it was interrupted.

    Args:
        job: {'run_trial': 'module:function', 'arguments': {…} to call it with, 'result_path', 'log_path'}
    """
    from slm_lab.lib.errors import LabError
    from slm_lab.lib.files import write_json

    module, _, name = job['run_trial'].partition(':')
    try:
        result = getattr(importlib.import_module(module), name)(stop=stop, **job['arguments'])
    except LabError as e:
        result = {'status': 'failed', 'error': str(e)}
    except Exception as e:
        with open(job['log_path'], 'a') as f:
            traceback.print_exc(file=f)
        result = {'status': 'failed', 'error': f'{type(e).__name__}: {e}; the traceback is in {job["log_path"]}'}
    if result is not None:
        write_json(result, job['result_path'], durable=True)


def main():
    """Reads a job from stdin. What the trial logs is in its log files; stderr is for crashes of the interpreter."""
    job = json.loads(_read_line(0))
    reports = os.dup(1)  # not inherited by the sessions
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    stop = WatchedStop(job['parent'], reports if job['reports'] else None, job['verdict_path'])
    stop.install(ignore_interrupt=True)
    if stop.given_up or not stop():
        run_job(job, stop)


def _read_line(descriptor):
    line = b''
    while not line.endswith(b'\n'):
        byte = os.read(descriptor, 4096)
        if not byte:
            sys.exit('no job came')
        line += byte
    return line


# --- in the Ray worker


def python_path():
    """PYTHONPATH of a process that is to find this lab."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([root, *filter(None, [os.environ.get('PYTHONPATH')])])


class TrialProcess:
    """Starts a trial's process and waits for it.

    Args:
        job: as of `run_job`, with 'reports' (whether rows are wanted), 'verdict_path' and 'output_path' (of what it
            prints)
    """

    def __init__(self, job):
        self.output_path = Path(job['output_path'])
        self.output_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.output_path, 'wb') as output:
            self.process = subprocess.Popen(
                [sys.executable, '-m', 'slm_lab.experiment.search_worker'],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**os.environ, 'PYTHONPATH': python_path()},
                start_new_session=True,  # what ends the worker's group shall let it save
                bufsize=0,
            )
        self.buffer, self.owes_answer, self.row = b'', False, {}
        line = json.dumps({**job, 'parent': os.getpid()}) + '\n'
        self._write(line.encode())

    def next(self):
        """What has happened since, within half a second: the newest row (the same one again when nothing has), or
        {'done': True, 'died': how, or None}. Calling it says that the trial may go on from the row before."""
        if self.owes_answer:
            self.owes_answer = False
            self._write(GO_ON)
        if b'\n' not in self.buffer and select.select([self.process.stdout], [], [], _POLL)[0]:
            read = os.read(self.process.stdout.fileno(), 65536)
            if not read:
                return {'done': True, 'died': self._how_it_died()}
            self.buffer += read
        line, newline, rest = self.buffer.partition(b'\n')
        if newline:
            self.buffer, self.row, self.owes_answer = rest, json.loads(line), True
        return dict(self.row)

    def end(self):
        """Interrupts the trial; returns when it has saved."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self._wait()

    def _wait(self):
        status = self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        with contextlib.suppress(OSError):
            if not self.output_path.stat().st_size:
                self.output_path.unlink()
        return status

    def _how_it_died(self):
        status = self._wait()
        if status == 0:
            return None
        how = f'killed by signal {-status}' if status < 0 else f'exit {status}'
        return f'its process died ({how}); what it printed is in {self.output_path}'

    def _write(self, content):
        with contextlib.suppress(BrokenPipeError):  # it has died, which `next` tells
            self.process.stdin.write(content)


def trainable_class():
    """The class that Ray Tune runs a trial by."""
    from ray import tune

    class SearchTrial(tune.Trainable):
        def setup(self, config):
            self.trial_process = TrialProcess(config['job'])

        def reset_config(self, new_config):
            """The next trial in the same worker, which saves starting one anew."""
            self.trial_process.end()
            self.trial_process = TrialProcess(new_config['job'])
            return True

        def step(self):
            return self.trial_process.next()

        def cleanup(self):
            self.trial_process.end()

    return SearchTrial


if __name__ == '__main__':
    main()
