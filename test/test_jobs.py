"""Job files: the shipped ones, and jobs that are stopped, killed, or fail in part, and then go on."""

import json
import re
import signal

import pytest
from lab_process import hashes, make_spec, read_rows

from run_lab import check_jobs, main, read_jobs
from slm_lab.agent.agent import Agent
from slm_lab.experiment import param_runs
from slm_lab.lib import paths

SHIPPED = sorted((paths.CHECKOUT / 'job').glob('*.json'))


@pytest.fixture
def lab(lab, command, monkeypatch):
    monkeypatch.chdir(lab.folder)
    specs = {name: make_spec(max_frame=120, log_frequency=60) for name in ('first', 'second', 'third')}
    specs['tiny'] = specs['third'] | {
        'env': [{**make_spec()['env'][0], 'name': '${env}', 'max_frame': 60}],
        'spec_params': {'env': ['CartPole-v0', 'CartPole-v1']},
    }
    specs['tiny']['meta'] = {**specs['tiny']['meta'], 'num_cpus': 1000}  # one after the other
    lab.spec_file.write_text(json.dumps(specs))
    return lab


def write_job(lab, **modes):
    (lab.folder / 'job.json').write_text(json.dumps({'spec.json': modes}))


def runs(lab, name):
    return sorted(p for p in lab.data.iterdir() if re.fullmatch(rf'{name}_\d{{4}}_\d\d_\d\d_\d{{6}}', p.name))


def run_of(lab, name):
    (folder,) = runs(lab, name)
    return folder


def frames(folder):
    (rows,) = folder.glob('info/*_session_df_train.csv')
    return read_rows(rows)['frame']


def record(lab):
    return json.loads((run_of(lab, 'job') / 'job.json').read_text())


def statuses(lab):
    return {entry['spec_name']: entry['status'] for entry in record(lab)['entries']}


def stop_at(monkeypatch, call):
    calls, act = [0], Agent.act

    def counted(*args, **kwargs):
        calls[0] += 1
        if calls[0] == call:
            signal.raise_signal(signal.SIGTERM)
        return act(*args, **kwargs)

    monkeypatch.setattr(Agent, 'act', counted)


@pytest.mark.parametrize('path', SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_job_file_names_specs_that_come_with_the_lab(path, command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # wherever it is started
    found, jobs = read_jobs([f'job/{path.name}'])
    assert found == path and jobs
    check_jobs(jobs)


def test_without_a_name_it_is_the_shipped_experiments():
    path, jobs = read_jobs([])
    assert path.name == 'experiments.json' and jobs == [('demo.json', 'dqn_cartpole', 'dev')]


def test_a_job_that_was_stopped_goes_on(lab, monkeypatch, capsys):
    """What was done stays as it is, what was under way goes on from its checkpoint, the rest runs."""
    write_job(lab, first='train', second='train', third='train')
    with monkeypatch.context() as m:
        stop_at(m, 120 + 70)
        assert main(['job.json']) == 143
    out = capsys.readouterr().out
    assert re.search(r'^Go on with the jobs with: \S+ \S+ job\.json --resume$', out, re.MULTILINE)
    assert statuses(lab) == {'first': 'done', 'second': 'begun', 'third': 'waiting'}
    before, second = hashes(run_of(lab, 'first')), run_of(lab, 'second')
    assert main(['job.json', '--resume']) == 0
    output = capsys.readouterr().out
    assert 'Resumed trial 0 session 0 from the checkpoint of frame 70' in output
    assert 'Go on with' not in output
    assert hashes(run_of(lab, 'first')) == before
    assert run_of(lab, 'second') == second
    assert [frames(run_of(lab, name)) for name in ('first', 'second', 'third')] == [['0', '60', '120']] * 3
    assert set(statuses(lab).values()) == {'done'}
    unchanged = hashes(lab.data, '*/checkpoint/**/*')
    assert main(['job.json', '--resume']) == 0  # nothing is left
    assert hashes(lab.data, '*/checkpoint/**/*') == unchanged


@pytest.mark.parametrize(
    ('function', 'call', 'num_runs'),
    [
        ('slm_lab.experiment.jobs:Job.save', 1, 1),  # the record's folder is there, the record is not
        ('slm_lab.experiment.jobs:Job.save', 4, 2),  # the second run's folder is there, the record does not name it
        ('slm_lab.experiment.trial:Trial.run', 2, 1),  # named, not begun
        ('slm_lab.agent.agent:Agent.act', 120 + 70, 1),  # within
        ('slm_lab.experiment.jobs:Job.save', 5, 1),  # finished, not recorded
    ],
    ids=['first', 'unnamed', 'not begun', 'within', 'not recorded'],
)
def test_a_job_that_was_killed_goes_on(lab, function, call, num_runs, capsys):
    write_job(lab, first='train', second='train')
    module, name = function.split(':')
    hooks = [(module, name, call, 'os.kill(os.getpid(), signal.SIGKILL)')]
    assert lab.run('job.json', hooks=hooks).status == -signal.SIGKILL
    if function.endswith('save') and call == 1:
        assert main(['job.json', '--resume']) == 2  # nothing had begun
        assert 'no job of' in capsys.readouterr().err
        assert [p.name[:4] for p in lab.data.iterdir()] == ['job_']
        return
    assert main(['job.json', '--resume']) == 0
    assert [frames(folder) for folder in runs(lab, 'first')] == [['0', '60', '120']]
    second = runs(lab, 'second')
    assert len(second) == num_runs  # an empty folder is all that a kill can leave
    assert [frames(folder) for folder in second if param_runs.holds_run(folder)] == [['0', '60', '120']]
    assert statuses(lab) == {'first': 'done', 'second': 'done'}


def test_a_job_that_fails_does_not_lose_the_others_and_is_tried_again(lab, capsys):
    specs = json.loads(lab.spec_file.read_text())
    specs['first']['env'][0]['name'] = 'CartPol-v1'
    lab.spec_file.write_text(json.dumps(specs))
    write_job(lab, first='train', second='train', third='train@latest')
    assert main(['job.json']) == 2
    captured = capsys.readouterr()
    assert "did you mean 'CartPole-v1'?" in captured.err and "no run of spec 'third'" in captured.err
    assert '2 of 3 jobs failed: first train, third train@latest' in captured.out
    assert re.search(r'^Go on with the jobs with: .* job\.json --resume$', captured.out, re.MULTILINE)
    assert runs(lab, 'first') == [] and frames(run_of(lab, 'second'))[-1] == '120'
    specs['first']['env'][0]['name'] = 'CartPole-v1'
    lab.spec_file.write_text(json.dumps(specs))
    write_job(lab, first='train', second='train')  # an entry may go; others keep their state
    before = hashes(run_of(lab, 'second'))
    assert main(['job.json', '--resume']) == 0
    assert frames(run_of(lab, 'first'))[-1] == '120'
    assert hashes(run_of(lab, 'second')) == before


def test_a_template_in_a_job_goes_on_and_latest_is_settled_when_the_job_begins(lab, monkeypatch):
    assert main(['--stop-after', '0', 'spec.json', 'first', 'train']) == 0
    first = run_of(lab, 'first')
    write_job(lab, tiny='train', first='train@latest')
    with monkeypatch.context() as m:
        stop_at(m, 60 + 40)
        assert main(['job.json']) == 143
    done, begun = run_of(lab, 'tiny_CartPole-v0'), run_of(lab, 'tiny_CartPole-v1')
    assert frames(begun)[-1] != '60'
    before = hashes(done)
    assert main(['job.json', '--resume']) == 0
    assert hashes(done) == before and frames(begun) == ['0', '60']
    assert run_of(lab, 'first') == first and frames(first)[-1] == '120'
    assert record(lab)['entries'][1]['run'] == first.name


def test_two_processes_do_not_run_one_job(lab, capsys):
    write_job(lab, first='train')
    life = lab.start('job.json', hooks=[('slm_lab.agent.agent', 'Agent.act', 1, "mark('acts'); time.sleep(60)")])
    life.wait_for(lambda: lab.has_mark('acts'))
    assert main(['job.json', '--resume']) == 2
    assert f'is being trained by process {life.pid}' in capsys.readouterr().err
    life.kill()


@pytest.mark.parametrize(
    ('args', 'line'),
    [
        (['job.json', '--resume'], 'no job of '),
        (['spec.json', 'first', 'train', '--resume'], '--resume is for job files; to go on with a run, give the mode'),
        (['job/roboschool_benchmark.json'], "did you mean 'job/mujoco_benchmark.json'?"),
    ],
)
def test_a_job_that_cannot_be_is_one_line(lab, args, line, capsys):
    write_job(lab, first='train')
    assert main(args) == 2
    err = capsys.readouterr().err
    assert line in err and err.count('\n') == 1
    assert not lab.data.exists()


def test_a_job_is_told_from_another_of_its_name(lab, tmp_path, capsys):
    write_job(lab, first='train')
    assert main(['--stop-after', '0', 'job.json']) == 0
    other = tmp_path / 'other'
    other.mkdir()
    (other / 'job.json').write_text((tmp_path / 'job.json').read_text())
    assert main(['other/job.json', '--resume']) == 2
    assert 'other/job.json is recorded' in capsys.readouterr().err
    assert main(['job.json', '--resume']) == 0
    assert statuses(lab) == {'first': 'done'}
