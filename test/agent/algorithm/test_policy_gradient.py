"""REINFORCE, actor-critic and PPO by numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from slm_lab.agent.algorithm.actor_critic import TargetScale, split_net_spec
from slm_lab.agent.algorithm.base import World
from slm_lab.agent.algorithm.ppo import clipped_policy_loss
from slm_lab.agent.algorithm.reinforce import policy_loss
from slm_lab.agent.distribution import Categorical
from slm_lab.agent.memory.batch import Batch
from slm_lab.lib.errors import SpecError
from slm_lab.lib.registry import ALGORITHMS
from slm_lab.spec import spec_util

NO_DECAY = {'name': 'no_decay', 'start_val': 0.2}
PPO = {'lam': 0.5, 'clip_eps_spec': NO_DECAY, 'minibatch_size': 3, 'time_horizon': 4, 'training_epoch': 2}


def resolved(name, memory='OnPolicyBatchReplay', net=None, **algorithm):
    net = {'type': 'MLPNet', 'hid_layers': [], 'hid_layers_activation': None, **(net or {})}
    algorithm = {'name': name, 'gamma': 0.5, **algorithm}
    agent = {'name': name, 'algorithm': algorithm, 'memory': {'name': memory}, 'net': net}
    spec = {
        'name': 'x',
        'agent': [agent],
        'env': [{'name': 'CartPole-v1', 'max_frame': 10}],
        'meta': {'max_session': 1},
    }
    return spec_util.resolve(spec)['agent']


def built(name, space=None, **kwargs):
    if name != 'Reinforce':
        kwargs['net'] = {'shared': False, **kwargs.get('net', {})}
    world = World(spaces.Box(-9, 9, (1,), np.float32), space or spaces.Discrete(2), 1)
    return ALGORITHMS.get(name)(resolved(name, **kwargs), world, seed=0)


def batch(rewards, terminated=None, truncated=None, states=None, next_states=None):
    """One env's steps (T, 1); states count 1, 2, …, and each step's successor is the next, if not told otherwise."""
    t = len(rewards)

    def column(values, default):
        return torch.tensor([default] * t if values is None else values, dtype=torch.float32).unsqueeze(1)

    states = torch.arange(1.0, t + 1) if states is None else torch.tensor(states)
    next_states = torch.arange(2.0, t + 2) if next_states is None else torch.tensor(next_states)
    actions = torch.zeros(t, 1, dtype=torch.int64)
    return Batch(
        states.reshape(t, 1, 1),
        actions,
        column(rewards, 0.0),
        next_states.reshape(t, 1, 1),
        column(terminated, 0.0),
        column(truncated, 0.0),
    )


def with_identity_critic(algorithm):
    """V(s) = s."""
    with torch.no_grad():
        for name, value in algorithm.critic_net.named_parameters():
            value.fill_(1.0 if name.endswith('weight') else 0.0)
    return algorithm


def test_the_policy_loss_by_hand():
    pd = Categorical(torch.tensor([[0.0, math.log(3)], [0.0, 0.0]]))
    loss, entropy = policy_loss(pd, torch.tensor([1, 0]), torch.tensor([2.0, -4.0]), 0.5, 0.1)
    entropies = [-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), math.log(2)]
    expected = -0.5 * (2 * math.log(0.75) - 4 * math.log(0.5)) / 2 - 0.1 * sum(entropies) / 2
    assert loss.item() == pytest.approx(expected)
    assert entropy.item() == pytest.approx(sum(entropies) / 2)


def test_reinforce_takes_returns_to_each_episodes_end():
    """gamma 0.5: 1 + 0.5 · (2 + 0.5 · 4) = 3, 4, 4 | 8 + 0.5 · 16 = 16, 16; nothing comes over an episode's end."""
    b = batch([1.0, 2.0, 4.0, 8.0, 16.0], terminated=[0, 0, 1, 0, 0], truncated=[0, 0, 0, 0, 1])
    plain = built('Reinforce', training_frequency=1)
    assert plain.calc_returns(b).flatten().tolist() == [3, 4, 4, 16, 16]
    centred = built('Reinforce', training_frequency=1, center_return=True)
    assert centred.calc_returns(b).flatten().tolist() == pytest.approx([3 - 8.6, 4 - 8.6, 4 - 8.6, 16 - 8.6, 16 - 8.6])


def test_values_are_those_of_each_steps_true_successor():
    """Where a time limit cut the episode, and at the end, the successor is not the next step's state."""
    a2c = with_identity_critic(built('ActorCritic', lam=0.9, training_frequency=4))
    b = batch([0.0] * 4, truncated=[0, 1, 0, 0], next_states=[2.0, 30.0, 4.0, 50.0])
    values, next_values = a2c.calc_values(b)
    assert values.flatten().tolist() == [1, 2, 3, 4]
    assert next_values.flatten().tolist() == [2, 30, 4, 50]


def test_n_step_advantages():
    """V(s) = s, gamma 0.5. R3 = 1 + 0.5 · 5, R2 = 1 + 0.5 R3, R1 = 1 (terminated), R0 = 1 + 0.5 R1."""
    a2c = with_identity_critic(built('ActorCritic', lam=None, num_step_returns=4))
    assert a2c.spec['training_frequency'] == 4
    advantages, targets = a2c.calc_advantages(batch([1.0] * 4, terminated=[0, 1, 0, 0]))
    returns = [1.5, 1.0, 2.75, 3.5]
    assert targets.flatten().tolist() == returns
    assert advantages.flatten().tolist() == [r - v for r, v in zip(returns, [1, 2, 3, 4], strict=True)]


def test_gae_is_standardised_and_its_targets_are_not():
    a2c = with_identity_critic(built('ActorCritic', lam=0.5, training_frequency=3))
    advantages, targets = a2c.calc_advantages(batch([1.0, 1.0, 1.0], truncated=[0, 1, 0], next_states=[2.0, 10.0, 4.0]))
    # deltas: 1 + 1 − 1, 1 + 5 − 2, 1 + 2 − 3; the sum is cut at the truncation: 1 + 0.25 · 4, 4, 0
    raw = np.array([2.0, 4.0, 0.0])
    assert targets.flatten().tolist() == [3, 6, 3]
    assert advantages.flatten().tolist() == pytest.approx(list((raw - raw.mean()) / raw.std(ddof=1)))


def test_the_clipped_loss_by_hand():
    """Ratios 2, 2, 0.5, 0.5 at eps 0.2 with A 1, −1, 1, −1: 1.2, −2, 0.5, −0.8."""
    ratios = torch.tensor([2.0, 2.0, 0.5, 0.5])
    loss = clipped_policy_loss(ratios.log(), torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.2)
    assert loss.item() == pytest.approx(-(1.2 - 2 + 0.5 - 0.8) / 4)
    assert torch.isfinite(clipped_policy_loss(torch.tensor([1e9]), torch.zeros(1), torch.tensor([-1.0]), 0.2))


def test_ppo_goes_over_all_transitions_each_epoch_in_minibatches():
    ppo = built('PPO', **PPO)
    rows = [part.tolist() for part in ppo._minibatches(7)]
    assert [len(part) for part in rows] == [3, 3, 1] and sorted(sum(rows, [])) == list(range(7))
    done = ppo.train_on(batch([1.0] * 7))
    assert done.opt_steps == 2 * 3 * 2  # epochs, minibatches, nets
    shared = built('PPO', net={'shared': True}, **PPO)
    assert shared.train_on(batch([1.0] * 7)).opt_steps == 2 * 3


def test_value_targets_are_divided_by_their_running_deviation():
    """Batches [1, 3] and [5, 7, 9]: the deviation of all five is √8. What is larger than 10 of them is cut."""
    scale = TargetScale()
    scale.add(torch.tensor([1.0, 3.0]))
    assert scale(torch.tensor([2.0])).item() == 2.0  # a deviation of 1
    scale.add(torch.tensor([5.0, 7.0, 9.0]))
    values = torch.tensor([4.0, -4.0, 1000.0])
    assert scale(values).tolist() == pytest.approx([4 / 8**0.5, -4 / 8**0.5, 10])
    other = TargetScale()
    other.load_state_dict(scale.state_dict())
    assert other(values).tolist() == scale(values).tolist()


def test_a_small_deviation_does_not_blow_values_up():
    scale = TargetScale()
    scale.add(torch.tensor([1.0, 1.1]))
    assert scale(torch.tensor([3.0])).item() == 3.0


def test_normalised_targets_are_counted_once_a_batch_and_used_by_the_loss():
    a2c = with_identity_critic(built('ActorCritic', lam=None, num_step_returns=4, normalize_v_targets=True))
    a2c.train_on(batch([4.0, 8.0, 12.0, 16.0], terminated=[1] * 4))
    assert (a2c.target_scale.count, a2c.target_scale.mean) == (4, 10.0)
    with_identity_critic(a2c)
    errors = a2c.value_errors(torch.tensor([0.0]), torch.tensor([20.0**0.5]))
    assert errors.item() == pytest.approx(1.0)  # the deviation of the targets is √20


def test_a_held_value_counts_by_the_larger_of_two_losses():
    """V(s) = s, eps 0.2. Old 1: V 2 is held at 1.2. Target 3: 1 and 3.24 give 3.24; target 0: 4 and 1.44 give 4."""
    ppo = with_identity_critic(built('PPO', clip_vloss=True, **PPO))
    assert ppo.clip_eps == pytest.approx(0.2)
    loss = ppo.value_loss(torch.tensor([[2.0], [2.0]]), torch.tensor([3.0, 0.0]), torch.tensor([1.0, 1.0]))
    assert loss.item() == pytest.approx(ppo.spec['val_loss_coef'] * (3.24 + 4) / 2)
    assert ppo.train_on(batch([1.0] * 4)).opt_steps > 0


def test_without_an_entropy_schedule_the_loss_is_finite_and_the_row_is_empty():
    ppo = built('PPO', **PPO)
    assert math.isnan(ppo.entropy_coef) and math.isfinite(ppo.train_on(batch([1.0] * 4)).loss)


def test_the_first_step_moves_the_policy_towards_what_was_better():
    for name, keys in (('Reinforce', {}), ('ActorCritic', {'lam': None}), ('PPO', PPO)):
        algorithm = built(name, training_frequency=4, **keys)
        b = batch([1.0, 0.0, 1.0, 0.0], terminated=[1] * 4, states=[1.0] * 4)
        b = b._replace(actions=torch.tensor([[1], [0], [1], [0]]))
        before = algorithm.policy_output(torch.ones(1, 1)).softmax(-1)[0, 1].item()
        for _ in range(5):
            algorithm.train_on(b)
        assert algorithm.policy_output(torch.ones(1, 1)).softmax(-1)[0, 1].item() > before, name


@pytest.mark.parametrize(
    'space', [spaces.Box(-2, 2, (1,)), spaces.Box(-2, 2, (3,)), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3)]
)
@pytest.mark.parametrize('shared', [False, True])
def test_every_kind_of_action(space, shared):
    ppo = built('PPO', space=space, net={'shared': shared}, **PPO)
    actions = ppo.act(np.ones((4, 1), np.float32))
    for row in ppo.to_env(actions):
        assert space.contains(row.astype(space.dtype))
    b = batch([1.0] * 4)._replace(actions=torch.as_tensor(actions).unsqueeze(1))
    assert math.isfinite(ppo.train_on(b).loss)


def test_a_key_with_a_prefix_is_the_actors_or_the_critics():
    net = {'type': 'MLPNet', 'shared': False, 'optim_spec': 1, 'actor_optim_spec': 2, 'critic_hid_layers': 3}
    actor, critic = split_net_spec(net)
    assert actor == {'type': 'MLPNet', 'optim_spec': 2}
    assert critic == {'type': 'MLPNet', 'optim_spec': 1, 'hid_layers': 3}
    actor, critic = split_net_spec({**net, 'use_same_optim': True})
    assert critic == actor


@pytest.mark.parametrize(
    ('name', 'keys', 'wanted'),
    [
        ('ActorCritic', {'lam': 0.9, 'training_frequency': 4}, "agent.0.net: key 'shared' is missing"),
        ('ActorCritic', {'net': {'shared': True}, 'lam': 0.9}, "key 'training_frequency' is missing"),
        ('PPO', {**PPO, 'clip_eps_spec': None, 'net': {'shared': True}}, 'clip_eps_spec: PPO needs a schedule'),
        ('PPO', {**PPO, 'net': {'shared': True}, 'memory': 'OnPolicyReplay'}, 'PPO cannot train from OnPolicyReplay'),
        ('PPO', {**PPO, 'net': {'shared': True, 'critic_optm_spec': {}}}, "did you mean 'optim_spec'"),
        ('Reinforce', {'training_frequency': 1, 'memory': 'Replay'}, "key 'batch_size' is missing"),
    ],
)
def test_a_spec_that_lacks_something_is_refused(name, keys, wanted):
    with pytest.raises(SpecError) as e:
        resolved(name, **keys)
    assert wanted in str(e.value)


def test_an_env_explores_with_its_whole_action():
    space = spaces.Box(-2, 2, (3,))
    explore = {'action_policy': 'epsilon_greedy', 'explore_var_spec': {'name': 'no_decay', 'start_val': 0.5}}
    ppo = built('PPO', space=space, **explore, **PPO)
    assert ppo.act(np.ones((8, 1), np.float32)).shape == (8, 3)


@pytest.mark.parametrize(
    ('keys', 'wanted'),
    [
        ({'action_policy': 'boltzmann'}, "'boltzmann' divides logits of discrete actions"),
        ({'action_policy': 'epsilon_greedy', 'action_pdtype': 'Beta'}, 'not those of Beta'),
    ],
)
def test_a_policy_that_does_not_fit_the_actions_is_refused(keys, wanted):
    with pytest.raises(SpecError, match=wanted):
        built('PPO', space=spaces.Box(-2, 2, (3,)), explore_var_spec=NO_DECAY, **keys, **PPO)


@pytest.mark.parametrize(
    ('name', 'keys'),
    [
        ('Reinforce', {'training_frequency': 1}),
        ('ActorCritic', {'lam': 0.9, 'training_frequency': 4}),
        ('ActorCritic', {'lam': 0.9, 'training_frequency': 4, 'net': {'shared': True}}),
        ('PPO', PPO),
    ],
    ids=['reinforce', 'a2c', 'a2c shared', 'ppo'],
)
def test_a_policy_without_a_gradient_is_refused(name, keys):
    with pytest.raises(SpecError, match=f"action_pdtype: 'Argmax' has no gradient that {name} could follow"):
        built(name, action_pdtype='Argmax', **keys)


@pytest.mark.parametrize(
    ('name', 'net', 'unread'),
    [
        ('Reinforce', {'update_type': 'polyak', 'polyak_coef': 0.1}, ['update_type', 'polyak_coef']),
        ('DQN', {'update_type': 'replace', 'polyak_coef': 0.1}, ['polyak_coef']),
        ('DQN', {'update_type': 'polyak', 'polyak_coef': 0.1}, []),
    ],
)
def test_keys_of_a_target_net_that_nothing_reads_are_said(name, net, unread):
    net = {'type': 'MLPNet', 'hid_layers': [4], 'hid_layers_activation': 'relu', **net}
    values, ignored = ALGORITHMS.get(name).resolve_net(net, 'net')
    assert ignored == [f'net.{key}' for key in unread]
    assert values['polyak_coef'] == (None if unread else 0.1)


@pytest.mark.parametrize(('shape', 'shared'), [((1,), False), ((1,), True), ((3,), False), ((3,), True)])
def test_a_continuous_policy_starts_with_the_deviation_that_is_asked_for(shape, shared):
    ppo = built('PPO', space=spaces.Box(-2, 2, shape), net={'shared': shared, 'log_std_init': -1.0}, **PPO)
    stddev = ppo.distribution(ppo.policy_output(torch.tensor([[0.5], [-0.5]]))).base_dist.stddev
    torch.testing.assert_close(stddev, torch.full_like(stddev, math.exp(-1)), rtol=0.02, atol=0)


def test_only_a_distribution_with_a_deviation_can_start_with_one():
    for name, space in (('Categorical', spaces.Discrete(2)), ('Beta', spaces.Box(-2, 2, (1,)))):
        with pytest.raises(SpecError, match=f'log_std_init: {name} has no standard deviation'):
            built('PPO', space=space, net={'log_std_init': -1.0}, action_pdtype=name, **PPO)


@pytest.mark.parametrize('norm', ['batch_norm', 'batch_renorm'])
def test_acting_and_evaluating_move_no_running_statistics_and_training_does(norm):
    ppo = built('PPO', net={'hid_layers': [4], norm: True}, **PPO)

    def statistics():
        return {name: value.clone() for name, value in ppo.net.named_buffers()}

    before = statistics()
    for evaluating in (False, True):
        ppo.act(np.float32([[5.0], [7.0], [9.0]]), evaluating)
    assert all(torch.equal(value, before[name]) for name, value in statistics().items())
    ppo.train_on(batch([1.0] * 4))
    assert not any(torch.equal(value, before[name]) for name, value in statistics().items())
