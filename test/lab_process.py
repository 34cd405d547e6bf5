"""Runs the lab's command in processes of its own, for tests that stop, kill and damage runs.

- `Lab`: a folder with spec files and data, in which the command is run.
- `Life`: one such process; its output is in a file, its process group its own.
- hooks: Python code that runs when a function of the lab is called for the n-th time, also in session processes.

Importing the lab takes seconds, so most lives are forked from a server that has imported it (`ForkServer`); a life
that shall show its own start is started afresh.
"""

import atexit
import contextlib
import functools
import hashlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

from slm_lab.experiment.checkpoint import CheckpointStore
from slm_lab.lib.state import Ring, first_difference

ROOT = Path(__file__).resolve().parents[1]
RUN_LAB = ROOT / 'run_lab.py'
SPEC_NAME = 'tiny'
TIMEOUT = 90  # seconds; a life that takes longer hangs

# A hook is (module, name of a function in it, number of the call, code). The code runs before that call, and sees
# `args`; call 0 stands for every call. An empty name: the code runs when the module has been imported.
# `mark(name)` leaves a file in the lab's folder, and says whether it was the first to.
_HOOKS = """
import functools, importlib.abc, importlib.util, os, signal, sys, time

def mark(name):
    try:
        os.close(os.open(os.path.join(FOLDER, name), os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False

def in_session_process():
    return os.getpid() != os.getsid(0)  # a life leads a session, in the sense of the system, of its own

def wrap(owner, name, number, code):
    function, calls = getattr(owner, name), [0]
    @functools.wraps(function)
    def hooked(*args, **kwargs):
        calls[0] += 1
        if number in (0, calls[0]):
            exec(code, {**globals(), 'args': args})
        return function(*args, **kwargs)
    setattr(owner, name, hooked)

def apply(module, hooks):
    for module_name, path, number, code in hooks:
        if module_name != module.__name__:
            continue
        owner, *names = module, *path.split('.')
        if not path:
            exec(code, globals())
            continue
        for name in names[:-1]:
            owner = getattr(owner, name)
        wrap(owner, names[-1], number, code)

class AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, name, hooks):
        self.name, self.hooks = name, hooks
    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            apply(module, self.hooks)
        spec.loader.exec_module = exec_module
        return spec

def install(hooks):
    for name in dict.fromkeys(hook[0] for hook in hooks):
        if name in sys.modules:
            apply(sys.modules[name], hooks)
        else:
            sys.meta_path.insert(0, AfterImport(name, hooks))
"""

# a picture takes longer than all the training of these tests; runs whose graphs matter ask for them
_NO_SEARCH_GRAPH = 'import slm_lab.experiment.experiment_analysis as a; a.draw_experiment = lambda *_: True'
NO_GRAPHS = [
    ('slm_lab.experiment.analysis', '', 1, 'import slm_lab.experiment.analysis as a; a._draw = lambda *_: True'),
    ('slm_lab.experiment.experiment_analysis', '', 1, _NO_SEARCH_GRAPH),
]

# Sessions side by side are forked from their trial instead of started anew, which takes each of them seconds.
_FORKED = """
import multiprocessing, types
import slm_lab.experiment.child_processes as children
children.multiprocessing = types.SimpleNamespace(get_context=lambda _: multiprocessing.get_context('fork'))
"""
FORKED = [('slm_lab.experiment.child_processes', '', 1, _FORKED)]

_SERVER = """
import json, os, runpy, sys
import numpy, pandas, torch, gymnasium
import slm_lab.experiment.trial, slm_lab.experiment.resume, slm_lab.experiment.enjoy, slm_lab.experiment.verify
import slm_lab.spec.spec_util
import torch._dynamo  # building an optimizer imports it
print('ready', flush=True)
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        output = os.open(request['output'], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdin = open(os.devnull)
        os.chdir(request['cwd'])
        os.environ.clear()
        os.environ.update(request['env'])
        namespace = {'__name__': 'hooks'}
        exec(request['hooks_code'], namespace)
        namespace['install'](request['hooks'])
        sys.argv = [request['script'], *request['args']]
        sys.path[0] = os.path.dirname(request['script'])
        status = 1
        try:
            runpy.run_path(request['script'], run_name='__main__')
        except SystemExit as e:
            status = e.code or 0
        except BaseException:
            import traceback
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class ForkServer:
    """A process that has imported the lab and forks one life at a time."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, '-c', _SERVER],
            env={**os.environ, 'PYTHONPATH': str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._received = b''
        assert self._line() == 'ready'

    def _line(self, timeout=TIMEOUT):
        until = time.monotonic() + timeout
        while b'\n' not in self._received:
            if not select.select([self.process.stdout], [], [], max(0, until - time.monotonic()))[0]:
                return None
            received = os.read(self.process.stdout.fileno(), 1000)
            assert received, 'the fork server has ended'
            self._received += received
        line, _, self._received = self._received.partition(b'\n')
        return line.decode()

    def fork(self, **request):
        self.process.stdin.write(json.dumps(request).encode() + b'\n')
        self.process.stdin.flush()
        return int(self._line())

    def wait(self, timeout):
        line = self._line(timeout)
        return None if line is None else int(line)

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@functools.cache
def fork_server():
    """The server of this process."""
    server = ForkServer()
    atexit.register(server.close)
    return server


class Life:
    """One process of the lab. `status` is its exit status, negative after a signal; None while it lives."""

    def __init__(self, pid, wait, output_file):
        self.pid, self._wait, self._output_file = pid, wait, output_file
        self.status = None

    @property
    def output(self):
        return self._output_file.read_text()

    def wait(self, timeout=TIMEOUT):
        if self.status is None:
            self.status = self._wait(timeout)
            if self.status is None:
                self.kill()
                raise AssertionError(f'the lab did not end within {timeout} s:\n{self.output}')
        return self

    def poll(self):
        if self.status is None:
            self.status = self._wait(0)
        return self.status

    def signal(self, number):
        os.kill(self.pid, number)

    def signal_group(self, number):
        os.killpg(self.pid, number)

    def kill(self):
        """kill -9 of the process and of every process of its group."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.status = self._wait(TIMEOUT)

    def group(self):
        """The pids of its process group that live."""
        import psutil

        pids = []
        for process in psutil.process_iter(['status']):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(process.pid) == self.pid and process.info['status'] != psutil.STATUS_ZOMBIE:
                    pids.append(process.pid)
        return pids

    def wait_for_no_process(self):
        """Until no process of its group is left; helpers of multiprocessing end a moment after it."""
        self.wait_for(lambda: not self.group(), timeout=10)

    def wait_for(self, condition, timeout=TIMEOUT):
        """Waits until `condition()` holds; fails when the process ends before. Returns what it returned."""
        until = time.monotonic() + timeout
        was_alive = self.status is None
        while time.monotonic() < until:
            has_ended = was_alive and self.poll() is not None
            if value := condition():
                return value
            if has_ended:
                break
            time.sleep(0.005)
        self.kill()
        raise AssertionError(f'it never came to that:\n{self.output}')


class Lab:
    """A folder to run the lab in."""

    def __init__(self, folder, server=None):
        self.folder, self.server = Path(folder), server
        self.folder.mkdir(parents=True, exist_ok=True)
        self.data = self.folder / 'data'
        self.spec_file = self.folder / 'spec.json'
        self._lives = 0
        self._started = []

    def close(self):
        """Ends what a failed test may have left running."""
        import psutil

        for life in self._started:
            for pid in life.group():
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    if Path(process.cwd()).is_relative_to(self.folder):
                        process.kill()
            life.kill()

    def living(self, word=None):
        """Processes started anew for its data, such as Ray's, which leave the process group of their life.

        Args:
            word: one of their command line; None stands for any
        """
        import psutil

        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get('LAB_DATA_DIR') != str(self.data) or process.status() == 'zombie':
                    continue
                if word is None or word in process.cmdline():
                    found.append(process)
        return found

    def kill_living(self, word=None):
        import psutil

        for process in self.living(word):
            with contextlib.suppress(psutil.Error):
                process.kill()

    def assert_nothing_lives(self, word=None, timeout=20):
        """Whatever ends by itself gets some seconds to."""
        until = time.monotonic() + timeout
        while (left := self.living(word)) and time.monotonic() < until:
            time.sleep(0.1)
        assert left == []

    def write_spec(self, **changes):
        self.spec_file.write_text(json.dumps({SPEC_NAME: make_spec(**changes)}))

    def start(self, *args, hooks=(), fresh=False, spawned=False, graphs=False, cwd=None, env=()):
        """Starts `run_lab.py args`.

        Args:
            hooks: see above
            fresh: in a process that imports all by itself
            spawned: its session processes likewise, as they are in earnest
            graphs: draw them
        Returns: Life
        """
        self._lives += 1
        output = self.folder / f'output_{self._lives}.txt'
        output.touch()
        hooks = [*([] if graphs else NO_GRAPHS), *([] if spawned else FORKED), *hooks]
        environment = {k: v for k, v in os.environ.items() if k not in ('RENDER', 'LOG_LEVEL', 'PYTHONPATH')}
        environment |= {'LAB_DATA_DIR': str(self.data), 'RENDER': 'false', **dict(env)}
        site = self.folder / f'hooks_{self._lives}'
        site.mkdir()
        code = f'FOLDER = {str(self.folder)!r}\n{_HOOKS}'
        (site / 'sitecustomize.py').write_text(f'{code}\ninstall({hooks!r})\n')
        environment['PYTHONPATH'] = str(site)
        cwd = str(cwd or self.folder)
        args = [str(a) for a in args]
        if self.server is None or fresh:
            with open(output, 'ab') as f:
                process = subprocess.Popen(
                    [sys.executable, str(RUN_LAB), *args],
                    cwd=cwd,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=f,
                    stderr=f,
                    start_new_session=True,
                )
            return self._remember(Life(process.pid, lambda timeout: _wait_process(process, timeout), output))
        pid = self.server.fork(
            output=str(output),
            cwd=cwd,
            env=environment,
            hooks_code=code,
            hooks=hooks,
            script=str(RUN_LAB),
            args=args,
        )
        return self._remember(Life(pid, self.server.wait, output))

    def _remember(self, life):
        self._started.append(life)
        return life

    def run(self, *args, **kwargs):
        return self.start(*args, **kwargs).wait()

    def train(self, mode='train', **kwargs):
        return self.run(self.spec_file, SPEC_NAME, mode, **kwargs)

    def train_with(self, *options, mode='train', **kwargs):
        return self.run(*options, self.spec_file, SPEC_NAME, mode, **kwargs)

    def start_train(self, mode='train', **kwargs):
        return self.start(self.spec_file, SPEC_NAME, mode, **kwargs)

    @property
    def run_folder(self):
        """The run folder, of which there is one."""
        (folder,) = [p for p in self.data.iterdir() if p.is_dir()]
        return folder

    def has_mark(self, name):
        return (self.folder / name).exists()

    def log(self, session=0):
        path = self.run_folder / 'log' / f'{SPEC_NAME}_t0_s{session}.log'
        return path.read_text() if path.is_file() else ''

    def store(self, session=0):
        return CheckpointStore(self.run_folder / 'checkpoint' / f'{SPEC_NAME}_t0_s{session}')

    def frame(self, session=0):
        """The frame of the newest complete checkpoint, None where there is none, or no run folder yet."""
        if not (self.data.is_dir() and any(path.is_dir() for path in self.data.iterdir())):
            return None
        generation = self.store(session).find().generation
        return generation and generation.frame


def _wait_process(process, timeout):
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None


def resume_command(output):
    """The arguments of the command that an output tells to resume with."""
    import shlex

    (line,) = re.findall(r'^(?:Resume|Extend) it with: (.*)$', output, re.MULTILINE)
    python, script, *args = shlex.split(line)
    assert python in ('python', sys.executable)
    return script, args


def resumed_frames(output):
    """The frames of the checkpoints that the sessions of a life went on from."""
    return [int(f) for f in re.findall(r'Resumed trial 0 session \d+ from the checkpoint of frame (\d+)', output)]


# --- what a run has come to


def end_of(run_folder, session=0):
    """All of a session's end that two equal runs share: state tree, rows, classic files; and the trial's metrics."""
    trial = json.loads((run_folder / 'info' / f'{SPEC_NAME}_t0_trial_metrics.json').read_text())
    return {**end_of_session(run_folder, session), 'trial': trial}


def end_of_session(run_folder, session):
    name = f'{SPEC_NAME}_t0_s{session}'
    store = CheckpointStore(run_folder / 'checkpoint' / name)
    generation = store.find().generation
    assert generation is not None and generation.final
    models = sorted((run_folder / 'model').glob(f'{name}_*.pt'))
    assert models
    return {
        'state': read_state(store, generation),
        'best': store.best(generation),
        'train': read_rows(run_folder / 'info' / f'{name}_session_df_train.csv'),
        'eval': read_rows(run_folder / 'info' / f'{name}_session_df_eval.csv'),
        'models': {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in models},
        'metrics': json.loads((run_folder / 'info' / f'{name}_session_metrics_eval.json').read_text()),
    }


@functools.cache
def undisturbed(**changes):
    """[end of each session] of a run that nothing stopped; `changes` are those of `make_spec`."""
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(folder, fork_server())
        lab.write_spec(**changes)
        life = lab.train()
        assert life.status == 0, life.output
        return [end_of(lab.run_folder, session) for session in range(changes.get('max_session', 1))]


def read_state(store, generation):
    rings = {
        # as one that grows, which any ring can be read as
        path: Ring({k: np.zeros((r['capacity'], *shape), dtype) for k, (dtype, shape) in r['layout'].items()}, 0, 0)
        for path, r in generation.manifest['rings'].items()
    }
    return _without_wall_clock(store.restore(generation, rings))


def _without_wall_clock(tree):
    if isinstance(tree, dict):
        return {k: _without_wall_clock(v) for k, v in tree.items() if k not in ('wall_t', 'fps')}
    return tree


def read_rows(path):
    rows = pd.read_csv(path, dtype=str, keep_default_na=False).drop(columns=['wall_t', 'fps'])
    return rows.to_dict('list')


def assert_same_end(run_folder, expected, session=0):
    difference = first_difference(expected, end_of(run_folder, session))
    assert difference is None, f'{run_folder}: {difference}'


def hashes(folder, *patterns):
    """{relative path: hash} of the files under a folder."""
    paths = [p for pattern in patterns or ('**/*',) for p in folder.glob(pattern) if p.is_file()]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(paths)}


def leftovers(run_folder):
    """Temporary files that somebody forgot."""
    return [str(p) for p in run_folder.rglob('*.tmp')]


GAME_NET = {'type': 'ConvNet', 'conv_hid_layers': [[4, 8, 8, 0, 1]], 'fc_hid_layers': [8], 'normalize': True}
GAME_ENV = {'frame_op': 'concat', 'frame_op_len': 4, 'reward_scale': 'sign', 'resume': 'native'}


def make_spec(max_frame=600, max_session=1, log_frequency=100, rigorous_eval=0, warm_up=100, game=None, **meta):
    """DQN on CartPole, or on an Atari game."""
    spec = _cartpole_spec(max_frame, max_session, log_frequency, rigorous_eval, warm_up, **meta)
    if game is not None:
        net = spec['agent'][0]['net']
        del net['hid_layers']
        net.update(GAME_NET)
        spec['env'][0].update(GAME_ENV, name=game)
    return spec


def _cartpole_spec(max_frame, max_session, log_frequency, rigorous_eval, warm_up, **meta):
    return {
        'agent': [
            {
                'name': 'DQN',
                'algorithm': {
                    'name': 'DQN',
                    'action_pdtype': 'Argmax',
                    'action_policy': 'epsilon_greedy',
                    'explore_var_spec': {
                        'name': 'linear_decay',
                        'start_val': 1.0,
                        'end_val': 0.1,
                        'start_step': 0,
                        'end_step': 400,
                    },
                    'gamma': 0.99,
                    'training_batch_iter': 1,
                    'training_iter': 2,
                    'training_frequency': 4,
                    'training_start_step': warm_up,
                },
                'memory': {'name': 'Replay', 'batch_size': 16, 'max_size': 250, 'use_cer': True},
                'net': {
                    'type': 'MLPNet',
                    'hid_layers': [16],
                    'hid_layers_activation': 'selu',
                    'clip_grad_val': 0.5,
                    'loss_spec': {'name': 'MSELoss'},
                    'optim_spec': {'name': 'Adam', 'lr': 0.02},
                    'lr_scheduler_spec': {'name': 'StepLR', 'step_size': 200, 'gamma': 0.9},
                    'update_type': 'polyak',
                    'update_frequency': 8,
                    'polyak_coef': 0.1,
                    'gpu': False,
                },
            }
        ],
        'env': [{'name': 'CartPole-v1', 'max_t': None, 'max_frame': max_frame}],
        'meta': {
            'distributed': False,
            'log_frequency': log_frequency,
            'eval_frequency': log_frequency,
            'rigorous_eval': rigorous_eval,
            'max_session': max_session,
            'max_trial': 1,
            'random_seed': 7,
            **meta,
        },
    }
