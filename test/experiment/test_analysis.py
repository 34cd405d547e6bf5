import json
import math

import numpy as np
import pandas as pd
import pytest

from slm_lab.experiment import analysis, baseline
from slm_lab.experiment.analysis import calc_session_metrics, calc_trial_metrics
from slm_lab.lib import viz

NAN = float('nan')
SPEC_NAME = 'dqn_cartpole'
GRAPHS = [
    'mean_returns_vs_frames',
    'strengths_vs_frames',
    'sample_efficiencies_vs_frames',
    'training_efficiencies_vs_opt_steps',
    'stabilities_vs_frames',
]


def make_df(returns, frames=None):
    n = len(returns)
    frames = frames or [10 * i for i in range(n)]
    return pd.DataFrame(
        {
            'opt_step': [frame // 2 for frame in frames],
            'frame': frames,
            'total_reward': returns,
            'loss': [0.5] * n,
            'explore_var': [1.0] * n,
            'entropy': [NAN] * n,
        }
    )


@pytest.fixture
def make_spec(tmp_path, monkeypatch):
    """Returns a spec of a session, or of a trial, in tmp_path; the random policy's mean return is 1."""
    monkeypatch.setattr(baseline, 'random_mean', lambda env_name, folder: 1.0)
    monkeypatch.setattr(viz, '_render', lambda figure, path: b'png')

    def make(session=0, unit='t0_s0'):
        prepaths = {f'{kind}_prepath': str(tmp_path / kind / f'{SPEC_NAME}_{unit}') for kind in ('info', 'graph')}
        return {
            'name': SPEC_NAME,
            'env': [{'name': 'CartPole-v0'}],
            'meta': {'trial': 0, 'session': session, **prepaths},
        }

    return make


def test_session_metrics_by_hand():
    # strengths: NaN, 2, 4, 3; ratios to frames: –, 2/10, 4/20, 3/40; to opt_steps: –, 2/5, 4/10, 3/20
    metrics = calc_session_metrics(make_df([NAN, 3.0, 5.0, 4.0], frames=[0, 10, 20, 40]), random_mean=1.0)
    assert metrics['scalar'] == pytest.approx(
        {
            'final_return_ma': (3 + 5 + 4) / 3,
            'strength': (2 + 4 + 3) / 3,
            'max_strength': 4,
            'final_strength': 3,
            'sample_efficiency': (0.2 + 0.2 + 0.075) / 9,
            'training_efficiency': (0.4 + 0.4 + 0.15) / 9,
            'stability': 1 - 1 / (2 + 4),
        }
    )
    local = metrics['local']
    assert local['mean_returns'] == pytest.approx([NAN, 3, 5, 4], nan_ok=True)
    assert local['strengths'] == pytest.approx([NAN, 2, 4, 3], nan_ok=True)
    assert local['sample_efficiencies'] == pytest.approx([NAN, 0.2 / 2, 0.4 / 6, 0.475 / 9], nan_ok=True)
    assert local['training_efficiencies'] == pytest.approx([NAN, 0.4 / 2, 0.8 / 6, 0.95 / 9], nan_ok=True)
    assert local['stabilities'] == pytest.approx([NAN, 1, 1 - 1 / 4], nan_ok=True)
    assert local['frames'] == [0, 10, 20, 40] and local['opt_steps'] == [0, 5, 10, 20]


def test_final_return_ma_is_over_the_last_100_rows():
    df = make_df([1000.0] * 50 + [7.0] * 99 + [107.0])
    assert calc_session_metrics(df, 0.0)['scalar']['final_return_ma'] == pytest.approx(8)


def test_a_row_at_frame_0_with_a_return_has_a_strength_but_no_ratio():
    metrics = calc_session_metrics(make_df([2.0, 2.0, 2.0]), random_mean=0.0)  # frames 0, 10, 20
    assert metrics['scalar']['sample_efficiency'] == pytest.approx((0.2 + 0.1) / 6)
    assert metrics['local']['sample_efficiencies'] == pytest.approx([NAN, 0.2 / 4, 0.3 / 6], nan_ok=True)


@pytest.mark.parametrize('returns', [[], [1.0], [NAN, 1.0], [NAN] * 5])
def test_a_run_too_short_for_metrics_has_nan(returns):
    metrics = calc_session_metrics(make_df(returns), random_mean=1.0)
    assert set(metrics['scalar']) == set(analysis.SESSION_SCALARS)
    assert all(math.isnan(value) for value in metrics['scalar'].values())
    assert len(metrics['local']['mean_returns']) == len(returns)
    trial = calc_trial_metrics([metrics, metrics])
    assert all(math.isnan(trial['scalar'][name]) for name in analysis.TRIAL_SCALARS)


def test_an_empty_data_frame_without_columns_has_nan():
    assert math.isnan(calc_session_metrics(pd.DataFrame(), 0.0)['scalar']['strength'])


def test_trial_metrics_by_hand():
    first = calc_session_metrics(make_df([NAN, 2.0, 4.0, 3.0]), random_mean=0.0)
    second = calc_session_metrics(make_df([NAN, 4.0, 4.0, 5.0, 9.0]), random_mean=0.0)  # its last row is cut off
    trial = calc_trial_metrics([first, second])
    # row means 3, 4, 4; sample stds of (2, 4), (4, 4), (3, 5): √2, 0, √2
    assert trial['scalar']['consistency'] == pytest.approx(1 - 2 * 2 * math.sqrt(2) / 11)
    row = [NAN, 1 - 2 * math.sqrt(2) / 3, 1, 1 - 2 * math.sqrt(2) / 4]
    assert trial['local']['consistencies'] == pytest.approx(row, nan_ok=True)
    assert trial['scalar']['strength'] == pytest.approx(((2 + 4 + 3) / 3 + (4 + 4 + 5 + 9) / 4) / 2)
    assert trial['scalar']['max_strength'] == pytest.approx((4 + 9) / 2)
    assert [len(series) for series in trial['local']['mean_returns']] == [4, 4]
    assert [len(series) for series in trial['local']['stabilities']] == [3, 3]
    assert trial['local']['frames'] == [0, 10, 20, 30] and trial['local']['opt_steps'] == [0, 5, 10, 15]


def test_a_trial_of_one_session_is_consistent():
    session = calc_session_metrics(make_df([NAN, 2.0, 4.0, 3.0]), random_mean=0.0)
    trial = calc_trial_metrics([session])
    assert trial['scalar'] == {**session['scalar'], 'consistency': 1.0}
    assert np.isnan(trial['local']['consistencies']).all()


def test_a_session_without_metrics_is_not_left_out_of_the_mean():
    good = calc_session_metrics(make_df([1.0, 2.0, 4.0, 3.0]), random_mean=0.0)
    bad = calc_session_metrics(make_df([NAN] * 4), random_mean=0.0)
    assert math.isnan(calc_trial_metrics([good, bad])['scalar']['strength'])


def test_analyze_session_writes_metrics_and_graphs(tmp_path, make_spec):
    metrics = analysis.analyze_session(make_spec(), make_df([NAN, 3.0, 5.0, 4.0]), 'eval', plot=True)
    prename = 'dqn_cartpole_t0_s0_session'
    for path in (tmp_path / 'info', tmp_path):
        scalar = json.loads((path / f'{prename}_metrics_scalar_eval.json').read_text())
        assert scalar == pytest.approx(metrics['scalar'])
    whole = json.loads((tmp_path / 'info' / f'{prename}_metrics_eval.json').read_text())
    assert whole['scalar'] == pytest.approx(metrics['scalar'])
    assert whole['local']['mean_returns'] == [None, 3.0, 5.0, 4.0]  # JSON has no NaN
    smooth = [name.replace('_vs_', '_ma_vs_') for name in GRAPHS]
    # entropy is NaN in all rows: nothing to draw
    drawn = {f'{prename}_graph_eval_{name}' for name in [*GRAPHS, *smooth, 'loss_vs_frame', 'explore_var_vs_frame']}
    assert {path.stem for path in (tmp_path / 'graph').glob('*.png')} == drawn
    assert {path.stem for path in (tmp_path / 'graph').glob('*.html')} == drawn
    assert {path.name for path in tmp_path.glob('*.png')} == {
        f'{prename}_graph_eval_mean_returns_vs_frames.png',
        f'{prename}_graph_eval_mean_returns_ma_vs_frames.png',
    }


def test_analyze_session_without_plots_draws_nothing(tmp_path, make_spec):
    analysis.analyze_session(make_spec(), make_df([NAN, 3.0, 5.0, 4.0]), 'train', plot=False)
    assert (tmp_path / 'info' / 'dqn_cartpole_t0_s0_session_metrics_train.json').is_file()
    assert not (tmp_path / 'graph').exists()


@pytest.mark.parametrize(('num_sessions', 'num_graphs'), [(1, 10), (2, 12)])  # one session has no consistencies
def test_analyze_trial_writes_metrics_and_graphs(tmp_path, make_spec, num_sessions, num_graphs):
    session_metrics = [calc_session_metrics(make_df([NAN, 3.0, 5.0, 4.0]), 1.0)] * num_sessions
    metrics = analysis.analyze_trial(make_spec(-1, 't0'), session_metrics)
    for path in (tmp_path / 'info', tmp_path):
        scalar = json.loads((path / 'dqn_cartpole_t0_trial_metrics_scalar.json').read_text())
        assert scalar == pytest.approx(metrics['scalar'])
    assert (tmp_path / 'info' / 'dqn_cartpole_t0_trial_metrics.json').is_file()
    graphs = sorted(path.name for path in (tmp_path / 'graph').glob('*.png'))
    assert len(graphs) == num_graphs
    assert 'dqn_cartpole_t0_trial_graph_training_efficiencies_ma_vs_opt_steps.png' in graphs
    assert (tmp_path / 'dqn_cartpole_t0_trial_graph_mean_returns_ma_vs_frames.png').is_file()


@pytest.mark.parametrize('returns', [[], [NAN] * 4])
def test_a_run_without_returns_is_analysed_and_drawn_all_the_same(tmp_path, make_spec, returns):
    metrics = analysis.analyze_session(make_spec(), make_df(returns), 'eval', plot=True)
    analysis.analyze_trial(make_spec(-1, 't0'), [metrics, metrics])
    scalar = json.loads((tmp_path / 'dqn_cartpole_t0_trial_metrics_scalar.json').read_text())
    assert scalar == dict.fromkeys(analysis.TRIAL_SCALARS)


def test_titles_and_series_of_graphs(make_spec, monkeypatch):
    figures = {}
    monkeypatch.setattr(viz, 'save_image', lambda figure, path: figures.__setitem__(path.name, figure))
    spec = make_spec()
    first = analysis.analyze_session(spec, make_df([NAN, 2.0, 4.0, 6.0]), 'eval', plot=True)
    second = calc_session_metrics(make_df([NAN, 4.0, 6.0, 8.0]), 1.0)
    analysis.analyze_trial(make_spec(-1, 't0'), [first, second])
    stabilities = figures['dqn_cartpole_t0_s0_session_graph_eval_stabilities_vs_frames']
    assert stabilities.layout.title.text == 'session graph: dqn_cartpole t0 s0'
    assert (stabilities.layout.xaxis.title.text, stabilities.layout.yaxis.title.text) == ('frames', 'stabilities')
    assert list(stabilities.data[0].x) == [10, 20]
    smooth = figures['dqn_cartpole_t0_s0_session_graph_eval_mean_returns_ma_vs_frames']
    assert list(smooth.data[0].y) == pytest.approx([2, 3, 4])
    trial = figures['dqn_cartpole_t0_trial_graph_mean_returns_vs_frames']
    assert trial.layout.title.text == 'trial graph: dqn_cartpole t0 2 sessions'
    band, mean = trial.data
    assert list(mean.y) == pytest.approx([3, 5, 7])
    assert list(band.y[:3]) == pytest.approx([value + math.sqrt(2) for value in (3, 5, 7)])


def test_a_run_ends_well_where_graphs_cannot_be_written(tmp_path, make_spec, caplog):
    (tmp_path / 'graph').write_text('a file, where the folder should be')
    analysis.analyze_session(make_spec(), make_df([NAN, 3.0, 5.0]), 'eval', plot=True)
    assert [record.levelname for record in caplog.records] == ['ERROR']
    assert 'cannot write graphs' in caplog.text
