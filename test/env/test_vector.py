import numpy as np
import pytest
from env_cases import one_life, spec_of

from slm_lab.env import make_env
from slm_lab.env.vector import VectorEnv


def rows(array):
    return array[:, 0].tolist()


def test_termination_keeps_the_true_final_observation():
    env = make_env(spec_of('Count-v0'), seed=0)
    assert rows(env.reset()) == [0]
    env.step([0])
    step = env.step([1])
    assert (rows(step.next_state), rows(step.state), rows(env.state)) == ([2], [0], [0])
    assert (step.reward.tolist(), step.terminated.tolist(), step.truncated.tolist()) == ([2.0], [True], [False])
    # the next step is an ordinary one of the new episode
    step = env.step([0])
    assert (rows(step.next_state), step.reward.tolist(), step.terminated.tolist()) == ([1], [1.0], [False])


def test_truncation_keeps_the_true_final_observation():
    env = make_env(spec_of('Count-v0', max_t=2), seed=0)
    env.reset()
    env.step([0])
    step = env.step([0])
    assert (rows(step.next_state), rows(step.state)) == ([2], [0])
    assert (step.terminated.tolist(), step.truncated.tolist()) == ([False], [True])


def test_both_at_once_are_both_told():
    env = make_env(spec_of('Count-v0', max_t=1), seed=0)
    env.reset()
    step = env.step([1])
    assert (step.terminated.tolist(), step.truncated.tolist()) == ([True], [True])


def test_slots_end_on_their_own():
    env = make_env(spec_of('Count-v0', num_envs=3, max_t=2), seed=0)
    env.reset()
    first = env.step(np.array([0, 1, 0]))
    assert (rows(first.next_state), rows(first.state)) == ([1, 1, 1], [1, 0, 1])
    second = env.step(np.array([0, 0, 1]))
    assert (rows(second.next_state), rows(second.state)) == ([2, 1, 2], [0, 1, 0])
    assert second.terminated.tolist() == [False, False, True]
    assert second.truncated.tolist() == [True, False, True]
    assert second.reward.tolist() == [2.0, 1.0, 2.0]


def test_pendulum_ends_after_200_steps_by_truncation():
    env = make_env(spec_of('Pendulum-v1', num_envs=2), seed=3)
    env.reset()
    for _ in range(199):
        step = env.step(np.zeros((2, 1), dtype=np.float32))
        assert step.state is step.next_state
    step = env.step(np.zeros((2, 1), dtype=np.float32))
    assert step.truncated.tolist() == [True, True] and step.terminated.tolist() == [False, False]
    # cos² + sin² = 1 in the true final state, which is not the new episode's first
    np.testing.assert_allclose(np.square(step.next_state[:, :2]).sum(axis=1), 1, atol=1e-6)
    assert (step.next_state != step.state).all()


def test_no_later_step_writes_into_an_earlier_one():
    env = make_env(spec_of('Count-v0', num_envs=2, frame_op='concat', frame_op_len=2), seed=0)
    env.reset()
    steps = [env.step(np.array([0, i % 2])) for i in range(4)]
    assert [s.next_state[0].tolist() for s in steps] == [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert [s.next_state[1].tolist() for s in steps] == [[0, 1], [1, 2], [0, 1], [1, 2]]
    assert [s.state[1].tolist() for s in steps] == [[0, 1], [0, 0], [0, 1], [0, 0]]


@pytest.mark.parametrize('action', [np.zeros((1, 1)), np.zeros((1, 1), np.float32), np.zeros(1), [[0.0]]])
def test_a_box_gets_its_own_dtype_and_shape(action, monkeypatch):
    env = make_env(spec_of('Pendulum-v1'), seed=0)
    env.reset()
    inner, given = env.unwrapped.slots[0].env, []
    original = inner.step
    monkeypatch.setattr(inner, 'step', lambda a: given.append(a) or original(a))
    env.step(action)
    assert given[0].shape == (1,) and given[0].dtype == np.float32


def test_reset_in_mid_episode_begins_anew():
    env = make_env(spec_of('CartPole-v1'), seed=0)
    first = env.reset().copy()
    env.step([0])
    second = env.reset()
    assert (first != second).all()
    assert env.unwrapped.slots[0].state_dict()['actions'].tolist() == []


def test_long_episodes_are_recorded_whole():
    env = make_env(spec_of('Count-v0'), seed=0)
    env.reset()
    for _ in range(1000):
        env.step([0])
    assert env.unwrapped.slots[0].state_dict()['actions'].tolist() == [0] * 1000


def test_lives_on_tells_the_slots_whose_game_goes_on():
    env = VectorEnv('Game-v0', one_life, 4, 0, 'replay', None, vector='sync')
    env.reset()
    steps = [env.step(np.ones(4, dtype=int)) for _ in range(60)]
    assert all(s.lives_on is None for s in steps if not s.terminated.any())
    seen = set()
    for step in steps:
        lives_on = np.zeros(4, bool) if step.lives_on is None else step.lives_on
        assert lives_on.dtype == np.bool_ and (step.lives_on is None or lives_on.any())
        # the game goes on where lives are left
        np.testing.assert_array_equal(lives_on, step.terminated & (step.next_state[:, 0] > 0))
        seen |= set(zip(step.terminated.tolist(), lives_on.tolist(), strict=True))
    assert seen == {(False, False), (True, True), (True, False)}
