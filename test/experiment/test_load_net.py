"""`load_net`: a new run that starts from the nets of another, and takes nothing else from it."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from resume import StopAt, hash_files, raw_spec, run_to, session_spec, uninterrupted

import run_lab
from slm_lab.experiment import trained_nets
from slm_lab.experiment.session import Session, store_of
from slm_lab.lib import files
from slm_lab.lib.state import first_difference, snapshot
from slm_lab.spec import spec_util

pytestmark = pytest.mark.usefixtures('command')


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    """A run that was stopped at frame 250, with best nets of frame 122 or so: its session spec"""
    spec = session_spec(tmp_path_factory.mktemp('source'), raw_spec('DQN'))
    run_to(spec, StopAt(250))
    return spec


@pytest.fixture
def begun(monkeypatch):
    """What a session is when its loop begins."""
    seen = {}

    def run(session):
        seen['nets'] = snapshot({name: dict(net.state_dict()) for name, net in session.agent.algorithm.nets.items()})
        seen['frame'], seen['rows'] = session.clock.frame, len(session.agent.body.train_df)
        seen['moments'] = len(session.agent.algorithm.learners['net'].optim.state_dict()['state'])
        seen['memory'] = session.agent.memory.size
        seen['env'] = snapshot(session.env.state_dict())
        return original(session)

    original = Session.run
    monkeypatch.setattr(Session, 'run', run)
    return seen


def train(folder, load_net, mode='train', **parts):
    """Returns: (exit status, spec file) of a run whose spec has `load_net`."""
    raw = raw_spec(parts.pop('algorithm', 'DQN'), agent={'load_net': str(load_net)}, **parts)
    spec_file = folder / 'spec.json'
    files.write_json({'tiny': raw}, spec_file)
    return run_lab.main([str(spec_file), 'tiny', mode]), spec_file


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def pt(spec, stem):
    return f'{spec["meta"]["model_prepath"]}_{stem}.pt'


def run_folder(spec):
    return spec['meta']['predir']


def forms(spec):
    best, last = pt(spec, 'ckpt-best_net_model'), pt(spec, 'net_model')
    return {
        'run folder': (run_folder(spec), best),
        'model prepath': (spec['meta']['model_prepath'], last),
        'prepath of the best': (f'{spec["meta"]["model_prepath"]}_ckpt-best', best),
        'a file': (last, last),
    }


@pytest.mark.parametrize('form', ['run folder', 'model prepath', 'prepath of the best', 'a file'])
def test_it_starts_at_frame_0_with_these_nets(form, source, begun, tmp_path, capsys):
    load_net, wanted = forms(source)[form]
    assert torch.load(wanted, weights_only=True).keys() == {
        'model.0.weight',
        'model.0.bias',
        'model_tail.0.weight',
        'model_tail.0.bias',
    }
    before = hash_files(run_folder(source))
    status, _ = train(tmp_path, load_net)
    assert status == 0
    assert same(begun['nets']['net'], torch.load(wanted, weights_only=True))
    assert (begun['frame'], begun['rows'], begun['memory'], begun['moments']) == (0, 0, 0, 0)
    assert f'Starting from the trained nets of {wanted}' in capsys.readouterr().out
    assert hash_files(run_folder(source)) == before
    (folder,) = (tmp_path / 'data').iterdir()
    rows = files.read_csv(folder / 'info' / 'tiny_t0_s0_session_df_train.csv')
    assert list(rows['frame']) == [0, 61, 122, 183, 244, 303] and rows['explore_var'].iloc[0] == 1.0


def test_the_best_and_the_last_nets_of_the_source_differ(source):
    """So that the test above can tell them apart."""
    nets = [torch.load(path, weights_only=True) for _, path in (forms(source)['run folder'], forms(source)['a file'])]
    assert not same(*nets)


def test_the_target_net_is_its_own_where_there_is_one_and_else_in_step(source, begun, tmp_path):
    """From one file: as at the start of any run, the target equals its source."""
    train(tmp_path / 'prepath', source['meta']['model_prepath'])
    assert same(begun['nets']['target_net'], torch.load(pt(source, 'target_net_model'), weights_only=True))
    train(tmp_path / 'file', pt(source, 'net_model'))
    assert same(begun['nets']['target_net'], begun['nets']['net'])


def test_an_algorithm_without_target_takes_the_net_alone(source, begun, tmp_path):
    status, _ = train(tmp_path, run_folder(source), algorithm='SARSA')
    assert status == 0
    assert same(begun['nets']['net'], torch.load(pt(source, 'ckpt-best_net_model'), weights_only=True))


def test_another_shape_is_refused_by_the_name_of_the_tensor(source, begun, tmp_path, capsys):
    status, _ = train(tmp_path, run_folder(source), nets={'hid_layers': [9]})
    assert status == 2 and not begun
    error = capsys.readouterr().err
    assert 'model.0.weight is (8, 4) there and (9, 4) by the spec' in error and 'net_model.pt' in error


def test_another_kind_of_net_is_refused(source, begun, tmp_path, capsys):
    status, _ = train(tmp_path, run_folder(source), net='DuelingMLPNet')
    assert status == 2 and not begun
    assert 'does not fit net' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('write', 'wanted'),
    [
        (lambda path, spec: path.write_bytes(b'no net'), 'was not read'),
        (lambda path, spec: torch.save(torch.zeros(3), path), 'holds a Tensor'),
        (lambda path, spec: torch.save({'state': {}, 'param_groups': []}, path), 'model.0.weight is nothing there'),
        (lambda path, spec: None, "'{}'"),  # there is none
    ],
)
def test_what_is_no_net_is_refused(write, wanted, source, begun, tmp_path, capsys):
    path = tmp_path / 'some.pt'
    write(path, source)
    status, _ = train(tmp_path, path)
    assert status == 2 and not begun
    assert wanted.format(path) in capsys.readouterr().err


def test_a_prepath_of_none_of_its_nets_is_refused_and_does_not_train_from_nothing(source, begun, tmp_path, capsys):
    """`model/tiny` begins the names of the files, but what is between is no net's name."""
    status, _ = train(tmp_path, source['meta']['model_prepath'].removesuffix('_t0_s0'))
    assert status == 2 and not begun
    assert 'none of these is a net of DQN, which has net, target_net' in capsys.readouterr().err


def test_resuming_such_a_run_does_not_load_them_again(source, tmp_path):
    """It goes on from the nets that it has trained since, as the run in one piece does."""
    status, _ = train(tmp_path, run_folder(source), env={'max_frame': 122})
    assert status == 0
    status, _ = train(tmp_path, run_folder(source), mode='train@latest')
    assert status == 0
    (folder,) = (tmp_path / 'data').iterdir()
    resumed = torch.load(folder / 'model' / 'tiny_t0_s0_net_model.pt', weights_only=True)
    (tmp_path / 'data').rename(tmp_path / 'first')
    train(tmp_path, run_folder(source))
    (folder,) = (tmp_path / 'data').iterdir()
    assert same(resumed, torch.load(folder / 'model' / 'tiny_t0_s0_net_model.pt', weights_only=True))
    plain = uninterrupted(session_spec(tmp_path, raw_spec('DQN')))
    assert not same(resumed, plain['tree']['agent']['algorithm']['nets']['net'])


# --- observation statistics


@pytest.fixture(scope='module')
def standardized(tmp_path_factory):
    """As `source`, of standardised observations: (session spec, {'best', 'last': the statistics of these nets})"""
    spec = session_spec(tmp_path_factory.mktemp('standardized'), raw_spec('DQN', normalize_state=True))
    last = run_to(spec, StopAt(250))['tree']['env']['NormalizeState']
    best = store_of(spec).best(store_of(spec).find().generation)['nets']['statistics']['NormalizeState']
    assert 0 < best['count'] < last['count']
    spec_util.save(spec)
    return spec, {'best': best, 'last': last}


def without_checkpoints(spec, folder):
    """What SLM Lab v4.2 leaves."""
    return Path(shutil.copytree(run_folder(spec), folder / 'classic', ignore=shutil.ignore_patterns('checkpoint')))


@pytest.mark.parametrize(
    ('form', 'which'),
    [('run folder', 'best'), ('prepath of the best', 'best'), ('model prepath', 'last'), ('a file', 'last')],
)
@pytest.mark.parametrize('num_envs', [1, 3])
def test_the_statistics_come_with_the_nets_that_read_by_them(
    form, which, num_envs, standardized, begun, tmp_path, capsys
):
    spec, statistics = standardized
    before = hash_files(run_folder(spec))
    extra = {'env': {'reward_scale': 2}, 'meta': {'rigorous_eval': 1}}  # wrappers around, an env that shares them
    status, _ = train(tmp_path, forms(spec)[form][0], num_envs=num_envs, normalize_state=True, **extra)
    assert status == 0
    assert first_difference(statistics[which], begun['env']['NormalizeState']) is None
    output = capsys.readouterr().out
    assert f'Starting from the observation statistics of {forms(spec)[form][1]}' in output
    assert 'WARNING' not in output
    assert hash_files(run_folder(spec)) == before


@pytest.mark.parametrize(
    ('source_is', 'standardizes', 'wanted'),
    [
        ('plain', True, 'was trained on plain observations, and gets standardised ones here (env.normalize_state)'),
        ('standardized', False, 'was trained on standardised observations, and gets plain ones here'),
        ('classic', False, 'was trained on standardised observations, and gets plain ones here'),
        ('classic', True, 'were not taken over: no checkpoint of its run holds them'),
        ('a file of no run', True, 'were not taken over: no checkpoint of its run holds them'),
        ('a file of no run', False, None),
        ('plain', False, None),
    ],
)
def test_nets_that_will_read_inputs_of_another_scale_are_a_warning(
    source_is, standardizes, wanted, source, standardized, begun, tmp_path, capsys
):
    spec, _ = standardized
    file = tmp_path / 'some_net_model.pt'
    shutil.copy(pt(spec, 'net_model'), file)
    load_net = {
        'plain': run_folder(source),
        'standardized': run_folder(spec),
        'classic': without_checkpoints(spec, tmp_path),
        'a file of no run': file,
    }[source_is]
    status, _ = train(tmp_path, load_net, normalize_state=standardizes)
    assert status == 0
    assert not standardizes or begun['env']['NormalizeState']['count'] == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if 'WARNING' in line]
    assert len(warnings) == (wanted is not None)
    assert wanted is None or ('load_net: ' in warnings[0] and wanted in warnings[0])


def test_statistics_of_another_shape_are_a_warning(standardized, begun, tmp_path, capsys, monkeypatch):
    """The nets fit all the same where a stack of frames is as long as a frame of the other env."""
    spec, statistics = standardized
    longer = {key: np.zeros(5) if key != 'count' else 3 for key in statistics['best']}
    monkeypatch.setattr(trained_nets, 'find_statistics', lambda *_: {'NormalizeState': longer})
    status, _ = train(tmp_path, run_folder(spec), normalize_state=True)
    assert status == 0 and begun['env']['NormalizeState']['count'] == 0
    assert 'were not taken over: they have another shape' in capsys.readouterr().out


def test_resuming_such_a_run_does_not_take_the_statistics_again(standardized, tmp_path):
    """It goes on with those that it has gathered since, as the run in one piece does."""
    spec, _ = standardized
    ends = []
    for i, stops in enumerate([(303,), (122, 303)]):
        for max_frame, mode in zip(stops, ('train', 'train@latest'), strict=False):
            status, _ = train(tmp_path, run_folder(spec), mode=mode, normalize_state=True, env={'max_frame': max_frame})
            assert status == 0
        (folder,) = (tmp_path / 'data').iterdir()
        ends.append(torch.load(folder / 'model' / 'tiny_t0_s0_net_model.pt', weights_only=True))
        (tmp_path / 'data').rename(tmp_path / f'data{i}')
    assert same(*ends)
