"""What may change in the spec of a run that goes on: only what leaves its past as it was."""

import copy

import pytest
from test_spec_util import DQN, REMOVE, changed

from slm_lab.lib.errors import ResumeError
from slm_lab.spec import resume_rules, spec_util


def resolved(*changes):
    return spec_util.resolve(changed(*changes))


WAS = (('meta.random_seed', 7), ('env.0.max_frame', 500), ('meta.max_session', 2))

ALLOWED = [
    ('env.0.max_frame', 1000),
    ('env.0.max_frame', 300),  # the run has reached frame 300
    ('meta.max_session', 3),
    ('meta.log_frequency', 50),
    ('meta.eval_frequency', 50),
    ('meta.max_trial', 8),
    ('meta.num_cpus', 2),
    ('meta.num_gpus', 0),
    ('agent.0.net.gpu', True),
    ('agent.0.name', 'another label'),
]
REFUSED = [
    ('env.0.max_frame', 299, 'env.max_frame'),
    ('meta.max_session', 1, 'meta.max_session'),
    ('meta.random_seed', 8, 'meta.random_seed'),
    ('meta.rigorous_eval', 2, 'meta.rigorous_eval'),
    ('meta.torch_num_threads', 2, 'meta.torch_num_threads'),
    ('agent.0.algorithm.name', 'DoubleDQN', 'agent.algorithm.name'),
    ('agent.0.algorithm.gamma', 0.98, 'agent.algorithm.gamma'),
    ('agent.0.algorithm.action_policy', 'boltzmann', 'agent.algorithm.action_policy'),
    ('agent.0.algorithm.explore_var_spec.end_step', 101, 'agent.algorithm.explore_var_spec.end_step'),
    ('agent.0.algorithm.training_start_step', 4, 'agent.algorithm.training_start_step'),
    ('agent.0.memory.max_size', 101, 'agent.memory.max_size'),
    ('agent.0.memory.use_cer', True, 'agent.memory.use_cer'),
    ('agent.0.net.type', 'DuelingMLPNet', 'agent.net.type'),
    ('agent.0.net.hid_layers', [8, 8], 'agent.net.hid_layers'),
    ('agent.0.net.optim_spec', {'name': 'Adam', 'lr': 0.5}, 'agent.net.optim_spec.lr'),
    ('agent.0.net.clip_grad_val', 0.5, 'agent.net.clip_grad_val'),
    ('agent.0.load_net', 'data/x', 'agent.load_net'),
    ('env.0.name', 'CartPole-v0', 'env.name'),
    ('env.0.resume', 'fresh', 'env.resume'),
    ('env.0.num_envs', 2, 'env.num_envs'),
    ('env.0.max_t', 100, 'env.max_t'),
    ('env.0.normalize_state', True, 'env.normalize_state'),
    ('env.0.gravity', 5, 'env.gravity'),  # a keyword of the environment's own
]


def test_an_unchanged_spec_has_no_changes():
    assert resume_rules.compare(resolved(*WAS), resolved(*WAS), 300) == []


@pytest.mark.parametrize(('place', 'value'), ALLOWED)
def test_what_leaves_the_past_as_it_was_is_taken_over(place, value):
    was, now = resolved(*WAS), resolved(*WAS, (place, value))
    short = place.replace('.0', '')
    room, *_, key = short.split('.')
    old = was['agent']['net'][key] if 'net' in short.split('.') else was[room][key]
    assert resume_rules.compare(was, now, 300) == [(short, old, value)]


@pytest.mark.parametrize(('place', 'value', 'key'), REFUSED)
def test_what_would_have_altered_the_past_is_refused(place, value, key):
    was, now = resolved(*WAS), resolved(*WAS, (place, value))
    with pytest.raises(ResumeError) as e:
        resume_rules.compare(was, now, 300)
    lines = str(e.value).split('\n')
    assert lines[0].startswith('this run cannot go on with the changed spec')
    assert [cell.strip() for cell in lines[1].split('|')] == ['key', 'was', 'is']
    assert lines[2].split('|')[0].strip() == key and len(lines) == 4
    assert 'restore the values, or start a new run' in lines[3] and 'load_net' in lines[3]


def test_the_table_has_a_row_for_each_refused_key_and_none_for_allowed_ones():
    was = resolved(*WAS)
    now = resolved(*WAS, ('env.0.max_frame', 900), ('agent.0.net.hid_layers', [16]), ('agent.0.algorithm.gamma', 0.5))
    with pytest.raises(ResumeError) as e:
        resume_rules.compare(was, now, 300)
    assert str(e.value).split('\n')[1:4] == [
        '  key                   | was  | is',
        '  agent.algorithm.gamma | 0.99 | 0.5',
        '  agent.net.hid_layers  | [8]  | [16]',
    ]


def test_of_two_objects_the_table_shows_the_keys_that_differ():
    was = resolved(('agent.0.net.optim_spec', {'name': 'Adam', 'lr': 0.1, 'eps': 1e-6}))
    now = resolved(('agent.0.net.optim_spec', {'name': 'Adam', 'lr': 0.2, 'eps': 1e-6, 'amsgrad': True}))
    with pytest.raises(ResumeError) as e:
        resume_rules.compare(was, now)
    assert [[cell.strip() for cell in row.split('|')] for row in str(e.value).split('\n')[2:4]] == [
        ['agent.net.optim_spec.lr', '0.1', '0.2'],
        ['agent.net.optim_spec.amsgrad', 'null', 'true'],
    ]


def test_a_long_value_is_cut():
    text = resume_rules.table([('key', list(range(100)), None)])
    was = text.split('\n')[1].split('|')[1].strip()
    assert len(was) == 58 and was.endswith('…') and was.startswith('[0,1,2')


def test_a_drawn_seed_stays_when_the_file_names_none():
    assert resume_rules.compare(resolved(*WAS), resolved(*WAS, ('meta.random_seed', None))) == []
    assert resume_rules.compare(resolved(*WAS), resolved(*WAS)) == []
    with pytest.raises(ResumeError, match=r'meta\.random_seed \| null +\| 7'):
        resume_rules.compare(resolved(*WAS, ('meta.random_seed', None)), resolved(*WAS))


@pytest.mark.parametrize(
    ('place', 'value'),
    [
        ('agent.0.memory.use_cer', False),
        ('agent.0.net.clip_grad_val', None),
        ('agent.0.net.loss_spec', {'name': 'MSELoss'}),
        ('agent.0.algorithm.action_pdtype', 'Argmax'),
        ('agent.0.algorithm.explore_var_spec.start_step', 0),
        ('env.0.num_envs', 1),
        ('env.0.max_t', None),
        ('meta.rigorous_eval', 0),
        # the same number, written another way
        ('agent.0.memory.max_size', 1e2),
        ('agent.0.algorithm.explore_var_spec.end_step', 1e2),
        ('agent.0.algorithm.explore_var_spec.start_val', 1),
        # what nothing reads
        ('agent.0.net.cuda_id', 3),
        ('agent.0.algorithm.normalize_state', True),
        ('env.0.image_downsize', [84, 84]),
        ('meta.search', 'RandomSearch'),
    ],
)
def test_a_default_that_is_written_out_is_no_change(place, value):
    was, now = resolved(), resolved((place, value))
    assert resume_rules.compare(was, now) == []


def test_the_order_of_keys_is_no_change():
    def turned(part):
        return {k: turned(v) for k, v in reversed(part.items())} if isinstance(part, dict) else part

    spec = changed(('agent.0.net.optim_spec', {'name': 'Adam', 'lr': 0.1, 'eps': 1e-6}))
    other = {**spec, 'agent': [turned(spec['agent'][0])], 'env': [turned(spec['env'][0])]}
    was, now = spec_util.resolve(spec), spec_util.resolve(other)
    assert list(now['agent']['net']['optim_spec']) == ['eps', 'lr', 'name']
    assert resume_rules.compare(was, now) == []


def test_a_null_that_is_left_out_is_no_change():
    was = resolved(('agent.0.net.lr_scheduler_spec', None))
    now = resolved(('agent.0.net.lr_scheduler_spec', None), ('agent.0.net.lr_scheduler_spec', REMOVE))
    assert resume_rules.compare(was, now) == []


def test_resolving_changes_nothing_in_the_spec():
    spec = changed()
    spec_util.resolve(spec)
    assert spec == {**copy.deepcopy(DQN), 'name': 'my_spec'}
