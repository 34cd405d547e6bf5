"""Self-imitation by numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from slm_lab.agent.algorithm.actor_critic import ActorCritic
from slm_lab.agent.algorithm.base import World
from slm_lab.agent.algorithm.sil import sil_losses
from slm_lab.agent.memory.batch import Batch
from slm_lab.lib.errors import SpecError
from slm_lab.lib.registry import ALGORITHMS
from slm_lab.lib.state import check_tree, first_difference, snapshot
from slm_lab.spec import spec_util

SIL = {'sil_policy_loss_coef': 1.0, 'sil_val_loss_coef': 1.0, 'training_batch_iter': 2, 'training_iter': 3}
CLIP = {'name': 'no_decay', 'start_val': 0.2}
PARENT = {
    'SIL': {'lam': 0.5, 'training_frequency': 4},
    'PPOSIL': {'lam': 0.5, 'clip_eps_spec': CLIP, 'minibatch_size': 4, 'time_horizon': 4, 'training_epoch': 1},
}
REPLAY = {'batch_size': 4, 'max_size': 20}
PRIORITIZED = {**REPLAY, 'sil_replay_name': 'PrioritizedReplay', 'alpha': 1.0, 'epsilon': 0.5}


def resolved(name='SIL', memory=None, shared=False, **algorithm):
    agent = {
        'algorithm': {'name': name, 'gamma': 0.5, **PARENT[name], **SIL, **algorithm},
        'memory': {'name': 'OnPolicyBatchReplay', **(REPLAY if memory is None else memory)},
        'net': {'type': 'MLPNet', 'hid_layers': [], 'hid_layers_activation': None, 'shared': shared},
    }
    env, meta = [{'name': 'CartPole-v1', 'max_frame': 10}], {'max_session': 1}
    return spec_util.resolve({'name': 'x', 'agent': [agent], 'env': env, 'meta': meta})['agent']


def built(name='SIL', memory=None, seed=0, num_envs=1, **kwargs):
    world = World(spaces.Box(-99, 99, (1,), np.float64), spaces.Discrete(2), num_envs)
    return ALGORITHMS.get(name)(resolved(name, memory, **kwargs), world, seed)


def set_weights(net, weight, bias=0.0):
    with torch.no_grad():
        for name, value in net.named_parameters():
            value.copy_(torch.tensor(weight if name.endswith('weight') else bias).expand(value.shape))


def batch(rewards, terminated=None, truncated=None, next_states=None):
    """Steps (T, N) of lists by step; env 0's states count 1, 2, …, env 1's 101, 102, …; all actions are 0."""
    rewards = torch.tensor(rewards)
    t, n = rewards.shape
    zeros = torch.zeros(t, n)
    states = torch.arange(1.0, t + 1).unsqueeze(1) + 100 * torch.arange(n)
    following = states + 1 if next_states is None else torch.tensor(next_states)
    ends = [zeros if e is None else torch.tensor(e, dtype=torch.float32) for e in (terminated, truncated)]
    return Batch(states.unsqueeze(-1), zeros.long(), rewards, following.unsqueeze(-1), *ends)


def remembered(algorithm, field='rewards'):
    return algorithm.replay.arrays[field][: algorithm.replay.size].flatten().tolist()


def test_the_losses_by_hand():
    """R − V is 2, −3, 0: what went worse than expected counts as nothing."""
    log_probs = torch.tensor([math.log(0.5), math.log(0.25), math.log(0.1)])
    values, returns = torch.tensor([1.0, 4.0, 2.0]), torch.tensor([3.0, 1.0, 2.0])
    policy, value, advantages = sil_losses(log_probs, values, returns)
    assert policy.item() == pytest.approx(2 * math.log(2) / 3)
    assert value.item() == pytest.approx(2**2 / 2 / 3)
    assert advantages.tolist() == [2, 0, 0]


def test_the_policy_loss_leaves_values_alone_and_the_value_loss_pulls_them_up():
    log_probs = torch.tensor([-0.5, -0.5], requires_grad=True)
    values = torch.tensor([1.0, 4.0], requires_grad=True)
    policy, value, _ = sil_losses(log_probs, values, torch.tensor([3.0, 3.0]))
    assert torch.autograd.grad(policy, values, retain_graph=True, allow_unused=True) == (None,)
    assert torch.autograd.grad(policy, log_probs)[0].tolist() == [-1, 0]  # −A / 2
    assert torch.autograd.grad(value, values)[0].tolist() == [-1, 0]  # (V − R) / 2 where R is above V


def test_returns_are_stored_with_their_transitions():
    """gamma 0.5, V(s) = s. Terminated: 1 + 0.5 · 2 = 2, 2. Truncated before state 40: 4 + 0.5 · 40. Still running
    before state 60: 1 + 0.5 · (2 + 0.5 · 60)."""
    sil = built()
    set_weights(sil.critic_net, 1.0)
    b = batch(
        [[1.0], [2.0], [4.0], [1.0], [2.0]],
        terminated=[[0], [1], [0], [0], [0]],
        truncated=[[0], [0], [1], [0], [0]],
        next_states=[[2.0], [30.0], [40.0], [5.0], [60.0]],
    )
    sil.remember(b)
    assert remembered(sil) == [2, 2, 24, 17, 32]
    assert remembered(sil, 'states') == [1, 2, 3, 4, 5]
    assert sil.replay.arrays['states'].dtype == np.float32 and sil.replay.arrays['actions'].dtype == np.int64


def test_each_env_has_returns_of_its_own():
    """V = 0. Env 0: 1 + 0.5 · 2, 2; env 1: 4 (terminated), 8."""
    sil = built(num_envs=2)
    set_weights(sil.critic_net, 0.0)
    sil.remember(batch([[1.0, 4.0], [2.0, 8.0]], terminated=[[0, 1], [1, 0]]))
    assert remembered(sil) == [2, 4, 2, 8]
    assert remembered(sil, 'states') == [1, 101, 2, 102]
    assert sil.replay.seen_size == 4


def test_whole_episodes_of_an_episodic_memory_are_remembered():
    """As OnPolicyReplay hands them over: one after the other, here as (B,)."""
    sil = built(memory={'name': 'OnPolicyReplay', **REPLAY}, lam=None, num_step_returns=None)
    flat = batch([[1.0], [2.0], [4.0]], terminated=[[0], [1], [1]])

    class Memory:
        def is_due(self, frequency):
            return True

        def sample(self, frame):
            return Batch(*(x.squeeze(1) for x in flat[:-1]))

    assert sil.train(Memory(), 3).opt_steps == 2
    assert remembered(sil) == [2, 2, 4]


def test_a_batch_larger_than_the_replay_leaves_its_newest_rows():
    sil = built(memory={'batch_size': 2, 'max_size': 3})
    sil.remember(batch([[1.0], [2.0], [3.0], [4.0], [5.0]], terminated=[[1]] * 5))
    assert sorted(remembered(sil)) == [3, 4, 5] and sil.replay.head == 1


@pytest.mark.parametrize(('shared', 'nets'), [(False, 2), (True, 1)])
@pytest.mark.parametrize('name', ['SIL', 'PPOSIL'])
def test_it_waits_for_a_batch_in_the_replay_and_counts_every_step(name, shared, nets):
    sil = built(name, shared=shared)
    assert sil.train_on(batch([[1.0]] * 3)).opt_steps == nets  # the parent's alone: 3 rows are no batch of 4
    sampled = sil.replay.rng.bit_generator.state
    trained = sil.train_on(batch([[1.0]] * 3))
    assert trained.opt_steps == nets * (1 + 3 * 2)
    assert math.isfinite(trained.loss) and math.isfinite(trained.entropy)
    assert sil.replay.rng.bit_generator.state != sampled


def test_the_loss_is_the_parents_plus_the_mean_of_the_updates(monkeypatch):
    sil, parent = built(), built()
    parent.load_state_dict(snapshot(sil.state_dict()))
    updates = iter([[1.0, 2.0], [3.0], [], [2.0, 4.0], [9.0, 0.0]])
    monkeypatch.setattr(sil, 'imitate', lambda batch: next(updates))
    b = batch([[1.0]] * 4)
    own = ActorCritic.train_on(parent, b)
    trained = sil.train_on(b)
    # the three batches: updates of 3 and 3; none, so on to the next batch; 6 and 9
    assert trained.loss == pytest.approx(own.loss + 21 / 4)
    assert trained.opt_steps == own.opt_steps + 2 + 1 + 2 + 2


@pytest.mark.parametrize('name', ['SIL', 'PPOSIL'])
def test_a_separate_critic_is_trained_and_both_only_by_what_went_better(name):
    """SGD at 0.1 on states and actions that are all the same: R = 8, V = 0, two actions of equal probability."""
    sil = built(name)
    for net in (sil.net, sil.critic_net):
        set_weights(net, 0.0)
    for learner in sil.learners.values():
        learner.optim = torch.optim.SGD(learner.params, lr=0.1)
        learner.clip_grad_val = None
    states, ones = torch.ones(4, 1), torch.ones(4)
    b = Batch(states, torch.zeros(4, dtype=torch.long), 8 * ones, states, ones, 0 * ones)
    taken = sil.imitate(b)
    # −log(1/2) · 8 and 8² / 2; the gradients of V's weight and bias are −8, of the first logit −8 (1 − 1/2)
    assert taken == pytest.approx([8 * math.log(2), 32])
    assert [p.flatten().tolist() for p in sil.critic_net.parameters()] == [pytest.approx([0.8])] * 2
    assert [p.flatten().tolist() for p in sil.net.parameters()] == [pytest.approx([0.4, -0.4])] * 2
    before = snapshot([net.state_dict() for net in sil.nets.values()])
    assert sil.imitate(b._replace(rewards=-8 * ones)) == [0, 0]
    assert first_difference(before, [net.state_dict() for net in sil.nets.values()]) is None


def test_coefficients_weigh_the_losses():
    sil = built(sil_policy_loss_coef=0.5, sil_val_loss_coef=0.25)
    for net in (sil.net, sil.critic_net):
        set_weights(net, 0.0)
    ones = torch.ones(4)
    b = Batch(torch.ones(4, 1), torch.zeros(4, dtype=torch.long), 8 * ones, torch.ones(4, 1), ones, 0 * ones)
    assert sil.imitate(b) == pytest.approx([4 * math.log(2), 8])


def test_priorities_are_the_advantages():
    """V = 0, alpha 1, epsilon 0.5: returns of 3 and −2 give 3.5 and 0.5."""
    sil = built(memory=PRIORITIZED, training_batch_iter=1)
    set_weights(sil.critic_net, 0.0)
    sil.remember(batch([[3.0], [-2.0], [3.0], [-2.0]], terminated=[[1]] * 4))
    assert sil.replay.tree.leaves[:4].tolist() == [1] * 4
    drawn = sil.sample(sil.replay, 0)
    sil.imitate(drawn)
    assert sil.replay.batch_slots.tolist() == [0, 1, 2, 3]  # one of each quarter of the equal priorities
    assert sil.replay.tree.leaves[:4].tolist() == [3.5, 0.5, 3.5, 0.5]


@pytest.mark.parametrize('memory', [REPLAY, PRIORITIZED])
@pytest.mark.parametrize('name', ['SIL', 'PPOSIL'])
def test_it_goes_on_from_its_state(name, memory):
    b = batch([[1.0], [2.0], [3.0], [4.0], [5.0]])
    whole, resumed = built(name, memory), built(name, memory, seed=1)
    whole.train_on(b)
    state = snapshot(whole.state_dict())
    check_tree(state)
    expected = whole.train_on(b)
    resumed.load_state_dict(state)
    assert resumed.train_on(b) == expected
    assert first_difference(whole.state_dict(), resumed.state_dict()) is None


def test_its_draws_are_its_own():
    a, b, other = built(), built(), built(seed=1)
    assert a.replay.rng.integers(2**60) == b.replay.rng.integers(2**60) != other.replay.rng.integers(2**60)
    assert a.replay.rng.bit_generator.state != a.rng.bit_generator.state


@pytest.mark.parametrize('name', ['SIL', 'PPOSIL'])
@pytest.mark.parametrize(
    ('memory', 'wanted'),
    [
        ({}, "agent.0.memory: key 'batch_size' is missing"),
        ({'batch_size': 4}, "agent.0.memory: key 'max_size' is missing"),
        ({**REPLAY, 'max_size': 0}, 'agent.0.memory.max_size: 0 is too small'),
        ({**REPLAY, 'sil_replay_name': 'PrioritizedReplay'}, "key 'alpha' is missing"),
        ({**REPLAY, 'sil_replay_name': 'OnPolicyReplay'}, "'OnPolicyReplay' is no replay; did you mean 'Replay'?"),
    ],
)
def test_a_replay_that_cannot_be_built_is_refused(name, memory, wanted):
    with pytest.raises(SpecError) as e:
        resolved(name, memory)
    assert wanted in str(e.value)


@pytest.mark.parametrize('name', ['SIL', 'PPOSIL'])
@pytest.mark.parametrize('key', SIL)
def test_every_key_of_self_imitation_is_needed(name, key, monkeypatch):
    monkeypatch.delitem(SIL, key)
    with pytest.raises(SpecError, match=f"key '{key}' is missing"):
        resolved(name)
