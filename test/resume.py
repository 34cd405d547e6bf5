"""What the tests of resuming share: small specs, runs that stop where they are told, and a fresh process to go on in.

    spec = session_spec(tmp_path, raw_spec('DQN', 'Replay'))
    saved = run_to(spec, StopAt(150))               # trains, saves through the real store, and is thrown away
    resumed = fresh.call('go_on', spec)             # another process: builds all anew, loads, trains to max_frame
    assert_equal(resumed, run_to(unsaved(spec)))

Run as a program, this file is that process: it answers calls on stdin until its end. Before each call the
process-wide generators are set to values that no run has, so nothing can come right by being left over.
"""

import copy
import hashlib
import os
import pickle
import random
import secrets
import subprocess
import sys
from pathlib import Path

import numpy as np
import tiny_envs  # noqa: F401 (registers them, in the fresh process too)
import torch

from slm_lab.experiment import resume
from slm_lab.experiment.session import Session
from slm_lab.experiment.stop import StopRequest
from slm_lab.lib.state import WALL_CLOCK, first_difference, snapshot
from slm_lab.spec import spec_util

ROOT = Path(__file__).parents[1]
TS = '2026_01_31_120000'
MEMORIES = {
    'Random': ('OnPolicyReplay', 'OnPolicyBatchReplay', 'Replay', 'PrioritizedReplay', 'OnPolicyCrossEntropy'),
    'SARSA': ('OnPolicyReplay', 'OnPolicyBatchReplay'),
    'VanillaDQN': ('Replay', 'PrioritizedReplay'),
    'DQN': ('Replay', 'PrioritizedReplay'),
    'DoubleDQN': ('Replay', 'PrioritizedReplay'),
}
EPSILON = {'name': 'linear_decay', 'start_val': 1.0, 'end_val': 0.1, 'start_step': 20, 'end_step': 250}

# --- specs


def raw_spec(algorithm='DQN', memory=None, net='MLPNet', num_envs=1, normalize_state=False, **parts):
    """A spec as a user writes it, small enough to train a few hundred frames in a tenth of a second.

    Args:
        parts: further keys by part: algo, mem, nets, env, meta, agent; e.g. `nets={'optim_spec': {'name': 'SGD'}}`
    """
    memory = memory or MEMORIES[algorithm][0]
    algo = {'name': algorithm}
    net_spec = {}
    if algorithm != 'Random':
        algo.update(gamma=0.9, action_pdtype='Argmax', action_policy='epsilon_greedy', explore_var_spec=dict(EPSILON))
        algo['training_frequency'] = {'OnPolicyReplay': 2, 'OnPolicyBatchReplay': 7}.get(memory, 6)
        net_spec = {
            'type': net,
            'hid_layers': [8],
            'hid_layers_activation': 'selu',
            'clip_grad_val': 0.5,
            'optim_spec': {'name': 'Adam', 'lr': 0.02},
            'lr_scheduler_spec': {'name': 'StepLR', 'step_size': 40, 'gamma': 0.9},
        }
    if 'DQN' in algorithm:
        algo.update(training_batch_iter=2, training_iter=1, training_start_step=8)
    if algorithm in ('DQN', 'DoubleDQN'):
        net_spec.update(update_type='polyak', update_frequency=12, polyak_coef=0.3)
    mem = {'name': memory}
    if memory in ('Replay', 'PrioritizedReplay'):
        mem.update(batch_size=8, max_size=90, use_cer=False)  # it goes round more than once
    if memory == 'PrioritizedReplay':
        mem.update(alpha=0.6, epsilon=0.001)
    env = {'name': 'CartPole-v1', 'max_t': 30, 'max_frame': 303}
    env.update({'num_envs': num_envs} if num_envs > 1 else {}, **({'normalize_state': True} if normalize_state else {}))
    meta = {'distributed': False, 'log_frequency': 61, 'eval_frequency': 50, 'max_session': 1, 'max_trial': 1}
    meta['random_seed'] = 7
    for part, keys in ((algo, 'algo'), (mem, 'mem'), (net_spec, 'nets'), (env, 'env'), (meta, 'meta')):
        part.update(parts.pop(keys, {}))
    agent = {'name': algorithm, 'algorithm': algo, 'memory': mem, 'net': net_spec, **parts.pop('agent', {})}
    assert not parts, parts
    return {'agent': [agent], 'env': [env], 'meta': meta}


def session_spec(folder, raw, session=0):
    """`raw` as the first trial's session of a run in `folder` has it."""
    spec = copy.deepcopy(raw)
    spec['name'] = 'tiny'
    spec_util.prepare(spec, TS)
    spec['meta']['predir'] = str(Path(folder) / f'tiny_{TS}')
    spec_util.tick(spec, 'trial')
    return spec_util.session_spec(spec, session)


# --- runs


class StopAt(StopRequest):
    """Stops a session at the first frame from `frame` on that lies `inside` an episode of every env, or `between` two:
    where an episode has just ended (of some env, if there are several)."""

    def __init__(self, frame, where=None):
        super().__init__()
        self.frame, self.where, self.session = frame, where, None

    def __call__(self):
        if self.session.clock.frame < self.frame:
            return False
        if self.where is None:
            return True
        begun = [slot['actions'].size for slot in self.session.env.state_dict()['slots']]
        return all(begun) if self.where == 'inside' else not all(begun)


never = StopRequest()


def build(spec, stop=never, store=None, mode='train'):
    session = Session(spec, mode, stop, store)
    if isinstance(stop, StopAt):
        stop.session = session
    return session


def result_of(session):
    """All that two equal runs share."""
    body = session.agent.body
    return {'tree': snapshot(session.state_dict()), 'train_df': body.train_df, 'eval_df': body.eval_df}


def closed(session, result):
    """The result of a session that is done with: workers of its env would hold the pipes of the fresh process open."""
    session.close()
    return result


def run_to(spec, stop=never, store=None, mode='train'):
    """Trains a new session until it stops or ends. Returns: `result_of` it"""
    session = build(spec, stop, store, mode)
    spec_util.save(spec) if store is None else None
    session.run()
    return closed(session, result_of(session))


def go_on(spec, stop=never, mode='train'):
    """Resumes a session from its run folder and trains on. Returns: `result_of` it, and what it was when `loaded`"""
    session = build(spec, stop, mode=mode)
    restored = resume.restore_session(session)
    loaded = snapshot(session.state_dict())
    session.run()
    result = {**result_of(session), 'loaded': loaded, 'exact': restored.exact, 'missing': restored.missing}
    return closed(session, result)


def load_only(spec):
    """Returns: the state tree of a session straight after it was restored"""
    session = build(spec)
    resume.restore_session(session)
    return closed(session, snapshot(session.state_dict()))


def uninterrupted(spec):
    """The same run in one piece, of which nothing is written."""
    return run_to(spec, store=False)


def without_clock(df):
    return df.drop(columns=list(WALL_CLOCK))


def assert_equal(a, b):
    """Bit for bit: the whole state tree, and every column of the data frames but wall_t and fps."""
    difference = first_difference(a['tree'], b['tree'])
    assert difference is None, difference
    for name in ('train_df', 'eval_df'):
        left, right = without_clock(a[name]), without_clock(b[name])
        assert len(left) and left.equals(right), f'{name}\n{left}\n{right}'


def hash_files(folder):
    """{path below the folder: hash} of every file, to tell whether anything was written, moved or removed."""
    paths = sorted(p for p in Path(folder).rglob('*') if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}


# --- the fresh process


def environment(**changes):
    """That of a process which finds the lab where this one does."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])])
    return {**os.environ, 'PYTHONPATH': path, **changes}


class FreshProcess:
    """Calls functions of this file in another process."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
        )

    def call(self, function, *args):
        pickle.dump((function, args), self.process.stdin)
        self.process.stdin.flush()
        worked, answer = pickle.load(self.process.stdout)
        assert worked, answer
        return answer

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()


def scramble():
    """Sets the process's generators to what no run has set them to."""
    seed = secrets.randbelow(2**31)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def serve():
    """Answers calls: a pickled (function, args) on stdin gives a pickled (True, result) or (False, traceback)."""
    import traceback

    answers = os.fdopen(os.dup(1), 'wb')
    os.dup2(2, 1)  # what is logged must not mix with the answers
    while True:
        try:
            function, args = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        scramble()
        try:
            answer = True, globals()[function](*args)
        except Exception:
            answer = False, traceback.format_exc()
        answers.write(pickle.dumps(answer))
        answers.flush()


if __name__ == '__main__':
    sys.modules['resume'] = sys.modules['__main__']  # so that what is pickled there is found here
    serve()
