"""n frames, save, load into a fresh process, n more == 2n frames, for policy gradients and for nets over sequences."""

import itertools

import pytest
from resume import StopAt, raw_spec
from test_resume_equality import HALF, check_resume

LINEAR = {'name': 'linear_decay', 'start_val': 0.2, 'end_val': 0.01, 'start_step': 20, 'end_step': 280}
SEQUENCE = {'fc_hid_layers': [6], 'rnn_hidden_size': 6, 'seq_len': 3}
GAE, NSTEP, RETURNS = {'lam': 0.9}, {'lam': None, 'num_step_returns': 6}, {'lam': None, 'num_step_returns': None}
PPO = {'lam': 0.9, 'clip_eps_spec': LINEAR, 'minibatch_size': 8, 'time_horizon': 11, 'training_epoch': 2}
SIL = {'sil_policy_loss_coef': 0.5, 'sil_val_loss_coef': 0.5, 'training_batch_iter': 2, 'training_iter': 2}
EPISODIC = ['OnPolicyReplay', 'OnPolicyBatchReplay', 'OnPolicyCrossEntropy']
MEMORIES = {
    'Reinforce': EPISODIC,
    'ActorCritic': EPISODIC,
    'PPO': ['OnPolicyBatchReplay'],
    'SIL': EPISODIC,
    'PPOSIL': ['OnPolicyBatchReplay'],
}
WAYS = {
    'Reinforce': [{}, {'center_return': True}],
    'ActorCritic': [GAE, NSTEP, RETURNS],
    'PPO': [PPO],
    'SIL': [{**GAE, **SIL}, {**RETURNS, **SIL}],
    'PPOSIL': [{**PPO, **SIL}, {**PPO, **SIL}],
}
# the replay of SIL and PPOSIL, by the number of the way; it goes round more than once
SIL_REPLAYS = [
    {'batch_size': 8, 'max_size': 60, 'use_cer': True},
    {'batch_size': 8, 'max_size': 60, 'sil_replay_name': 'PrioritizedReplay', 'alpha': 0.6, 'epsilon': 0.01},
]
# image nets are in test_resume_spaces.py
NETS = {'MLPNet': {}, 'RecurrentNet': SEQUENCE}
ENVS = {'discrete': 'CartPole-v1', 'continuous': 'Pendulum-v1'}


def cases():
    for algorithm, memories in MEMORIES.items():
        shared = [None] if algorithm == 'Reinforce' else [True, False]
        choices = (memories, range(len(WAYS[algorithm])), NETS, shared, [1, 4], ENVS)
        for i, case in enumerate(itertools.product(*choices)):
            # every fifth in the normal run: 5 has no factor in common with the numbers of choices
            yield pytest.param(algorithm, *case, marks=() if i % 5 == 0 else pytest.mark.slow)


def policy_spec(algorithm, memory, way, net, shared, num_envs, env, **parts):
    nets = {**NETS[net], **({} if shared is None else {'shared': shared, 'use_same_optim': False})}
    if shared is False:
        nets.update(critic_optim_spec={'name': 'RMSprop', 'lr': 0.01})
    algo = {'action_pdtype': 'default', 'action_policy': 'default', 'explore_var_spec': None}
    algo.update(entropy_coef_spec=LINEAR, **WAYS[algorithm][way])
    mem = dict(SIL_REPLAYS[way]) if 'SIL' in algorithm else {}
    if memory == 'OnPolicyCrossEntropy':
        mem.update(cross_entropy=0.5)
        algo.update(training_frequency=2)
    raw = raw_spec(algorithm, memory, net, num_envs, algo=algo, nets=nets, mem=mem, env={'name': ENVS[env]}, **parts)
    if net == 'RecurrentNet':
        del raw['agent'][0]['net']['hid_layers']
    return raw


@pytest.mark.parametrize(('algorithm', 'memory', 'way', 'net', 'shared', 'num_envs', 'env'), list(cases()), ids=str)
def test_a_resumed_run_equals_the_uninterrupted_one(
    algorithm, memory, way, net, shared, num_envs, env, tmp_path, fresh
):
    check_resume(tmp_path, policy_spec(algorithm, memory, way, net, shared, num_envs, env), fresh, StopAt(HALF))


@pytest.mark.parametrize('pdtype', ['Beta', 'LogNormal', 'Gumbel', 'MultivariateNormal'])
def test_equal_with_each_distribution_and_evaluation(pdtype, tmp_path, fresh):
    raw = policy_spec('PPO', 'OnPolicyBatchReplay', 0, 'MLPNet', True, 4, 'continuous', meta={'rigorous_eval': 2})
    raw['agent'][0]['algorithm']['action_pdtype'] = pdtype
    check_resume(tmp_path, raw, fresh, StopAt(HALF))


@pytest.mark.parametrize('cell', ['GRU', 'LSTM', 'RNN'])
def test_equal_with_each_cell(cell, tmp_path, fresh):
    nets = {**SEQUENCE, 'cell_type': cell, 'rnn_num_layers': 2, 'bidirectional': cell == 'LSTM'}
    raw = raw_spec('DQN', 'PrioritizedReplay', 'RecurrentNet', 4, nets=nets)
    del raw['agent'][0]['net']['hid_layers']
    check_resume(tmp_path, raw, fresh, StopAt(HALF))


@pytest.mark.parametrize('algorithm', ['ActorCritic', 'PPO'])
def test_equal_with_a_running_scale_of_values(algorithm, tmp_path, fresh):
    raw = policy_spec(algorithm, 'OnPolicyBatchReplay', 0, 'MLPNet', True, 4, 'continuous')
    raw['agent'][0]['algorithm'].update(
        {'normalize_v_targets': True, 'clip_vloss': True} if algorithm == 'PPO' else {'normalize_v_targets': True}
    )
    check_resume(tmp_path, raw, fresh, StopAt(HALF))
