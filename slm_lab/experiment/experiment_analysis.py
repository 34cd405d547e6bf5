"""What a search has found: its table, and graphs of all its trials."""

import logging
from pathlib import Path

import pandas as pd

from slm_lab.experiment import analysis
from slm_lab.lib import viz
from slm_lab.lib.files import dump_json, read_json, write_atomic, write_csv, write_json

logger = logging.getLogger(__name__)

METRICS = analysis.TRIAL_SCALARS


def make_table(rows):
    """One row for each trial, the strongest first; those without a strength last, in the order of trials.

    Args:
        rows: [{'trial': index, 'values': {place: value}, 'metrics': {name: float or None}, 'status', 'frame', 'error'}]
    Returns: data frame with the columns trial, the places that were searched over in the order of their names, METRICS,
        status, frame (None where there is no checkpoint), error.
    """
    places = sorted({place for row in rows for place in row['values']})
    table = [
        {
            'trial': row['trial'],
            **{place: _cell(row['values'].get(place)) for place in places},
            **{name: _number(row['metrics'].get(name)) for name in METRICS},
            'status': row['status'],
            'frame': row['frame'],
            'error': row['error'] or '',
        }
        for row in rows
    ]
    df = pd.DataFrame(table, columns=['trial', *places, *METRICS, 'status', 'frame', 'error'])
    df = df.astype({'trial': int, 'frame': 'Int64'})
    return df.sort_values(['strength', 'trial'], ascending=[False, True], na_position='last').reset_index(drop=True)


def _cell(value):
    return dump_json(value, indent=0).replace('\n', '') if isinstance(value, (list, dict)) else value


def _number(value):
    return float('nan') if value is None else float(value)


def write_table(spec, rows):
    """Writes the table under `info/`, and once more where a user looks first. Returns: the data frame"""
    df = make_table(rows)
    path = Path(f'{spec["meta"]["info_prepath"]}_experiment_df.csv')
    write_csv(df, path)
    write_csv(df, path.parents[1] / path.name)
    data = {row['trial']: {**row['metrics'], **row['values'], 'status': row['status']} for row in rows}
    write_json(data, f'{spec["meta"]["info_prepath"]}_trial_data_dict.json')
    return df


def draw(spec, df, rows):
    """Draws all graphs of a search. Returns False, having logged why, when they cannot be written."""
    with viz.rendering():
        return draw_experiment(spec, df) & draw_trials(spec, rows)


def draw_experiment(spec, df):
    """`graph/{name}_experiment_graph`: each metric over each value that was searched over."""
    places = [name for name in df.columns[1:] if name not in (*METRICS, 'status', 'frame', 'error')]
    columns = {place: [_point(value) for value in df[place]] for place in places}
    rows = {name: df[name].tolist() for name in METRICS}
    figure = viz.grid_figure(columns, rows, df['strength'].tolist(), f'experiment graph: {spec["name"]}')
    path = Path(f'{spec["meta"]["graph_prepath"]}_experiment_graph')
    try:
        png = viz.save_image(figure, path)
        if png is not None:
            write_atomic(path.parents[1] / f'{path.name}.png', png)
    except OSError as e:  # a search ends well without its graphs
        logger.error('cannot write graphs: %s', e)
        return False
    return True


def _point(value):
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number else str(value)


def draw_trials(spec, rows):
    """`graph/{name}_multi_trial_graph_…`: the mean and spread of each trial that has metrics."""
    metrics_of = {}
    for row in sorted(rows, key=lambda row: row['trial']):
        path = Path(f'{spec["meta"]["info_prepath"]}_t{row["trial"]}_trial_metrics.json')
        if row['metrics'] and path.is_file():
            metrics_of[label(row['trial'], row['values'])] = read_json(path)
    return analysis.draw_multi_trial(spec, metrics_of) if metrics_of else True


def label(trial, values):
    """E.g. `t3: gamma 0.95 lr 0.00123457`."""
    parts = [f'{place.rpartition(".")[2]} {_short(value)}' for place, value in sorted(values.items())]
    return f't{trial}: {" ".join(parts)}'


def _short(value):
    return round(value, 8) if isinstance(value, float) else _cell(value)
