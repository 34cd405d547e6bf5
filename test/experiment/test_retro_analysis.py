import json
import os
import pickle
from pathlib import Path

import pandas as pd
import pytest

from slm_lab.experiment import retro_analysis
from slm_lab.experiment.retro_analysis import find_run, find_sessions, load_session_data
from slm_lab.lib import logger, viz
from slm_lab.lib.errors import LabError, ResumeError

RUN = 'dqn_cartpole_2026_01_31_120000'
COLUMNS = (
    'epi,t,wall_t,opt_step,frame,fps,total_reward,total_reward_ma,loss,lr,explore_var,entropy_coef,entropy,grad_norm'
)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A repository with a data folder of four runs, and an unrelated current directory."""
    root = tmp_path / 'repository'
    names = [RUN, 'dqn_cartpole_2025_12_31_235959', 'dqn_cartpole_v1_2026_06_01_000000', 'ppo_pong_2026_02_01_000000']
    for name in names:
        (root / 'data' / name).mkdir(parents=True)
        (root / 'data' / name / f'{name[:-18]}_t0_s0_spec.json').write_text('{}')
    (root / 'data' / 'dqn_cartpole_2026_09_09_090909').mkdir()  # ended before it wrote anything
    monkeypatch.setattr(retro_analysis.paths, 'CHECKOUT', root)
    monkeypatch.setenv('LAB_DATA_DIR', str(root / 'data'))
    (tmp_path / 'elsewhere').mkdir()
    monkeypatch.chdir(tmp_path / 'elsewhere')
    return root / 'data'


@pytest.mark.parametrize('form', [RUN, f'{RUN}/', f'data/{RUN}', f'data/{RUN}/', f'./data/{RUN}', f'{{data}}/{RUN}/'])
def test_find_run_by_name_with_or_without_data(data, form):
    assert find_run(form.format(data=data)) == data / RUN


def test_find_run_relative_to_the_current_directory(data, tmp_path, monkeypatch):
    assert find_run(f'../repository/data/{RUN}/') == data / RUN
    monkeypatch.chdir(data / RUN)
    assert find_run('.') == data / RUN
    monkeypatch.chdir(data)
    assert find_run(RUN) == data / RUN


def test_find_run_in_data_that_lies_elsewhere(data, tmp_path, monkeypatch):
    monkeypatch.setenv('LAB_DATA_DIR', str(tmp_path / 'scratch'))
    (tmp_path / 'scratch').mkdir()
    (data / RUN).rename(tmp_path / 'scratch' / RUN)
    for form in (RUN, f'data/{RUN}', f'data/{RUN}/'):
        assert find_run(form) == tmp_path / 'scratch' / RUN
    assert find_run('latest', 'dqn_cartpole') == tmp_path / 'scratch' / RUN
    assert find_run('latest', 'ppo_pong', data_dir=data) == data / 'ppo_pong_2026_02_01_000000'


def test_latest_is_the_newest_of_exactly_this_spec(data):
    assert find_run('latest', 'dqn_cartpole') == data / RUN
    assert find_run('latest', 'dqn_cartpole_v1') == data / 'dqn_cartpole_v1_2026_06_01_000000'


def test_what_is_not_found_is_named_with_what_there_is(data):
    with pytest.raises(ResumeError, match=f"no run 'dqn_cartpole_2026_01_31_12000'.*nearest: {RUN}"):
        find_run('dqn_cartpole_2026_01_31_12000')
    with pytest.raises(ResumeError, match="no run of spec 'sac'.*runs there: .*ppo_pong_2026_02_01_000000"):
        find_run('latest', 'sac')
    with pytest.raises(ResumeError, match="no run of spec 'dqn'.*nearest: .*dqn_cartpole_2025_12_31_235959"):
        find_run('latest', 'dqn')
    with pytest.raises(ResumeError, match='is no run folder'):
        find_run('dqn_cartpole_2026_09_09_090909')
    for empty in ('', '/', ' '):
        with pytest.raises(ResumeError):
            find_run(empty)
    with pytest.raises(ResumeError, match='needs a spec name'):
        find_run('latest')


def test_where_there_are_no_runs(tmp_path):
    with pytest.raises(ResumeError, match='there are no runs there'):
        find_run('latest', 'dqn', data_dir=tmp_path / 'nothing')


class RunsWhenUnpickled:
    """Pickles as a call that leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def old_run(tmp_path, monkeypatch):
    """A folder as SLM Lab v4.2 leaves one: specs with relative prepaths, pickled metrics, no manifest."""
    monkeypatch.setattr(viz, '_render', lambda figure, path: b'png')
    folder = tmp_path / 'colleague' / RUN
    for kind in ('info', 'model', 'graph', 'log'):
        (folder / kind).mkdir(parents=True)
    name = 'dqn_cartpole'
    spec = {'name': name, 'env': [{'name': 'CartPole-v0'}], 'agent': [{}]}
    (folder / f'{name}_spec.json').write_text(json.dumps(spec))
    for trial, num_sessions in ((0, 3), (1, 1)):
        (folder / f'{name}_t{trial}_spec.json').write_text(json.dumps(spec))
        for session in (0, 1, 10)[:num_sessions]:
            unit = f'{name}_t{trial}_s{session}'
            meta = {'trial': trial, 'session': session, 'info_prepath': f'data/{RUN}/info/{unit}'}
            (folder / f'{unit}_spec.json').write_text(json.dumps({**spec, 'meta': meta}))
            rows = [f'{i},0,1.0,{5 * i},{10 * i},10.0,{20 + i},20,0.5,0.01,1,nan,nan,nan' for i in range(4)]
            for mode in ('train', 'eval'):
                path = folder / 'info' / f'{unit}_session_df_{mode}.csv'
                path.write_text('\n'.join([COLUMNS, *rows]) + '\n')
            metrics = pickle.dumps(RunsWhenUnpickled(folder / 'ran'))
            (folder / 'info' / f'{unit}_session_metrics_eval.pkl').write_bytes(metrics)
            for part in ('net_model', 'net_optim', 'target_net_model'):
                (folder / 'model' / f'{unit}_{part}.pt').write_bytes(b'')
                (folder / 'model' / f'{unit}_ckpt-best_{part}.pt').write_bytes(b'')
    (folder / f'{name}_t0_s-1_spec.json').write_text(json.dumps(spec))  # of a distributed run
    return folder


def test_find_sessions_of_an_old_run(old_run):
    sessions = find_sessions(old_run)
    assert [(files.trial, files.session) for files in sessions] == [(0, 0), (0, 1), (0, 10), (1, 0)]
    files = sessions[1]
    model = old_run / 'model'
    assert files.name == 'dqn_cartpole_t0_s1'
    assert files.spec_path == old_run / 'dqn_cartpole_t0_s1_spec.json'
    assert files.model_prepath == str(model / 'dqn_cartpole_t0_s1')
    assert files.train_csv == old_run / 'info' / 'dqn_cartpole_t0_s1_session_df_train.csv'
    assert files.nets == {
        'net': (model / 'dqn_cartpole_t0_s1_net_model.pt', model / 'dqn_cartpole_t0_s1_net_optim.pt'),
        'target_net': (model / 'dqn_cartpole_t0_s1_target_net_model.pt', None),
    }
    best = 'dqn_cartpole_t0_s1_ckpt-best'
    assert files.best_nets == {
        'net': (model / f'{best}_net_model.pt', model / f'{best}_net_optim.pt'),
        'target_net': (model / f'{best}_target_net_model.pt', None),
    }


def test_find_sessions_without_models_or_tables(old_run):
    for path in [*(old_run / 'model').iterdir(), *(old_run / 'info').iterdir()]:
        path.unlink()
    (old_run / 'model').rmdir()
    files = find_sessions(old_run)[0]
    assert (files.train_csv, files.eval_csv, files.nets, files.best_nets) == (None, None, {}, {})
    assert load_session_data(files) == (None, None)


def test_load_session_data(old_run):
    train_df, eval_df = load_session_data(find_sessions(old_run)[0])
    assert list(train_df.columns) == COLUMNS.split(',')
    assert train_df['frame'].tolist() == [0, 10, 20, 30]
    pd.testing.assert_frame_equal(train_df, eval_df)


@pytest.mark.parametrize('content', ['', 'a,b\n1,2\n', 'frame,opt_step,total_reward\n1,2,x\n'])
def test_a_damaged_table_is_named(old_run, content):
    path = old_run / 'info' / 'dqn_cartpole_t0_s0_session_df_train.csv'
    path.write_text(content)
    with pytest.raises(LabError, match=str(path)):
        load_session_data(find_sessions(old_run)[0])


def test_the_command_analyses_an_old_run_where_it_lies(old_run, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert retro_analysis.main([f'colleague/{RUN}/']) == 0
    for unit in ('t0', 't1'):
        scalar = json.loads((old_run / f'dqn_cartpole_{unit}_trial_metrics_scalar.json').read_text())
        assert scalar['final_return_ma'] == pytest.approx(21.5)  # of 20, 21, 22, 23
        assert (old_run / 'graph' / f'dqn_cartpole_{unit}_trial_graph_mean_returns_vs_frames.png').is_file()
    for mode in ('train', 'eval'):
        prename = f'dqn_cartpole_t0_s10_session_graph_{mode}'
        assert (old_run / 'graph' / f'{prename}_loss_vs_frame.html').is_file()
        assert (old_run / f'{prename}_mean_returns_ma_vs_frames.png').is_file()
    assert len(list((old_run / 'graph').glob('plotly.min.js'))) == 1
    assert 't0_s0: eval metrics' in (old_run / 'log' / 'retro_analyze.log').read_text()
    assert not (tmp_path / 'data').exists()  # where the specs say the run was
    assert not (old_run / 'ran').exists()  # pickles were not read
    assert capsys.readouterr().err == ''


def test_a_missing_table_is_one_line_and_is_skipped(old_run, capsys, monkeypatch):
    monkeypatch.setattr(viz, 'save_image', lambda figure, path: None)
    (old_run / 'info' / 'dqn_cartpole_t0_s0_session_df_train.csv').unlink()
    (old_run / 'info' / 'dqn_cartpole_t0_s1_session_df_eval.csv').unlink()
    assert retro_analysis.main([str(old_run)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if 'WARNING' in line]
    assert len(lines) == 2
    assert 'dqn_cartpole_t0_s0_session_df_train.csv' in lines[0]
    assert 'dqn_cartpole_t0_s1_session_df_eval.csv' in lines[1]
    metrics = json.loads((old_run / 'info' / 'dqn_cartpole_t0_trial_metrics.json').read_text())
    assert len(metrics['local']['mean_returns']) == 2


def test_graphs_that_cannot_be_written_are_an_error_line(old_run, capsys):
    (old_run / 'graph').rmdir()
    (old_run / 'graph').write_text('a file, where the folder should be')
    assert retro_analysis.main([str(old_run)]) == 2
    captured = capsys.readouterr()
    assert 'ERROR' in captured.out and 'cannot write graphs' in captured.out
    assert 'Traceback' not in captured.out + captured.err
    assert (old_run / 'dqn_cartpole_t0_trial_metrics_scalar.json').is_file()


def test_a_folder_that_cannot_be_written_is_one_line(old_run, capsys, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, 'Permission denied', str(old_run))

    monkeypatch.setattr(logger, 'setup', refuse)
    assert retro_analysis.main([str(old_run)]) == 2
    assert capsys.readouterr().err.splitlines() == [f"error: [Errno 13] Permission denied: '{old_run}'"]


@pytest.mark.parametrize('args', [[], ['--help'], ['a', 'b'], ['nowhere']])
def test_a_wrong_command_is_one_line(args, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv('LAB_DATA_DIR', str(tmp_path))
    assert retro_analysis.main(args) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_spec_that_is_none_is_named(old_run, capsys):
    path = old_run / 'dqn_cartpole_t0_s0_spec.json'
    path.write_text('[]')
    assert retro_analysis.main([str(old_run)]) == 2
    assert str(path) in capsys.readouterr().err


def test_files_are_found_by_absolute_paths(old_run, monkeypatch):
    monkeypatch.chdir(old_run.parent)
    files = find_sessions(RUN)[0]
    assert Path(files.model_prepath).is_absolute() and files.spec_path.is_absolute() and files.train_csv.is_absolute()
