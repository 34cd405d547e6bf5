"""Searches: which trials run, what they leave, what goes on after a stop; those that start Ray are last."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest
import search_trials
from lab_process import ROOT, SPEC_NAME, Lab, end_of_session, fork_server, hashes, make_spec, resume_command

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
from slm_lab.lib import logger as lab_logger
from slm_lab.lib import viz
from slm_lab.lib.errors import LabError, ResumeError, SpecError
from slm_lab.lib.files import read_json, write_json
from slm_lab.lib.state import first_difference
from slm_lab.spec import spec_util

HERE = Path(__file__).parent
ASHA = {'grace_period': 200, 'reduction_factor': 2}
GIVEN_UP = experiment.GIVEN_UP
FULL = ('finished', 1600)
GAMMA = 'agent.0.algorithm.gamma'
DRAW = {'_draw': analysis._draw, 'draw_experiment': experiment_analysis.draw_experiment}
GRID = {'agent': [{'algorithm': {'gamma__grid_search': [0.5, 0.9, 0.99]}}]}


@pytest.fixture
def lab(tmp_path):
    lab = Lab(tmp_path, fork_server())
    yield lab
    lab.close()
    for process in living(lab):
        process.kill()


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Searches in this process without Ray, one trial after another; stand-ins for their trials; no graphs."""

    monkeypatch.setattr(search, 'run', search_trials.run_without_ray)
    monkeypatch.setattr(search, 'require_ray', lambda: None)
    monkeypatch.setattr(analysis, '_draw', lambda *args: True)
    monkeypatch.setattr(experiment_analysis, 'draw_experiment', lambda *args: True)
    monkeypatch.setenv('LAB_DATA_DIR', str(tmp_path / 'data'))
    monkeypatch.syspath_prepend(str(HERE))
    yield
    lab_logger.close()


def make_search(search=GRID, **changes):
    return {**make_spec(**changes), 'search': search}


def get_spec(search=GRID, **changes):
    return spec_util.prepare({**make_search(search, **changes), 'name': SPEC_NAME})


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


_NO_GRAPH = 'import slm_lab.experiment.experiment_analysis as a; a.draw_experiment = lambda *_: True'
NO_EXPERIMENT_GRAPH = [('slm_lab.experiment.experiment_analysis', '', 1, _NO_GRAPH)]
NO_RAY = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
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
    hooks = [('slm_lab.experiment.search', '', 1, NO_RAY), *NO_EXPERIMENT_GRAPH, kill]
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


def test_search_without_ray_says_how_to_install_it_and_train_needs_none(command, monkeypatch, tmp_path, capsys):
    from run_lab import main

    monkeypatch.setitem(sys.modules, 'ray', None)
    spec_file = tmp_path / 'spec.json'
    spec_file.write_text(json.dumps({SPEC_NAME: make_search(max_frame=120)}))
    assert main([str(spec_file), SPEC_NAME, 'search']) == 2
    assert re.findall('^error: .*', capsys.readouterr().err, re.MULTILINE) == [
        "error: search needs Ray: pip install '.[ray]'"
    ]
    assert not (tmp_path / 'data').exists()
    assert main([str(spec_file), SPEC_NAME, 'train']) == 0


# --- the process of a trial


def job_of(tmp_path, trials, reports=False):
    job = {'run_trial': f'search_trials:{trials}', 'arguments': {'spec': get_spec(), 'index': 0}, 'reports': reports}
    places = ('result_path', 'verdict_path', 'log_path', 'output_path')
    return {**job, **{place: str(tmp_path / place) for place in places}}


def start_process(tmp_path, trials, reports=False):
    return search_worker.TrialProcess(job_of(tmp_path, trials, reports))


def last_news(process, verdict_at=None, path=None):
    frames = []
    until = time.monotonic() + 60
    while time.monotonic() < until:
        news = process.next()
        if news.get('done'):
            return news, frames
        if news and news['frame'] not in frames:
            frames.append(news['frame'])
        if verdict_at is not None and news and news['frame'] == verdict_at:
            path.touch()
    raise AssertionError('it never ended')


@pytest.fixture
def search_path(monkeypatch):
    monkeypatch.setenv('PYTHONPATH', str(HERE))


def test_a_trial_waits_at_each_row_and_stops_at_its_verdict(search_path, tmp_path):
    news, frames = last_news(start_process(tmp_path, 'climb', True), 300, tmp_path / 'verdict_path')
    assert news == {'done': True, 'died': None} and frames == [100, 200, 300]
    assert read_json(tmp_path / 'result_path')['status'] == 'stopped by the scheduler'
    assert read_json(tmp_path / 'result_path')['frame'] == 300
    assert not (tmp_path / 'output_path').exists()  # it printed nothing


def test_an_interrupted_trial_leaves_no_result_and_no_process(search_path, tmp_path):
    process = start_process(tmp_path, 'wait')
    assert process.next() == {}
    process.end()
    assert process.process.returncode == 0 and not (tmp_path / 'result_path').exists()


def test_a_trial_stops_when_its_worker_is_killed(search_path, tmp_path):
    """As when the driver is killed with -9, which takes Ray with it."""
    code = f"""
import json, sys, time
sys.path.insert(0, {str(ROOT)!r})
from slm_lab.experiment.search_worker import TrialProcess
process = TrialProcess(json.loads({json.dumps(json.dumps(job_of(tmp_path, 'wait')))}))
process.next()
print(process.process.pid, flush=True)
time.sleep(60)
"""
    worker = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True)
    trial = psutil.Process(int(worker.stdout.readline()))
    worker.kill()
    worker.wait()
    worker.stdout.close()
    assert not psutil.wait_procs([trial], timeout=20)[1]


# --- with Ray

PATIENCE = 200  # seconds: Ray takes a while to start where other things run


def living(lab):
    """Processes of whatever was started in a lab."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get('LAB_DATA_DIR') == str(lab.data) and process.status() != 'zombie':
                found.append(process)
        except psutil.Error:
            continue
    return found


def assert_nothing_is_left(lab):
    until = time.monotonic() + 20
    while living(lab) and time.monotonic() < until:
        time.sleep(0.1)
    assert [process.cmdline()[:4] for process in living(lab)] == []


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

    life = lab.start_train('search', hooks=NO_EXPERIMENT_GRAPH)
    life.wait_for(lambda: info(0, 'result') and checkpoint(1), PATIENCE)
    os.kill(life.pid, signal.SIGKILL)
    life.wait()
    assert not info(3, 'result')
    done = ['checkpoint/*_t0_*/*', 'info/*_t0_*', 'model/*_t0_*', '*_t0_*']
    before = hashes(lab.run_folder, *done)
    assert len(before) > 10

    life = lab.start_train('search@latest', hooks=NO_EXPERIMENT_GRAPH)
    life.wait_for(lambda: info(1, 'result') and checkpoint(2), PATIENCE)
    os.kill(life.pid, signal.SIGTERM)
    life.wait(PATIENCE)
    assert life.status == 143, life.output
    _, args = resume_command(life.output)
    assert args[-1].startswith('search@')
    assert_nothing_is_left(lab)

    life = lab.start(*args, hooks=NO_EXPERIMENT_GRAPH).wait(PATIENCE)
    assert life.status == 0, life.output
    assert_nothing_is_left(lab)
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
import test_search
test_search.run_as_process({search!r}, {meta!r}, {trials!r}, {with_ray!r})
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
        path=[str(ROOT), str(HERE), str(HERE.parent)],
        search=part,
        meta={'search_resources': {'cpu': experiment.count_cpus()}, **meta},
        trials=trials,
        with_ray=with_ray,
    )
    env = {**os.environ, 'LAB_DATA_DIR': str(lab.data), 'PYTHONPATH': str(HERE)}
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
    assert_nothing_is_left(lab)


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
    assert_nothing_is_left(lab)


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
