"""`load_net`: a new run that starts from the nets of another, and takes nothing else from it."""

import pytest
import torch
from resume import StopAt, hash_files, raw_spec, run_to, session_spec, uninterrupted

import run_lab
from slm_lab.experiment.session import Session
from slm_lab.lib import files
from slm_lab.lib.state import snapshot

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
