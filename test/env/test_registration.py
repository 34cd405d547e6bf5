import errno
import importlib
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from env_cases import spec_of
from gymnasium import spaces

from slm_lab.env import atari, make_env, registration
from slm_lab.env.registration import current_id, make_single
from slm_lab.lib.errors import MachineError, SpecError

SETUP = Path(__file__).parents[2] / 'setup.py'


def test_an_old_id_runs_as_the_current_one_with_one_line(caplog):
    with caplog.at_level(logging.INFO, logger='slm_lab.env'):
        env = make_env(spec_of('Pendulum-v0', num_envs=2, resume='fresh'), seed=0)
        env.reset()
    assert env.unwrapped.slots[0].env.spec.id == 'Pendulum-v1'
    assert [r.getMessage() for r in caplog.records] == ["env 'Pendulum-v0' is an old id, running 'Pendulum-v1'"]


def test_every_old_id_leads_to_one_that_is_made():
    missing = [new for new in registration.CURRENT_IDS.values() if new not in gymnasium.registry]
    assert missing == []
    still_made = [old for old in registration.CURRENT_IDS if registration.current_id(old) == old]
    assert still_made == []


@pytest.mark.parametrize(
    'old, new',
    [
        ('LunarLander-v2', 'LunarLander-v3'),
        ('BipedalWalker-v2', 'BipedalWalker-v3'),
        ('Hopper-v2', 'Hopper-v5'),
        ('Ant-v3', 'Ant-v5'),
        ('Reacher-v2', 'Reacher-v5'),
        ('Hopper-v4', 'Hopper-v4'),  # is made as ever
        ('Hopper-v5', 'Hopper-v5'),
    ],
)
def test_an_old_id_is_replaced_only_where_nothing_makes_it(old, new):
    assert current_id(old) == new


def test_an_old_id_that_another_package_makes_stays(monkeypatch):
    spec = gymnasium.envs.registration.EnvSpec('Hopper-v2', 'elsewhere.mujoco:HopperEnv')
    monkeypatch.setitem(gymnasium.registry, 'Hopper-v2', spec)
    assert current_id('Hopper-v2') == 'Hopper-v2'


@pytest.mark.parametrize(
    'name, package', [('LunarLander-v2', 'Box2D'), ('BipedalWalker-v2', 'Box2D'), ('Hopper-v2', 'mujoco')]
)
def test_environments_of_the_extras_run(name, package):
    pytest.importorskip(package)
    env = make_env(spec_of(name, num_envs=2, vector='sync', resume='replay'), seed=0)
    state = env.reset()
    step = env.step(_actions(env))
    assert state.dtype == np.float32 and np.isfinite(step.next_state).all() and np.isfinite(step.reward).all()
    env.close()


def _actions(env):
    return np.stack([env.action_space.sample() for _ in range(env.num_envs)])


@pytest.mark.parametrize(
    'name, line',
    [
        ('RoboschoolHopper-v1', "'RoboschoolHopper-v1' no longer exists; its place is taken by 'Hopper-v5'"),
        ('RoboschoolHumanoidFlagrunHarder-v1', "taken by 'Humanoid-v5'"),
        ('UnityHallway-v0', "'UnityHallway-v0' is one of Unity, .* 'Ant-v5'"),
        ('gridworld', "'gridworld' is one of Unity"),
    ],
)
def test_environments_that_are_gone_name_what_takes_their_place(name, line):
    with pytest.raises(SpecError, match=line) as e:
        make_single(name)
    assert '\n' not in str(e.value)


def test_every_replacement_of_a_gone_environment_is_there():
    assert atari.register()
    assert [new for new in registration.GONE.values() if new not in gymnasium.registry] == []


def test_cartpole_v0_stays_and_lasts_200_steps(recwarn):
    assert current_id('CartPole-v0') == 'CartPole-v0'
    assert make_single('CartPole-v0').spec.max_episode_steps == 200
    assert not recwarn.list


def test_max_t_truncates():
    env = make_single('CartPole-v1', max_t=2)
    env.reset(seed=0)
    assert [env.step(0)[2:4] for _ in range(2)] == [(False, False), (False, True)]


def test_an_unknown_name_gets_the_close_ones_and_not_all():
    with pytest.raises(SpecError) as e:
        make_single('CartPool-v1', where='mine > env.0')
    line = str(e.value)
    assert line.startswith("mine > env.0.name: environment 'CartPool-v1' is unknown; did you mean 'CartPole-v1'?")
    assert 'CartPole-v0' in line and 'Pendulum-v1' not in line


def test_the_nearest_match_does_not_mind_upper_and_lower_case():
    with pytest.raises(SpecError, match="did you mean 'MountainCar-v0'"):
        make_single('mountaincar-v0')


def test_an_unknown_name_that_resembles_nothing():
    with pytest.raises(SpecError, match='resembles none'):
        make_single('qqqqqqqqqqqqqq')


def test_a_missing_package_names_the_pip_extra(monkeypatch):
    def entry_point():
        raise gymnasium.error.DependencyNotInstalled('X is not installed, run `pip install "gymnasium[box2d]"`')

    monkeypatch.setitem(gymnasium.registry, 'Absent-v0', gymnasium.envs.registration.EnvSpec('Absent-v0', entry_point))
    with pytest.raises(SpecError, match=r"'Absent-v0' needs a package .*: pip install '\.\[box2d\]'"):
        make_single('Absent-v0')


@pytest.mark.parametrize(
    'package, extra',
    [('mujoco', 'mujoco'), ('imageio', 'mujoco'), ('Box2D', 'box2d'), ('cv2', 'atari'), ('vizdoom', 'vizdoom')],
)
def test_a_package_that_is_not_there_names_the_extra_of_the_lab(package, extra, hide, monkeypatch):
    def entry_point():
        importlib.import_module(f'{package}.inside')

    hide(package)
    monkeypatch.setitem(gymnasium.registry, 'Absent-v0', gymnasium.envs.registration.EnvSpec('Absent-v0', entry_point))
    with pytest.raises(SpecError, match=rf"'Absent-v0' needs '{package}': pip install '\.\[{extra}\]'"):
        make_single('Absent-v0')


def test_every_extra_that_an_error_names_is_one_of_setup():
    assert set(registration.EXTRA_OF.values()) <= set(re.findall(r"^    '(\w+)': \[", SETUP.read_text(), re.MULTILINE))


def test_the_env_room_imports_no_package_of_an_extra():
    packages = set(registration.EXTRA_OF)
    code = f'import sys, slm_lab.env; print(sorted({packages} & set(sys.modules)))'
    done = subprocess.run([sys.executable, '-c', code], cwd=SETUP.parent, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == '[]'


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(SpecError, match="'no_such_module:My-v0' cannot be imported.*no_such_module"):
        make_single('no_such_module:My-v0')


def test_a_keyword_is_passed_on():
    assert make_single('Pendulum-v1', kwargs={'g': 9.81}).unwrapped.g == 9.81


def test_a_keyword_that_the_environment_does_not_take_is_named():
    with pytest.raises(SpecError, match=r"env\.0\.gravity: 'CartPole-v1' does not take this keyword"):
        make_single('CartPole-v1', kwargs={'gravity': 1})


class Demanding(gymnasium.Env):
    """Fails in its `__init__` by the error that it is given, or lacks a space."""

    def __init__(self, error=None, lacks=None, size=4):
        if error is not None:
            raise error
        all_spaces = {'observation_space': spaces.Box(-1.0, 1.0, (size,)), 'action_space': spaces.Discrete(2)}
        for key, space in all_spaces.items():
            if key != lacks:
                setattr(self, key, space)


@pytest.fixture
def demanding(monkeypatch):
    entry = gymnasium.envs.registration.EnvSpec('Demanding-v0', Demanding)
    monkeypatch.setitem(gymnasium.registry, 'Demanding-v0', entry)


@pytest.mark.parametrize(
    'error, text',
    [
        (ValueError('size is\n5, not 4'), 'ValueError: size is 5, not 4'),
        (KeyError('easy'), "KeyError: 'easy'"),
        (AssertionError(), 'AssertionError'),
        (TypeError('a number is wanted'), 'TypeError: a number is wanted'),
        (OSError('File walker.xml does not exist'), 'OSError: File walker.xml does not exist'),  # as MuJoCo's say it
        (FileNotFoundError(errno.ENOENT, 'No such file', 'a.xml'), r"FileNotFoundError: .*'a\.xml'"),
        (ZeroDivisionError('division'), 'ZeroDivisionError: division'),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else '',
)
def test_an_error_in_making_an_environment_is_one_line_with_its_keywords(error, text, demanding):
    kwargs = {'error': error, 'size': 5}
    with pytest.raises(SpecError) as told:
        make_single('Demanding-v0', kwargs=kwargs, where='mine > env.0')
    start = re.escape("mine > env.0.name: environment 'Demanding-v0' cannot be made with error ")
    pattern = rf'{start}.*, size 5: {text} \(test_registration\.py:\d+ in __init__\)'
    assert re.fullmatch(pattern, str(told.value), re.DOTALL), told.value


def test_a_value_that_the_environment_refuses_is_told():
    pytest.importorskip('Box2D')
    with pytest.raises(SpecError) as told:
        make_single('LunarLander-v3', kwargs={'gravity': 5.0})
    line = str(told.value)
    assert "environment 'LunarLander-v3' cannot be made with gravity 5.0: AssertionError: gravity" in line
    assert '\n' not in line


def test_what_the_machine_is_short_of_is_no_error_of_the_spec(demanding):
    """A shortage of memory goes on as it is, to those who know what was needed."""
    with pytest.raises(MachineError, match=r"'Demanding-v0' cannot be made with .*Too many open files"):
        make_single('Demanding-v0', kwargs={'error': OSError(errno.EMFILE, os.strerror(errno.EMFILE))})
    with pytest.raises(MemoryError):
        make_single('Demanding-v0', kwargs={'error': MemoryError()})


@pytest.mark.parametrize('key', ['observation_space', 'action_space'])
def test_an_environment_without_a_space_is_refused(key, demanding):
    with pytest.raises(SpecError, match=rf"env\.0\.name: 'Demanding-v0' has no {key}, which its __init__ or its class"):
        make_single('Demanding-v0', kwargs={'lacks': key})


def test_a_discrete_observation_is_refused_with_what_is_supported():
    with pytest.raises(SpecError, match=r"'Tabular-v0' has observations of type Discrete\(16\); supported are Box"):
        make_single('Tabular-v0')


def test_a_window_is_wanted_without_a_display(caplog, monkeypatch):
    for variable in ('DISPLAY', 'WAYLAND_DISPLAY'):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(registration.sys, 'platform', 'linux')
    with caplog.at_level(logging.INFO, logger='slm_lab.env'):
        env = make_env(spec_of('CartPole-v1'), seed=0, render=True)
    assert env.unwrapped.slots[0].env.render_mode is None
    assert len(caplog.records) == 1 and 'no display' in caplog.text


def test_only_the_first_slot_is_shown(monkeypatch):
    monkeypatch.setenv('DISPLAY', ':0')
    env = make_env(spec_of('Count-v0', num_envs=2), seed=0, render=True)
    modes = [slot.env.spec.kwargs.get('render_mode') for slot in env.unwrapped.slots]
    assert modes == ['human', None]
