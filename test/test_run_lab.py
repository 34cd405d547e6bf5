"""The command: what it accepts, what it refuses and how, and what it leaves on disk."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lab_process import SPEC_NAME, end_of, hashes, make_spec, resume_command

from run_lab import main, parse_mode
from slm_lab import __version__
from slm_lab.experiment.trial import Trial
from slm_lab.lib.errors import LabError, SpecError
from slm_lab.spec import spec_util

ROOT = Path(__file__).parents[1]


@pytest.fixture
def lab(lab):
    lab.write_spec(max_frame=120, log_frequency=60)
    return lab


def assert_refused(lab, life, *wanted):
    """One line that says what was wrong, exit status 2, no traceback, nothing on disk."""
    assert life.status == 2
    errors = [line for line in life.output.splitlines() if line]
    assert len(errors) == 1, life.output
    assert errors[0].startswith('error: ')
    for text in wanted:
        assert text in errors[0]
    assert not lab.data.exists()


# --- arguments


@pytest.mark.parametrize('count', [2, 4, 5])
def test_a_number_of_arguments_that_means_nothing_is_refused(lab, count):
    assert_refused(lab, lab.run(*[lab.spec_file] * count), f'{count} arguments', 'SPEC_FILE SPEC_NAME MODE')


@pytest.mark.parametrize(
    ('mode', 'wanted'),
    [
        ('trian', ["mode 'trian' is unknown", "did you mean 'train'?", 'verify']),
        ('enjoi@latest', ["did you mean 'enjoy'?"]),
        ('eval', ["mode 'eval' is unknown"]),
        ('train@', ['after the @', "'latest'"]),
        ('enjoy', ['needs a run', 'enjoy@<run folder>']),
        ('verify', ['needs a run', 'verify@<run folder>']),
        ('search', ["key 'search' is missing or empty"]),
        ('search@latest', ["no run of spec 'tiny'"]),
        ('train@latest', ["no run of spec 'tiny'"]),
        ('train@nowhere', ["no run 'nowhere'"]),
    ],
)
def test_a_wrong_mode_is_refused(lab, mode, wanted):
    assert_refused(lab, lab.train(mode), *wanted)


def test_a_mode_is_parted_from_its_run_at_the_first_at_sign():
    assert parse_mode('train') == ('train', None)
    assert parse_mode('train@data/a@b') == ('train', 'data/a@b')
    with pytest.raises(SpecError, match="did you mean 'dev'"):
        parse_mode('dvе')  # the last letter is Cyrillic


@pytest.mark.parametrize(
    ('args', 'wanted'),
    [
        (['demo.jsn', 'dqn_cartpole', 'train'], ["spec file 'demo.jsn'", "did you mean 'demo.json'?"]),
        (['demo.json', 'dqn_cartpol', 'train'], ["spec 'dqn_cartpol' is unknown", "did you mean 'dqn_cartpole'?"]),
        (['slm_lab/spec/demo.json', 'x', 'train'], ["spec 'x' is unknown", 'Known: dqn_cartpole']),
        (['no_such_job.json'], ["job file 'no_such_job.json' does not exist"]),
    ],
)
def test_an_unknown_file_or_spec_is_refused_with_the_nearest(lab, args, wanted):
    assert_refused(lab, lab.run(*args), *wanted)


@pytest.mark.parametrize(
    ('place', 'key', 'value', 'wanted'),
    [
        ('algorithm', 'gama', 0.9, ['agent.0.algorithm', 'gama', "did you mean 'gamma'?"]),
        ('net', 'hid_layer', [8], ['agent.0.net', "did you mean 'hid_layers'?"]),
        ('memory', 'max_size', 'many', ['agent.0.memory.max_size']),
        ('env', 'max_frames', 10, ['env.0.max_frames', "did you mean 'max_frame'?"]),
        ('meta', 'log_frequncy', 10, ['meta', "did you mean 'log_frequency'?"]),
        ('top', 'agents', [], ["key 'agents' is unknown", "did you mean 'agent'?"]),
        # what only building shows
        ('env', 'name', 'CartPol-v1', ['env.0.name', "did you mean 'CartPole-v1'?"]),
        ('env', 'gravityy', 3, ['does not take this keyword', 'env.0.gravityy']),
        ('env', 'name', 'Pendulum-v1', ['DQN takes discrete actions; the env has Box']),
        ('net', 'load', 'x', ["key 'load' is unknown"]),
        ('top', 'spec_params', {'env': ['a']}, ['spec_params.env', "no string of the spec uses '${env}'"]),
    ],
)
def test_a_wrong_key_is_one_line_and_nothing_is_created(lab, place, key, value, wanted):
    spec = make_spec()
    part = {'env': spec['env'][0], 'meta': spec['meta'], 'top': spec}.get(place)
    (spec['agent'][0][place] if part is None else part)[key] = value
    lab.spec_file.write_text(json.dumps({SPEC_NAME: spec}))
    assert_refused(lab, lab.train(), *wanted)


def test_a_spec_file_given_as_a_job_names_its_specs(lab):
    assert_refused(lab, lab.run('demo.json'), "job file 'demo.json' does not exist")
    assert_refused(lab, lab.run(lab.spec_file), 'is a spec file: give SPEC_FILE SPEC_NAME MODE', 'its specs: tiny')


def test_a_variable_that_is_no_number_is_refused(lab, monkeypatch):
    monkeypatch.setenv('CUDA_OFFSET', 'x')
    with pytest.raises(SpecError, match="CUDA_OFFSET: 'x' is not a whole number"):
        spec_util.get('demo.json', 'dqn_cartpole')
    monkeypatch.setenv('CUDA_OFFSET', '')
    assert spec_util.get('demo.json', 'dqn_cartpole')['meta']['cuda_offset'] == 0


@pytest.mark.parametrize('name', ['../evil', 'a/b', '.', '', 'x' * 250])
def test_a_name_that_is_no_folder_s_is_refused_and_nothing_is_created_anywhere(name, lab):
    lab.spec_file.write_text(json.dumps({name: make_spec()}))
    (lab.folder / 'job.json').write_text(json.dumps({'spec.json': {name: 'train'}}))
    for args in ((lab.spec_file, name, 'train'), ('job.json',)):
        assert_refused(lab, lab.run(*args), 'name for a spec')
    assert [path for path in lab.folder.iterdir() if path.is_dir() and not path.name.startswith('hooks_')] == []


def test_files_can_bear_the_longest_name(lab):
    name = 'x' * 160
    lab.spec_file.write_text(json.dumps({name: make_spec(max_frame=60, log_frequency=60)}))
    life = lab.run(lab.spec_file, name, 'train', graphs=True)
    assert life.status == 0 and 'cannot write' not in life.output
    (folder,) = lab.data.iterdir()
    assert (folder / 'graph' / f'{name}_t0_s0_session_graph_eval_mean_returns_ma_vs_frames.html').is_file()
    while_it_is_written = max(len(path.name) for path in folder.rglob('*')) + len('..4194304.tmp')
    assert while_it_is_written + len('999') <= 255  # of more trials and sessions


@pytest.mark.parametrize('form', ['spec', 'job'])
def test_a_key_that_is_there_twice_is_refused(form, lab):
    """Of the two the last one would count, in silence."""
    job = lab.folder / 'job.json'
    if form == 'spec':
        lab.spec_file.write_text(lab.spec_file.read_text().replace('"gamma"', '"gamma": 0.5, "gamma"', 1))
        assert_refused(lab, lab.train(), "spec.json: key 'gamma' is there twice, at line ")
    else:
        job.write_text('{"spec.json": {"tiny": "train",\n"tiny": "dev"}}')
        wanted = "job.json: key 'tiny' is there twice, at line 1 column 16 and at line 2 column 1"
        assert_refused(lab, lab.run('job.json'), wanted)


def test_text_that_is_no_json_is_refused(lab):
    lab.spec_file.write_text('{"tiny": ')
    assert_refused(lab, lab.train(), 'spec.json is not valid JSON')


def test_a_data_folder_that_cannot_be_made_is_one_line(lab):
    lab.data.write_text('a file where the folder should be')
    life = lab.train()
    assert life.status == 2
    assert 'Traceback' not in life.output
    assert re.search(r'^error: .*the run folder cannot be made: ', life.output, re.MULTILINE)


def test_help_names_every_form_mode_and_exit_status(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(['--help'])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for mode in ('dev', 'train', 'train@RUN', 'dev@RUN', 'search', 'search@RUN', 'enjoy@RUN', 'verify@RUN'):
        assert re.search(rf'^\s.*\b{mode}', text, re.MULTILINE), mode
    for word in (
        'JOB.json',
        'SPEC_FILE SPEC_NAME MODE',
        '--stop-after',
        '--force',
        '130/143/138',
        'load_net',
        'latest',
    ):
        assert word in text


# --- --stop-after


def test_a_wrong_time_limit_is_refused_before_anything_starts(lab):
    assert_refused(lab, lab.train_with('--stop-after', 'soon'), "--stop-after: 'soon' is no duration")


def test_a_time_limit_stops_with_status_0_and_the_command_that_resumes(lab):
    life = lab.train_with('--stop-after', '0')
    assert life.status == 0
    assert 'Stopped by the time limit; complete checkpoints: session 0 at frame 0' in life.output
    _, args = resume_command(life.output)
    resumed = lab.run(*args)
    assert resumed.status == 0
    assert lab.frame() == 120


# --- --force


@pytest.mark.parametrize('mode', ['search', 'enjoy@latest', 'verify@latest'])
def test_modes_that_estimate_no_memory_refuse_to_be_forced(mode, capsys):
    assert main(['demo.json', 'dqn_cartpole', mode, '--force']) == 2
    assert '--force is for train and dev' in capsys.readouterr().err


def test_a_run_that_cannot_fit_is_refused_unless_it_is_forced(lab):
    code = """
import slm_lab.experiment.memory_estimate as m
from slm_lab.lib.machine import Available
m.available = lambda: Available(100 * m.MB)
"""
    little_memory = [('slm_lab.experiment.memory_estimate', '', 1, code)]
    refused = lab.train(hooks=little_memory)
    assert_refused(lab, refused, 'not enough memory: it takes about', '100 MB are there', '--force')
    life = lab.train_with('--force', hooks=little_memory)
    assert life.status == 0, life.output
    assert lab.frame() == 120
    # the command that resumes it would be refused too, without the flag
    lab.write_spec(max_frame=180, log_frequency=60)
    assert lab.train('train@latest', hooks=little_memory).status == 2
    _, args = resume_command(life.output)
    assert lab.run(*args, hooks=little_memory).status == 0
    assert lab.frame() == 180


# --- where it runs


def test_the_doctor_reports_and_runs_nothing(command, monkeypatch, capsys):
    assert main(['--doctor']) == 0
    assert capsys.readouterr().out.endswith('no problem found\n')
    monkeypatch.setattr('slm_lab.lib.doctor.report', lambda version: ([f'a line of {version}'], ['torch is ill']))
    assert main(['--doctor']) == 1
    assert f'a line of {__version__}\nPROBLEM: torch is ill\n' in capsys.readouterr().out
    assert main(['--doctor', 'demo.json', 'dqn_cartpole', 'train']) == 2


def test_a_python_without_the_packages_is_told_what_to_do(tmp_path):
    """As a user who runs the checkout by a Python that has none of them, which `-S` makes of this one."""
    command = [sys.executable, '-S', str(ROOT / 'run_lab.py'), 'demo.json', 'dqn_cartpole', 'train']
    env = {key: value for key, value in os.environ.items() if key != 'PYTHONPATH'}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert re.fullmatch(r"error: No module named '\w+', which the lab needs; .*bin/lab.*\n", done.stderr)
    assert sys.executable in done.stderr


# --- where things are


def test_a_spec_is_found_as_given_then_among_those_of_the_lab(lab):
    """A local file wins over the lab's own of the same name; `slm_lab/spec/` may be left out."""
    refused = lab.run('demo.json', 'tiny', 'train')
    assert "spec 'tiny' is unknown" in refused.output
    (lab.folder / 'demo.json').write_text(lab.spec_file.read_text())
    assert lab.run('demo.json', 'tiny', 'train').status == 0
    assert lab.frame() == 120


def test_it_runs_and_resumes_from_any_folder_by_the_command_it_prints(lab, tmp_path):
    """A new process, from a folder that is not the checkout, with blanks in the path of the spec."""
    elsewhere = tmp_path / 'some where'
    elsewhere.mkdir()
    spec_file = elsewhere / 'my spec.json'
    lab.write_spec(max_frame=100, log_frequency=50)
    lab.spec_file.rename(spec_file)
    first = lab.run('my spec.json', SPEC_NAME, 'train', fresh=True, cwd=elsewhere)
    assert first.status == 0, first.output
    assert first.output.count('Extend it with: ') == 1
    script, args = resume_command(first.output)
    assert args[0] == 'my spec.json'
    assert script.endswith('run_lab.py')
    lab.spec_file = spec_file
    lab.write_spec(max_frame=150, log_frequency=50)
    assert lab.run(*args, cwd=elsewhere).status == 0
    assert lab.frame() == 150
    assert not (elsewhere / 'data').exists()


# --- jobs


def write_job(lab, jobs):
    (lab.folder / 'job.json').write_text(json.dumps(jobs))
    return 'job.json'


def test_without_arguments_it_runs_the_jobs_of_the_checkout(lab):
    """The shipped job is `dev` of the demo; a signal before its first frame keeps it short."""
    hooks = [('slm_lab.experiment.session', 'Session.run', 1, 'os.kill(os.getpid(), signal.SIGTERM)')]
    life = lab.run(hooks=hooks)
    assert life.status == 143
    assert sorted(p.name[:-18] for p in lab.data.iterdir()) == ['dqn_cartpole', 'experiments']
    assert resume_command(life.output)[1][2].startswith('dev@')


def test_a_job_file_runs_its_specs_in_order_and_may_resume(lab):
    other = lab.folder / 'other.json'
    other.write_text(json.dumps({'second': make_spec(max_frame=40, log_frequency=20)}))
    job = write_job(lab, {'spec.json': {SPEC_NAME: 'train'}, 'other.json': {'second': 'train'}})
    life = lab.run(job)
    assert life.status == 0, life.output
    assert re.findall(r'Run folder: data/(\w+?)_\d', life.output) == [SPEC_NAME, 'second']
    lab.write_spec(max_frame=180, log_frequency=60)
    life = lab.run(write_job(lab, {'spec.json': {SPEC_NAME: 'train@latest'}}))
    assert life.status == 0, life.output
    (folder,) = [p for p in lab.data.iterdir() if p.name.startswith(SPEC_NAME)]
    assert 'Resumed trial 0 session 0 from the checkpoint of frame 120' in life.output
    assert end_of(folder)['train']['frame'] == ['0', '60', '120', '180']


def test_a_job_with_a_fault_is_refused_before_the_first_of_its_specs_starts(lab):
    job = write_job(lab, {'spec.json': {SPEC_NAME: 'train', 'tine': 'train'}})
    assert_refused(lab, lab.run(job), "spec 'tine' is unknown", "did you mean 'tiny'?")
    job = write_job(lab, {'spec.json': {SPEC_NAME: 'train'}, 'demo.json': {'dqn_cartpole': 1}})
    assert_refused(lab, lab.run(job), "mode '1' is unknown")
    assert_refused(lab, lab.run(write_job(lab, ['spec.json'])), 'a job file is')


def test_a_signal_stops_the_jobs_and_not_only_the_one_that_runs(lab):
    job = write_job(lab, {'spec.json': {SPEC_NAME: 'train'}, 'demo.json': {'dqn_cartpole': 'train'}})
    hooks = [('slm_lab.agent.agent', 'Agent.act', 70, 'os.kill(os.getpid(), signal.SIGUSR1)')]
    life = lab.run(job, hooks=hooks)
    assert life.status == 128 + signal.SIGUSR1
    assert 'complete checkpoints: session 0 at frame 70' in life.output
    assert sorted(p.name[:-18] for p in lab.data.iterdir()) == ['job', SPEC_NAME]


# --- the run folder


def test_a_new_run_never_takes_the_folder_of_another(lab):
    """Jobs of an array start in the same second."""

    def starts_at(*timestamps):
        code = f"""
times, strftime = iter({timestamps!r}), time.strftime
time.strftime = lambda form, *args: next(times) if form == '%Y_%m_%d_%H%M%S' else strftime(form, *args)
"""
        return [('slm_lab.spec.spec_util', '', 1, code)]

    assert lab.train(hooks=starts_at('2026_01_31_120000')).status == 0
    before = hashes(lab.data)
    assert lab.train(hooks=starts_at('2026_01_31_120000', '2026_01_31_120001')).status == 0
    assert sorted(p.name for p in lab.data.iterdir()) == [f'{SPEC_NAME}_2026_01_31_12000{i}' for i in (0, 1)]
    assert {k: v for k, v in hashes(lab.data).items() if k in before} == before


@pytest.mark.parametrize('predir', [None, 'x'])
def test_a_data_folder_that_is_not_there_is_one_line_and_not_tried_again(predir, lab, monkeypatch):
    """Of a link to a folder that is gone the system says that it exists."""
    lab.data.symlink_to(lab.folder / 'gone' / 'far')
    trial = new_trial(lab, monkeypatch, predir and str(lab.data / predir))
    monkeypatch.setattr('time.sleep', lambda seconds: pytest.fail('it waits'))
    with pytest.raises(LabError, match='the run folder cannot be made: File exists'):
        trial._make_folder()


def test_a_run_for_which_no_second_is_free_gives_up(lab, monkeypatch):
    """A clock that stands still, say."""
    waits = []
    monkeypatch.setattr('time.strftime', lambda form, *args: '2026_01_31_120000')
    trial = new_trial(lab, monkeypatch)
    trial.folder.mkdir(parents=True)
    monkeypatch.setattr('time.sleep', waits.append)
    with pytest.raises(LabError, match='for 1000 seconds each new run folder was there already'):
        trial._make_folder()
    assert waits.count(1) == 1000


def new_trial(lab, monkeypatch, predir=None):
    monkeypatch.setenv('LAB_DATA_DIR', str(lab.data))
    spec = spec_util.get(lab.spec_file, SPEC_NAME)
    spec['meta']['predir'] = predir
    return Trial(spec)


def test_the_history_keeps_each_start_and_resume(lab):
    lab.train_with('--stop-after', '0')
    lab.train('train@latest')
    lines = (lab.run_folder / 'info' / f'{SPEC_NAME}_history.jsonl').read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [e['event'] for e in events] == ['start', 'stop', 'resume', 'session resumed', 'finish']
    assert events[1]['frames'] == {'0': 0}
    assert (events[3]['session'], events[3]['frame']) == (0, 0)
    assert events[0]['spec']['agent'] == make_spec()['agent']  # the first spec, whatever becomes of the file
    assert events[4]['frames'] == {'0': 120}
    assert {e['random_seed'] for e in events if 'random_seed' in e} == {7}
