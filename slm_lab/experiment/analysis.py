"""Metrics and graphs of sessions and trials: pure functions of data frames first, then what goes into the run folder.

A strength is a return less the random policy's mean return. Efficiencies weigh strengths by 1/time, stability counts
the drops, consistency the spread between sessions; their formulas are SLM Lab's. One row of a data frame is one
checkpoint.
"""

import logging
from pathlib import Path

import numpy as np
import pandas as pd

from slm_lab.experiment import baseline
from slm_lab.lib import viz
from slm_lab.lib.files import write_atomic, write_json

MA_WINDOW = 100  # rows
MIN_ROWS = 3
COLUMNS = ('frame', 'opt_step', 'total_reward')  # what metrics are computed from
SESSION_SCALARS = (
    'final_return_ma',
    'strength',
    'max_strength',
    'final_strength',
    'sample_efficiency',
    'training_efficiency',
    'stability',
)
TRIAL_SCALARS = (*SESSION_SCALARS, 'consistency')
# what is drawn of a session and of a trial, over what
GRAPHS = (
    ('mean_returns', 'frames'),
    ('strengths', 'frames'),
    ('sample_efficiencies', 'frames'),
    ('training_efficiencies', 'opt_steps'),
    ('stabilities', 'frames'),
)
COLUMN_GRAPHS = ('loss', 'explore_var', 'entropy')  # of the data frame itself, over its `frame`

_logger = logging.getLogger(__name__)


def calc_session_metrics(df, random_mean):
    """Metrics of one session.

    Args:
        df: a session's data frame with columns frame, opt_step, total_reward
        random_mean: the random policy's mean return
    Returns: {'scalar': {name: float}, 'local': {name: list of floats, one for each row}}; stabilities are one shorter,
        each belonging to the row before the drop. With fewer than 3 rows or no finite return all scalars are NaN.
    """
    frames, opt_steps, returns = df.reindex(columns=list(COLUMNS)).to_numpy(float).T
    strengths = returns - random_mean
    with np.errstate(divide='ignore', invalid='ignore'):
        sample_efficiency, sample_efficiencies = _efficiency(strengths, frames)
        training_efficiency, training_efficiencies = _efficiency(strengths, opt_steps)
        stability, stabilities = _stability(strengths)
    if len(returns) < MIN_ROWS or not np.isfinite(returns).any():
        scalar = dict.fromkeys(SESSION_SCALARS, float('nan'))
    else:
        scalar = {
            'final_return_ma': _mean(returns[-MA_WINDOW:]),
            'strength': _mean(strengths),
            'max_strength': float(np.nanmax(strengths)),
            'final_strength': float(strengths[-1]),
            'sample_efficiency': sample_efficiency,
            'training_efficiency': training_efficiency,
            'stability': stability,
        }
    local = {
        'mean_returns': returns,
        'strengths': strengths,
        'sample_efficiencies': sample_efficiencies,
        'training_efficiencies': training_efficiencies,
        'stabilities': stabilities,
    }
    local = {name: series.tolist() for name, series in local.items()}
    return {'scalar': scalar, 'local': {**local, 'frames': _counts(frames), 'opt_steps': _counts(opt_steps)}}


def calc_trial_metrics(session_metrics_list):
    """Metrics of one trial out of those of its sessions.

    Series are cut to the shortest session's. Scalars are plain means: a session without metrics makes them NaN.

    Returns: {'scalar': {name: float}, 'local': {name: list of one list for each session}}, but for consistencies,
        frames and opt_steps, which are one list each.
    """
    locals_ = [metrics['local'] for metrics in session_metrics_list]
    local = {name: _cut([series[name] for series in locals_]) for name, _ in GRAPHS}
    num_rows = min(len(series['frames']) for series in locals_)
    consistency, consistencies = _consistency(local['strengths'])
    scalar = {
        name: float(np.mean([metrics['scalar'][name] for metrics in session_metrics_list])) for name in SESSION_SCALARS
    }
    if not np.isfinite(scalar['strength']):
        consistency = float('nan')
    local['consistencies'] = consistencies
    local['frames'] = locals_[0]['frames'][:num_rows]
    local['opt_steps'] = locals_[0]['opt_steps'][:num_rows]
    return {'scalar': {**scalar, 'consistency': consistency}, 'local': local}


def _efficiency(strengths, times):
    """Σ(strength/t) / Σ strength, and the same up to each row; rows at time 0 have no ratio."""
    ratios = strengths / times
    ratios[~np.isfinite(ratios)] = np.nan
    return _ratio(np.nansum(ratios), np.nansum(strengths)), _running_sum(ratios) / _running_sum(strengths)


def _stability(strengths):
    """1 − |Σ drops / Σ strengths| over all rows but the last, and the same of each row."""
    drops = np.minimum(np.diff(strengths), 0)
    strengths = strengths[:-1]
    return 1 - abs(_ratio(np.nansum(drops), np.nansum(strengths))), 1 - np.abs(drops / strengths)


def _consistency(strengths_list):
    """1 − 2 Σ std / Σ mean between sessions (sample std), and the same of each row.

    One session has no spread: its consistency is 1, and that of a row is NaN.
    """
    table = pd.DataFrame(np.array(strengths_list, dtype=float).T)
    mean, std = table.mean(axis=1), table.std(axis=1, ddof=1)
    with np.errstate(divide='ignore', invalid='ignore'):
        return 1 - 2 * _ratio(std.sum(), mean.sum()), (1 - 2 * std / mean).tolist()


def _ratio(numerator, denominator):
    with np.errstate(divide='ignore', invalid='ignore'):
        return float(np.float64(numerator) / np.float64(denominator))


def _mean(values):
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else float('nan')


def _running_sum(values):
    """NaN adds nothing, and stays NaN in its own row."""
    return np.where(np.isnan(values), np.nan, np.nancumsum(values))


def _cut(series_list):
    shortest = min(len(series) for series in series_list)
    return [list(series[:shortest]) for series in series_list]


def _counts(series):
    return [int(value) if np.isfinite(value) else None for value in series]


def analyze_session(spec, df, df_mode, plot):
    """Computes a session's metrics and writes them, as JSON, into the run folder.

    Args:
        spec: the session's spec; its meta says where
        df: its data frame
        df_mode: 'train' or 'eval', which stands in the names of the files
        plot: also draw its graphs
    Returns: as `calc_session_metrics`.
    """
    meta = spec['meta']
    run_folder = Path(meta['info_prepath']).parents[1]
    metrics = calc_session_metrics(df, baseline.random_mean(spec['env'][0], run_folder))
    write_json(metrics, f'{meta["info_prepath"]}_session_metrics_{df_mode}.json')
    _write_scalar(metrics, meta, f'session_metrics_scalar_{df_mode}')
    if plot:
        draw_session(spec, metrics, df, df_mode)
    return metrics


def analyze_trial(spec, session_metrics_list, plot=True):
    """Computes a trial's metrics out of its sessions', and writes them as `analyze_session` does.

    Returns: as `calc_trial_metrics`.
    """
    metrics = calc_trial_metrics(session_metrics_list)
    write_json(metrics, f'{spec["meta"]["info_prepath"]}_trial_metrics.json')
    _write_scalar(metrics, spec['meta'], 'trial_metrics_scalar')
    if plot:
        draw_trial(spec, metrics)
    return metrics


def _write_scalar(metrics, meta, name):
    """Beside the trial's other files, and once more where a user looks first."""
    path = Path(f'{meta["info_prepath"]}_{name}.json')
    write_json(metrics['scalar'], path)
    write_json(metrics['scalar'], path.parents[1] / path.name)


def draw_session(spec, metrics, df, df_mode):
    """Draws a session's graphs. Returns False, having logged why, when they cannot be written."""
    meta = spec['meta']
    title = f'session graph: {spec["name"]} t{meta["trial"]} s{meta["session"]}'
    graphs = []
    for suffix, smooth in (('', _plain), ('_ma', _moving_average)):
        for name, time in GRAPHS:
            series = smooth(metrics['local'][name])
            graphs.append((f'{name}{suffix}', time, viz.line_figure, (metrics['local'][time], series)))
    columns = {name: df[name].astype(float) for name in COLUMN_GRAPHS if name in df}
    graphs += [
        (name, 'frame', viz.line_figure, (df['frame'].tolist(), column.tolist()))
        for name, column in columns.items()
        if np.isfinite(column).any()  # an agent without this has an empty column
    ]
    return _draw(graphs, title, f'{meta["graph_prepath"]}_session_graph_{df_mode}')


def draw_trial(spec, metrics):
    """Draws a trial's graphs. Returns False, having logged why, when they cannot be written."""
    meta, local = spec['meta'], metrics['local']
    num_sessions = len(local['mean_returns'])
    title = f'trial graph: {spec["name"]} t{meta["trial"]} {num_sessions} session{"s" if num_sessions > 1 else ""}'
    graphs = []
    for suffix, smooth in (('', _plain), ('_ma', _moving_average)):
        for name, time in GRAPHS:
            mean, std = _mean_and_std([smooth(series) for series in local[name]])
            graphs.append((f'{name}{suffix}', time, viz.mean_figure, (local[time], mean, std)))
        if num_sessions > 1:
            series = smooth(local['consistencies'])
            graphs.append((f'consistencies{suffix}', 'frames', viz.line_figure, (local['frames'], series)))
    return _draw(graphs, title, f'{meta["graph_prepath"]}_trial_graph')


def draw_multi_trial(spec, metrics_of):
    """Draws the trials of a search over one another.

    Args:
        spec: the experiment's
        metrics_of: {label of a trial: its metrics, as of `calc_trial_metrics`}
    Returns False, having logged why, when they cannot be written.
    """
    graphs = []
    for suffix, smooth in (('', _plain), ('_ma', _moving_average)):
        for name, time in GRAPHS:
            lines = [
                (label, m['local'][time], *_mean_and_std([smooth(series) for series in m['local'][name]]))
                for label, m in metrics_of.items()
            ]
            graphs.append((f'{name}{suffix}', time, viz.means_figure, (lines,)))
    title = f'multi trial graph: {spec["name"]}'
    return _draw(graphs, title, f'{spec["meta"]["graph_prepath"]}_multi_trial_graph')


def _draw(graphs, title, prepath):
    """Writes `{prepath}_{name}_vs_{time}` as HTML and PNG; those of mean returns also into the run folder itself.

    Args:
        graphs: [(name, time, function that makes a figure, what it takes before titles)]
    """
    try:
        with viz.rendering():
            for name, time, make_figure, data in graphs:
                path = Path(f'{prepath}_{name}_vs_{time}')
                png = viz.save_image(make_figure(*data, time, name, title), path)
                if png is not None and name in ('mean_returns', 'mean_returns_ma'):
                    write_atomic(path.parents[1] / f'{path.name}.png', png)
    except OSError as e:  # a run ends well without its graphs
        _logger.error('cannot write graphs: %s', e)
        return False
    return True


def _plain(series):
    return series


def _moving_average(series):
    return pd.Series(series, dtype=float).rolling(MA_WINDOW, min_periods=1).mean().tolist()


def _mean_and_std(series_list):
    """Row by row over sessions, NaN left out; the sample std, which one session does not have."""
    table = pd.DataFrame(np.array(series_list, dtype=float).T)
    return table.mean(axis=1).tolist(), table.std(axis=1, ddof=1).tolist()
