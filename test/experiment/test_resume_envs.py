"""n frames, save, load into a fresh process, n more == 2n frames, in the environments that people train in."""

import numpy as np
import pytest
from resume import StopAt, raw_spec, run_to, session_spec
from test_resume_equality import HALF, check_resume
from test_resume_policy import policy_spec
from test_resume_soft import soft_spec

from slm_lab.env import make_env
from slm_lab.lib.state import first_difference

CONVOLUTION = {'conv_hid_layers': [[4, 8, 8, 0, 1]], 'fc_hid_layers': [8], 'normalize': True}
STACKED = {'frame_op': 'concat', 'frame_op_len': 4, 'reward_scale': 'sign'}
GAMES = {
    'Pong': {'name': 'ALE/Pong-v5', 'repeat_action_probability': 0.25},
    'Pong without sticky actions': {'name': 'PongNoFrameskip-v4'},
    'Breakout': {'name': 'ALE/Breakout-v5', 'repeat_action_probability': 0.25},
    'Breakout without sticky actions': {'name': 'BreakoutNoFrameskip-v4'},
}
# (num_envs, vector)
SLOTS = [(1, 'sync'), (4, 'sync'), (4, 'async')]


def game_spec(game, algorithm, num_envs, vector):
    # what `auto` finds; trying it out takes as long as the rest of these runs
    env = {**GAMES[game], **STACKED, 'vector': vector, 'max_t': None, 'resume': 'native'}
    if algorithm == 'PPO':
        raw = policy_spec('PPO', 'OnPolicyBatchReplay', 0, 'MLPNet', True, num_envs, 'discrete')
        raw['agent'][0]['net'].update(CONVOLUTION, type='ConvNet')
    else:
        memory = 'Replay' if algorithm == 'DQN' else 'PrioritizedReplay'
        raw = raw_spec(algorithm, memory, 'ConvNet', num_envs, nets=CONVOLUTION)
    del raw['agent'][0]['net']['hid_layers']
    raw['env'][0].update(env)
    return raw


GAME_CASES = [
    (game, algorithm, num_envs, vector)
    for game in GAMES
    for algorithm in ('DQN', 'DoubleDQN', 'PPO')
    for num_envs, vector in SLOTS
]


@pytest.mark.parametrize(
    ('game', 'algorithm', 'num_envs', 'vector'),
    # every fifth: 5 has no factor in common with the numbers of choices
    [pytest.param(*case, marks=() if i % 5 == 0 else pytest.mark.slow) for i, case in enumerate(GAME_CASES)],
    ids=str,
)
def test_equal_in_atari_games(game, algorithm, num_envs, vector, tmp_path, fresh):
    pytest.importorskip('ale_py')
    check_resume(tmp_path, game_spec(game, algorithm, num_envs, vector), fresh, StopAt(HALF))


@pytest.mark.parametrize('game', ['Pong', 'Breakout without sticky actions'])
def test_games_are_brought_back_by_their_own_state(game):
    pytest.importorskip('ale_py')
    env = make_env({**game_spec(game, 'DQN', 1, 'sync'), 'env': [{**GAMES[game], **STACKED, 'max_frame': 1}]}, seed=1)
    assert env.unwrapped.resume_mode() == 'native'
    env.close()


@pytest.mark.parametrize('num_envs', [1, 4])
def test_equal_in_a_game_whose_lives_are_lost(num_envs, tmp_path, fresh):
    """Long enough for lives, and whole games, to end on both sides of the stop, with evaluation of whole games."""
    pytest.importorskip('ale_py')
    raw = game_spec('Breakout', 'DQN', num_envs, 'sync')
    raw['env'][0].update(max_frame=1203, frameskip=16)
    raw['meta'].update(log_frequency=300, rigorous_eval=0)
    spec = session_spec(tmp_path, raw)
    check_halves(spec, fresh, 600)


def check_halves(spec, fresh, half):
    from resume import assert_equal, uninterrupted

    first_half = run_to(spec, StopAt(half))
    assert first_half['tree']['clock']['epi'] > 0
    resumed = fresh.call('go_on', spec)
    assert resumed['exact'], resumed['missing']
    assert first_difference(first_half['tree'], resumed['loaded']) is None
    assert resumed['tree']['clock']['epi'] > first_half['tree']['clock']['epi']
    assert_equal(resumed, uninterrupted(spec))


BODIES = {  # name: (package, discrete)
    'LunarLander-v3': ('Box2D', True),
    'BipedalWalker-v3': ('Box2D', False),
    'Hopper-v5': ('mujoco', False),
    'HalfCheetah-v5': ('mujoco', False),
}
BODY_CASES = [
    (name, algorithm, num_envs, vector)
    for name, (_, discrete) in BODIES.items()
    for algorithm in (('DQN', 'PPO', 'SoftActorCritic') if discrete else ('PPO', 'SoftActorCritic'))
    for num_envs, vector in SLOTS
]


@pytest.mark.parametrize(
    ('name', 'algorithm', 'num_envs', 'vector'),
    [pytest.param(*case, marks=() if i % 4 == 0 else pytest.mark.slow) for i, case in enumerate(BODY_CASES)],
    ids=str,
)
def test_equal_with_bodies_that_move(name, algorithm, num_envs, vector, tmp_path, fresh):
    package, discrete = BODIES[name]
    pytest.importorskip(package)
    kind = 'discrete' if discrete else 'continuous'
    if algorithm == 'SoftActorCritic':
        raw = soft_spec(algorithm, 'Replay', 'MLPNet', num_envs, kind)
    elif algorithm == 'PPO':
        raw = policy_spec('PPO', 'OnPolicyBatchReplay', 0, 'MLPNet', False, num_envs, kind)
    else:
        raw = raw_spec(algorithm, num_envs=num_envs)
    raw['env'][0].update(name=name, vector=vector, max_t=70)
    check_resume(tmp_path, raw, fresh, StopAt(HALF))


@pytest.mark.parametrize(('num_envs', 'vector'), SLOTS)
def test_equal_in_an_environment_of_legacy_gym(num_envs, vector, tmp_path, fresh):
    gym = pytest.importorskip('gym')
    assert 'CartPole-v1' in gym.envs.registry
    raw = raw_spec('DQN', num_envs=num_envs)
    raw['env'][0].update(name='gym:CartPole-v1', vector=vector)
    check_resume(tmp_path, raw, fresh, StopAt(HALF))


def test_a_run_saved_with_workers_goes_on_without_them(tmp_path, fresh):
    raw = raw_spec('DQN', num_envs=4)
    raw['env'][0]['vector'] = 'async'
    spec = session_spec(tmp_path, raw)
    run_to(spec, StopAt(HALF))
    raw['env'][0]['vector'] = 'sync'
    spec = session_spec(tmp_path, raw)
    from resume import assert_equal, uninterrupted

    assert_equal(fresh.call('go_on', spec), uninterrupted(spec))


@pytest.mark.parametrize(('num_envs', 'vector'), SLOTS)
def test_an_environment_that_is_not_deterministic_begins_a_new_episode_and_keeps_all_else(
    num_envs, vector, tmp_path, fresh
):
    raw = raw_spec('DQN', num_envs=num_envs)
    raw['env'][0].update(name='TinyUnseeded-v0', vector=vector)
    spec = session_spec(tmp_path, raw)
    saved = run_to(spec, StopAt(HALF, 'inside') if vector == 'sync' else StopAt(HALF))['tree']
    assert saved['env']['resume'] == 'episode'
    loaded = fresh.call('load_only', spec)
    assert loaded['clock']['epi'] == saved['clock']['epi'] + num_envs
    for part in ('agent', 'rng', 'eval_rng'):
        assert first_difference(saved[part], loaded[part]) is None
    for was, now in zip(saved['env']['slots'], loaded['env']['slots'], strict=True):
        assert now['actions'].size == 0
        assert not np.array_equal(was['observation'], now['observation'])
