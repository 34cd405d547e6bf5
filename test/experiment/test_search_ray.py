"""Searches by Ray's trials side by side, and searches in a process of their own that is killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import search_trials
from lab_process import ROOT, SPEC_NAME, end_of_session, hashes, resume_command
from search_specs import GAMMA, get_spec, make_search
from search_trials import FOLDER

from slm_lab.experiment import analysis, experiment, experiment_analysis, search, search_records
from slm_lab.experiment.experiment import Experiment
from slm_lab.lib.files import read_json
from slm_lab.lib.state import first_difference

ASHA = {'grace_period': 200, 'reduction_factor': 2}
GIVEN_UP = experiment.GIVEN_UP
FULL = ('finished', 1600)
PATIENCE = 200  # seconds: Ray takes a while to start where other things run


@pytest.fixture
def lab(lab):
    yield lab
    lab.close()
    lab.kill_living()


@pytest.mark.timeout(600)
def test_a_search_that_is_killed_and_stopped_ends_as_if_it_had_not_been(lab, here, tmp_path):
    """One life killed with -9, one stopped by SIGTERM, one that goes on to the end."""
    pytest.importorskip('ray')
    search_part = {'agent': [{'algorithm': {'gamma__grid_search': [0.5, 0.9], 'training_iter__choice': [1, 2, 3]}}]}
    changes = {
        'max_trial': 2,
        'max_frame': 400,
        'log_frequency': 50,
        'search_resources': {'cpu': experiment.count_cpus()},
    }
    lab.spec_file.write_text(json.dumps({SPEC_NAME: make_search(search_part, **changes)}))
    expected_folder = tmp_path / 'undisturbed'
    spec = get_spec(search_part, **changes)
    spec['meta']['predir'] = str(expected_folder)
    expected = Experiment(spec).run().table
    assert expected['status'].tolist() == ['finished'] * 4

    def info(trial, what):
        return lab.data.is_dir() and any(lab.data.glob(f'*/info/tiny_t{trial}_{what}.json'))

    def checkpoint(trial):
        return lab.data.is_dir() and any(lab.data.glob(f'*/checkpoint/tiny_t{trial}_s0/*.json'))

    life = lab.start_train('search')
    life.wait_for(lambda: info(0, 'result') and checkpoint(1), PATIENCE)
    os.kill(life.pid, signal.SIGKILL)
    life.wait()
    assert not info(3, 'result')
    done = ['checkpoint/*_t0_*/*', 'info/*_t0_*', 'model/*_t0_*', '*_t0_*']
    before = hashes(lab.run_folder, *done)
    assert len(before) > 10

    life = lab.start_train('search@latest')
    life.wait_for(lambda: info(1, 'result') and checkpoint(2), PATIENCE)
    os.kill(life.pid, signal.SIGTERM)
    life.wait(PATIENCE)
    assert life.status == 143, life.output
    _, args = resume_command(life.output)
    assert args[-1].startswith('search@')
    lab.assert_nothing_lives()

    life = lab.start(*args).wait(PATIENCE)
    assert life.status == 0, life.output
    lab.assert_nothing_lives()
    assert hashes(lab.run_folder, *done) == before
    folders = expected_folder, lab.run_folder
    table, wanted = (pd.read_csv(folder / 'tiny_experiment_df.csv', dtype=str) for folder in folders[::-1])
    pd.testing.assert_frame_equal(table, wanted)
    for trial in range(4):
        ends = [end_of_trial(folder, trial) for folder in folders]
        assert first_difference(*ends) is None
    assert not list(lab.run_folder.glob('lock_t*')) and not list(lab.run_folder.rglob('*.tmp'))


def end_of_trial(folder, trial):
    """As of `end_of_session`, of any trial."""
    import lab_process

    name = lab_process.SPEC_NAME
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab_process, 'SPEC_NAME', f'{name}_t{trial}')
        for path in folder.rglob(f'{name}_t{trial}_s0*'):  # `end_of_session` looks for trial 0 of a name
            alias = path.with_name(path.name.replace(f'{name}_t{trial}_s0', f'{name}_t{trial}_t0_s0'))
            if not alias.exists():
                alias.symlink_to(path)
        end = end_of_session(folder, 0)
        for path in folder.rglob(f'{name}_t{trial}_t0_s0*'):
            path.unlink()
    return end


SEARCH = """
import os, sys
sys.path[:0] = {path!r}
os.environ['SEARCH_PID'] = str(os.getpid())
import test_search_ray
test_search_ray.run_as_process({search!r}, {meta!r}, {trials!r}, {with_ray!r})
"""


def run_as_process(part, meta, trials, with_ray):
    """Starts a search, or goes on with the one that is there, and prints its table. No graphs."""
    analysis._draw = experiment_analysis.draw_experiment = lambda *args: True
    experiment.reached_frame = search_records.reached_frame = frame_of_rows
    experiment.is_complete = lambda spec: True
    if not with_ray:
        search.run, search.require_ray = search_trials.run_without_ray, lambda: None
    spec = get_spec(part, max_frame=1600, **meta)
    data = Path(os.environ['LAB_DATA_DIR'])
    folder = next(data.iterdir(), None) if data.is_dir() else None
    if folder is not None:
        spec['meta']['predir'] = str(folder)
    outcome = Experiment(spec, resumes=folder is not None, run_trial=f'search_trials:{trials}').run()
    print(outcome.table.to_json(orient='records'))


def frame_of_rows(session_specs):
    """Stand-ins leave no checkpoints, but some leave rows."""
    frames = [search_trials.last_frame(f'{s["meta"]["info_prepath"]}_session_df_train.csv') for s in session_specs]
    return min(frames) or None


def search_process(lab, part, trials, kill_at=None, with_ray=True, **meta):
    """Returns: {trial: its row of the table}; None where `kill_at` says when it is killed, as it must be then."""
    code = SEARCH.format(
        path=[str(ROOT), str(ROOT / 'test'), FOLDER],
        search=part,
        meta={'search_resources': {'cpu': experiment.count_cpus()}, **meta},
        trials=trials,
        with_ray=with_ray,
    )
    env = {**os.environ, 'LAB_DATA_DIR': str(lab.data), 'PYTHONPATH': FOLDER}
    with open(lab.folder / 'output.txt', 'w+') as output:  # processes that outlive it hold the file
        done = subprocess.run(
            [sys.executable, '-c', code],
            env=env if kill_at is None else {**env, 'KILL_AT': kill_at},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE,
        )
        output.seek(0)
        text = output.read()
    assert done.returncode == (0 if kill_at is None else -signal.SIGKILL), text
    return None if kill_at else {row['trial']: row for row in json.loads(text.splitlines()[-1])}


def test_asha_that_starts_anew_decides_on_what_it_was_told_before():
    """Rungs at frames 200, 400, 800; below the median at a rung, a trial ends there."""
    pytest.importorskip('ray')

    class Queue:
        gammas, frames, given_up = [0.5, 0.9, 0.4, 0.8], [1600, 1600, 200, 300], []

        def others(self):
            return [0, 1]

        def reports(self, trial):
            return [(frame, self.gammas[trial]) for frame in range(100, self.frames[trial] + 1, 100)]

        def give_up(self, trial, frame):
            self.given_up.append((trial, frame))

    queue = Queue()
    asha = search._make_asha(queue, {**ASHA, 'brackets': 1, 'max_t': 10**6}, seed=0)
    trials = [search._EarlierTrial(str(i), {'trial': i}) for i in range(5)]
    asha.on_trial_add(None, trials[2])
    assert queue.given_up == [(2, 200)]  # nobody had decided on its last row
    asha.on_trial_add(None, trials[3])
    asha.on_trial_result(None, trials[3], {'frame': 400, 'total_reward_ma': 0.8})
    assert queue.given_up == [(2, 200)]
    queue.frames.append(0)
    asha.on_trial_add(None, trials[4])
    for frame in (200, 300, 400):  # its medians are 0.65 and 0.8
        asha.on_trial_result(None, trials[4], {'frame': frame, 'total_reward_ma': 0.7})
    assert queue.given_up == [(2, 200), (4, 400)]


@pytest.mark.timeout(600)
def test_asha_stops_what_is_worse_than_what_came_before_and_failures_are_rows(lab):
    """One trial at a time, reduction factor 2, rungs at frames 200, 400, 800: below the median of the earlier ones at
    a rung, a trial ends there. Those of gamma 0.6 and 0.7 crash and die before they tell of anything."""
    pytest.importorskip('ray')
    part = {'agent': [{'algorithm': {'gamma__grid_search': [0.5, 0.9, 0.6, 0.4, 0.7, 0.8]}}]}
    rows = search_process(lab, part, 'climb', search_scheduler=ASHA)
    # 0.5 is the first, 0.9 is above it, 0.4 is below the median 0.7 of both. 0.8 is above the median 0.5 of 0.4, 0.5,
    # 0.9 at the first rung, and above the median 0.7 of 0.5 and 0.9 at the others
    ends = {trial: (row['status'], row['frame']) for trial, row in rows.items()}
    assert {trial: ends[trial] for trial in (0, 1, 3, 5)} == {0: FULL, 1: FULL, 3: (GIVEN_UP, 200), 5: FULL}
    assert ends[2][0] == ends[4][0] == 'failed'
    assert 'RuntimeError: boom' in rows[2]['error'] and 'its process died (exit 7)' in rows[4]['error']
    lab.assert_nothing_lives()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_asha_that_is_killed_twice_decides_as_if_it_had_not_been(lab):
    """As above: one at a time, rungs at frames 200, 400, 800."""
    pytest.importorskip('ray')
    part = {'agent': [{'algorithm': {'gamma__grid_search': [0.5, 0.9, 0.4, 0.8, 0.72, 0.62]}}]}
    # killed before the scheduler has heard of the row that trial 2 ends by
    search_process(lab, part, 'climb_on_disk', '2 200 untold', search_scheduler=ASHA)
    before = hashes(lab.run_folder, 'info/*_t0_*', 'info/*_t1_*')
    assert len(before) == 6  # sample, result, rows
    search_process(lab, part, 'climb_on_disk', '3 300 told', search_scheduler=ASHA)
    before |= hashes(lab.run_folder, 'info/*_t2_*')
    rows = search_process(lab, part, 'climb_on_disk', search_scheduler=ASHA)
    # 0.72 is above the median 0.65 of 0.4, 0.5, 0.8, 0.9 at the first rung, below the median 0.8 of 0.5, 0.8, 0.9 at
    # the second; 0.62 is below the median 0.72 of all five at the first, and above 0.61, what it were without 0.8
    expected = {0: FULL, 1: FULL, 2: (GIVEN_UP, 200), 3: FULL, 4: (GIVEN_UP, 400), 5: (GIVEN_UP, 200)}
    assert {trial: (row['status'], row['frame']) for trial, row in rows.items()} == expected
    assert hashes(lab.run_folder, *before) == before
    for trial, (_, end) in expected.items():
        df = pd.read_csv(lab.run_folder / 'info' / f'tiny_t{trial}_s0_session_df_train.csv')
        assert df['frame'].tolist() == list(range(100, end + 1, 100))
    lab.assert_nothing_lives()


def test_optuna_that_is_killed_draws_as_if_it_had_not_been(lab):
    """One trial at a time: each is drawn from the results of all before it."""
    pytest.importorskip('optuna')
    part = {'agent': [{'algorithm': {'gamma__uniform': [0, 1]}}]}
    options = {'with_ray': False, 'max_trial': 14, 'search_alg': 'optuna'}
    search_process(lab, part, 'finish_or_kill', '11', **options)  # its first ten draws are random, whatever it is told
    records = lab.run_folder / 'info'
    assert [(records / f'tiny_t{i}_sample.json').exists() for i in (11, 12)] == [True, False]
    drawn = hashes(records, '*_sample.json')
    rows = search_process(lab, part, 'finish_or_kill', **options)
    assert hashes(records, *drawn) == drawn
    spaces, told = search_records.search_space.parse(get_spec(part)), []
    for trial in range(14):
        values = search.suggest_by_optuna(spaces, 7, trial, told)  # random_seed 7
        assert (rows[trial]['status'], read_json(records / f'tiny_t{trial}_sample.json')['values']) == (
            'finished',
            values,
        )
        told.append((values, values[GAMMA]))
    assert search.suggest_by_optuna(spaces, 7, 13, told[:11]) != values
