"""Action policies: how often, from which generator, and how evaluation differs."""

import math

import numpy as np
import pytest
import torch
from agent_cases import algorithm, world
from gymnasium import spaces

from slm_lab.agent import policy
from slm_lab.agent.distribution import Argmax, Categorical
from slm_lab.lib import rng as rng_lib
from slm_lab.lib.rng import generator


class Actor:
    """Has the same logits in every state."""

    def __init__(self, logits=(0.0, 1.0, 0.5), distribution=Argmax):
        self.row, self.distribution = torch.tensor(logits), distribution
        self.world = world(actions=len(logits))

    def logits(self, states):
        return self.row.expand(len(states), -1)

    def random_actions(self, n, rng):
        return policy.random_actions(self.world.action_space, n, rng)


def frequencies(actions, n=3):
    return np.bincount(actions, minlength=n) / len(actions)


def assert_close(frequencies, expected, n):
    """Within four standard deviations."""
    expected = np.asarray(expected)
    assert (np.abs(frequencies - expected) <= 4 * np.sqrt(expected * (1 - expected) / n)).all()


def test_default_samples_the_distribution():
    torch.manual_seed(0)
    states = np.zeros((4000, 2))
    logits = (0.0, math.log(2), math.log(5))
    drawn = policy.default(states, Actor(logits, Categorical), math.nan, generator(0))
    assert_close(frequencies(drawn), [1 / 8, 2 / 8, 5 / 8], 4000)
    assert (policy.default(states, Actor(logits), math.nan, generator(0)) == 2).all()


def test_random_is_uniform():
    drawn = policy.random(np.zeros((3000, 2)), Actor(), math.nan, generator(0))
    assert_close(frequencies(drawn), [1 / 3] * 3, 3000)


@pytest.mark.parametrize('epsilon', [0.0, 0.3, 0.9, 1.0])
def test_epsilon_greedy_explores_with_probability_epsilon(epsilon):
    """The greedy action also comes from exploring: 1 − 2/3 epsilon."""
    drawn = policy.epsilon_greedy(np.zeros((6000, 2)), Actor(), epsilon, generator(0))
    assert_close(frequencies(drawn), [epsilon / 3, 1 - 2 / 3 * epsilon, epsilon / 3], 6000)


def test_each_env_draws_for_itself_whether_it_explores():
    rng, mixed = generator(0), 0
    for _ in range(300):
        greedy = policy.epsilon_greedy(np.zeros((4, 2)), Actor((0.0,) * 99 + (1.0,)), 0.5, rng) == 99
        mixed += 0 < greedy.sum() < 4
    assert abs(mixed / 300 - 14 / 16) < 0.1  # all four alike: 2 of 16; a draw for all would give 0


@pytest.mark.parametrize('tau', [0.5, 1.0, 4.0])
@pytest.mark.parametrize('pdtype', [Argmax, Categorical])
def test_boltzmann_samples_the_logits_over_the_temperature(pdtype, tau):
    torch.manual_seed(0)
    drawn = policy.boltzmann(np.zeros((6000, 2)), Actor((0.0, 1.0, 2.0), pdtype), tau, generator(0))
    weights = np.exp(np.array([0.0, 1.0, 2.0]) / tau)
    assert_close(frequencies(drawn), weights / weights.sum(), 6000)


# --- random actions of every space


def test_discrete_actions():
    drawn = policy.random_actions(spaces.Discrete(3), 3000, generator(0))
    assert drawn.shape == (3000,)
    assert_close(frequencies(drawn), [1 / 3] * 3, 3000)
    shifted = policy.random_actions(spaces.Discrete(3, start=5), 100, generator(0))
    assert set(shifted) == {0, 1, 2}  # counted from 0, as a net's outputs are


def test_multi_discrete_actions():
    drawn = policy.random_actions(spaces.MultiDiscrete([2, 5]), 3000, generator(0))
    assert drawn.shape == (3000, 2)
    assert_close(frequencies(drawn[:, 0], 2), [1 / 2] * 2, 3000)
    assert_close(frequencies(drawn[:, 1], 5), [1 / 5] * 5, 3000)


def test_multi_binary_actions():
    drawn = policy.random_actions(spaces.MultiBinary(4), 3000, generator(0))
    assert drawn.shape == (3000, 4) and drawn.dtype == np.int8
    assert (np.abs(drawn.mean(axis=0) - 0.5) < 4 * 0.5 / math.sqrt(3000)).all()


def test_boxes_with_and_without_bounds():
    low = np.array([-2, -np.inf, 1, -np.inf], np.float32)
    high = np.array([3, np.inf, np.inf, 5], np.float32)
    space = spaces.Box(low, high, dtype=np.float32)
    drawn = policy.random_actions(space, 4000, generator(0))
    assert drawn.shape == (4000, 4) and drawn.dtype == np.float32
    assert all(space.contains(row) for row in drawn)
    # uniform on [−2, 3], standard normal, 1 + exponential, 5 − exponential
    assert drawn.mean(axis=0) == pytest.approx([0.5, 0, 2, 4], abs=4 * 1.45 / math.sqrt(4000))
    assert drawn.std(axis=0) == pytest.approx([5 / math.sqrt(12), 1, 1, 1], abs=0.1)


def test_a_box_of_whole_numbers_includes_both_bounds():
    drawn = policy.random_actions(spaces.Box(-1, 2, (1,), np.int32), 4000, generator(0))
    assert drawn.shape == (4000, 1) and drawn.dtype == np.int32
    assert_close(frequencies(drawn[:, 0] + 1, 4), [1 / 4] * 4, 4000)


@pytest.mark.parametrize(
    'space',
    [spaces.Discrete(9), spaces.MultiDiscrete([9, 9]), spaces.MultiBinary(9), spaces.Box(-1, 1, (3,), np.float32)],
    ids=str,
)
def test_random_actions_come_from_the_generator_alone(space):
    one, other = generator(0), generator(0)
    for _ in range(3):
        assert np.array_equal(policy.random_actions(space, 5, one), policy.random_actions(space, 5, other))


# --- acting for training and for evaluation


def test_evaluating_uses_the_final_epsilon_and_leaves_training_s_generator():
    dqn = algorithm('DQN', explore_var_spec={'name': 'linear_decay', 'start_val': 1.0, 'end_val': 0.0, 'end_step': 10})
    states, before = np.ones((200, 2), np.float32), rng_lib.generator_state(dqn.rng)
    evaluated = dqn.act(states, evaluating=True)
    assert len(set(evaluated)) == 1  # greedy, and the states are equal
    assert rng_lib.generator_state(dqn.rng) == before
    eval_before = rng_lib.generator_state(dqn.eval_rng)
    assert len(set(dqn.act(states))) == 3  # epsilon is still 1
    assert rng_lib.generator_state(dqn.eval_rng) == eval_before
    assert rng_lib.generator_state(dqn.rng) != before


def test_exploring_follows_the_frame():
    dqn = algorithm('DQN')
    assert dqn.explore_var == 1.0
    dqn.update(frame=25)
    assert dqn.explore_var == 0.75
    dqn.set_frame(frame=100)
    assert dqn.explore_var == 0.0
    assert len(set(dqn.act(np.ones((200, 2), np.float32)))) == 1
