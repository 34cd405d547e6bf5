"""A run folder as SLM Lab v4.2 leaves it: specs, nets, optimizers and data frames, and no checkpoint.

The fixture writes that layout by hand: nothing of it comes from our own saving.
"""

import json
import os

import pytest
import torch
from resume import TS, hash_files, raw_spec

import run_lab
from slm_lab.experiment.session import Session
from slm_lab.lib import files
from slm_lab.lib.state import snapshot

NAME = 'tiny_t0_s0'
COLUMNS = (
    'epi,t,wall_t,opt_step,frame,fps,total_reward,total_reward_ma,loss,lr,explore_var,entropy_coef,entropy,grad_norm'
)
# as v4.2 writes them: float32 turned to text, whole numbers with .0, an empty field where there is none
ROWS = """\
0.0,0.0,0.0,0.0,0.0,0.0,,,,0.02,1.0,,,
4.0,11.0,1.0,24.0,61.0,61.0,14.0,14.0,0.5,0.018,0.84,,,
9.0,3.0,2.0,60.0,122.0,61.0,30.0,22.0,0.25,0.0146,0.6,,,
12.0,7.0,3.0,96.0,183.0,61.0,10.0,18.0,0.75,0.0131,0.36,,,"""


pytestmark = pytest.mark.usefixtures('command')


def net_state(value):
    """MLPNet of 4 inputs, 8 hidden units and 2 outputs."""
    shapes = {'model.0.weight': (8, 4), 'model.0.bias': (8,)}
    shapes |= {'model_tail.0.weight': (2, 8), 'model_tail.0.bias': (2,)}
    return {
        name: torch.arange(torch.Size(shape).numel()).reshape(shape) * 0.01 + value for name, shape in shapes.items()
    }


def optim_state():
    """Adam as torch 1.3 saved it: the step a python int, no keys of later versions."""
    state = {
        i: {'step': 96, 'exp_avg': torch.full_like(p, 0.125), 'exp_avg_sq': torch.full_like(p, 0.25)}
        for i, p in enumerate(net_state(0).values())
    }
    group = {'lr': 0.5, 'betas': (0.9, 0.999), 'eps': 1e-08, 'weight_decay': 0, 'amsgrad': False, 'initial_lr': 0.02}
    return {'state': state, 'param_groups': [{**group, 'params': [0, 1, 2, 3]}]}


class Classic:
    def __init__(self, folder, raw):
        self.spec_file = folder / 'spec.json'
        self.raw = raw
        raw['meta'].pop('random_seed', None)  # no spec of v4.2 has one
        files.write_json({'tiny': raw}, self.spec_file)
        self.folder = folder / 'data' / f'tiny_{TS}'
        for unit, trial, session in (('tiny', -1, -1), ('tiny_t0', 0, -1), (NAME, 0, 0)):
            files.write_json(self.spec(unit, trial, session), self.folder / f'{unit}_spec.json')
        (self.folder / 'model').mkdir()
        (self.folder / 'info').mkdir()
        self.csv.write_text(f'{COLUMNS}\n{ROWS}\n')
        self.save('net_model', net_state(1.0))
        self.save('target_net_model', net_state(2.0))
        self.save('net_optim', optim_state())
        self.save('ckpt-best_net_model', net_state(3.0))
        self.save('ckpt-best_target_net_model', net_state(4.0))
        self.save('ckpt-best_net_optim', optim_state())

    def spec(self, unit, trial, session):
        """With the keys that v4.2 adds at run time; its prepaths are relative to its checkout."""
        spec = json.loads(json.dumps(self.raw))
        spec['agent'][0]['net'].update({'gpu': False, 'cuda_id': 0})
        prepaths = {f'{kind}_prepath': f'data/tiny_{TS}/{kind}/{unit}' for kind in ('graph', 'info', 'log', 'model')}
        spec['meta'] = {
            **spec['meta'],
            'rigorous_eval': 0,
            'experiment': 0,
            'trial': trial,
            'session': session,
            'cuda_offset': 0,
            'resume': False,
            'experiment_ts': TS,
            'prepath': f'data/tiny_{TS}/{unit}',
            **prepaths,
            'git_sha': '7605a825',
            'random_seed': 1580000000 if session >= 0 else None,
        }
        return {**spec, 'body': {'product': 'outer', 'num': 1}, 'name': 'tiny'}

    @property
    def csv(self):
        return self.folder / 'info' / f'{NAME}_session_df_train.csv'

    def model(self, stem):
        return self.folder / 'model' / f'{NAME}_{stem}.pt'

    def save(self, stem, state):
        torch.save(state, self.model(stem))

    def resume(self):
        return run_lab.main([str(self.spec_file), 'tiny', f'train@{self.folder}'])


@pytest.fixture
def classic(tmp_path):
    return Classic(tmp_path, raw_spec('DQN'))


@pytest.fixture
def loaded(monkeypatch):
    """What a session is when its loop begins."""
    seen = {}

    def run(session):
        algorithm = session.agent.algorithm
        seen.update(
            clock=session.clock.state_dict(),
            nets=snapshot({name: dict(net.state_dict()) for name, net in algorithm.nets.items()}),
            optim=snapshot(algorithm.learners['net'].optim.state_dict()) if algorithm.learners else None,
            explore_var=algorithm.explore_var,
            lr=algorithm.lr,
            best=session.agent.body.best_total_reward_ma,
        )
        return original(session)

    original = Session.run
    monkeypatch.setattr(Session, 'run', run)
    return seen


def test_it_goes_on_from_what_is_there(classic, loaded, capsys):
    assert classic.resume() == 0
    out = capsys.readouterr().out
    clock = loaded['clock']
    # the last row's frame and steps; its episode, the 13th, is over: a new one begins
    assert (clock['frame'], clock['epi'], clock['t'], clock['opt_step']) == (183, 13, 0, 96)
    assert all(type(clock[key]) is int for key in ('frame', 'epi', 't', 'opt_step')) and clock['wall_t'] >= 3
    assert loaded['best'] == 22.0  # the highest moving average of all rows, not the last one
    for name, value in (('net', 1.0), ('target_net', 2.0)):
        assert all(torch.equal(loaded['nets'][name][key], tensor) for key, tensor in net_state(value).items())
    # functions of the frame: epsilon falls from 20 to 250, the rate by a tenth every 40 frames
    assert loaded['explore_var'] == pytest.approx(1 - 0.9 * (183 - 20) / 230)
    assert loaded['lr'] == pytest.approx(0.02 * 0.9**4)
    assert 'Resumed trial 0 session 0 from the nets and data frames alone (no checkpoint)' in out
    (missing,) = [line for line in out.splitlines() if line.startswith('  missing: ')]
    assert missing == '  missing: memory; random generators; the running episode'
    (restored,) = [line for line in out.splitlines() if line.startswith('  restored: ')]
    assert 'optimizers' in restored and 'memory' not in restored


def test_old_optimizer_state_is_loaded_and_goes_on(classic, loaded):
    """Moments and step counts are the file's; then each step adds one."""
    assert classic.resume() == 0
    for entry, old in zip(loaded['optim']['state'].values(), optim_state()['state'].values(), strict=True):
        assert float(entry['step']) == 96
        assert torch.equal(entry['exp_avg'], old['exp_avg']) and torch.equal(entry['exp_avg_sq'], old['exp_avg_sq'])
    now = torch.load(classic.model('net_optim'), weights_only=True)
    trained = files.read_csv(classic.csv)['opt_step'].iloc[-1] - 96
    assert trained > 0 and {float(entry['step']) for entry in now['state'].values()} == {96.0 + trained}


def test_its_rows_are_kept_and_new_ones_follow(classic, loaded):
    assert classic.resume() == 0
    df = files.read_csv(classic.csv)
    assert list(df['frame']) == [0, 61, 122, 183, 244, 303]
    assert list(df['opt_step'])[:4] == [0, 24, 60, 96]
    assert list(df['total_reward_ma'])[1:4] == [14.0, 22.0, 18.0]
    assert df['frame'].dtype == 'int64' and df['opt_step'].is_monotonic_increasing


def test_the_best_nets_stay_until_there_are_better_ones(classic, loaded):
    best = classic.model('ckpt-best_net_model').read_bytes()
    assert classic.resume() == 0
    df = files.read_csv(classic.csv)
    has_better = (df['total_reward_ma'].iloc[4:5] >= 22.0).any()  # at 244; the end row never counts
    assert (classic.model('ckpt-best_net_model').read_bytes() == best) == (not has_better)


def test_what_it_saves_is_a_whole_checkpoint(classic, capsys):
    assert classic.resume() == 0
    capsys.readouterr()
    raw = json.loads(json.dumps(classic.raw))
    raw['env'][0]['max_frame'] = 400
    files.write_json({'tiny': raw}, classic.spec_file)
    assert classic.resume() == 0
    out = capsys.readouterr().out
    assert 'from the checkpoint of frame 303' in out and 'missing: nothing' in out


def test_unknown_figures_in_the_last_row_count_as_0(classic, loaded):
    """SLM Lab v5 leaves epi empty for vector envs."""
    lines = classic.csv.read_text().splitlines()
    lines[-1] = ',7.0,,,183.0,61.0,10.0,18.0,,,,,,'
    classic.csv.write_text('\n'.join(lines) + '\n')
    assert classic.resume() == 0
    clock = loaded['clock']
    assert (clock['frame'], clock['epi'], clock['opt_step']) == (183, 0, 0)


def test_several_envs_count_time_in_frames(tmp_path, loaded):
    assert Classic(tmp_path, raw_spec('DQN', num_envs=4)).resume() == 0
    assert loaded['clock']['t'] == 183


def test_a_missing_optimizer_is_named(classic, capsys):
    classic.model('net_optim').unlink()
    assert classic.resume() == 0
    out = capsys.readouterr().out
    assert 'missing: net optimizer; memory' in out
    (restored,) = [line for line in out.splitlines() if line.startswith('  restored: ')]
    assert 'optimizers' not in restored


def test_a_missing_target_net_is_named_and_starts_as_its_source(classic, loaded, capsys):
    classic.model('target_net_model').unlink()
    assert classic.resume() == 0
    assert 'missing: target_net; memory' in capsys.readouterr().out
    assert all(torch.equal(loaded['nets']['target_net'][key], tensor) for key, tensor in net_state(1.0).items())


@pytest.mark.parametrize('damage', ['no csv', 'no rows', 'no net'])
def test_too_little_is_refused_and_nothing_is_lost(damage, classic, capsys):
    if damage == 'no csv':
        classic.csv.unlink()
    elif damage == 'no rows':
        classic.csv.write_text(COLUMNS + '\n')
    else:
        classic.model('net_model').unlink()
        classic.model('target_net_model').unlink()
    before = hash_files(classic.folder / 'model'), hash_files(classic.folder / 'info')
    assert classic.resume() == 2
    error = capsys.readouterr().err
    if damage == 'no net':
        assert 'no net under model/' in error
    else:
        assert 'no rows' in error and 'load_net' in error
    info = hash_files(classic.folder / 'info')
    assert before[0] == hash_files(classic.folder / 'model')
    assert before[1].items() <= info.items()  # the history is added


def test_rows_without_nets_of_an_agent_that_has_none(tmp_path, loaded, capsys):
    """Random: its data frame is all there ever was; it goes on, and never starts anew over it."""
    classic = Classic(tmp_path, raw_spec('Random'))
    for path in (classic.folder / 'model').iterdir():
        path.unlink()
    assert classic.resume() == 0
    assert loaded['clock']['frame'] == 183
    assert list(files.read_csv(classic.csv)['frame']) == [0, 61, 122, 183, 244, 303]


def test_another_shape_is_refused_by_the_name_of_the_tensor(classic, capsys):
    state = net_state(1.0)
    state['model.0.weight'] = torch.zeros(9, 4)
    classic.save('net_model', state)
    assert classic.resume() == 2
    assert 'model.0.weight is (9, 4) there and (8, 4) by the spec' in capsys.readouterr().err


class Poison:
    """What a pickle would run when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize('stem', ['net_model', 'net_optim'])
def test_a_poisoned_file_is_refused_and_nothing_of_it_runs(stem, classic, tmp_path, capsys):
    torch.save({'model.0.weight': Poison(tmp_path / 'poisoned')}, classic.model(stem))
    assert classic.resume() == 2
    error = capsys.readouterr().err
    assert f'{NAME}_{stem}.pt was not read' in error and len(error.splitlines()) == 1
    assert not (tmp_path / 'poisoned').exists()
    torch.load(classic.model(stem), weights_only=False)  # it was poison indeed
    assert (tmp_path / 'poisoned').exists()
