"""A user's own environment, named by the key `module`: the worked example of docs/envs.md, and what goes wrong."""

import json
import re
import sys
from pathlib import Path

import gymnasium
import pandas as pd
import pytest
from env_cases import spec_of

from slm_lab.env import check_env_spec, make_env, make_raw, registration, what_is_made
from slm_lab.env.registration import make_single
from slm_lab.lib.errors import ResumeError, SpecError
from slm_lab.lib.registry import ENV_TABLES
from slm_lab.spec import resume_rules

DOCS = (Path(__file__).parents[2] / 'docs' / 'envs.md').read_text()
(EXAMPLE,) = re.findall(r'```python\n(import gymnasium\n.*?)```', DOCS, re.DOTALL)
(SPEC,) = [json.loads(text) for text in re.findall(r'```json\n(\{.*?)```', DOCS, re.DOTALL)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, with nothing of it left in this process afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', list(sys.path))
    monkeypatch.setattr(registration, '_registered_by', {})
    known, ids = set(sys.modules), set(gymnasium.registry)
    yield tmp_path
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], '__file__', None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]
    for name in set(gymnasium.registry) - ids:
        del gymnasium.registry[name]


def write_example(folder, package):
    (folder / package).mkdir()
    (folder / package / 'corridor.py').write_text(EXAMPLE)


def spec_with(**env):
    spec = json.loads(json.dumps(SPEC))
    spec['dqn_corridor']['env'][0].update(env)
    spec['dqn_corridor']['meta'].update(log_frequency=40, eval_frequency=40, random_seed=3)
    return json.dumps(spec)


def frames(lab, session):
    (path,) = lab.run_folder.glob(f'info/*_s{session}_session_df_train.csv')
    return pd.read_csv(path)['frame'].tolist()


def test_the_worked_example_trains_in_two_sessions_and_is_resumed_in_the_middle_of_its_episodes(lab):
    write_example(lab.folder, 'my_envs')
    lab.spec_file.write_text(spec_with(max_frame=120, vector='async'))
    life = lab.run(lab.spec_file, 'dqn_corridor', 'train')
    assert life.status == 0, life.output
    lab.spec_file.write_text(spec_with(max_frame=200, vector='async'))
    life = lab.run(lab.spec_file, 'dqn_corridor', 'train@latest')
    assert life.status == 0, life.output
    assert len(re.findall('from the checkpoint of frame 120', life.output)) == 2
    assert 'cannot be brought back' not in life.output
    assert [frames(lab, session) for session in (0, 1)] == [[0, 40, 80, 120, 160, 200]] * 2


def test_the_key_is_checked_and_belongs_to_the_run():
    env_spec = SPEC['dqn_corridor']['env'][0]
    assert check_env_spec(env_spec, 'env.0') == []
    with pytest.raises(SpecError, match=r'env\.0\.module: 3 is not of the type wanted here: str or null'):
        check_env_spec({**env_spec, 'module': 3}, 'env.0')
    was, now = ({'env': ENV_TABLES.get('env')({**env_spec, **c}, 'e')[0]} for c in ({}, {'module': 'other'}))
    with pytest.raises(ResumeError, match=r'env\.module +\| "my_envs\.corridor" +\| "other"'):
        resume_rules.compare(was, now)


def test_the_module_is_imported_from_the_current_directory_for_every_way_of_making(folder):
    write_example(folder, 'envs_here')
    spec = spec_of('Corridor-v0', module='envs_here.corridor', length=4, resume='replay')
    env = make_env(spec, seed=0)
    assert env.unwrapped.slots[0].env.unwrapped.length == 4
    assert make_raw(spec['env'][0]).unwrapped.length == 4
    assert what_is_made(spec['env'][0]) == ('Corridor-v0', None, {'length': 4})


def test_what_a_module_registers_is_no_old_id(folder):
    (folder / 'old_name.py').write_text(EXAMPLE.replace('Corridor-v0', 'LunarLander-v2'))
    env = make_env(spec_of('LunarLander-v2', module='old_name', resume='replay'), seed=0)
    assert type(env.unwrapped.slots[0].env.unwrapped).__name__ == 'Corridor'


def test_a_module_that_is_nowhere_says_where_it_was_looked_for(folder):
    with pytest.raises(SpecError) as e:
        make_single('My-v0', module='no_such.place', where='mine > env.0')
    line = str(e.value)
    start = f"mine > env.0.module: module 'no_such.place' is neither in the current directory ({folder}) nor in "
    assert line.startswith(start) and sys.path[-2] in line and '\n' not in line


@pytest.mark.parametrize(
    'code, line',
    [
        ('import not_there_at_all', "module: 'broken_env' imports 'not_there_at_all', which is not installed"),
        ('x = 1 / 0', "module: 'broken_env' fails at import: ZeroDivisionError: division by zero"),
        ('def broken(:', "module: 'broken_env' fails at import: SyntaxError"),
        ('x = 1', "'Mine-v0' is unknown: module 'broken_env' registers no environment"),
        (
            "import gymnasium\nfor n in ('Mine-v1', 'Other-v0'):\n    gymnasium.register(n, 'broken_env:A')",
            "'Mine-v0' is no longer made: .* Please use `Mine-v1` instead",
        ),
        (
            "import gymnasium\nfor n in ('Mined-v0', 'Other-v0'):\n    gymnasium.register(n, 'broken_env:A')",
            "'Mine-v0' is unknown: module 'broken_env' registers Mined-v0, Other-v0; did you mean 'Mined-v0'",
        ),
    ],
    ids=['missing import', 'error', 'syntax', 'nothing', 'version', 'names'],
)
def test_a_module_that_does_not_do_is_explained_in_one_line(code, line, folder):
    (folder / 'broken_env.py').write_text(code)
    with pytest.raises(SpecError, match=line) as e:
        make_single('Mine-v0', module='broken_env')
    assert '\n' not in str(e.value)


def test_a_second_making_lists_the_same_names(folder):
    (folder / 'twice_env.py').write_text("import gymnasium\ngymnasium.register('Twice-v0', 'twice_env:A')")
    for _ in range(2):
        with pytest.raises(SpecError, match="module 'twice_env' registers Twice-v0"):
            make_single('Thrice-v0', module='twice_env')
