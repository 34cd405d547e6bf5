"""n steps, save, load, n more == 2n steps, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from env_cases import decode, encode, play, resume, spec_of, through_text

import slm_lab
from slm_lab.env import make_env
from slm_lab.lib.state import check_tree, first_difference

NAMES = ['CartPole-v0', 'CartPole-v1', 'Acrobot-v1', 'MountainCar-v0', 'Pendulum-v1']
WRAPPERS = {
    'bare': {},
    'concat': {'frame_op': 'concat', 'frame_op_len': 4},
    'normalized stack': {'frame_op': 'stack', 'frame_op_len': 3, 'normalize_state': True, 'reward_scale': 0.5},
}


def run(spec, seed, stop):
    """A run that was never interrupted: (its first state, its steps, its state at the end)."""
    env = make_env(spec, seed)
    first = env.reset().copy()
    return first, play(env, 0, stop), through_text(env.state_dict())


def stopped(spec, seed, at):
    """The state of a run that was stopped after `at` steps, as text."""
    env = make_env(spec, seed)
    env.reset()
    play(env, 0, at)
    check_tree(env.state_dict())
    return json.dumps(encode(env.state_dict()))


def stops(steps):
    """After how many steps to stop: in the middle of an episode, right at the end of one, and one step later."""
    ends = [i + 1 for i, s in enumerate(steps) if (s['terminated'] | s['truncated'])[0]]
    return [ends[0] - 1, ends[0], ends[0] + 1, ends[1] + 3]


def assert_continues(resumed, spec, seed, at, steps, state):
    assert resumed['restarted'] == []
    np.testing.assert_array_equal(resumed['restored'], steps[at - 1]['state'])
    assert first_difference(resumed['steps'], steps[at:]) is None
    assert first_difference(resumed['state'], state) is None


@pytest.mark.parametrize('wrappers', WRAPPERS)
@pytest.mark.parametrize('num_envs', [1, 3])
@pytest.mark.parametrize('name', NAMES)
def test_a_resumed_env_continues_as_if_never_stopped(name, num_envs, wrappers):
    spec = spec_of(name, num_envs=num_envs, max_t=25, **WRAPPERS[wrappers])
    _, steps, state = run(spec, 7, 80)
    assert {len(s['state']) for s in steps} == {num_envs}
    for at in stops(steps):
        case = {'spec': spec, 'seed': 7, 'state': json.loads(stopped(spec, 7, at)), 'start': at, 'stop': 80}
        assert_continues(resume(case), spec, 7, at, steps, state)


@pytest.mark.parametrize('name', ['Carried-v0', 'OldCount-v0'])
def test_so_do_environments_that_carry_something_over_a_reset_or_write_into_the_same_memory(name):
    spec = spec_of(name, num_envs=2, frame_op='stack', frame_op_len=2)
    _, steps, state = run(spec, 1, 40)
    for at in stops(steps):
        case = {'spec': spec, 'seed': 1, 'state': json.loads(stopped(spec, 1, at)), 'start': at, 'stop': 40}
        assert_continues(resume(case), spec, 1, at, steps, state)


def test_so_do_envs_in_a_fresh_process():
    """Full episodes (no max_t), all at once, since a process takes seconds to start."""
    runs, cases = [], []
    for name in NAMES:
        for num_envs in (1, 2):
            spec = spec_of(name, num_envs=num_envs, **WRAPPERS['normalized stack' if num_envs == 2 else 'bare'])
            stop = 60 if name.startswith('CartPole') else 230
            at = stop // 2 + 1
            _, steps, state = run(spec, 3, stop)
            runs.append((spec, at, steps, state))
            cases.append(
                {'spec': spec, 'seed': 3, 'state': json.loads(stopped(spec, 3, at)), 'start': at, 'stop': stop}
            )
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name('env_cases.py'))],
        input=json.dumps(cases),
        cwd=Path(slm_lab.__file__).parents[1],
        env={**os.environ, 'PYTHONPATH': str(Path(slm_lab.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    for resumed, (spec, at, steps, state) in zip(decode(json.loads(done.stdout)), runs, strict=True):
        assert_continues(resumed, spec, 3, at, steps, state)


def test_five_resumes_in_a_row():
    spec = spec_of('CartPole-v1', num_envs=2, normalize_state=True, frame_op='concat', frame_op_len=2)
    _, steps, state = run(spec, 0, 120)
    env = make_env(spec, 0)
    env.reset()
    played = play(env, 0, 20)
    for start in range(20, 120, 20):
        saved = through_text(env.state_dict())
        env = make_env(spec, 0)
        env.load_state_dict(saved)
        assert env.restarted == []
        played += play(env, start, start + 20)
    assert first_difference(played, steps) is None
    assert first_difference(env.state_dict(), state) is None


def first_observations(env, count, start):
    """The first observations of the next episodes."""
    firsts = []
    while len(firsts) < count:
        step = play(env, start, start + 1)[0]
        start += 1
        if step['terminated'][0] or step['truncated'][0]:
            firsts.append(step['state'][0].tolist())
    return firsts, start


def test_no_resume_sees_the_episodes_of_the_start_again():
    spec = spec_of('CartPole-v1')
    env = make_env(spec, 0)
    seen = [env.reset()[0].tolist()]
    start = 0
    for _ in range(6):
        firsts, start = first_observations(env, 5, start)
        seen += firsts
        saved = through_text(env.state_dict())
        env = make_env(spec, 0)  # the same seed, as a resume builds it
        env.load_state_dict(saved)
    uninterrupted = make_env(spec, 0)
    expected = [uninterrupted.reset()[0].tolist()]
    expected += first_observations(uninterrupted, 30, 0)[0]
    assert seen == expected
    assert len({tuple(first) for first in seen}) == 31


def test_saving_does_not_perturb():
    spec = spec_of('Pendulum-v1', max_t=10, num_envs=2, normalize_state=True)
    _, steps, state = run(spec, 0, 40)
    env = make_env(spec, 0)
    env.reset()
    for step in range(40):
        played = play(env, step, step + 1)
        env.state_dict()
        assert first_difference(played, steps[step : step + 1]) is None
    assert first_difference(env.state_dict(), state) is None


def test_an_env_in_use_takes_a_state_as_a_new_one_does():
    spec = spec_of('Acrobot-v1', max_t=20)
    _, steps, state = run(spec, 0, 50)
    env = make_env(spec, 0)
    env.reset()
    play(env, 0, 30)
    saved = through_text(env.state_dict())
    play(env, 30, 45)
    env.load_state_dict(saved)
    assert first_difference(play(env, 30, 50), steps[30:]) is None
    assert first_difference(env.state_dict(), state) is None
