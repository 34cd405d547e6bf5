"""SARSA: targets by hand, and whose actions they bootstrap on."""

import numpy as np
import pytest
import torch
from agent_cases import algorithm, fill, memory, net_spec, world
from test_dqn import GAMMA, NET, table_net

from slm_lab.agent.memory.batch import Batch
from slm_lab.lib import rng as rng_lib

EYE = torch.eye(2)


def tabular(**keys):
    one = algorithm('SARSA', world(2, 3, **keys), net_spec(hid_layers=[]), gamma=GAMMA, action_pdtype='Argmax')
    table_net(one, 'net', NET)
    return one


def batch(next_states, actions, terminated, truncated):
    actions, terminated, truncated = (torch.tensor(x) for x in (actions, terminated, truncated))
    states = EYE[torch.tensor(next_states)]
    return Batch(torch.zeros_like(states), actions, torch.ones(actions.shape), states, terminated, truncated)


@pytest.fixture
def asked(monkeypatch):
    """Makes the policy answer action 2, and keeps what it was asked."""
    states = []

    def install(sarsa):
        monkeypatch.setattr(sarsa, 'act', lambda s: states.append(s.argmax(axis=-1).tolist()) or np.full(len(s), 2))
        return states

    return install


def test_next_actions_are_those_of_the_next_step(asked):
    """Two envs, four steps; env 1 is cut at step 1 and terminates at step 2, where the next action has no meaning."""
    sarsa = tabular(num_envs=2)
    states = asked(sarsa)
    b = batch(
        next_states=[[0, 0], [0, 1], [0, 0], [1, 0]],
        actions=[[0, 1], [1, 1], [0, 1], [1, 0]],
        terminated=[[0.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]],
        truncated=[[0.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]],
    )
    assert sarsa.next_actions(b).tolist() == [[1, 1], [0, 2], [1, 0], [2, 2]]
    assert states == [[1, 1, 0]]  # next states where it was not known: the cut one, and the last of both envs
    assert b.truncated.tolist()[3] == [0.0, 0.0] and b.actions.tolist()[3] == [1, 0]  # the batch stays as it was


def test_next_actions_of_whole_episodes(asked):
    sarsa = tabular()
    states = asked(sarsa)
    b = batch([0, 1, 1, 0], [0, 1, 0, 1], [0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0])
    assert sarsa.next_actions(b).tolist() == [1, 2, 1, 2]
    assert states == [[1, 0]]


def test_targets_by_hand():
    """Next values Q(s', a') of NET; the terminated step does not bootstrap, the truncated one does."""
    sarsa = tabular()
    b = batch([0, 1, 1, 0], [0, 1, 0, 1], [0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0])
    targets = sarsa.calc_targets(b, torch.tensor([1, 2, 0, 2]))
    assert targets.tolist() == [1 + GAMMA * 3.0, 1 + GAMMA * 5.0, 1.0, 1 + GAMMA * 2.0]


def test_drawn_actions_are_the_policy_s_own():
    """At epsilon 0 they are greedy; what is drawn comes from training's generator."""
    sarsa = tabular()
    b = batch([0, 1], [0, 0], [0.0, 0.0], [0.0, 0.0])
    before = rng_lib.generator_state(sarsa.rng)
    sarsa.explore_var = 0.0
    assert sarsa.next_actions(b).tolist() == [0, 2]  # the best of state 1
    assert rng_lib.generator_state(sarsa.rng) != before


@pytest.mark.parametrize(('name', 'frequency', 'due'), [('OnPolicyBatchReplay', 4, [4, 8]), ('OnPolicyReplay', 2, [6])])
def test_one_step_is_taken_whenever_it_is_due(name, frequency, due):
    sarsa = algorithm('SARSA', world(1, num_envs=2), training_frequency=frequency)
    store, trained_at = memory(name, num_envs=2), []
    for i in range(1, 9):
        fill(store, 1, first=2 * i, terminated=[4, 12])
        done = sarsa.train(store, i)
        trained_at += [i] * done.opt_steps
        assert np.isfinite(done.loss) == bool(done.opt_steps)
    assert trained_at == due


def test_the_loss_of_a_batch_by_hand():
    """One env, two steps: Q(0, 1) = 3 towards 1 + 0.5 · 5 = 3.5 and Q(1, 2) = 5 towards 1: (0.25 + 16) / 2."""
    sarsa = tabular()
    store = memory('OnPolicyBatchReplay', state=(2, np.float32))
    zero, one = np.eye(2)[[0]], np.eye(2)[[1]]
    store.add(zero, np.array([1]), np.array([1.0]), one, np.array([False]), np.array([False]))
    store.add(one, np.array([2]), np.array([1.0]), zero, np.array([True]), np.array([False]))
    sarsa.spec['training_frequency'] = 2
    done = sarsa.train(store, 2)
    assert done.loss == pytest.approx((0.25 + 16) / 2) and done.opt_steps == 1
