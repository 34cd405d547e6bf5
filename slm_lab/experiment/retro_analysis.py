"""Finding runs and what they hold, and analysing them again: `python -m slm_lab.experiment.retro_analysis <folder>`.

Reads JSON and CSV alone, of our run folders and of SLM Lab v4.2's.
"""

import difflib
import itertools
import logging
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from slm_lab.experiment import analysis, experiment_analysis, search_records
from slm_lab.lib import logger, paths, viz
from slm_lab.lib.errors import LabError, ResumeError
from slm_lab.lib.files import read_csv, read_json
from slm_lab.spec import spec_util

_TIMESTAMP = r'\d{4}_\d{2}_\d{2}_\d{6}'
_SESSION_SPEC = re.compile(r'^(?P<name>.+_t(?P<trial>\d+)_s(?P<session>\d+))_spec\.json$')  # no s-1: no session's data
_NUM_NAMED = 8  # runs that an error line names

_logger = logging.getLogger('slm_lab.experiment.retro_analysis')


@dataclass
class SessionFiles:
    """What a run folder holds of one session; paths are absolute.

    Args:
        name: the session's part of file names, e.g. `dqn_cartpole_t0_s0`
        model_prepath: what the names of its nets begin with
        train_csv, eval_csv: None where there is none
        nets, best_nets: {net name: (path of the model, path of its optimizer or None)}
    """

    trial: int
    session: int
    name: str
    spec_path: Path
    model_prepath: str
    train_csv: Path | None
    eval_csv: Path | None
    nets: dict = field(default_factory=dict)
    best_nets: dict = field(default_factory=dict)


def find_run(prename, spec_name=None, data_dir=None):
    """The run folder that a command line means.

    Args:
        prename: a run folder, absolute or relative to the current directory, to the repository or to the data folder,
            with or without `data/`, trailing slash or not; or `latest`, the newest run of exactly this spec name
        spec_name: for `latest`
        data_dir: path, if not where `lib.paths.data_dir()` says
    Returns: its absolute path.
    Raises: ResumeError that names what was looked for, and the runs there are.
    """
    folder = Path(data_dir or paths.data_dir()).absolute()
    if prename == 'latest':
        return _latest_run(spec_name, folder)
    for path in _places(prename, folder):
        if _is_run(path):
            return path
    for path in _places(prename, folder):
        if path.is_dir():
            raise ResumeError(f"'{prename}': {path} is no run folder: it holds no spec (*_spec.json)")
    raise ResumeError(f"no run '{prename}' (looked in {Path.cwd()} and {folder}){_suggest_run(prename, folder)}")


def _places(prename, folder):
    """The paths that a prename may mean, each once."""
    if not prename.strip('/ '):
        return []
    path = Path(prename).expanduser()
    roots = [Path.cwd(), *([paths.CHECKOUT] if paths.CHECKOUT else []), folder, Path.cwd() / 'data']
    places = [root / path for root in roots]
    if path.parts[:1] == ('data',):
        places.append(folder.joinpath(*path.parts[1:]))
    # an absolute path is the same in all of them; the path is made plain so that a folder called `.` has a name
    return list(dict.fromkeys(Path(os.path.normpath(place)) for place in places))


def _is_run(path):
    return path.is_dir() and any(path.glob('*_spec.json'))


def _latest_run(spec_name, folder):
    if not spec_name:
        raise ResumeError("'latest' needs a spec name: the newest run of which spec?")
    pattern = re.compile(rf'{re.escape(spec_name)}_{_TIMESTAMP}')
    runs = [name for name in _run_names(folder) if pattern.fullmatch(name)]
    if not runs:
        raise ResumeError(f"no run of spec '{spec_name}' in {folder}{_suggest_run(spec_name, folder)}")
    return folder / max(runs)  # equal up to the timestamp, which sorts by time


def _run_names(folder):
    return sorted(path.name for path in folder.iterdir() if _is_run(path)) if folder.is_dir() else []


def _suggest_run(prename, folder):
    names = _run_names(folder)
    if not names:
        return '; there are no runs there'
    wanted = Path(prename).name
    near = difflib.get_close_matches(wanted, names, n=_NUM_NAMED, cutoff=0.6)
    near += [name for name in names if name.startswith(wanted) and name not in near]
    if near:
        return f'; nearest: {", ".join(near[:_NUM_NAMED])}'
    more = f' and {len(names) - _NUM_NAMED} more' if len(names) > _NUM_NAMED else ''
    return f'; runs there: {", ".join(names[:_NUM_NAMED])}{more}'


def find_sessions(run_folder):
    """What a run folder holds, as a list of SessionFiles in the order of trials and sessions."""
    run_folder = Path(run_folder).absolute()
    model_folder = run_folder / 'model'
    model_names = {path.name for path in model_folder.iterdir()} if model_folder.is_dir() else set()
    sessions = []
    for path in run_folder.glob('*_spec.json'):
        match = _SESSION_SPEC.match(path.name)
        if match:
            name = match['name']
            csvs = [run_folder / 'info' / f'{name}_session_df_{mode}.csv' for mode in ('train', 'eval')]
            sessions.append(
                SessionFiles(
                    int(match['trial']),
                    int(match['session']),
                    name,
                    path,
                    str(model_folder / name),
                    *(csv if csv.is_file() else None for csv in csvs),
                    nets=_find_nets(model_folder, model_names, name),
                    best_nets=_find_nets(model_folder, model_names, f'{name}_ckpt-best'),
                )
            )
    return sorted(sessions, key=lambda files: (files.trial, files.session))


def _find_nets(folder, names, prename):
    nets = {}
    for name in sorted(names):
        if not name.startswith(f'{prename}_') or not name.endswith('_model.pt'):
            continue
        net = name[len(prename) + 1 : -len('_model.pt')]
        if net and not net.startswith('ckpt-'):
            optim = f'{prename}_{net}_optim.pt'
            nets[net] = folder / name, folder / optim if optim in names else None
    return nets


def load_session_data(files):
    """A session's (train, eval) data frames, None where there is none.

    Raises: LabError naming a file that is no table.
    """
    return _load_csv(files.train_csv), _load_csv(files.eval_csv)


def _load_csv(path):
    if path is None:
        return None
    try:
        df = read_csv(path)
        df[list(analysis.COLUMNS)].astype(float)
    except (ValueError, KeyError) as e:  # pandas' errors of parsing are kinds of ValueError
        raise LabError(f'{path} is no session data frame: {e}') from None
    return df


def analyze_folder(folder):
    """Redoes the metrics and graphs of all sessions (train and eval) and trials of a run folder, and of its search.

    Returns: whether everything that the folder has data for could be drawn.
    Raises: ResumeError where there is nothing to analyse; OSError where the folder cannot be written.
    """
    sessions = find_sessions(folder)
    if not sessions:
        raise ResumeError(f'{folder} holds no session (*_t0_s0_spec.json)')
    all_drawn, trial_metrics = True, {}
    with viz.rendering():
        for trial, group in itertools.groupby(sessions, key=lambda files: files.trial):
            group = list(group)
            eval_metrics = []
            for files in group:
                metrics, drawn = _analyze_session(files)
                all_drawn &= drawn
                if 'eval' in metrics:
                    eval_metrics.append(metrics['eval'])
            if eval_metrics:
                spec = located_spec(group[0], is_trial=True)
                trial_metrics[trial] = analysis.analyze_trial(spec, eval_metrics, plot=False)
                all_drawn &= analysis.draw_trial(spec, trial_metrics[trial])
        return all_drawn & _analyze_search(folder, trial_metrics)


def _analyze_search(folder, trial_metrics):
    """Redoes the table and the graphs of a search, where the folder holds one.

    Args:
        trial_metrics: {trial: its metrics}, done anew
    Returns: whether all could be drawn.
    """
    spec = search_records.find_search(Path(folder))
    if spec is None:
        return True
    rows = search_records.SearchRecords(spec).rows()
    for row in rows:
        if row['metrics'] and row['trial'] in trial_metrics:
            row['metrics'] = trial_metrics[row['trial']]['scalar']
    df = experiment_analysis.write_table(spec, rows)
    drawn = not any(row['metrics'] for row in rows) or experiment_analysis.draw(spec, df, rows)
    _logger.info('%s: the table of %d trials and their graphs are done', spec['name'], len(rows))
    return drawn


def _analyze_session(files):
    """Returns ({df mode: metrics}, whether all could be drawn)."""
    spec, metrics, all_drawn = located_spec(files), {}, True
    for mode, df in zip(('train', 'eval'), load_session_data(files), strict=True):
        if df is None:
            _logger.warning('%s: there is no %s_session_df_%s.csv, skipped', files.name, files.name, mode)
            continue
        metrics[mode] = analysis.analyze_session(spec, df, mode, plot=False)
        all_drawn &= analysis.draw_session(spec, metrics[mode], df, mode)
        _logger.info('%s: %s metrics and graphs are done', files.name, mode)
    return metrics, all_drawn


def located_spec(files, is_trial=False):
    """A session's saved spec with the places of where the folder is now: it may have been moved since the run.

    Args:
        is_trial: the paths of its trial instead
    Raises: LabError for a file that is no session spec.
    """
    spec = read_json(files.spec_path)
    try:
        spec['name'], spec['env'][0]['name']
    except (LookupError, TypeError):
        raise LabError(f"{files.spec_path} is no session spec: it lacks 'name' or 'env.0.name'") from None
    place = {'predir': str(files.spec_path.parent), 'trial': files.trial, 'session': -1 if is_trial else files.session}
    return spec_util.set_paths({**spec, 'meta': {**spec.get('meta', {}), **place}})


def main(args):
    """Returns the exit status: 0, or 2 after one line that says what was wrong."""
    if len(args) != 1 or args[0].startswith('-'):
        print('usage: python -m slm_lab.experiment.retro_analysis <run folder>', file=sys.stderr)
        return 2
    try:
        folder = find_run(args[0])
        logger.setup(folder / 'log' / 'retro_analyze.log')
        try:
            return 0 if analyze_folder(folder) else 2
        finally:
            logger.close()
    except (LabError, OSError) as e:
        print(f'error: {e}', file=sys.stderr)
        return 2


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
