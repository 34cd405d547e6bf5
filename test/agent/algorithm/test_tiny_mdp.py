"""Each algorithm finds the values of a small Markov decision process that can be solved by hand.

    state 0: action 0 ends, reward 0.2;           action 1 goes to state 1, reward 0
    state 1: action 0 goes back to 0, reward 0;   action 1 ends, reward 1

A time limit cuts every episode after 3 steps. It is no part of the state, so a step that it cuts must bootstrap:
taken for an end, going back would be worth far less than it is.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from agent_cases import algorithm_spec, memory_spec, net_spec
from gymnasium import spaces

from slm_lab.agent.agent import Agent

GAMMA, EPSILON, TIME_LIMIT = 0.9, 0.5, 3
# Q*(1,1) = 1, Q*(0,1) = 0.9 · 1, Q*(1,0) = 0.9 · 0.9
OPTIMAL = np.array([[0.2, 0.9], [0.81, 1.0]])


def values_of_epsilon_greedy():
    """Solves Q = r + gamma P Q of the policy that takes action 1 with probability 1 − epsilon / 2."""
    first, second = EPSILON / 2, 1 - EPSILON / 2
    q = np.array([[0.2, 0.0], [0.0, 1.0]])
    for _ in range(500):
        v = q @ [first, second]
        q = np.array([[0.2, GAMMA * v[1]], [GAMMA * v[0], 1.0]])
    return q


class TinyEnvs:
    """N slots, as the agent sees an env."""

    frames_per_state = 1

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.observation_space, self.action_space = spaces.Box(0, 1, (2,), np.float32), spaces.Discrete(2)
        self.at, self.t = np.zeros(num_envs, int), np.zeros(num_envs, int)

    @property
    def state(self):
        return np.eye(2, dtype=np.float32)[self.at]

    def step(self, actions):
        self.t += 1
        terminated = self.at == actions
        reward = np.where(terminated, np.array([0.2, 1.0])[self.at], 0.0)
        truncated = ~terminated & (self.t == TIME_LIMIT)
        self.at = np.where(terminated, self.at, 1 - self.at)
        step = Step(self.state, reward, terminated, truncated)
        ended = terminated | truncated
        self.at, self.t = np.where(ended, 0, self.at), np.where(ended, 0, self.t)
        return step


class Step(NamedTuple):
    next_state: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


def learn(name, frames, memory, num_envs=3, **keys):
    """Trains a linear net on one-hot states: a table. Returns: Q (2, 2) and the optimizer steps taken"""
    torch.manual_seed(0)
    net = net_spec(
        hid_layers=[],
        optim_spec={'name': 'SGD', 'lr': keys.pop('lr')},
        lr_scheduler_spec={'name': 'LinearToZero', 'frame': 1.02 * frames},
        **({'update_frequency': 30} if name in ('DQN', 'DoubleDQN') else {}),
    )
    explore = {'name': 'no_decay', 'start_val': EPSILON}
    algorithm = algorithm_spec(name, gamma=GAMMA, explore_var_spec=explore, action_pdtype='Argmax', **keys)
    agent_spec = {'name': name, 'algorithm': algorithm, 'memory': memory, 'net': net}
    env, opt_steps = TinyEnvs(num_envs), 0
    agent = Agent({'agent': agent_spec, 'env': {}, 'meta': {'rigorous_eval': 0}}, env, seed=1)
    for frame in range(num_envs, frames, num_envs):
        states = env.state
        actions = agent.act(states)
        opt_steps += agent.update(states, actions, env.step(actions), frame)
    return agent.algorithm.logits(np.eye(2)).detach().numpy(), opt_steps


@pytest.mark.parametrize('name', ['VanillaDQN', 'DQN', 'DoubleDQN'])
@pytest.mark.parametrize('memory', ['Replay', 'PrioritizedReplay'])
def test_q_learning_finds_the_optimal_values(name, memory):
    keys = {'alpha': 0.6, 'epsilon': 0.01} if memory == 'PrioritizedReplay' else {}
    replay = memory_spec(memory, batch_size=16, max_size=500, **keys)
    q, opt_steps = learn(name, 1800, replay, lr=0.5, training_frequency=3, training_start_step=30)
    assert opt_steps == (1800 - 30) // 3 - 1
    assert q == pytest.approx(OPTIMAL, abs=1e-4)


@pytest.mark.parametrize(('memory', 'frequency'), [('OnPolicyBatchReplay', 4), ('OnPolicyReplay', 6)])
def test_sarsa_finds_the_values_of_its_own_policy(memory, frequency):
    expected = values_of_epsilon_greedy()
    assert expected[1, 0] < 0.7 < OPTIMAL[1, 0]  # it is another answer than that of Q-learning
    q, _ = learn('SARSA', 30000, memory_spec(memory), 12, lr=0.4, training_frequency=frequency)
    assert q == pytest.approx(expected, abs=0.05)
    assert q.argmax(axis=1).tolist() == [1, 1]


def test_sarsa_finds_the_optimal_values_where_it_hardly_explores(monkeypatch):
    """Its own policy is then close to the optimal one, while every action is still tried now and then."""
    monkeypatch.setattr(f'{__name__}.EPSILON', 0.05)
    q, _ = learn('SARSA', 60000, memory_spec('OnPolicyBatchReplay'), 24, lr=0.8, training_frequency=4)
    assert q == pytest.approx(OPTIMAL, abs=0.06)
