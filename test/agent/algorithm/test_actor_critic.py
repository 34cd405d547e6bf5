"""Which keys of a net spec an actor-critic reads, and which nets it can have."""

import logging

import numpy as np
import pytest
import torch
from gymnasium import spaces

from slm_lab.agent.algorithm.base import World
from slm_lab.lib.errors import SpecError
from slm_lab.lib.registry import ALGORITHMS
from slm_lab.spec import spec_util

OPTIM = {'name': 'SGD', 'lr': 0.5}
SHARED, SAME, APART = {'shared': True}, {'shared': False, 'use_same_optim': True}, {'shared': False}
PPO = {'lam': 0.5, 'clip_eps_spec': {'name': 'no_decay', 'start_val': 0.2}, 'time_horizon': 4, 'training_epoch': 1}
A2C = {'training_frequency': 4}


def net(**keys):
    return {'type': 'MLPNet', 'hid_layers': [4], 'hid_layers_activation': 'relu', **keys}


def resolve(name='ActorCritic', **keys):
    return ALGORITHMS.get(name).resolve_net(net(**keys), 'net')


def spec(name, **keys):
    algorithm = {'name': name, 'gamma': 0.5, **(PPO if name == 'PPO' else A2C)}
    return {
        'name': 'x',
        'agent': [{'algorithm': algorithm, 'memory': {'name': 'OnPolicyBatchReplay'}, 'net': net(**keys)}],
        'env': [{'name': 'CartPole-v1', 'max_frame': 10}],
        'meta': {'max_session': 1},
    }


def built(name, space=None, **keys):
    world = World(spaces.Box(-9, 9, (1,), np.float32), space or spaces.Discrete(2), 1)
    return ALGORITHMS.get(name)(spec_util.resolve(spec(name, **keys))['agent'], world, seed=0)


@pytest.mark.parametrize(
    ('nets', 'keys', 'unread'),
    [
        (SHARED, {'actor_optim_spec': OPTIM, 'critic_optim_spec': OPTIM}, ['critic_optim_spec']),
        (SAME, {'actor_optim_spec': OPTIM, 'critic_optim_spec': OPTIM}, ['critic_optim_spec']),
        (APART, {'actor_optim_spec': OPTIM, 'critic_optim_spec': OPTIM}, []),
        (SHARED, {'use_same_optim': True}, ['use_same_optim']),
        (APART, {'use_same_optim': False}, []),
        *[
            (nets, {'critic_gpu': True, 'critic_shared': 1}, ['critic_gpu', 'critic_shared'])
            for nets in (SHARED, APART)
        ],
        *[(nets, {'actor_gpu': True, 'actor_shared': 1}, ['actor_gpu', 'actor_shared']) for nets in (SAME, APART)],
        (SAME, {'critic_hid_layers': [8], 'critic_optim_spec': {'lr': 1}}, ['critic_hid_layers', 'critic_optim_spec']),
        # what both have their own of
        (APART, {'optim_spec': OPTIM, 'actor_optim_spec': OPTIM, 'critic_optim_spec': OPTIM}, ['optim_spec']),
        (APART, {'optim_spec': OPTIM, 'actor_optim_spec': OPTIM}, []),
        (SHARED, {'optim_spec': OPTIM, 'actor_optim_spec': OPTIM}, ['optim_spec']),
        # only values are compared, and only the actor draws actions
        (APART, {'actor_loss_spec': {'name': 'L1Loss'}, 'critic_loss_spec': {'name': 'L1Loss'}}, ['actor_loss_spec']),
        (APART, {'actor_log_std_init': 0, 'critic_log_std_init': 0}, ['critic_log_std_init']),
        *[(nets, {'loss_spec': {'name': 'L1Loss'}, 'log_std_init': 0}, []) for nets in (SHARED, SAME, APART)],
        # what no algorithm without a target net reads, by the name that it was given
        (APART, {'critic_polyak_coef': 0.1, 'cuda_id': 0}, ['critic_polyak_coef', 'cuda_id']),
    ],
)
def test_keys_that_nothing_reads_are_said_and_change_nothing(nets, keys, unread):
    values, ignored = resolve(**nets, **keys)
    assert ignored == [f'net.{key}' for key in unread]
    assert values == resolve(**nets, **{k: v for k, v in keys.items() if k not in unread})[0]


@pytest.mark.parametrize('name', ['ActorCritic', 'PPO'])
def test_they_are_said_in_the_line_of_the_spec_check(name, caplog):
    with caplog.at_level(logging.WARNING):
        spec_util.check(spec(name, **SHARED, critic_optim_spec=OPTIM, critic_gpu=True))
    assert caplog.messages == ['x: nothing reads agent.0.net.critic_optim_spec, agent.0.net.critic_gpu']


@pytest.mark.parametrize('nets', [SHARED, SAME, APART])
def test_an_unknown_key_is_refused_whether_or_not_its_net_is_read(nets):
    with pytest.raises(SpecError, match="key 'optm_spec' is unknown; did you mean 'optim_spec'"):
        resolve(**nets, critic_optm_spec=OPTIM)


def test_the_loss_of_values_is_the_critics():
    a2c = built('ActorCritic', **APART, critic_loss_spec={'name': 'L1Loss'})
    assert a2c.value_errors(torch.tensor([1.0]), torch.tensor([4.0])).item() == 3
    for nets in (SHARED, SAME):
        a2c = built('ActorCritic', **nets, actor_loss_spec={'name': 'L1Loss'})
        assert a2c.value_errors(torch.tensor([1.0]), torch.tensor([4.0])).item() == 3


@pytest.mark.parametrize('name', ['ActorCritic', 'PPO'])
@pytest.mark.parametrize(
    ('space', 'shared', 'heads'),
    [
        (spaces.Discrete(2), True, r'\[2, 1\]'),
        (spaces.Box(-1, 1, (3,)), True, r'\[3, 3, 1\]'),
        (spaces.Box(-1, 1, (3,)), False, r'\[3, 3\]'),
    ],
)
def test_a_dueling_net_is_refused_where_outputs_lie_side_by_side(name, space, shared, heads):
    wanted = f'agent.0.net.type: DuelingMLPNet joins its heads to one output and cannot give {heads} .* such as MLPNet'
    with pytest.raises(SpecError, match=wanted):
        built(name, space, type='DuelingMLPNet', shared=shared)
    assert built(name, type='DuelingMLPNet', shared=False).act(np.ones((1, 1), np.float32)).shape == (1,)
