"""Templates: which specs `spec_params` stands for, and runs of them that are stopped, killed and resumed."""

import json
import re
import signal

import pytest
from lab_process import hashes, make_spec, read_rows

from run_lab import main
from slm_lab.agent.agent import Agent
from slm_lab.experiment import param_runs
from slm_lab.lib.errors import ResumeError, SpecError
from slm_lab.spec import spec_util, templates

TEMPLATE = {
    'agent': [{'name': 'of ${env}', 'lr': '${lr}'}],
    'env': [{'name': '${env}', 'cost': '$$5 ${env}/${lr}', 'num_envs': 2, 'gentle': None}],
    'spec_params': {'env': ['A-v0', 'B-v1'], 'lr': [0.1, '1e-3']},
}


def changed(**changes):
    return {**TEMPLATE, **changes}


# --- which specs it stands for


def test_one_spec_per_combination_the_first_key_varying_slowest():
    expanded = templates.expand('ppo', TEMPLATE)
    assert list(expanded) == ['ppo_A-v0_0.1', 'ppo_A-v0_1e-3', 'ppo_B-v1_0.1', 'ppo_B-v1_1e-3']
    assert templates.names('ppo', TEMPLATE) == list(expanded)
    assert expanded['ppo_B-v1_0.1'] == {
        'agent': [{'name': 'of B-v1', 'lr': 0.1}],
        'env': [{'name': 'B-v1', 'cost': '$5 B-v1/0.1', 'num_envs': 2, 'gentle': None}],
    }
    assert expanded['ppo_A-v0_1e-3']['agent'][0]['lr'] == '1e-3'  # a string stays one


def test_expanding_leaves_the_template_and_the_other_specs_alone():
    before = json.dumps(TEMPLATE)
    expanded = templates.expand('ppo', TEMPLATE)
    expanded['ppo_A-v0_0.1']['env'][0]['num_envs'] = 9
    assert expanded['ppo_A-v0_1e-3']['env'][0]['num_envs'] == 2
    assert json.dumps(TEMPLATE) == before


@pytest.mark.parametrize(
    ('value', 'filled', 'name'),
    [(True, True, 'true'), (3, 3, '3'), ('ALE/Pong-v5', 'ALE/Pong-v5', 'ALE-Pong-v5'), ('a b', 'a b', 'a-b')],
)
def test_a_value_keeps_its_type_and_gives_a_name_fit_for_a_folder(value, filled, name):
    spec = {'env': [{'key': '${x}', 'short': '$x', 'text': '<${x}>'}], 'spec_params': {'x': [value]}}
    text = {True: 'true'}.get(value, str(value))
    assert templates.expand('s', spec) == {
        f's_{name}': {'env': [{'key': filled, 'short': filled, 'text': f'<{text}>'}]}
    }


@pytest.mark.parametrize(
    ('spec', 'line'),
    [
        (changed(spec_params={}), 'ppo > spec_params: {} is not {key: [values]}'),
        (changed(spec_params=['A']), "ppo > spec_params: ['A'] is not {key: [values]}"),
        (changed(spec_params={'env': 'A', 'lr': [1]}), "ppo > spec_params.env: 'A' is not a list of values"),
        (changed(spec_params={'env': [], 'lr': [1]}), 'ppo > spec_params.env: [] is not a list of values'),
        (changed(spec_params={'env': ['A', None], 'lr': [1]}), 'ppo > spec_params.env: None is no value here; give'),
        (
            changed(spec_params={'env': [['A']], 'lr': [1]}),
            "ppo > spec_params.env: ['A'] is no value here; give strings",
        ),
        (changed(spec_params={'env': [''], 'lr': [1]}), "ppo > spec_params.env: '' is no value here; give strings"),
        (changed(spec_params={'e v': ['A']}), "ppo > spec_params: 'e v' cannot stand in '${…}'"),
        (
            changed(spec_params={'env': ['A'], 'lrr': [1]}),
            "ppo: '${lr}' in '${lr}' has no value in spec_params; did you mean 'lrr'? Known: env, lrr",
        ),
        (
            changed(spec_params={'env': ['A'], 'lr': [1], 'seed': [2]}),
            "ppo > spec_params.seed: no string of the spec uses '${seed}'",
        ),
        (changed(body='costs 5$'), "ppo: a '$' in 'costs 5$' begins no '${key}'; write $$ for a dollar sign"),
        (
            changed(spec_params={'env': ['A', 'A_1'], 'lr': ['1_1', '1']}),
            "ppo > spec_params: two combinations of values make the name 'ppo_A_1_1'",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else '',
)
def test_a_wrong_template_is_refused_in_one_line(spec, line):
    with pytest.raises(SpecError) as e:
        templates.expand('ppo', spec)
    assert str(e.value).startswith(line) and '\n' not in str(e.value)


# --- found by name


def tiny_template(num_cpus=1000, **changes):
    """Two envs; with 1000 CPUs per session, one runs after the other."""
    spec = make_spec(**{'max_frame': 120, 'log_frequency': 60, 'num_cpus': num_cpus, **changes})
    spec['env'][0]['name'] = '${env}'
    spec['spec_params'] = {'env': ['CartPole-v0', 'CartPole-v1']}
    return spec


@pytest.fixture
def spec_file(tmp_path):
    path = tmp_path / 'spec.json'
    path.write_text(json.dumps({'tiny': tiny_template(), 'other': make_spec()}))
    return path


def test_a_spec_of_a_template_is_found_by_its_name(spec_file):
    spec = spec_util.get(spec_file, 'tiny_CartPole-v1')
    assert (spec['name'], spec['env'][0]['name']) == ('tiny_CartPole-v1', 'CartPole-v1')
    assert 'spec_params' not in spec
    assert spec_util.template_names(spec_file, 'tiny') == ['tiny_CartPole-v0', 'tiny_CartPole-v1']
    assert spec_util.template_names(spec_file, 'other') == []
    with pytest.raises(SpecError, match=r"'tiny_CartPole-v2' is unknown; did you mean 'tiny_CartPole-v[01]'\?"):
        spec_util.get(spec_file, 'tiny_CartPole-v2')
    with pytest.raises(SpecError, match=r"'tiny' is a template; .* name one of its specs, e\.g\. tiny_CartPole-v0"):
        spec_util.get(spec_file, 'tiny')


@pytest.mark.parametrize(
    ('name', 'line'), [('../evil', r"'\.\./evil_CartPole-v0' is no name for a spec"), ('a' * 150, 'is too long a name')]
)
def test_a_template_s_name_is_checked_as_those_of_its_specs(name, line, tmp_path):
    path = tmp_path / 'spec.json'
    path.write_text(json.dumps({name: tiny_template()}))
    with pytest.raises(SpecError, match=line):
        spec_util.get_all(path, name)


def test_the_specs_of_a_template_are_spread_over_the_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv('CUDA_OFFSET', '1')
    path = tmp_path / 'spec.json'
    path.write_text(json.dumps({'tiny': tiny_template(max_session=3)}))
    specs = spec_util.get_all(path, 'tiny')
    assert [spec['name'] for spec in specs] == ['tiny_CartPole-v0', 'tiny_CartPole-v1']
    assert [spec['meta']['cuda_offset'] for spec in specs] == [1, 4]


def test_two_specs_of_one_name_are_refused(spec_file):
    spec_file.write_text(json.dumps({'tiny': tiny_template(), 'tiny_CartPole-v1': make_spec()}))
    for find in (spec_util.get_all, spec_util.get):
        name = 'tiny' if find is spec_util.get_all else 'tiny_CartPole-v1'
        with pytest.raises(SpecError, match="'tiny' and 'tiny_CartPole-v1' both make a spec named 'tiny_CartPole-v1'"):
            find(spec_file, name)
    spec_file.write_text(json.dumps({'tiny': tiny_template(), 'tiny_CartPole-v1': make_spec(), 'other': make_spec()}))
    assert spec_util.get(spec_file, 'other')['name'] == 'other'


def test_a_key_without_spec_params_is_one_line(spec_file):
    spec = tiny_template()
    del spec['spec_params']
    spec_file.write_text(json.dumps({'tiny': spec}))
    with pytest.raises(SpecError, match=r"tiny: '\$\{env\}' in '\$\{env\}' has no value in spec_params; there is no"):
        spec_util.get(spec_file, 'tiny')


# --- places


def make_run(folder):
    folder.mkdir(parents=True)
    (folder / f'{folder.name[:-18]}_spec.json').write_text('{}')


def test_latest_of_a_template_is_what_was_started_together(command, tmp_path):
    data, names = tmp_path / 'data', ['ppo_A', 'ppo_B']
    with pytest.raises(ResumeError, match="no run of template 'ppo' in"):
        param_runs.find_place('latest', 'ppo', names)
    make_run(data / 'ppo_A_2026_01_01_000000')
    make_run(data / 'ppo_C_2026_01_05_000000')
    make_run(data / 'ppo_2026_01_06_000000')  # of a plain spec that bore the name before
    place = param_runs.find_place('latest', 'ppo', names)
    assert place == data / 'ppo_2026_01_01_000000' and place.is_dir()
    recorded = data / 'ppo_2026_01_02_000000'
    recorded.mkdir()
    (recorded / 'runs.json').write_text('{}')
    make_run(data / 'ppo_B_2026_01_04_000000')  # one of the specs, run by its own name
    assert param_runs.find_place('latest', 'ppo', names) == recorded


@pytest.mark.parametrize(
    'prename', ['ppo_2026_01_01_000000', 'data/ppo_2026_01_01_000000/', 'ppo_B_2026_01_01_000000', 'absolute']
)
def test_a_template_s_runs_are_found_by_any_of_them(command, tmp_path, monkeypatch, prename):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / 'data' / 'ppo_B_2026_01_01_000000')
    prename = str(tmp_path / 'data' / 'ppo_B_2026_01_01_000000') if prename == 'absolute' else prename
    assert param_runs.find_place(prename, 'ppo', ['ppo_A', 'ppo_B']) == tmp_path / 'data' / 'ppo_2026_01_01_000000'
    for wrong in ('ppo_C_2026_01_01_000000', 'ppo_2026_01_01_000001', 'elsewhere'):
        with pytest.raises(ResumeError, match=wrong):
            param_runs.find_place(wrong, 'ppo', ['ppo_A', 'ppo_B'])


def test_a_new_place_never_is_one_where_a_run_of_the_template_lies(command, tmp_path, monkeypatch):
    times = iter(['2026_01_01_000000', '2026_01_01_000001', '2026_01_01_000002'])
    monkeypatch.setattr(param_runs.time, 'strftime', lambda form: next(times))
    monkeypatch.setattr(param_runs.time, 'sleep', lambda seconds: None)
    make_run(tmp_path / 'data' / 'ppo_2026_01_01_000000')
    make_run(tmp_path / 'data' / 'ppo_B_2026_01_01_000001')
    assert param_runs.claim('ppo', ['ppo_A', 'ppo_B']).name == 'ppo_2026_01_01_000002'


# --- runs


def stop_at(monkeypatch, call):
    """A signal at the n-th act of the agents of this process."""
    calls, act = [0], Agent.act

    def counted(*args, **kwargs):
        calls[0] += 1
        if calls[0] == call:
            signal.raise_signal(signal.SIGUSR1)
        return act(*args, **kwargs)

    monkeypatch.setattr(Agent, 'act', counted)


def run_of(data, name):
    (folder,) = [p for p in data.iterdir() if re.fullmatch(rf'{re.escape(name)}_\d{{4}}_.*', p.name)]
    return folder


def end_of(folder):
    """What two equal runs share: rows, and the nets."""
    (rows,) = folder.glob('info/*_session_df_train.csv')
    return read_rows(rows), hashes(folder, 'model/*.pt')


def test_a_template_stopped_within_its_second_spec_goes_on_there(command, spec_file, tmp_path, monkeypatch, capsys):
    data = tmp_path / 'data'
    with monkeypatch.context() as m:
        stop_at(m, 120 + 70)
        assert main([str(spec_file), 'tiny', 'train']) == 128 + signal.SIGUSR1
    out = capsys.readouterr().out
    assert '1 of 2 specs of tiny are finished' in out
    assert 'complete checkpoints: session 0 at frame 70' in out
    first, second = (run_of(data, f'tiny_CartPole-v{i}') for i in (0, 1))
    assert first.name[-17:] == second.name[-17:]
    before = hashes(first)
    (resumed,) = re.findall(r'^Resume it with: .* (train@\S+)$', out, re.MULTILINE)
    assert main([str(spec_file), 'tiny', resumed]) == 0
    output = capsys.readouterr().out
    assert 'tiny_CartPole-v0: finished before' in output and '2 of 2 specs of tiny are finished' in output
    assert hashes(first) == before
    monkeypatch.setenv('LAB_DATA_DIR', str(tmp_path / 'undisturbed'))
    assert main([str(spec_file), 'tiny_CartPole-v1', 'train']) == 0  # one spec, by its name
    assert end_of(second) == end_of(run_of(tmp_path / 'undisturbed', 'tiny_CartPole-v1'))
    assert end_of(second)[0]['frame'] == ['0', '60', '120']


def test_a_stopped_template_starts_what_is_missing_and_a_finished_one_extends(command, spec_file, tmp_path, capsys):
    data = tmp_path / 'data'
    assert main(['--stop-after', '0', str(spec_file), 'tiny', 'train']) == 0
    out = capsys.readouterr().out
    assert '0 of 2 specs of tiny are finished' in out
    (resumed,) = re.findall(r'^Resume it with: .* (train@\S+)$', out, re.MULTILINE)
    assert main([str(spec_file), 'tiny', resumed]) == 0
    assert [end_of(run_of(data, f'tiny_CartPole-v{i}'))[0]['frame'][-1] for i in (0, 1)] == ['120', '120']
    spec_file.write_text(json.dumps({'tiny': tiny_template(max_frame=180)}))
    assert main([str(spec_file), 'tiny', f'train@{run_of(data, "tiny_CartPole-v1")}']) == 0
    assert [end_of(run_of(data, f'tiny_CartPole-v{i}'))[0]['frame'][-1] for i in (0, 1)] == ['180', '180']


def test_one_spec_that_fails_does_not_lose_the_others(command, spec_file, tmp_path, capsys):
    spec = tiny_template()
    spec['spec_params']['env'].insert(0, 'CartPol-v1')
    spec_file.write_text(json.dumps({'tiny': spec}))
    assert main([str(spec_file), 'tiny', 'train']) == 2
    captured = capsys.readouterr()
    assert 'error: tiny_CartPol-v1: ' in captured.err and "did you mean 'CartPole-v1'?" in captured.err
    assert '2 of 3 specs of tiny are finished' in captured.out
    spec['spec_params']['env'] = ['CartPol-v1']
    spec_file.write_text(json.dumps({'tiny': spec}))
    before = sorted(p.name for p in (tmp_path / 'data').iterdir())
    assert main([str(spec_file), 'tiny', 'train']) == 2
    assert sorted(p.name for p in (tmp_path / 'data').iterdir()) == before  # nothing is left of what cannot begin


_SIDE_BY_SIDE = """
import multiprocessing, types
import slm_lab.experiment.child_processes as children
import slm_lab.experiment.param_runs as runs
children.multiprocessing = types.SimpleNamespace(get_context=lambda _: multiprocessing.get_context('fork'))
runs.count_cpus = lambda: 2
"""


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGTERM], ids=['kill', 'term'])
def test_specs_side_by_side_are_resumed_after_their_driver_dies(command, lab, monkeypatch, number):
    lab.spec_file.write_text(json.dumps({'tiny': tiny_template(num_cpus=1, max_frame=240)}))
    act = "mark(f'acts_{os.getpid()}'); time.sleep(0.01)"
    hooks = [('slm_lab.experiment.param_runs', '', 1, _SIDE_BY_SIDE), ('slm_lab.agent.agent', 'Agent.act', 0, act)]
    life = lab.start(lab.spec_file, 'tiny', 'train', hooks=hooks)
    life.wait_for(lambda: len(list(lab.folder.glob('acts_*'))) == 2)  # at the same time
    life.signal(number)
    life.wait()
    life.wait_for_no_process()  # what it started has saved and ended too
    assert life.status == (-number if number == signal.SIGKILL else 128 + number), life.output
    monkeypatch.setattr(param_runs, 'count_cpus', lambda: 1)  # processes of their own would take seconds to begin
    assert main([str(lab.spec_file), 'tiny', 'train@latest']) == 0
    for i in (0, 1):
        folder = run_of(lab.data, f'tiny_CartPole-v{i}')
        assert end_of(folder)[0]['frame'] == ['0', '60', '120', '180', '240']
        events = (folder / 'info' / f'tiny_CartPole-v{i}_history.jsonl').read_text()
        assert '"session resumed"' in events
