import math
from types import SimpleNamespace

import numpy as np
import pytest
from env_cases import play, spec_of, through_text
from gymnasium import spaces

from slm_lab.env import Step, make_env
from slm_lab.env.wrapper.stateful import FrameStack, NormalizeState, RunningStatistics, TrackReturn
from slm_lab.env.wrapper.transform import ScaleReward
from slm_lab.lib.errors import ResumeError
from slm_lab.lib.state import check_tree, first_difference


def test_return_of_the_last_finished_episode():
    env = make_env(spec_of('Count-v0'), seed=0)
    env.reset()
    assert math.isnan(env.total_reward)
    seen = []
    for action in (0, 0, 1, 0, 1, 1):
        env.step([action])
        seen.append(env.total_reward)
    # 1 + 2 + 3, then 1 + 2, then 1
    assert math.isnan(seen[0]) and math.isnan(seen[1])
    assert seen[2:] == [6.0, 6.0, 3.0, 1.0]
    assert type(env.total_reward) is float


@pytest.mark.filterwarnings('error')
def test_return_is_the_mean_over_the_slots_that_have_finished_one():
    env = make_env(spec_of('Count-v0', num_envs=3), seed=0)
    env.reset()
    assert math.isnan(env.total_reward)
    env.step([1, 0, 0])
    assert env.total_reward == 1.0
    env.step([0, 1, 0])
    assert env.total_reward == (1.0 + 3.0) / 2
    env.step([1, 0, 0])
    assert env.total_reward == (3.0 + 3.0) / 2


def test_a_reset_in_mid_episode_drops_its_return():
    env = make_env(spec_of('Count-v0'), seed=0)
    env.reset()
    env.step([0])
    env.reset()
    env.step([1])
    assert env.total_reward == 1.0


def test_truncated_episodes_count():
    env = make_env(spec_of('Count-v0', max_t=2), seed=0)
    env.reset()
    env.step([0])
    env.step([0])
    assert env.total_reward == 3.0


class Scripted(SimpleNamespace):
    """An env of N slots that answers with the steps that it was given; slots begin at observation 0."""

    def __init__(self, *steps, shape=(1,)):
        num_envs = len(steps[0].reward)
        super().__init__(name='Scripted', num_envs=num_envs, max_t=None, frames_per_state=1, state=None, steps=[*steps])
        self.observation_space, self.action_space = spaces.Box(0, 255, shape, np.uint8), spaces.Discrete(2)

    def reset(self):
        return np.zeros((self.num_envs, *self.observation_space.shape), np.uint8)

    def step(self, actions):
        return self.steps.pop(0)


def scripted_step(rewards, ended=(), lives_on=()):
    """Slot i comes to observation 10 i + its reward, and begins anew with 100 + i."""
    slots = np.arange(len(rewards))
    next_state = (10 * slots + rewards)[:, None].astype(np.uint8)
    terminated, state = np.isin(slots, ended), next_state
    if ended:
        state = np.where(terminated[:, None], 100 + slots[:, None], next_state).astype(np.uint8)
    lives = np.isin(slots, lives_on) if lives_on else None
    return Step(next_state, np.array(rewards, float), terminated, np.zeros(len(slots), bool), state, lives)


def test_a_life_that_is_lost_does_not_end_the_return():
    steps = [
        scripted_step([1, 2]),
        scripted_step([1, 2], ended=[0, 1], lives_on=[1]),  # slot 0: the game is over with 2
        scripted_step([5, 3]),
        scripted_step([5, 4], ended=[0, 1], lives_on=[0]),  # slot 1: over with 2 + 2 + 3 + 4
        scripted_step([6, 1], ended=[0]),  # slot 0: over with 5 + 5 + 6
    ]
    env, seen = TrackReturn(Scripted(*steps)), []
    env.reset()
    for _ in steps:
        env.step([0, 0])
        seen.append(env.total_reward)
    assert math.isnan(seen[0]) and seen[1:] == [2, 2, (2 + 11) / 2, (16 + 11) / 2]


def test_every_wrapper_passes_on_what_it_does_not_change():
    steps = [scripted_step([1, 2], ended=[0, 1], lives_on=[1]), scripted_step([1, 2])]
    env = ScaleReward(FrameStack(NormalizeState(TrackReturn(Scripted(*steps))), 'stack', 3), 2)
    assert env.frames_per_state == 3 and env.env.env.frames_per_state == 1
    env.reset()
    step = env.step([0, 0])
    assert step.lives_on.tolist() == [False, True] and step.reward.tolist() == [2, 4]
    assert step.terminated.tolist() == [True, True] and step.truncated.tolist() == [False, False]
    assert env.step([0, 0]).lives_on is None


def test_running_statistics_by_hand():
    statistics = RunningStatistics((2,))
    statistics.update(np.array([[1.0, 10.0]]))
    statistics.update(np.array([[2.0, 10.0], [6.0, 40.0]]))
    # 1, 2, 6: mean 3, variance (4 + 1 + 9)/3; 10, 10, 40: mean 20, variance (100 + 100 + 400)/3
    assert statistics.count == 3
    np.testing.assert_allclose(statistics.mean, [3, 20])
    np.testing.assert_allclose(statistics.m2, [14, 600])
    np.testing.assert_allclose(
        statistics.normalize(np.array([[6.0, 10.0]])), [[3 / math.sqrt(14 / 3), -10 / math.sqrt(200)]], rtol=1e-6
    )


def test_running_statistics_agree_with_those_of_the_whole_far_from_zero():
    data = 1e6 + np.random.default_rng(0).normal(size=(1000, 3))
    statistics = RunningStatistics((3,))
    for batch in np.split(data, [1, 2, 7, 300, 301, 999]):
        statistics.update(batch)
    np.testing.assert_allclose(statistics.mean, data.mean(axis=0), rtol=1e-14)
    np.testing.assert_allclose(statistics.m2 / 1000, data.var(axis=0), rtol=1e-8)


def test_a_dimension_that_never_moves_is_zero():
    statistics = RunningStatistics((1,))
    statistics.update(np.full((5, 1), 7.0))
    assert statistics.normalize(np.array([[7.0]])).tolist() == [[0.0]]


def test_normalize_state_by_hand():
    env = make_env(spec_of('Count-v0', normalize_state=True), seed=0)
    assert env.reset().tolist() == [[0.0]]  # seen: 0
    step = env.step([0])  # 0 1: mean 1/2, deviation 1/2
    np.testing.assert_allclose(step.next_state, [[1.0]], rtol=1e-6)
    assert step.next_state.dtype == np.float32 and env.observation_space.dtype == np.float32
    step = env.step([1])  # 0 1 2 and the new episode's 0: mean 3/4, variance 5/4 - 9/16 = 11/16
    deviation = math.sqrt(11 / 16)
    np.testing.assert_allclose(step.next_state, [[1.25 / deviation]], rtol=1e-6)
    np.testing.assert_allclose(step.state, [[-0.75 / deviation]], rtol=1e-6)
    np.testing.assert_array_equal(env.state, step.state)


def test_statistics_are_shared_by_all_slots_and_kept_per_dimension():
    env = make_env(spec_of('CartPole-v1', num_envs=3, normalize_state=True), seed=0)
    raw = [env.unwrapped.reset()]
    env.statistics.update(raw[0])
    for _ in range(5):
        env.step([0, 1, 0])
        raw.append(env.unwrapped.state)
    seen = np.concatenate(raw).astype(np.float64)
    np.testing.assert_allclose(env.statistics.mean, seen.mean(axis=0), rtol=1e-10)
    np.testing.assert_allclose(env.statistics.m2 / 18, seen.var(axis=0), rtol=1e-10)


@pytest.mark.parametrize('op, shape', [('concat', (3,)), ('stack', (3, 1))])
def test_frames_by_hand(op, shape):
    env = make_env(spec_of('Count-v0', frame_op=op, frame_op_len=3, start=5), seed=0)
    assert env.observation_space.shape == shape and env.observation_space.dtype == np.float32
    first = env.reset()
    assert first.shape == (1, *shape) and first.ravel().tolist() == [5, 5, 5]
    assert env.step([0]).state.ravel().tolist() == [5, 5, 6]
    assert env.step([0]).state.ravel().tolist() == [5, 6, 7]
    step = env.step([1])
    assert step.next_state.ravel().tolist() == [6, 7, 8]
    assert step.state.ravel().tolist() == [5, 5, 5] == env.state.ravel().tolist()
    assert env.step([0]).state.ravel().tolist() == [5, 5, 6]


def test_concat_joins_along_the_first_axis_oldest_first():
    env = make_env(spec_of('CartPole-v1', num_envs=2, frame_op='concat', frame_op_len=2), seed=0)
    before = env.reset()
    assert before.shape == (2, 8) == (2, *env.observation_space.shape)
    after = env.step([0, 1]).state
    np.testing.assert_array_equal(after[:, :4], before[:, 4:])
    np.testing.assert_array_equal(after[:, 4:], env.unwrapped.state)
    np.testing.assert_array_equal(env.observation_space.high[:4], env.observation_space.high[4:])


def test_only_the_ended_slot_begins_its_frames_anew():
    env = make_env(spec_of('Count-v0', num_envs=2, frame_op='stack', frame_op_len=2), seed=0)
    env.reset()
    env.step([0, 0])
    step = env.step([0, 1])
    assert step.next_state[..., 0].tolist() == [[1, 2], [1, 2]]
    assert step.state[..., 0].tolist() == [[1, 2], [0, 0]]


def plain_stacks(frames, step, k):
    """What a step of the env inside makes of stacks (N, k, …), by copying: (next state, state)."""
    following = np.concatenate([frames[:, 1:], step.next_state[:, None]], axis=1)
    going_on = following.copy()
    for i in np.flatnonzero(step.terminated | step.truncated):
        going_on[i] = step.state[i]
    return following, going_on


@pytest.mark.parametrize('op', ['concat', 'stack'])
@pytest.mark.parametrize('num_envs', [1, 3])
@pytest.mark.parametrize('k', [1, 2, 4])
@pytest.mark.parametrize('chance', [0.0, 0.1, 0.8])
def test_stacks_are_those_of_copying_and_stay_what_they_were(op, num_envs, k, chance):
    rng, steps = np.random.default_rng(0), []
    for _ in range(200):
        next_state = rng.integers(0, 256, (num_envs, 2, 3), np.uint8)
        ended = rng.random(num_envs) < chance
        state = next_state
        if ended.any():
            state = np.where(ended[:, None, None], rng.integers(0, 256, next_state.shape, np.uint8), next_state)
        steps.append(Step(next_state, np.zeros(num_envs), ended, ended & False, state))
    env = FrameStack(Scripted(*steps, shape=(2, 3)), op, k)
    shape = (num_envs, 2 * k, 3) if op == 'concat' else (num_envs, k, 2, 3)
    given = [(env.reset(), np.zeros(shape, np.uint8))]
    frames = np.zeros((num_envs, k, 2, 3), np.uint8)
    for inner in steps:
        step = env.step(None)
        following, frames = plain_stacks(frames, inner, k)
        given += [(step.next_state, following.reshape(shape)), (step.state, frames.reshape(shape))]
        assert (step.state is step.next_state) == (inner.state is inner.next_state) and env.state is step.state
    for array, expected in given:  # after all the steps
        assert array.shape == shape and np.array_equal(array, expected)


def test_a_step_copies_no_frames():
    env = FrameStack(Scripted(*(scripted_step([i, i]) for i in range(40))), 'stack', 4)
    states = [env.reset()] + [env.step(None).state for _ in range(40)]
    shared = [np.shares_memory(a, b) for a, b in zip(states[:-1], states[1:], strict=True)]
    assert shared == [True] * 40  # 4 frames to begin with and 40 more, of 64
    base = states[0].base
    assert all(state.base is base for state in states)


def test_the_saved_frames_are_the_stacks_alone():
    env = FrameStack(Scripted(scripted_step([1, 2]), scripted_step([3, 4])), 'concat', 3)
    env.reset()
    env.step(None)
    env.step(None)
    saved = env.own_state()['frames']
    assert saved.tolist() == [[[0], [1], [3]], [[0], [12], [14]]]
    later = FrameStack(Scripted(scripted_step([5, 6], ended=[1])), 'concat', 3)
    later.load_own_state({'frames': saved})
    assert later.state.tolist() == [[0, 1, 3], [0, 12, 14]]
    assert later.step(None).state.tolist() == [[1, 3, 5], [101, 101, 101]]


WHOLE = {'num_envs': 2, 'normalize_state': True, 'frame_op': 'concat', 'frame_op_len': 3, 'reward_scale': 0.1}


def test_every_wrappers_state_is_nested_by_name_and_restored():
    env = make_env(spec_of('CartPole-v1', **WHOLE), seed=0)
    env.reset()
    play(env, 0, 60)
    tree = env.state_dict()
    check_tree(tree)
    assert set(tree) == {'resume', 'slots', 'TrackReturn', 'NormalizeState', 'FrameStack'}
    saved = through_text(tree)
    later = make_env(spec_of('CartPole-v1', **WHOLE), seed=99)
    later.load_state_dict(saved)
    assert first_difference(saved, later.state_dict()) is None
    assert later.total_reward == env.total_reward and not math.isnan(later.total_reward)
    np.testing.assert_array_equal(later.state, env.state)


def test_a_loaded_state_is_a_copy():
    env = make_env(spec_of('CartPole-v1', **WHOLE), seed=0)
    env.reset()
    saved = through_text(env.state_dict())
    later = make_env(spec_of('CartPole-v1', **WHOLE), seed=0)
    later.load_state_dict(saved)
    kept = through_text(saved)
    play(later, 0, 40)
    assert first_difference(saved, kept) is None


@pytest.mark.parametrize(
    'was, now, line',
    [
        ({}, {'normalize_state': True}, 'the saved state lacks NormalizeState'),
        ({'normalize_state': True}, {}, 'the saved state has NormalizeState'),
        ({'num_envs': 2}, {'num_envs': 3}, 'has 2 slots, the spec has 3'),
    ],
)
def test_a_mismatch_is_refused_by_name_before_anything_changes(was, now, line):
    saved = make_env(spec_of('CartPole-v1', **was), seed=0)
    saved.reset()
    env = make_env(spec_of('CartPole-v1', **now), seed=1)
    env.reset()
    before = through_text(env.state_dict())
    with pytest.raises(ResumeError, match=line):
        env.load_state_dict(saved.state_dict())
    assert first_difference(before, env.state_dict()) is None
