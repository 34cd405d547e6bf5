"""Slots in worker processes do what slots in this process do, and their end is told."""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import numpy as np
import psutil
import pytest
from env_cases import actions_at, one_life, spec_of, through_text
from gymnasium import spaces

import slm_lab
from slm_lab.env import make_env, workers
from slm_lab.env.registration import make_single
from slm_lab.env.slot import probe
from slm_lab.env.vector import VectorEnv
from slm_lab.env.workers import worker_shares
from slm_lab.lib.errors import LabError, MachineError, SpecError
from slm_lab.lib.machine import count_cpus
from slm_lab.lib.rng import GlobalStreams
from slm_lab.lib.state import check_tree, first_difference


class Spaced(gymnasium.Env):
    """The observation tells which action came and of which type it was."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)

    def __init__(self, space):
        self.action_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.random(3), {}

    def step(self, action):
        observation = np.zeros(3)
        observation[: np.size(action)] = action
        return observation, float(np.asarray(action).dtype.itemsize), self.np_random.random() < 0.2, False, {}


class Failing(gymnasium.Env):
    """Fails at step 3 of the slot whose index is the action; the observation tells its process."""

    observation_space = spaces.Box(0, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, failure=None):
        self.failure, self.t = failure, 0

    def reset(self, *, seed=None, options=None):
        return np.array([os.getpid()], np.float64), {}

    def step(self, action):
        self.t += 1
        if action == 1 and self.failure is not None:
            self.failure()
        return np.array([os.getpid()], np.float64), 0.0, False, False, {}


def divide():
    return 1 // 0


def leave():
    os._exit(3)


def refuse():
    raise SpecError('env.0.name: cannot go on')


gymnasium.register('Failing-v0', Failing)
SPACES = {
    'discrete': spaces.Discrete(3, start=-1),
    'multi-discrete': spaces.MultiDiscrete([3, 3], start=[1, 4]),
    'multi-binary': spaces.MultiBinary(3),
    'box': spaces.Box(-1, 1, (3,), np.float32),
    'bytes': spaces.Box(0, 255, (2,), np.uint8),
}
for key, space in SPACES.items():
    gymnasium.register(f'Spaced-{key}-v0', functools.partial(Spaced, space))

BUILDERS = {
    'CartPole-v1': functools.partial(make_single, 'CartPole-v1'),
    'Pendulum-v1': functools.partial(make_single, 'Pendulum-v1', 20),
    'Count-v0': functools.partial(make_single, 'Count-v0', 7),
    'Carried-v0': functools.partial(make_single, 'Carried-v0'),
    'Game-v0': one_life,
}
MODES = [
    ('CartPole-v1', 'replay'),
    ('Pendulum-v1', 'replay'),
    ('Count-v0', 'replay'),
    ('Carried-v0', 'fresh'),
    ('Game-v0', 'replay'),
    ('Game-v0', 'native'),
]


@pytest.fixture
def make():
    """Makes a vector env that is closed when the test ends."""
    envs = []

    def make(name, vector, num_envs=3, resume='replay', build=None, cpus=2, **kwargs):
        build = build or BUILDERS[name]
        probing = functools.partial(probe, build, 0)
        envs.append(VectorEnv(name, build, num_envs, 7, resume, probing, vector=vector, cpus=cpus, **kwargs))
        return envs[-1]

    yield make
    for env in envs:
        env.close()


def play(env, start, stop):
    return [env.step(actions_at(env, step))._asdict() for step in range(start, stop)]


def processes(env):
    return [psutil.Process(link.process.pid) for link in env._backend.links]


def gone(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition, seconds=5):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    'num_envs, cpus, shares', [(1, 2, [1]), (3, 2, [2, 1]), (8, 3, [3, 3, 2]), (4, 9, [1, 1, 1, 1])]
)
def test_slots_are_shared_out_evenly(num_envs, cpus, shares):
    ranges = worker_shares(num_envs, cpus)
    assert [len(r) for r in ranges] == shares
    assert [i for r in ranges for i in r] == list(range(num_envs))


@pytest.mark.parametrize('name, resume', MODES)
def test_workers_yield_the_same_bits(make, name, resume):
    envs = [make(name, vector, resume=resume) for vector in ('sync', 'async')]
    firsts = [env.reset() for env in envs]
    assert len(processes(envs[1])) == 2
    assert firsts[0].dtype == firsts[1].dtype and firsts[0].tobytes() == firsts[1].tobytes()
    steps = [play(env, 0, 60) for env in envs]
    assert any((s['terminated'] | s['truncated']).any() for s in steps[0])
    assert first_difference(*steps) is None
    assert first_difference(*(env.state_dict() for env in envs)) is None
    check_tree(envs[1].state_dict())


@pytest.mark.parametrize('key', SPACES)
def test_actions_arrive_as_they_do_in_this_process(make, key):
    build = functools.partial(make_single, f'Spaced-{key}-v0')
    envs = [make('spaced', vector, build=build) for vector in ('sync', 'async')]
    for env in envs:
        env.reset()
    space = SPACES[key]
    rng = np.random.default_rng(0)
    for _ in range(10):
        actions = rng.integers(2, size=(3, *space.shape)) if key != 'box' else rng.normal(size=(3, 3))
        steps = [env.step(actions)._asdict() for env in envs]
        assert first_difference(*steps) is None
        start = np.asarray(getattr(space, 'start', 0))
        shown = steps[0]['next_state'].reshape(3, -1)[:, : max(1, actions[0].size)]
        np.testing.assert_allclose(shown, (actions + start).reshape(3, -1), rtol=1e-6)


@pytest.mark.parametrize('saving, loading', [('sync', 'async'), ('async', 'sync'), ('async', 'async')])
@pytest.mark.parametrize('name, resume', MODES)
def test_a_run_goes_on_in_either_way(make, name, resume, saving, loading):
    whole = make(name, 'sync', resume=resume)
    whole.reset()
    steps = play(whole, 0, 40)
    env = make(name, saving, resume=resume)
    env.reset()
    play(env, 0, 17)
    later = make(name, loading, resume='auto')
    later.load_state_dict(through_text(env.state_dict()))
    assert later.restarted == [] and later.resume == resume
    np.testing.assert_array_equal(later.state, env.state)
    assert first_difference(play(later, 17, 40), steps[17:]) is None
    assert first_difference(later.state_dict(), whole.state_dict()) is None


def test_episodes_that_do_not_come_back_are_named_by_their_slots(make):
    build = functools.partial(make_single, 'CartPole-v1')
    saved = make('CartPole-v1', 'sync', 5, build=build)
    saved.reset()
    play(saved, 0, 3)
    state = saved.state_dict()
    for i in (1, 4):
        state['slots'][i]['observation'] = state['slots'][i]['observation'] + np.float32(1)
    later = make('CartPole-v1', 'async', 5, build=build)
    later.load_state_dict(state)
    assert later.restarted == [1, 4]
    np.testing.assert_array_equal(later.state[[0, 2, 3]], saved.state[[0, 2, 3]])
    saved.reset()
    np.testing.assert_array_equal(later.state[[1, 4]], saved.state[[1, 4]])


def test_episodes_are_forgotten_in_workers_too(make):
    envs = [make('CartPole-v1', vector) for vector in ('sync', 'async')]
    for env in envs:
        env.reset()
        play(env, 0, 5)
        env.forget_episodes()
        assert env.state is None
        assert [slot['seed'] for slot in env.state_dict()['slots']] == [None] * 3
    assert first_difference(*(env.state_dict() for env in envs)) is None
    np.testing.assert_array_equal(*(env.reset() for env in envs))


def test_a_state_before_the_first_reset_is_the_same_too(make):
    envs = [make('CartPole-v1', vector) for vector in ('sync', 'async')]
    early = [through_text(env.state_dict()) for env in envs]
    assert first_difference(*early) is None
    first = envs[0].reset()
    envs[1].load_state_dict(early[0])
    assert envs[1].state is None
    np.testing.assert_array_equal(envs[1].reset(), first)


def test_no_later_step_writes_into_an_earlier_one(make):
    env = make('Count-v0', 'async', 2)
    first = env.reset()
    steps = [env.step(np.array([0, i % 2])) for i in range(4)]
    assert first[:, 0].tolist() == [0, 0]
    assert [s.next_state[:, 0].tolist() for s in steps] == [[1, 1], [2, 2], [3, 1], [4, 2]]
    assert [s.state[:, 0].tolist() for s in steps] == [[1, 1], [2, 0], [3, 1], [4, 0]]
    assert [s.reward.tolist() for s in steps] == [[1, 1], [2, 2], [3, 1], [4, 2]]
    assert [s.terminated.tolist() for s in steps] == [[False, False], [False, True]] * 2


def failing(failure=None):
    return functools.partial(make_single, 'Failing-v0', kwargs={'failure': failure})


@pytest.mark.parametrize('moment', ['between steps', 'in a step'])
def test_a_killed_worker_is_one_error_that_names_its_slots(make, moment):
    failure = None if moment == 'between steps' else functools.partial(time.sleep, 60)
    env = make('Failing-v0', 'async', 5, build=failing(failure), cpus=2)
    env.reset()
    victim, other = processes(env)[1], processes(env)[0]
    if moment == 'between steps':
        victim.kill()
        wait_until(lambda: gone(victim))
    else:
        signal.signal(signal.SIGALRM, lambda *_: victim.kill())
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    start = time.monotonic()
    with pytest.raises(MachineError) as told:
        env.step(np.array([0, 0, 0, 0, 1]))
    assert time.monotonic() - start < 2
    assert str(told.value) == "env 'Failing-v0', slots 3 to 4: the worker process was killed by signal 9"
    assert gone(other)
    for call in (lambda: env.step(np.zeros(5, int)), env.state_dict, env.reset):  # none hangs
        with pytest.raises(MachineError, match='signal 9'):
            call()


@pytest.mark.parametrize(
    'failure, error, text',
    [
        (divide, MachineError, r"^env 'Failing-v0', slot 2: ZeroDivisionError: .* \(test_workers\.py:\d+ in divide\)$"),
        (leave, MachineError, r"^env 'Failing-v0', slots 2 to 3: the worker process ended with exit status 3$"),
        (refuse, SpecError, r'^env\.0\.name: cannot go on$'),
    ],
)
def test_an_error_in_a_step_is_told_with_its_slot_and_place(make, failure, error, text, caplog):
    env = make('Failing-v0', 'async', 4, build=failing(failure))
    env.reset()
    env.step(np.zeros(4, int))
    alive = processes(env)
    with pytest.raises(error, match=text):
        env.step(np.array([0, 0, 1, 0]))
    assert all(gone(process) for process in alive)
    assert ('in divide' in caplog.text) == (failure is divide)  # the traceback


def test_an_environment_that_only_a_worker_cannot_build(make):
    parent = os.getpid()

    def build():
        if os.getpid() != parent:
            raise SpecError("env.0.module: 'my_env' is missing")
        return make_single('CartPole-v1')

    with pytest.raises(SpecError, match=r"^env\.0\.module: 'my_env' is missing$"):
        make('mine', 'async', build=build).reset()


def test_a_closed_env_says_so(make):
    env = make('CartPole-v1', 'async')
    env.reset()
    alive = processes(env)
    env.close()
    env.close()
    assert all(gone(process) for process in alive)
    with pytest.raises(LabError, match="env 'CartPole-v1' is closed"):
        env.step(np.zeros(3, int))


def test_workers_end_with_their_env(make):
    env = VectorEnv('CartPole-v1', BUILDERS['CartPole-v1'], 2, 0, 'replay', None, vector='async', cpus=2)
    env.reset()
    alive = processes(env)
    del env
    assert all(gone(process) for process in alive)


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_workers_leave_the_signals_to_their_parent(make, number):
    env = make('CartPole-v1', 'async')
    env.reset()
    for process in processes(env):
        process.send_signal(number)
    play(env, 0, 20)
    assert not any(gone(process) for process in processes(env))


def test_started_anew_instead_of_forked_they_do_the_same(make, monkeypatch):
    """As on platforms where forking is not safe."""
    monkeypatch.setattr(workers, 'START_METHOD', 'spawn')
    envs = [make('CartPole-v1', vector, 2, cpus=1) for vector in ('sync', 'async')]
    np.testing.assert_array_equal(*(env.reset() for env in envs))
    assert first_difference(*(play(env, 0, 30) for env in envs)) is None
    assert first_difference(*(env.state_dict() for env in envs)) is None
    victim = processes(envs[1])[0]
    victim.kill()
    with pytest.raises(MachineError, match=r'slots 0 to 1: the worker process was killed by signal 9'):
        play(envs[1], 30, 40)


def hold(sender, way):
    """A process that holds two envs with three workers each."""
    envs = [VectorEnv('c', BUILDERS['CartPole-v1'], 3, 0, 'replay', None, vector='async', cpus=3) for _ in range(2)]
    for env in envs:
        env.reset()
    sender.send([process.pid for env in envs for process in processes(env)])
    os.close(2)  # what is raised below is no error of the test's
    while way == 'killed':
        for env in envs:
            env.step(np.zeros(3, int))
    if way == 'error':
        raise ValueError('in the parent')


class Nobody(list):
    def add(self, item):
        pass


def only_by_pipes(monkeypatch):
    monkeypatch.setattr(workers, '_end_with', lambda parent: None)


def only_by_watching(monkeypatch):
    """The pipes of each worker stay open in those that were forked after it."""
    monkeypatch.setattr(workers, '_all_workers', Nobody())


@pytest.mark.parametrize(
    'way, notice', [('end', None), ('error', None), ('killed', only_by_pipes), ('killed', only_by_watching)]
)
def test_workers_end_with_their_parent(monkeypatch, way, notice):
    if notice:
        notice(monkeypatch)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    holder = multiprocessing.get_context('fork').Process(target=hold, args=(sender, way))
    before = set(os.listdir('/dev/shm'))
    holder.start()
    alive = [psutil.Process(pid) for pid in receiver.recv()]
    assert len(alive) == 6
    if way == 'killed':
        time.sleep(0.05)
        holder.kill()
    try:
        wait_until(lambda: all(gone(process) for process in alive), 2)
    finally:
        for process in alive:
            if not gone(process):
                process.kill()
    holder.join()
    assert holder.exitcode == {'end': 0, 'error': 1, 'killed': -signal.SIGKILL}[way]
    ours = [name for name in set(os.listdir('/dev/shm')) - before if name.startswith('pym-')]
    assert ours == []


SCRIPT = """
import functools, multiprocessing, sys

def run():
    from slm_lab.env.registration import make_single
    from slm_lab.env.vector import VectorEnv

    build = functools.partial(make_single, 'CartPole-v1')
    env = VectorEnv('CartPole-v1', build, 2, 0, 'replay', None, vector='async', cpus=2)
    env.reset()
    print(len(env._backend.links), 'workers')

if __name__ == '__main__':
    session = multiprocessing.get_context('spawn').Process(target=run)
    session.start()
    session.join()
    sys.exit(session.exitcode)
"""


def test_a_session_in_a_process_of_its_own_has_workers_and_ends_without_complaint(tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, 'PYTHONPATH': str(Path(slm_lab.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, '2 workers\n', '')


def with_cost(monkeypatch, seconds):
    monkeypatch.setattr('slm_lab.env.vector.step_seconds', lambda build, seed: seconds)


def test_auto_takes_workers_where_a_step_is_dear(make, monkeypatch):
    """Two workers of two slots save two steps of four, and cost 2 × 50 µs, which they have to save twice."""
    for seconds, expected in ((90e-6, 'sync'), (110e-6, 'async')):
        with_cost(monkeypatch, seconds)
        assert make('CartPole-v1', 'auto', 4, cpus=2).vector_mode() == expected


@pytest.mark.parametrize(
    'case', [{'num_envs': 1}, {'cpus': 1}, {'build_first': BUILDERS['CartPole-v1']}, {'resume': 'episode'}]
)
def test_auto_takes_none_for_one_slot_one_cpu_a_window_or_an_env_that_does_not_repeat_itself(make, monkeypatch, case):
    with_cost(monkeypatch, 1.0)
    assert make('CartPole-v1', 'auto').vector_mode() == 'async'
    assert make('CartPole-v1', 'auto', **case).vector_mode() == 'sync'


@pytest.mark.parametrize('vector, found', [('auto', 'sync'), ('async', 'async')])
def test_an_env_that_is_found_not_to_repeat_itself_has_workers_only_by_the_spec(make, monkeypatch, vector, found):
    with_cost(monkeypatch, 1.0)
    env = make('noisy', vector, build=functools.partial(make_single, 'Noisy-v0'), resume='auto')
    alive = processes(env)
    env.reset()
    assert (env.resume, env.vector) == ('episode', found)
    assert len(play(env, 0, 3)) == 3
    assert all(gone(process) == (found == 'sync') for process in alive)
    again = make('noisy', vector, build=functools.partial(make_single, 'Noisy-v0'), resume='auto')
    again.load_state_dict(env.state_dict())
    assert again.vector == found and again.restarted == [0, 1, 2]


def test_a_window_keeps_its_env_here(make):
    env = make('CartPole-v1', 'async', build_first=BUILDERS['CartPole-v1'])
    env.reset()
    assert len(env.slots) == 3


def test_evaluation_follows_the_pick_of_training(make, monkeypatch):
    with_cost(monkeypatch, 1.0)
    train = make('CartPole-v1', 'auto')
    with_cost(monkeypatch, 0.0)
    assert make('CartPole-v1', 'auto').vector_mode() == 'sync'
    assert make('CartPole-v1', 'auto', pick=train.vector_mode).vector_mode() == 'async'
    assert make('CartPole-v1', 'auto', 1, pick=train.vector_mode).vector_mode() == 'sync'


def test_timing_an_environment_disturbs_no_generator_of_the_run(make):
    streams = GlobalStreams(0)
    streams.install()
    before = streams.state_dict()
    build = functools.partial(make_single, 'GloballyNoisy-v0')
    env = make('GloballyNoisy-v0', 'auto', build=build, resume='replay', cpus=2)
    assert env.vector_mode() == 'sync'
    assert first_difference(before, streams.state_dict()) is None


def test_the_spec_says_where_the_slots_are():
    env = make_env(spec_of('CartPole-v1', num_envs=2, vector='async'), seed=0)
    try:
        env.reset()
        assert env.unwrapped.vector == 'async' and len(processes(env.unwrapped)) == min(2, count_cpus())
    finally:
        env.close()
