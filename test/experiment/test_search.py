"""Searches in this process, without Ray: which trials run, what they leave, what goes on after a stop."""

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pandas as pd
import pytest
from lab_process import SPEC_NAME, hashes
from search_specs import GAMMA, GRID, get_spec, make_search
from search_trials import FOLDER

from slm_lab.experiment import (
    analysis,
    experiment,
    experiment_analysis,
    retro_analysis,
    search,
    search_records,
    search_worker,
)
from slm_lab.experiment.experiment import Experiment, TrialQueue
from slm_lab.experiment.run_lock import RunLock
from slm_lab.experiment.stop import StopRequest
from slm_lab.experiment.trial import Trial
from slm_lab.lib import viz
from slm_lab.lib.errors import LabError, ResumeError, SpecError
from slm_lab.lib.files import read_json, write_json
from slm_lab.spec import spec_util

DRAW = {'_draw': analysis._draw, 'draw_experiment': experiment_analysis.draw_experiment}


def run_here(spec, trials='finish', stop=None, resumes=False):
    return Experiment(spec, stop, resumes, run_trial=f'search_trials:{trials}').run()


def again(spec):
    """The same spec in the run folder that it has made."""
    spec = spec_util.copy_of(spec)
    spec['meta']['predir'] = str(Path(spec['meta']['prepath']).parent)
    return spec


def pretend_checkpoints(monkeypatch):
    """Stand-ins leave none."""
    monkeypatch.setattr(experiment, 'is_complete', lambda spec: True)
    for module in (experiment, search_records):
        monkeypatch.setattr(module, 'reached_frame', lambda specs: 100)


# --- the table


def test_the_strongest_trial_comes_first_and_those_without_strength_last():
    def row(trial, strength, status='finished', error=None):
        metrics = {} if strength is None else {'strength': strength, 'stability': 0.5}
        values = {'env.0.max_t': [1, 2], GAMMA: 0.5}
        return {'trial': trial, 'values': values, 'metrics': metrics, 'status': status, 'frame': 9, 'error': error}

    rows = [row(0, None, 'failed', 'boom'), row(1, 2.0), row(2, 5.0), row(3, 2.0)]
    df = experiment_analysis.make_table(rows)
    assert df['trial'].tolist() == [2, 1, 3, 0]
    metrics = list(analysis.TRIAL_SCALARS)
    assert list(df.columns) == ['trial', GAMMA, 'env.0.max_t', *metrics, 'status', 'frame', 'error']
    assert df['env.0.max_t'][0] == '[1,2]'
    assert df['error'].tolist() == ['', '', '', 'boom'] and pd.isna(df['strength'][3])


def test_a_label_names_the_last_part_of_each_place():
    values = {GAMMA: 0.123456789123, 'agent.0.net.hid_layers': [8, 8]}
    assert experiment_analysis.label(3, values) == 't3: gamma 0.12345679 hid_layers [8,8]'


# --- without Ray


def test_each_trial_gets_its_values_and_the_table_has_them_all(here):
    spec = get_spec()
    outcome = run_here(spec)
    assert outcome.finished and outcome.best['trial'] == 2
    assert outcome.table[GAMMA].tolist() == [0.99, 0.9, 0.5] == outcome.table['strength'].tolist()
    folder = Path(spec['meta']['prepath']).parent
    for path in (folder / 'info' / 'tiny_experiment_df.csv', folder / 'tiny_experiment_df.csv'):
        assert pd.read_csv(path)['trial'].tolist() == [2, 1, 0]
    data = read_json(folder / 'info' / 'tiny_trial_data_dict.json')
    assert data['1'] == {'strength': 0.9, GAMMA: 0.9, 'status': 'finished'}


def test_a_trial_that_fails_is_a_row_and_is_tried_again(here, monkeypatch):
    spec = get_spec({'agent': [{'algorithm': {'gamma__grid_search': [0.5, 0.9]}}]})
    outcome = run_here(spec, 'fail')
    assert outcome.finished and outcome.count('failed') == 1 and outcome.best['trial'] == 0
    row = outcome.table.iloc[1]
    assert (row['trial'], row['status']) == (1, 'failed') and row['error'].startswith('RuntimeError: boom')
    log = Path(spec['meta']['prepath']).parent / 'log' / 'tiny_t1.log'
    assert str(log) in row['error'] and 'Traceback' in log.read_text()
    pretend_checkpoints(monkeypatch)
    before = read_json(log.parents[1] / 'info' / 'tiny_t0_result.json')
    outcome = run_here(again(spec), 'finish', resumes=True)
    assert outcome.table['status'].tolist() == ['finished', 'finished'] and outcome.best['trial'] == 1
    assert read_json(log.parents[1] / 'info' / 'tiny_t0_result.json') == before


def test_another_search_is_refused_in_the_same_folder_but_more_trials_are_not(here, monkeypatch):
    pretend_checkpoints(monkeypatch)
    part = {'agent': [{'algorithm': {'gamma__uniform': [0.5, 0.9]}}]}
    spec = get_spec(part, max_trial=2)
    first = run_here(spec).table
    other = again(spec)
    other['search'] = GRID
    with pytest.raises(ResumeError, match='gamma__grid_search'):
        run_here(other, resumes=True)
    more = again(spec)
    more['meta']['max_trial'] = 3
    table = run_here(more, resumes=True).table
    assert len(table) == 3
    rows = table[table['trial'] < 2].reset_index(drop=True)
    pd.testing.assert_frame_equal(rows, first)


def test_a_seed_is_drawn_and_recorded_where_none_is_given(here):
    spec = get_spec(random_seed=None)
    run_here(spec)
    folder = Path(spec['meta']['prepath']).parent
    seed = read_json(folder / 'tiny_spec.json')['meta']['random_seed']
    assert isinstance(seed, int)
    assert read_json(folder / 'info' / 'tiny_t2_sample.json')['random_seed'] == seed


def test_values_are_on_disk_before_a_trial_starts_and_outlive_the_search(here):
    spec = get_spec({'agent': [{'algorithm': {'gamma__uniform': [0.5, 0.9]}}]}, max_trial=2)
    queue = TrialQueue(Experiment(spec), [0, 1])
    path = Path(spec['meta']['info_prepath'] + '_t0_sample.json')
    gamma = queue.next().details['arguments']['spec']['agent'][0]['algorithm']['gamma']
    assert read_json(path)['values'] == {GAMMA: gamma}
    write_json({**read_json(path), 'values': {GAMMA: 0.77}}, path)  # what is on disk counts
    job = TrialQueue(Experiment(again(spec), resumes=True), [0, 1]).next()
    assert job.details['arguments']['spec']['agent'][0]['algorithm']['gamma'] == 0.77


@pytest.mark.parametrize(
    ('search', 'meta', 'wanted'),
    [
        ({'agent': [{'algorithm': {'gama__uniform': [0, 1]}}]}, {}, "key 'gama' is unknown; did you mean 'gamma'"),
        ({'agent': [{'algorithm': {'gamma__choice': ['x']}}]}, {}, 'gamma'),
        (GRID, {'search_alg': 'optuna'}, 'gamma__grid_search: search_alg optuna .* use choice'),
        (GRID, {'search_resources': {'cpu': 10**6}}, 'a trial takes 1e\\+06 CPUs, and there are'),
        (GRID, {'search_scheduler': {'grace_period': 700}}, 'grace_period 700 is above max_t 600'),
        (None, {}, "key 'search' is missing or empty"),
    ],
)
def test_a_search_that_cannot_run_is_refused_before_anything_is_written(here, tmp_path, search, meta, wanted):
    with pytest.raises(SpecError if 'optuna' not in str(meta) else LabError, match=wanted):
        run_here(get_spec(search, **meta))
    assert not (tmp_path / 'data').exists()


def write_lock(folder, trial, host='elsewhere', pid=1):
    path = folder / f'lock_t{trial}'
    path.write_text(json.dumps({'pid': pid, 'host': host, 'since': '2026-01-31T12:00:00+0000'}))
    return path


def test_trials_locked_by_another_host_are_all_named_before_anything_starts(here, monkeypatch):
    pretend_checkpoints(monkeypatch)
    spec = get_spec()
    run_here(spec)
    folder = Path(spec['meta']['prepath']).parent
    write_lock(folder, 1, socket.gethostname(), pid=10**9)  # of a process that has died
    locks = [write_lock(folder, 0), write_lock(folder, 2)]
    before = hashes(folder)
    began = time.monotonic()
    with pytest.raises(LabError) as refused:
        run_here(again(spec), resumes=True)
    line = str(refused.value)
    assert time.monotonic() - began < 30 and '\n' not in line
    for trial, path in zip((0, 2), locks, strict=True):
        assert f'trial {trial} of {folder} is being trained by process 1 on elsewhere' in line
        assert f'delete {path}' in line
    assert 'trial 1' not in line
    assert hashes(folder) == {**before, **hashes(folder, 'lock', 'lock_t1')}
    for path in locks:
        path.unlink()
    assert run_here(again(spec), resumes=True).finished
    assert not list(folder.glob('lock_t*'))


def test_a_trial_that_is_trained_by_itself_is_waited_for(here, monkeypatch):
    pretend_checkpoints(monkeypatch)
    spec = get_spec()
    run_here(spec)
    folder = Path(spec['meta']['prepath']).parent
    monkeypatch.setattr(experiment, '_PATIENCE', 0.2)
    lock = RunLock(folder, 1)
    with lock, pytest.raises(LabError, match=f'^trial 1 of .* by process {os.getpid()} on .*; wait for it or stop it$'):
        run_here(again(spec), resumes=True)
    monkeypatch.setattr(experiment, '_PATIENCE', 30)
    lock.__enter__()
    monkeypatch.setattr(time, 'sleep', lambda _: lock.__exit__())
    assert run_here(again(spec), resumes=True).finished


def test_a_lock_that_a_node_takes_along_costs_no_results(here, monkeypatch, capsys):
    """As of a cluster's node that dies under a trial."""
    spec, run = get_spec(), search.run

    def run_and_lose_a_node(*args):
        run(*args)
        write_lock(Path(spec['meta']['prepath']).parent, 1)

    monkeypatch.setattr(search, 'run', run_and_lose_a_node)
    outcome = run_here(spec)
    assert outcome.finished and outcome.best['trial'] == 2
    folder = Path(spec['meta']['prepath']).parent
    assert (folder / 'tiny_experiment_df.csv').is_file()
    assert [path.name for path in folder.glob('lock_t*')] == ['lock_t1']
    assert f'delete {folder / "lock_t1"}' in (folder / 'log' / 'tiny.log').read_text()


def test_any_trial_can_be_gone_on_with_by_itself(here, command, tmp_path, capsys):
    from run_lab import main

    def write(max_frame):
        search_part = {'agent': [{'algorithm': {'gamma__grid_search': [0.5, 0.9]}}]}
        spec_file.write_text(json.dumps({SPEC_NAME: make_search(search_part, max_frame=max_frame, warm_up=32)}))

    spec_file = tmp_path / 'spec.json'
    write(120)
    assert main([str(spec_file), SPEC_NAME, 'search']) == 0
    output = capsys.readouterr().out
    (folder,) = (tmp_path / 'data').iterdir()
    best = pd.read_csv(folder / 'tiny_experiment_df.csv').iloc[0]
    assert f'Best trial: {best["trial"]}, strength {best["strength"]:g}' in output
    first = hashes(folder, 'checkpoint/*_t0_*/*', '*_t0_*', 'info/*_t0_*', 'tiny_spec.json')
    write(180)
    assert main([str(spec_file), SPEC_NAME, f'train@{folder}/tiny_t1_spec.json']) == 0
    assert f'train@{folder}/tiny_t1_spec.json' in capsys.readouterr().out
    assert hashes(folder, 'checkpoint/*_t0_*/*', '*_t0_*', 'info/*_t0_*', 'tiny_spec.json') == first
    assert read_json(folder / 'tiny_t1_spec.json')['agent'][0]['algorithm']['gamma'] == 0.9
    rows = pd.read_csv(folder / 'info' / 'tiny_t1_s0_session_df_train.csv')
    assert rows['frame'].tolist() == [0, 100, 180]
    # the search goes on too: the first trial up to the new max_frame, the second has nothing left to train
    second = hashes(folder, 'checkpoint/*_t1_*/*')
    assert main([str(spec_file), SPEC_NAME, f'search@{folder}']) == 0
    assert pd.read_csv(folder / 'tiny_experiment_df.csv')['frame'].tolist() == [180, 180]
    assert hashes(folder, 'checkpoint/*_t1_*/*') == second


def test_a_trial_whose_search_died_before_its_graphs_were_drawn_is_not_done(here, monkeypatch):
    drawn, stop, analyze = [], StopRequest(parent=os.getppid()), Trial._analyze
    monkeypatch.setattr(analysis, '_draw', lambda *args: drawn.append(args) or True)

    def die_and_analyze(trial, *args):
        stop.parent = -1
        drawn.clear()
        return analyze(trial, *args)

    monkeypatch.setattr(Trial, '_analyze', die_and_analyze)
    spec = get_spec({'agent': [{'algorithm': {'gamma__grid_search': [0.9]}}]}, max_frame=60)
    outcome = Experiment(spec, stop).run()
    assert not outcome.finished and outcome.table['status'].tolist() == ['interrupted'] and not drawn

    monkeypatch.setattr(Trial, '_analyze', analyze)
    outcome = Experiment(again(spec), resumes=True).run()
    assert outcome.finished and outcome.table['status'].tolist() == ['finished'] and drawn


NO_RAY = f"""
import sys
sys.path.insert(0, {FOLDER!r})
import search_trials
import slm_lab.experiment.search as search
search.run, search.require_ray = search_trials.run_without_ray, lambda: None
"""


def test_a_search_in_a_job_that_is_killed_goes_on(lab, here, command, monkeypatch, capsys):
    from run_lab import main

    search_part = {'agent': [{'algorithm': {'gamma__grid_search': [0.5, 0.9, 0.99]}}]}
    lab.spec_file.write_text(json.dumps({SPEC_NAME: make_search(search_part, max_frame=120, log_frequency=60)}))
    (lab.folder / 'job.json').write_text(json.dumps({'spec.json': {SPEC_NAME: 'search'}}))
    monkeypatch.chdir(lab.folder)
    kill = ('slm_lab.agent.agent', 'Agent.act', 120 + 70, 'os.kill(os.getpid(), signal.SIGKILL)')
    hooks = [('slm_lab.experiment.search', '', 1, NO_RAY), kill]
    assert lab.run('job.json', hooks=hooks).status == -signal.SIGKILL
    first = ['checkpoint/*_t0_*/*', 'info/*_t0_*', '*_t0_*']
    (folder,) = lab.data.glob('tiny_*')
    before = hashes(folder, *first)
    assert read_json(folder / 'info' / 'tiny_t0_result.json')['status'] == 'finished'

    assert main(['job.json', '--resume']) == 0
    assert 'Resumed trial 1 session 0 from the checkpoint of frame 60' in capsys.readouterr().out
    assert list(lab.data.glob('tiny_*')) == [folder] and hashes(folder, *first) == before
    table = pd.read_csv(folder / 'tiny_experiment_df.csv').sort_values('trial')
    assert (table['status'].tolist(), table['frame'].tolist()) == (['finished'] * 3, [120] * 3)
    assert main(['job.json', '--resume']) == 0
    assert 'tiny search: done before, skipped' in capsys.readouterr().out

    # a job takes a trial by itself too
    lab.spec_file.write_text(json.dumps({SPEC_NAME: make_search(search_part, max_frame=180, log_frequency=60)}))
    trial = f'{folder.relative_to(lab.data)}/tiny_t1_spec.json'
    (lab.folder / 'job.json').write_text(json.dumps({'spec.json': {SPEC_NAME: f'train@{trial}'}}))
    assert main(['job.json']) == 0
    assert pd.read_csv(folder / 'info' / 'tiny_t1_s0_session_df_train.csv')['frame'].tolist() == [0, 60, 120, 180]
    (record,) = [read_json(path) for path in lab.data.glob('job_*/job.json') if 'train@' in path.read_text()]
    assert record['entries'][0]['run'] == trial


def test_retro_analysis_of_a_search_makes_what_the_search_made(here, command, monkeypatch):
    """Of one that was stopped within its last trial."""
    monkeypatch.setattr(analysis, '_draw', DRAW['_draw'])
    monkeypatch.setattr(experiment_analysis, 'draw_experiment', DRAW['draw_experiment'])
    monkeypatch.setattr(viz, '_render', lambda figure, path: b'png')
    part = {'agent': [{'algorithm': {'gamma__grid_search': [0.5, 0.9, 0.99]}}], 'env': [{'max_t__choice': [9, 20]}]}
    spec = get_spec(part, max_frame=120, log_frequency=40)
    run_job = search_worker.run_job
    monkeypatch.setattr(
        search_worker, 'run_job', lambda *args: None if args[0]['arguments']['index'] == 2 else run_job(*args)
    )
    assert not Experiment(spec).run().finished
    folder = Path(spec['meta']['prepath']).parent
    made = [
        'info/tiny_experiment_df.csv',
        'tiny_experiment_df.csv',
        'info/tiny_trial_data_dict.json',
        'graph/tiny_experiment_graph.html',
        'tiny_experiment_graph.png',
        *(f'graph/{path.name}' for path in folder.glob('graph/tiny_multi_trial_graph_*.html')),
        *(path.name for path in folder.glob('tiny_multi_trial_graph_*.png')),
    ]
    assert len(made) == 5 + 10 + 2
    before = {name: content(folder / name) for name in made}
    for name in made:
        (folder / name).unlink()
    moved = folder.with_name('elsewhere')
    folder.rename(moved)
    assert retro_analysis.main([str(moved)]) == 0
    assert {name: content(moved / name) for name in made} == before
    assert not folder.exists()


def content(path):
    """Text without the names that plotly draws anew for each HTML file."""
    return re.sub(r'[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}', '', path.read_text())


def test_what_a_trial_takes():
    cpus = experiment.count_cpus()
    assert experiment.resources(get_spec(num_cpus=0.25, max_session=2)) == (0.5, 0)
    assert experiment.resources(get_spec(max_session=cpus + 3)) == (cpus, 0)
    assert experiment.resources(get_spec(search_resources={'cpu': 0.5, 'gpu': 0.1})) == (0.5, 0.1)


def test_optuna_waits_for_the_results_that_a_trial_is_drawn_from(here):
    pytest.importorskip('optuna')
    part = {'agent': [{'algorithm': {'gamma__uniform': [0.5, 0.9], 'training_iter__choice': [1, 2]}}]}
    spec = get_spec(part, max_trial=4, search_alg='optuna', search_resources={'cpu': experiment.count_cpus() / 2})
    queue = TrialQueue(Experiment(spec), range(4))
    assert queue.concurrent == 2

    def end(job):
        search_worker.run_job({**job.details, 'run_trial': 'search_trials:finish'}, StopRequest())
        queue.ended(job.trial, None)

    jobs = [queue.next(), queue.next()]
    assert queue.next() is None
    end(jobs[1])
    assert queue.next() is None  # trial 2 is drawn from the result of trial 0
    end(jobs[0])
    assert queue.next().trial == 2 and queue.next().trial == 3
    with pytest.raises(StopIteration):
        queue.next()


def test_optuna_is_a_pure_function_that_finds_the_better_end():
    pytest.importorskip('optuna')
    spec = get_spec({'agent': [{'algorithm': {'gamma__uniform': [0, 1], 'training_iter__choice': [[1], [2]]}}]})
    spaces = Experiment(spec).spaces
    told = []
    for trial in range(30):
        values = search.suggest_by_optuna(spaces, 5, trial, told)
        assert values == search.suggest_by_optuna(spaces, 5, trial, told)
        failed = trial == 3
        told.append((values, None if failed else values[GAMMA] + (values['agent.0.algorithm.training_iter'] == [2])))
    late = [values for values, _ in told[-10:]]
    assert sum(values[GAMMA] > 0.7 for values in late) >= 7
    assert sum(values['agent.0.algorithm.training_iter'] == [2] for values in late) >= 7


@pytest.mark.parametrize('kind', ['quniform', 'qloguniform', 'randint', 'qrandint', 'lograndint', 'qlograndint'])
def test_optuna_draws_of_every_kind(kind):
    pytest.importorskip('optuna')
    args = [3, 20, 2] if kind.startswith('q') else [3, 20]
    spaces = {'x': experiment.search_space.Space(kind, tuple(args))}
    told = []
    for trial in range(12):
        values = search.suggest_by_optuna(spaces, 5, trial, told)
        assert 3 <= values['x'] <= (19 if kind in ('randint', 'lograndint') else 20)
        assert not kind.startswith('q') or values['x'] % 2 == 0
        told.append((values, float(values['x'])))


def test_search_without_ray_says_how_to_install_it_and_train_needs_none(command, hide, tmp_path, capsys):
    from run_lab import main

    hide('ray')
    spec_file = tmp_path / 'spec.json'
    spec_file.write_text(json.dumps({SPEC_NAME: make_search(max_frame=120)}))
    assert main([str(spec_file), SPEC_NAME, 'search']) == 2
    assert re.findall('^error: .*', capsys.readouterr().err, re.MULTILINE) == [
        "error: search needs Ray: pip install '.[ray]'"
    ]
    assert not (tmp_path / 'data').exists()
    assert main([str(spec_file), SPEC_NAME, 'train']) == 0
