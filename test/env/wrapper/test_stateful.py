import math

import numpy as np
import pytest
from env_cases import play, spec_of, through_text

from slm_lab.env import make_env
from slm_lab.env.wrapper.stateful import RunningStatistics
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
