"""The demo in one shot of 10,000 frames and in two (3,000, then `train@` to 10,000), same seed: all values compared.

    python bench/two_shot.py [--sessions 4] [--seed 1] [--first 3000] [--total 10000] [--graphs docs/images]

Each shot is a command line of its own. Prints the returns at both ends and whether the two runs are identical; exit
status 1 if they are not.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from slm_lab.experiment import retro_analysis
from slm_lab.experiment.session import Session, store_of
from slm_lab.lib import files
from slm_lab.lib.state import WALL_CLOCK, first_difference
from slm_lab.spec import spec_util

SPEC_NAME = 'dqn_cartpole'
ROOT = Path(__file__).resolve().parents[1]


def write_spec(path, max_frame, sessions, seed):
    spec = files.read_json(spec_util.find_file('demo.json'))
    spec[SPEC_NAME]['env'][0]['max_frame'] = max_frame
    spec[SPEC_NAME]['meta'].update(max_session=sessions, random_seed=seed)
    files.write_json(spec, path)


def run(data_dir, spec_file, mode):
    command = [sys.executable, str(ROOT / 'run_lab.py'), str(spec_file), SPEC_NAME, mode]
    subprocess.run(command, env={**os.environ, 'LAB_DATA_DIR': str(data_dir)}, stdout=subprocess.DEVNULL, check=True)
    return next(data_dir.glob(f'{SPEC_NAME}_2*'))


def load_state(session_files, folder):
    spec = files.read_json(session_files.spec_path)
    spec['meta']['predir'] = str(folder)
    session = Session(spec_util.set_paths(spec), store=False)
    store = store_of(session.spec)
    return store.restore(store.find().generation, session.state_dict())


def compare(one, two):
    """[(session, what differs first or None)] over state trees and data frames."""
    verdicts = []
    for a, b in zip(retro_analysis.find_sessions(one), retro_analysis.find_sessions(two), strict=True):
        difference = first_difference(load_state(a, one), load_state(b, two))
        for x, y in zip(retro_analysis.load_session_data(a), retro_analysis.load_session_data(b), strict=True):
            x, y = (df.drop(columns=list(WALL_CLOCK)) for df in (x, y))
            difference = difference or (None if x.equals(y) else ('data frame', 'differs', ''))
        verdicts.append((a.name, difference))
    return verdicts


def returns_at(folder, frame):
    """Each session's total_reward_ma at a frame."""
    data = (retro_analysis.load_session_data(s)[0] for s in retro_analysis.find_sessions(folder))
    return [float(df.loc[df['frame'] == frame, 'total_reward_ma'].iloc[0]) for df in data]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--sessions', type=int, default=4)
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--first', type=int, default=3000)
    parser.add_argument('--total', type=int, default=10000)
    parser.add_argument('--graphs', type=Path, help='folder for the graphs of the three runs')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        spec_file = scratch / 'spec.json'
        write_spec(spec_file, args.total, args.sessions, args.seed)
        one = run(scratch / 'one', spec_file, 'train')
        keep_graph(one, args.graphs, 'one_shot')
        write_spec(spec_file, args.first, args.sessions, args.seed)
        two = run(scratch / 'two', spec_file, 'train')
        keep_graph(two, args.graphs, 'two_shot_first')
        write_spec(spec_file, args.total, args.sessions, args.seed)
        run(scratch / 'two', spec_file, f'train@{two}')
        keep_graph(two, args.graphs, 'two_shot_resumed')
        for frame in (args.first, args.total):
            for name, folder in (('one shot', one), ('two shots', two)):
                values = returns_at(folder, frame)
                each = ', '.join(f'{v:.1f}' for v in values)
                print(f'frame {frame}, {name}: mean return {sum(values) / len(values):.1f} ({each})')
        verdicts = compare(one, two)
    for name, difference in verdicts:
        print(f'{name}: {"every value identical" if difference is None else f"differs: {difference}"}')
    return int(any(difference for _, difference in verdicts))


def keep_graph(folder, target, name):
    if target is not None:
        target.mkdir(parents=True, exist_ok=True)
        graph = folder / 'graph' / f'{SPEC_NAME}_t0_trial_graph_mean_returns_vs_frames.png'
        shutil.copyfile(graph, target / f'{name}.png')


if __name__ == '__main__':
    sys.exit(main())
