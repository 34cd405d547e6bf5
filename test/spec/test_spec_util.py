"""Specs: found, read, checked line by line, overridden, ticked, saved."""

import copy
import json
import logging
import re

import pytest
import torch

from slm_lab.lib import files, paths
from slm_lab.lib.errors import SpecError
from slm_lab.spec import spec_util

DQN = {
    'agent': [
        {
            'name': 'DQN',
            'algorithm': {
                'name': 'DQN',
                'explore_var_spec': {'name': 'linear_decay', 'start_val': 1.0, 'end_val': 0.1, 'end_step': 100},
                'gamma': 0.99,
                'training_batch_iter': 2,
                'training_iter': 1,
                'training_frequency': 4,
            },
            'memory': {'name': 'Replay', 'batch_size': 8, 'max_size': 100},
            'net': {'type': 'MLPNet', 'hid_layers': [8], 'hid_layers_activation': 'relu'},
        }
    ],
    'env': [{'name': 'CartPole-v1', 'max_frame': 500}],
    'meta': {'max_session': 2, 'max_trial': 1},
}
SARSA = {
    'name': 'SARSA',
    'algorithm': {'name': 'SARSA', 'gamma': 0.9, 'training_frequency': 4},
    'memory': {'name': 'OnPolicyBatchReplay'},
    'net': {'type': 'MLPNet', 'hid_layers': [8], 'hid_layers_activation': 'relu'},
}
REMOVE = 'left out'  # names a test the same in every process


def changed(*changes):
    """A copy of DQN, named `my_spec`, with values set at dotted places."""
    spec = {**copy.deepcopy(DQN), 'name': 'my_spec'}
    for place, value in changes:
        *path, last = place.split('.')
        part = spec
        for key in path:
            part = part[int(key) if key.isdigit() else key]
        last = int(last) if last.isdigit() else last
        if value is REMOVE:
            del part[last]
        else:
            part[last] = value
    return spec


@pytest.fixture
def spec_file(tmp_path):
    path = tmp_path / 'my.json'
    path.write_text(json.dumps({'my_spec': DQN, 'other_spec': DQN, 'number': 3})[:-1] + ',}')
    return path


# --- files


@pytest.mark.parametrize(
    ('name', 'place'),
    [
        ('demo.json', 'demo.json'),
        ('slm_lab/spec/demo.json', 'demo.json'),
        ('benchmark/dqn/dqn_cartpole.json', 'benchmark/dqn/dqn_cartpole.json'),
        (str(paths.SPEC_DIR / 'demo.json'), 'demo.json'),
    ],
)
def test_a_spec_file_is_found_from_anywhere(name, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert spec_util.find_file(name) == paths.SPEC_DIR / place


def test_a_file_of_the_current_directory_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'demo.json').write_text('{}')
    assert spec_util.find_file('demo.json') == tmp_path / 'demo.json'


def test_an_unknown_file_is_told_with_the_nearest():
    with pytest.raises(SpecError) as e:
        spec_util.find_file('slm_lab/spec/dem.json')
    line = str(e.value)
    assert line.startswith("spec file 'slm_lab/spec/dem.json' is neither here nor under slm_lab/spec/")
    assert "did you mean 'demo.json'? Known: " in line and '_random_baseline' not in line


def test_an_unknown_spec_is_told_with_the_nearest(spec_file):
    with pytest.raises(SpecError) as e:
        spec_util.get(spec_file, 'my_specs')
    known = 'Known: my_spec, number, other_spec'
    assert str(e.value) == f"{spec_file}: spec 'my_specs' is unknown; did you mean 'my_spec'? {known}"


def test_a_file_that_is_no_json_or_no_spec_is_refused(spec_file):
    with pytest.raises(SpecError, match='number: 3 is not of the type wanted here: dict'):
        spec_util.get(spec_file, 'number')
    spec_file.write_text('{"my_spec": {"agent": [}}')
    with pytest.raises(SpecError, match=r'my\.json is not valid JSON: .* line 1 column 24'):
        spec_util.get(spec_file, 'my_spec')
    spec_file.write_text('[]')
    with pytest.raises(SpecError, match="spec 'my_spec' is unknown"):
        spec_util.get(spec_file, 'my_spec')


@pytest.mark.parametrize(
    'name', ['../evil', 'a/b', '/a', '.', '..', '', ' ', '.hidden', '-x', '~', 'a\nb', 'a\0', 'a*']
)
def test_a_name_that_folders_and_files_cannot_bear_is_refused(name, spec_file):
    spec_file.write_text(json.dumps({name: DQN}))
    with pytest.raises(SpecError) as e:
        spec_util.get(spec_file, name)
    assert str(e.value).startswith(f'{name!r} is no name for a spec, ') and '\n' not in str(e.value)
    with pytest.raises(SpecError, match='is no name for a spec'):
        spec_util.set_paths({**copy.deepcopy(DQN), 'name': name})  # of a run folder: its spec names it


@pytest.mark.parametrize('name', ['a' * 161, 'ä' * 81])
def test_a_name_that_leaves_no_room_for_the_names_of_files_is_refused(name, spec_file):
    spec_file.write_text(json.dumps({name: DQN}))
    with pytest.raises(SpecError, match='is too long a name for a spec, .* 16[12] bytes; use up to 160'):
        spec_util.get(spec_file, name)


@pytest.mark.parametrize('name', ['dqn_cartpole', 'DQN 2.1-b', '_', '7', 'lr=1e-3+x.', 'größe', 'a' * 160])
def test_a_name_of_letters_digits_spaces_and_some_signs_is_taken(name, spec_file):
    spec_file.write_text(json.dumps({name: DQN}))
    assert spec_util.get(spec_file, name)['name'] == name


def test_get_extends_meta(spec_file):
    spec = spec_util.get(spec_file, 'my_spec')
    meta = spec['meta']
    assert spec['name'] == 'my_spec'
    assert {key: meta[key] for key in ('experiment', 'trial', 'session', 'resume', 'max_session')} == {
        'experiment': -1,
        'trial': -1,
        'session': -1,
        'resume': False,
        'max_session': 2,
    }
    assert [len(part) for part in meta['experiment_ts'].split('_')] == [4, 2, 2, 6]
    assert spec['agent'] == DQN['agent'] and spec['env'] == DQN['env']  # as they were written
    resumed = spec_util.get(spec_file, 'my_spec', '2026_01_31_120000')['meta']
    assert (resumed['resume'], resumed['experiment_ts']) == (True, '2026_01_31_120000')


def test_what_the_run_adds_overwrites_what_a_file_says():
    spec = spec_util.prepare(changed(('meta.trial', 5), ('meta.session', 3), ('meta.experiment_ts', 'old')))
    assert (spec['meta']['trial'], spec['meta']['session']) == (-1, -1)
    assert spec['meta']['experiment_ts'] != 'old'


def test_agent_and_env_may_be_objects_instead_of_lists():
    spec = spec_util.prepare(changed(('agent', DQN['agent'][0]), ('env', DQN['env'][0])))
    assert spec['agent'] == DQN['agent'] and spec['env'] == DQN['env']
    assert spec_util.resolve(spec) == spec_util.resolve(spec_util.prepare(changed()))


@pytest.mark.parametrize(
    ('path', 'name'),
    [
        (path, name)
        for path in sorted(paths.SPEC_DIR.rglob('*.json'))
        if not path.name.startswith('_')
        for name in files.read_json(path)
    ],
    ids=lambda v: v if isinstance(v, str) else v.stem,
)
def test_every_spec_that_comes_with_the_lab_passes(path, name, caplog):
    name = (spec_util.template_names(path, name) or [name])[0]  # the specs of a template differ in the env alone
    with caplog.at_level(logging.WARNING):
        spec_util.get(path, name)
    assert all(message == f'{name}: nothing reads meta.search' for message in caplog.messages)


# --- checking

WRONG = [
    ((), ('agents', []), ["my_spec > agents: key 'agents' is unknown; did you mean 'agent'?"]),
    ((), ('agent', REMOVE), ["my_spec: key 'agent' is missing or empty; it must be a list"]),
    ((), ('agent', []), ["my_spec: key 'agent' is missing or empty; it must be a list"]),
    ((), ('env', []), ["my_spec: key 'env' is missing or empty; it must be a list"]),
    ((), ('meta', REMOVE), ["my_spec: key 'meta' is missing or empty; it must be a dict"]),
    ((), ('meta', []), ["my_spec: key 'meta' is missing or empty; it must be a dict"]),
    ((), ('spec_params', {}), ['my_spec > spec_params: a template is no spec that runs; spec_util.get_all']),
    ((), ('agent.0', 'DQN'), ["my_spec > agent.0: 'DQN' is not of the type wanted here: dict"]),
    ((), ('agent.0.nett', {}), ["my_spec > agent.0.nett: key 'nett' is unknown; did you mean 'net'?", 'load_net']),
    ((), ('agent.0.memory', REMOVE), ["my_spec > agent.0: key 'memory' is missing (dict)"]),
    ((), ('agent.0.load_net', 5), ['agent.0.load_net: 5 is not of the type wanted here: str or null']),
    (
        ('algorithm',),
        ('name', 'DQNN'),
        [
            "my_spec > agent.0.algorithm.name: algorithm 'DQNN' is unknown; did you mean 'DQN'? Known: ",
            'SARSA',
        ],
    ),
    (('algorithm',), ('name', 'HydraDQN'), ["agent.0.algorithm.name: 'HydraDQN'", 'is not supported; train DQN']),
    (('net',), ('type', 'QMLPNet'), ["agent.0.net.type: 'QMLPNet' takes actions, so it can be a critic"]),
    (('algorithm',), ('name', ['DQN']), ["agent.0.algorithm.name: algorithm '['DQN']' is unknown"]),
    (('algorithm',), ('name', REMOVE), ["agent.0.algorithm: key 'name' is missing; it names the algorithm: ", 'DQN']),
    (('algorithm',), ('gamma', REMOVE), ["agent.0.algorithm: key 'gamma' is missing (number: discount)"]),
    (('algorithm',), ('gamma', 1.5), ['agent.0.algorithm.gamma: 1.5 is too large; the most is 1']),
    (('algorithm',), ('gamma', '0.9'), ["agent.0.algorithm.gamma: '0.9' is not of the type wanted here: number"]),
    (
        ('algorithm',),
        ('training_freqency', 4),
        ["agent.0.algorithm.training_freqency: key 'training_freqency' is unknown; did you mean 'training_frequency'?"],
    ),
    (('algorithm',), ('training_frequency', 0), ['training_frequency: 0 is too small; the least is 1']),
    (('algorithm',), ('training_iter', True), ['training_iter: True is not of the type wanted here: int']),
    (('algorithm',), ('training_iter', 1.5), ['training_iter: 1.5 is not of the type wanted here: int']),
    (
        ('algorithm',),
        ('action_policy', 'epsilon'),
        ["algorithm.action_policy: action policy 'epsilon' is unknown; did you mean 'epsilon_greedy'?", 'boltzmann'],
    ),
    (
        ('algorithm',),
        ('explore_var_spec', None),
        ["agent.0.algorithm.explore_var_spec: policy 'epsilon_greedy' needs a schedule, not null"],
    ),
    (
        ('algorithm', 'explore_var_spec'),
        ('name', 'linear'),
        ["agent.0.algorithm.explore_var_spec.name: 'linear' is unknown; did you mean 'linear_decay'?"],
    ),
    (
        ('algorithm', 'explore_var_spec'),
        ('end_step', REMOVE),
        ["explore_var_spec: key 'end_step' is missing (frames; linear_decay ends there)"],
    ),
    (('memory',), ('name', 'Replai'), ["agent.0.memory.name: memory 'Replai' is unknown; did you mean 'Replay'?"]),
    (('memory',), ('batch_size', REMOVE), ["agent.0.memory: key 'batch_size' is missing (int: "]),
    (('memory',), ('max_size', 0), ['agent.0.memory.max_size: 0 is too small; the least is 1']),
    (('memory',), ('use_cer', 1), ['agent.0.memory.use_cer: 1 is not of the type wanted here: bool']),
    (
        (),
        ('agent.0.memory', {'name': 'OnPolicyReplay'}),
        ['agent.0.memory.name: DQN cannot train from OnPolicyReplay; it takes Replay, PrioritizedReplay'],
    ),
    (('net',), ('type', 'MLPnet'), ["agent.0.net.type: net 'MLPnet' is unknown; did you mean 'MLPNet'?"]),
    (('net',), ('type', REMOVE), ["agent.0.net: key 'type' is missing; it names the net: ", 'DuelingMLPNet', 'MLPNet']),
    (('net',), ('hid_layers', 64), ['agent.0.net.hid_layers: 64 is not of the type wanted here: list']),
    (('net',), ('hid_layers', [64, 0]), ['agent.0.net.hid_layers: [64, 0] must be a list of layer sizes']),
    (('net',), ('hid_layers', [True]), ['agent.0.net.hid_layers: [True] must be']),
    (
        ('net',),
        ('hid_layers_activation', 'rellu'),
        ["agent.0.net.hid_layers_activation: activation 'rellu' is unknown; did you mean 'ReLU'?"],
    ),
    (('net',), ('init_fn', 'orthogonal'), ["net.init_fn: 'orthogonal' is no function of torch.nn.init; did you mean"]),
    (('net',), ('init_fn', '_no_grad_fill_'), ["net.init_fn: '_no_grad_fill_' is no function of torch.nn.init"]),
    (('net',), ('init_fn', 'constant_'), ["net.init_fn: 'constant_' cannot initialise linear layers"]),
    (('net',), ('clip_grad_val', 0), ['net.clip_grad_val: 0 is too small; it must be above 0']),
    (('net',), ('loss_spec', {'name': 'MSELos'}), ["net.loss_spec: loss 'MSELos' is unknown; did you mean 'MSELoss'?"]),
    (('net',), ('loss_spec', {}), ["net.loss_spec: key 'name' is missing"]),
    (('net',), ('loss_spec', {'name': 'MSELoss', 'x': 1}), ["net.loss_spec: torch refuses MSELoss with {'x': 1}"]),
    (('net',), ('loss_spec', {'name': 'CrossEntropyLoss'}), ['CrossEntropyLoss compares no two lists of numbers']),
    (('net',), ('loss_spec', {'name': 'CosineEmbeddingLoss'}), ['torch refuses CosineEmbeddingLoss']),
    (
        ('net',),
        ('optim_spec', {'name': 'adam'}),
        ["net.optim_spec.name: optimizer 'adam' is unknown; did you mean 'Adam'?", 'RMSprop'],
    ),
    (
        ('net',),
        ('optim_spec', {'name': 'Adam', 'learning_rate': 1}),
        ["net.optim_spec.learning_rate: Adam takes no 'learning_rate'", 'Known: ', 'lr'],
    ),
    (('net',), ('optim_spec', {'name': 'Adam', 'lr': -1}), ["optim_spec: torch refuses Adam with {'lr': -1"]),
    (('net',), ('lr_scheduler_spec', {'name': 'StepLR'}), ['net.lr_scheduler_spec: torch refuses StepLR with {}']),
    (
        ('net',),
        ('lr_scheduler_spec', {'name': 'StepLR', 'step_size': 1, 'gamma': 1e300}),
        ['my_spec > agent.0.net.lr_scheduler_spec: ', 'has no learning rate at frame '],
    ),
    (('net',), ('update_type', 'copy'), ["net.update_type: 'copy' is unknown", 'Known: polyak, replace']),
    (('net',), ('update_frequency', 0), ['net.update_frequency: 0 is too small; the least is 1']),
    (('net',), ('update_type', 'polyak'), ['agent.0.net.polyak_coef: None would never move the target net', 'write 1']),
    (('net',), ('polyak_coef', 1.1), ['net.polyak_coef: 1.1 is too large; the most is 1']),
    (('net',), ('polyak_coef', -0.1), ['net.polyak_coef: -0.1 is too small; the least is 0']),
    (('net',), ('gpu', 'yes'), ["net.gpu: 'yes' is unknown", 'Known: False, None, True, auto']),
    ((), ('env.0.name', REMOVE), ["my_spec > env.0: key 'name' is missing"]),
    ((), ('env.0.max_frame', REMOVE), ["my_spec > env.0: key 'max_frame' is missing"]),
    ((), ('env.0.max_frame', 0), ['my_spec > env.0.max_frame: 0 is too small']),
    ((), ('env.0', 'CartPole-v1'), ["my_spec > env.0: 'CartPole-v1' is not of the type wanted here: dict"]),
    ((), ('env.0.num_env', 4), ["my_spec > env.0.num_env: key 'num_env' is unknown; did you mean 'num_envs'?"]),
    ((), ('meta.max_session', 0), ['my_spec > meta.max_session: 0 is too small; the least is 1']),
    ((), ('meta.max_sessions', 2), ["meta.max_sessions: key 'max_sessions' is unknown; did you mean 'max_session'?"]),
    ((), ('meta.distributed', True), ["my_spec > meta.distributed: 'True' is unknown", 'False, shared, synced']),
    ((), ('meta.distributed', 'sync'), ["my_spec > meta.distributed: 'sync' is unknown; did you mean 'synced'?"]),
    ((), ('meta.random_seed', -1), ['my_spec > meta.random_seed: -1 is too small; the least is 0']),
    ((), ('meta.log_frequency', None), ['meta.log_frequency: None is not of the type wanted here: int']),
]


@pytest.mark.parametrize(
    ('parts', 'change', 'pieces'),
    WRONG,
    ids=[f'{key}={value!r}'[:40] for _, (key, value), _ in WRONG],
)
def test_a_wrong_spec_is_refused_in_one_line(parts, change, pieces):
    place, value = change
    prefix = '.'.join(['agent.0', *parts]) + '.' if parts else ''
    with pytest.raises(SpecError) as e:
        spec_util.check(changed((prefix + place, value)))
    line = str(e.value)
    assert '\n' not in line and line.startswith('my_spec')
    for piece in pieces:
        assert piece in line


@pytest.mark.parametrize('text', ['NaN', 'Infinity', '-Infinity', '1e999'])
@pytest.mark.parametrize(
    ('place', 'value'),
    [
        ('agent.0.algorithm.gamma', '{}'),
        ('agent.0.net.lr_scheduler_spec', '{{"name": "StepLR", "step_size": 10, "gamma": {}}}'),
        ('agent.0.net.optim_spec', '{{"name": "Adam", "betas": [0.9, {}]}}'),
        ('env.0.gravity', '{}'),
        ('body.any', '{}'),
    ],
)
def test_numbers_that_json_lacks_are_refused_wherever_they_stand(tmp_path, place, value, text):
    spec = changed(('body', {}), (place, 'HERE'))
    path = tmp_path / 'spec.json'
    path.write_text(json.dumps({'my_spec': spec}).replace('"HERE"', value.format(text)))
    with pytest.raises(SpecError, match=rf'^my_spec > {re.escape(place)}[.\w]*: -?(nan|inf) is not a finite number$'):
        spec_util.get(path, 'my_spec')


def test_a_polyak_coef_of_0_is_refused():
    """Old specs meant a full copy by it; here it is the weight of the source, so the target would never move."""
    with pytest.raises(SpecError, match=r'polyak_coef: 0 would never move .* write 1\.0'):
        spec_util.check(changed(('agent.0.net.update_type', 'polyak'), ('agent.0.net.polyak_coef', 0)))


def test_a_temperature_of_0_is_refused():
    schedule = {'name': 'linear_decay', 'start_val': 3.0, 'end_val': 0.0, 'end_step': 10}
    boltzmann = ('agent.0.algorithm.action_policy', 'boltzmann')
    with pytest.raises(SpecError, match='explore_var_spec: .* temperature; its values must be above 0'):
        spec_util.check(changed(boltzmann, ('agent.0.algorithm.explore_var_spec', schedule)))
    spec_util.check(changed(boltzmann, ('agent.0.algorithm.explore_var_spec', {**schedule, 'end_val': None})))


@pytest.mark.parametrize('key', ['update_type', 'update_frequency', 'polyak_coef'])
def test_a_net_without_target_takes_no_target_keys(key):
    value = {'update_type': 'replace', 'update_frequency': 1, 'polyak_coef': 0.1}[key]
    with pytest.raises(SpecError, match=f'net.{key}: VanillaDQN has no target net; remove the key or use DQN'):
        spec_util.check(changed(('agent.0.algorithm.name', 'VanillaDQN'), (f'agent.0.net.{key}', value)))


@pytest.mark.parametrize('memory', ['Replay', 'PrioritizedReplay'])
def test_sarsa_takes_no_replay(memory):
    replay = {'name': memory, 'batch_size': 8, 'max_size': 10}
    replay.update({'alpha': 0.6, 'epsilon': 0} if memory != 'Replay' else {})
    with pytest.raises(SpecError, match=f'SARSA cannot train from {memory}; it takes OnPolicyBatchReplay, OnPolicyRep'):
        spec_util.check(changed(('agent.0', {**SARSA, 'memory': replay})))


def test_what_nothing_reads_gives_one_warning_line(caplog):
    spec = changed(
        ('agent.0.algorithm.normalize_state', True),
        ('agent.0.net.cuda_id', 0),
        ('env.0.image_downsize', [84, 84]),
        ('meta.train_mode', 'x'),
        ('meta.search', 'RandomSearch'),
        ('env', [{**DQN['env'][0], 'image_downsize': [84, 84]}, {'name': 'second'}]),
    )
    with caplog.at_level(logging.WARNING):
        assert spec_util.check(spec) is True
    (record,) = caplog.records
    line = record.getMessage()
    assert line.startswith('my_spec: nothing reads ') and '\n' not in line
    assert set(line.removeprefix('my_spec: nothing reads ').split(', ')) == {
        'agent.0.algorithm.normalize_state',
        'agent.0.net.cuda_id',
        'env.0.image_downsize',
        'env.1',
        'meta.train_mode',
        'meta.search',
    }


def test_reinforce_has_one_net_and_compares_no_values_and_says_so(caplog):
    optim = {'name': 'RMSprop', 'lr': 0.0007}
    net = {
        **DQN['agent'][0]['net'],
        'loss_spec': {'name': 'CrossEntropyLoss'},  # which a value loss cannot be
        'actor_optim_spec': optim,
        'critic_optim_spec': optim,
    }
    algorithm = {'name': 'Reinforce', 'gamma': 0.9, 'training_frequency': 1}
    spec = changed(('agent.0', {'algorithm': algorithm, 'memory': {'name': 'OnPolicyReplay'}, 'net': net}))
    with caplog.at_level(logging.WARNING):
        resolved = spec_util.resolve(spec)
        spec_util.check(spec)
    assert resolved['agent']['net']['loss_spec'] == {'name': 'MSELoss'}
    (line,) = caplog.messages
    assert set(line.removeprefix('my_spec: nothing reads ').split(', ')) == {
        'agent.0.net.loss_spec',
        'agent.0.net.actor_optim_spec',
        'agent.0.net.critic_optim_spec',
    }


def test_random_reads_no_net_and_says_so(caplog):
    agent = {'algorithm': {'name': 'Random', 'gamma': 0.9}, 'memory': {'name': 'OnPolicyReplay'}, 'net': {'type': 'X'}}
    with caplog.at_level(logging.WARNING):
        spec_util.check(changed(('agent.0', agent)))
    assert caplog.messages == ['my_spec: nothing reads agent.0.algorithm.gamma, agent.0.net.type']


def test_a_clean_spec_gives_no_warning(caplog):
    with caplog.at_level(logging.WARNING):
        spec_util.check(changed())
    assert caplog.records == []


def test_resolve_fills_defaults_and_leaves_out_what_nothing_reads():
    resolved = spec_util.resolve(changed(('agent.0.net.cuda_id', 1), ('meta.search', 'x'), ('env.0.gravity', 5)))
    algorithm, net = resolved['agent']['algorithm'], resolved['agent']['net']
    assert (algorithm['action_policy'], algorithm['action_pdtype']) == ('epsilon_greedy', 'Argmax')
    assert algorithm['explore_var_spec']['start_step'] == 0
    assert (net['loss_spec'], net['optim_spec']) == ({'name': 'MSELoss'}, {'name': 'Adam'})
    assert (net['update_type'], net['update_frequency'], net['polyak_coef']) == ('replace', 1, None)
    assert resolved['agent']['memory']['use_cer'] is False
    assert (resolved['env']['num_envs'], resolved['env']['gravity']) == (1, 5)
    assert (resolved['meta']['log_frequency'], resolved['meta']['max_session']) == (10000, 2)
    assert 'cuda_id' not in net and 'search' not in resolved['meta'] and 'image_downsize' not in resolved['env']


def test_checking_draws_no_random_numbers():
    before = torch.get_rng_state()
    spec_util.check(changed(('agent.0.net.init_fn', 'orthogonal_')))
    assert torch.equal(torch.get_rng_state(), before)


# --- modes


def test_override_for_dev_enjoy_and_test():
    meta = {'max_session': 4, 'max_trial': 9, 'log_frequency': 500}
    assert spec_util.override_spec({'meta': dict(meta)}, 'train')['meta'] == meta
    assert spec_util.override_spec({'meta': dict(meta)}, 'enjoy')['meta'] == {**meta, 'max_session': 1}
    assert spec_util.override_spec({'meta': dict(meta)}, 'dev')['meta'] == {**meta, 'max_session': 1, 'max_trial': 2}


def test_override_for_test_shortens_all():
    spec = changed(('env.0.num_envs', 8), ('agent.0.algorithm.training_start_step', 32))
    assert spec_util.override_spec(spec, 'test') is spec
    algorithm, env, meta = spec['agent'][0]['algorithm'], spec['env'][0], spec['meta']
    keys = ('training_frequency', 'training_start_step', 'training_iter', 'training_batch_iter')
    assert [algorithm[key] for key in keys] == [8, 1, 1, 1] and 'time_horizon' not in algorithm
    assert (env['max_frame'], env['max_t'], env['num_envs']) == (40, 12, 2)
    assert meta == {'max_session': 1, 'max_trial': 2, 'log_frequency': 10, 'eval_frequency': 10}
    episodic = changed(('agent.0', {**copy.deepcopy(SARSA), 'memory': {'name': 'OnPolicyReplay'}}))
    assert spec_util.override_spec(episodic, 'test')['agent'][0]['algorithm']['training_frequency'] == 1
    assert 'num_envs' not in episodic['env'][0]


# --- ticks and paths


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.setenv('LAB_DATA_DIR', str(tmp_path))
    return spec_util.prepare(changed(), '2026_01_31_120000')


def indices(spec):
    return tuple(spec['meta'][key] for key in ('experiment', 'trial', 'session'))


def test_ticks_advance_their_index_and_restart_those_below(spec):
    assert indices(spec) == (-1, -1, -1)
    seen = []
    for unit in ('trial', 'session', 'session', 'trial', 'session', 'experiment', 'session'):
        assert spec_util.tick(spec, unit) is spec
        seen.append(indices(spec))
    assert seen == [(0, 0, -1), (0, 0, 0), (0, 0, 1), (0, 1, -1), (0, 1, 0), (1, -1, -1), (1, 0, 0)]
    with pytest.raises(ValueError, match="unit 'epoch' is none of experiment, trial, session"):
        spec_util.tick(spec, 'epoch')


def test_an_experiment_tick_takes_the_time_anew(spec):
    spec_util.tick(spec, 'experiment')
    assert spec['meta']['experiment_ts'] != '2026_01_31_120000'


def test_paths_follow_the_unit(spec, tmp_path):
    folder = tmp_path / 'my_spec_2026_01_31_120000'
    spec_util.set_paths(spec)
    assert spec['meta']['prepath'] == str(folder / 'my_spec')
    spec_util.tick(spec, 'trial')
    assert spec['meta']['prepath'] == str(folder / 'my_spec_t0')
    spec_util.tick(spec, 'session')
    assert spec['meta']['prepath'] == str(folder / 'my_spec_t0_s0')
    for name in ('graph', 'info', 'log', 'model'):
        assert spec['meta'][f'{name}_prepath'] == str(folder / name / 'my_spec_t0_s0')


def test_a_run_that_was_found_keeps_its_folder(spec, tmp_path):
    spec['meta']['predir'] = str(tmp_path / 'elsewhere')
    spec_util.tick(spec, 'trial')
    assert spec['meta']['prepath'] == str(tmp_path / 'elsewhere' / 'my_spec_t0')


def test_a_session_s_spec_is_a_copy(spec):
    spec_util.tick(spec, 'trial')
    session = spec_util.session_spec(spec, 3)
    assert indices(session) == (0, 0, 3) and session['meta']['prepath'].endswith('my_spec_t0_s3')
    session['agent'][0]['algorithm']['gamma'] = 0
    assert indices(spec) == (0, 0, -1) and spec['agent'] == DQN['agent']


def test_a_saved_spec_can_be_run_again(spec):
    spec_util.tick(spec, 'trial')
    spec['meta']['random_seed'] = 2**62 + 1
    spec_util.save(spec)
    saved = files.read_json(spec['meta']['prepath'] + '_spec.json')
    assert saved == spec
    spec_util.check(saved)
    assert spec_util.resolve(saved) == spec_util.resolve(spec)
