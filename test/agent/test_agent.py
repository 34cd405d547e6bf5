"""The agent: what it remembers, when it learns, and what is in its state."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from agent_cases import algorithm_spec, memory_spec, net_spec
from gymnasium import spaces

from slm_lab.agent.agent import Agent
from slm_lab.lib.state import check_tree, first_difference, snapshot


def world(states=None, actions=None, num_envs=2):
    states = states or spaces.Box(-1, 1, (2,), np.float32)
    actions = actions or spaces.Discrete(3)
    return SimpleNamespace(observation_space=states, action_space=actions, num_envs=num_envs, frames_per_state=1)


def build(env=None, name='DQN', memory='Replay', seed=0, rigorous_eval=0, **keys):
    agent = {'name': 'label', 'memory': memory_spec(memory), 'net': net_spec()}
    agent['algorithm'] = algorithm_spec(name, **keys)
    return Agent({'agent': agent, 'env': {}, 'meta': {'rigorous_eval': rigorous_eval}}, env or world(), seed)


def step(i, rewards=(1.0, 2.0)):
    return SimpleNamespace(
        next_state=np.full((2, 2), i + 0.5, np.float32),
        reward=np.array(rewards),
        terminated=np.array([True, False]),
        truncated=np.array([False, True]),
    )


def run(agent, steps, start=0):
    opt_steps = []
    for i in range(start, start + steps):
        states = np.full((2, 2), i, np.float32)
        opt_steps.append(agent.update(states, agent.act(states), step(i), 2 * (i + 1)))
    return opt_steps


@pytest.mark.parametrize(
    ('space', 'dtype'),
    [
        (spaces.Box(0, 255, (2,), np.uint8), np.uint8),
        (spaces.Box(-1, 1, (2,), np.float32), np.float32),
        (spaces.Box(-1, 1, (2,), np.float64), np.float32),
    ],
)
def test_the_memory_keeps_observations_in_the_env_s_dtype(space, dtype):
    """The env room hands float64 observations over as float32."""
    arrays = build(world(space)).memory.arrays
    assert arrays['states'].dtype == arrays['next_states'].dtype == dtype
    assert arrays['states'].shape == (10, 2)


@pytest.mark.parametrize(
    ('space', 'shape', 'dtype'),
    [
        (spaces.Discrete(3), (), np.int64),
        (spaces.MultiDiscrete([2, 3]), (2,), np.int64),
        (spaces.MultiBinary(4), (4,), np.int64),
        (spaces.Box(-1, 1, (3,), np.float32), (3,), np.float32),
    ],
    ids=str,
)
def test_the_memory_keeps_actions_by_their_space(space, shape, dtype):
    actions = build(world(actions=space), 'Random').memory.arrays['actions']
    assert actions.shape == (10, *shape) and actions.dtype == dtype


def test_a_step_of_each_env_is_remembered_as_it_was():
    agent = build(training_start_step=100)
    agent.update(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([2, 0]), step(7), frame=2)
    arrays = agent.memory.arrays
    assert arrays['states'][:2].tolist() == [[1, 2], [3, 4]] and arrays['actions'][:2].tolist() == [2, 0]
    assert arrays['next_states'][:2].tolist() == [[7.5, 7.5], [7.5, 7.5]] and arrays['rewards'][:2].tolist() == [1, 2]
    assert arrays['terminated'][:2].tolist() == [1, 0] and arrays['truncated'][:2].tolist() == [0, 1]


def test_update_gives_the_optimizer_steps_and_keeps_the_loss():
    agent = build(training_start_step=4, training_frequency=4, training_batch_iter=3)
    opt_steps = run(agent, 2)
    assert opt_steps == [0, 0] and math.isnan(agent.body.loss)
    assert run(agent, 1, 2) == [3]  # transition 5 is one past a multiple of 4
    loss = agent.body.loss
    assert loss > 0
    assert run(agent, 1, 3) == [0] and agent.body.loss == loss
    assert agent.algorithm.explore_var == pytest.approx(1 - 8 / 100)  # of frame 8
    assert run(agent, 1, 4) == [3] and agent.body.loss != loss


def test_a_loss_that_is_not_finite_is_no_step_and_no_loss():
    agent = build(training_start_step=0)
    run(agent, 4)
    loss, before = agent.body.loss, snapshot(agent.algorithm.nets['net'].state_dict())
    agent.memory.arrays['rewards'][:] = math.inf
    states = np.zeros((2, 2), np.float32)
    assert agent.update(states, agent.act(states), step(4, (math.inf, math.inf)), 10) == 0
    assert agent.body.loss == loss
    assert first_difference(agent.algorithm.nets['net'].state_dict(), before) is None


def test_evaluation_has_rows_of_its_own_when_the_spec_says_so():
    assert build(rigorous_eval=3).body.rigorous_eval and not build().body.rigorous_eval


@pytest.mark.parametrize(
    ('name', 'memory'), [('SARSA', 'OnPolicyReplay'), ('DoubleDQN', 'PrioritizedReplay'), ('Random', 'Replay')]
)
def test_an_agent_goes_on_from_its_state(name, memory):
    torch.manual_seed(0)
    agent = build(name=name, memory=memory)
    run(agent, 20)
    state = snapshot(agent.state_dict())
    assert set(state) == {'algorithm', 'memory', 'body'}
    check_tree(state)
    other = build(name=name, memory=memory, seed=4)
    run(other, 3)
    other.load_state_dict(state)
    process = torch.get_rng_state()
    expected = run(agent, 20, 20)
    torch.set_rng_state(process)
    assert run(other, 20, 20) == expected
    assert first_difference(other.state_dict(), agent.state_dict()) is None
