"""The agent that learns nothing."""

import math

import numpy as np
import pytest
from agent_cases import algorithm, fill, memory, world
from gymnasium import spaces

from slm_lab.lib import rng as rng_lib


@pytest.mark.parametrize(
    ('space', 'shape'),
    [(3, (5,)), (spaces.Box(-1, 1, (2,), np.float32), (5, 2)), (spaces.MultiDiscrete([2, 3]), (5, 2))],
    ids=str,
)
def test_it_samples_the_action_space_of_each_env(space, shape):
    agent = algorithm('Random', world(actions=space))
    assert agent.act(np.zeros((5, 2))).shape == shape


def test_evaluating_has_a_generator_of_its_own():
    agent = algorithm('Random')
    before = rng_lib.generator_state(agent.rng)
    agent.act(np.zeros((5, 2)), evaluating=True)
    assert rng_lib.generator_state(agent.rng) == before
    agent.act(np.zeros((5, 2)))
    assert rng_lib.generator_state(agent.rng) != before


def test_it_takes_no_step_and_has_no_nets():
    agent, replay = algorithm('Random'), memory('Replay')
    fill(replay, 5)
    done = agent.train(replay, 5)
    agent.update(5)
    assert done.opt_steps == 0 and math.isnan(done.loss) and math.isnan(agent.explore_var)
    assert agent.nets == {} and replay.size == 5


@pytest.mark.parametrize('name', ['OnPolicyReplay', 'OnPolicyBatchReplay'])
def test_it_empties_an_on_policy_memory(name):
    agent, store = algorithm('Random'), memory(name)
    fill(store, 3, terminated=[2])
    agent.train(store, 3)
    assert store.size == 0
