"""n frames, save, load into a fresh process, n more == 2n frames, for SAC and CrossQ."""

import itertools

import pytest
from resume import StopAt, raw_spec
from test_resume_equality import HALF, check_resume

MEMORIES = {name: ['Replay', 'PrioritizedReplay'] for name in ('SoftActorCritic', 'CrossQ')}
ENVS = {'discrete': 'CartPole-v1', 'continuous': 'Pendulum-v1'}
NETS = {'MLPNet': {}, 'RecurrentNet': {'fc_hid_layers': [6], 'rnn_hidden_size': 6, 'seq_len': 3}}
# there is no critic over sequences and actions
CASES = [
    case
    for case in itertools.product(MEMORIES, ['Replay', 'PrioritizedReplay'], NETS, [1, 4], ENVS)
    if not (case[2] == 'RecurrentNet' and case[4] == 'continuous')
]


def soft_spec(algorithm, memory, net, num_envs, env, algo=(), nets=(), **parts):
    keys = {'action_pdtype': 'default', 'action_policy': 'default', 'explore_var_spec': None}
    keys.update(training_iter=3, training_start_step=40, policy_delay=2, alpha_lr=0.005)  # 3: also an odd count
    keys.update(algo)
    nets = {**NETS[net], **dict(nets)}
    agent = {}
    if algorithm == 'SoftActorCritic':
        nets.update(update_type='polyak', update_frequency=4, polyak_coef=0.3)
    elif net == 'MLPNet':
        agent['critic_net'] = {'type': net, 'hid_layers': [7], 'hid_layers_activation': 'relu'}
        agent['critic_net'].update(batch_renorm={'warmup_steps': 20, 'momentum': 0.1})
    raw = raw_spec(
        algorithm, memory, net, num_envs, algo=keys, nets=nets, env={'name': ENVS[env]}, agent=agent, **parts
    )
    if net == 'RecurrentNet':
        del raw['agent'][0]['net']['hid_layers']
    return raw


@pytest.mark.parametrize(
    'case', [pytest.param(c, marks=() if i % 3 == 0 else pytest.mark.slow) for i, c in enumerate(CASES)], ids=str
)
def test_a_resumed_run_equals_the_uninterrupted_one(case, tmp_path, fresh):
    check_resume(tmp_path, soft_spec(*case), fresh, StopAt(HALF))


OPTIONS = {
    'evaluation, statistics': {'meta': {'rigorous_eval': 2}, 'normalize_state': True},
    'a target entropy': {'algo': {'target_entropy': -0.5}},
    'layer norm': {'nets': {'layer_norm': True}},
}


@pytest.mark.parametrize('name', OPTIONS)
def test_equal_with_each_option(name, tmp_path, fresh):
    raw = soft_spec('SoftActorCritic', 'Replay', 'MLPNet', 4, 'continuous', **OPTIONS[name])
    check_resume(tmp_path, raw, fresh, StopAt(HALF))


def test_equal_from_inside_the_warm_up(tmp_path, fresh):
    raw = soft_spec('SoftActorCritic', 'Replay', 'MLPNet', 1, 'continuous', algo={'training_start_step': 200})
    check_resume(tmp_path, raw, fresh, StopAt(HALF))
