"""Environments of legacy gym, beside the numpy that is installed."""

import functools
import logging
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from env_cases import play, spec_of, through_text

from slm_lab.env import legacy_gym, make_env
from slm_lab.env.registration import make_single
from slm_lab.env.slot import probe
from slm_lab.lib.errors import SpecError

if not legacy_gym.is_installed():
    pytest.skip('needs gym', allow_module_level=True)

gym = legacy_gym.import_gym()
ROOT = Path(__file__).parents[2]


class Walk(gym.Env):
    """Five values; a random walk from the seed, ended by action 1."""

    metadata = {'render_modes': ['human', 'rgb_array'], 'render_fps': 5}
    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, scale=1.0, render_mode=None):
        self.scale, self.render_mode = scale, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=1) * self.scale
        return self.place, {}

    def step(self, action):
        self.place = self.place + self.np_random.normal(size=1) * self.scale
        return self.place, 1.0, action == 1, False, {}

    def render(self):
        return np.zeros((2, 2, 3), np.uint8)


class FourValues(gym.Env):
    """The API before 0.26: `seed`, an observation alone from `reset`, one `done`, the mode in `render`."""

    metadata = {'render.modes': ['human']}
    observation_space = gym.spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self):
        self.seeds, self.modes, self.closed, self.t = [], [], 0, 0

    def seed(self, seed=None):
        self.seeds.append(seed)
        self.random = np.random.RandomState(seed)
        return [seed]

    def reset(self):
        self.t = 0
        return np.array([self.random.randint(50)], np.float32)

    def step(self, action):
        self.t += 1
        info = {'TimeLimit.truncated': True} if action == 2 else {}
        return np.array([self.t], np.float32), 0.5, action > 0, info

    def render(self, mode='human'):
        self.modes.append(mode)

    def close(self):
        self.closed += 1


class Unseeded(FourValues):
    """Draws from the generator that gym keeps, and has no `seed` of its own."""

    seed = property()

    def reset(self):
        self.t = 0
        return self.np_random.normal(size=1).astype(np.float32)


class Spaces(gym.Env):
    def __init__(self, observation, action):
        self.observation_space, self.action_space, self.actions = observation, action, []

    def reset(self, *, seed=None, options=None):
        return np.zeros(self.observation_space.shape, self.observation_space.dtype), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.actions.append(action)
        return self.reset()[0], 0.0, False, False, {}


BOX = gym.spaces.Box(np.float32([0, -1]), np.float32([3, 5]))

for name, entry_point, limit in (
    ('LegacyWalk-v0', Walk, 3),
    ('LegacyFour-v0', FourValues, 4),
    ('LegacyUnseeded-v0', Unseeded, None),
    ('LegacySpaces-v0', Spaces, None),
    ('LegacyCartPole-v0', 'gym.envs.classic_control.cartpole:CartPoleEnv', 500),
):
    if name not in gym.envs.registration.registry:
        gym.register(name, entry_point, max_episode_steps=limit)


def inner(env):
    return env.unwrapped.env


def test_gyms_cartpole_is_gymnasiums_cartpole():
    ours, other = make_single('LegacyCartPole-v0'), gymnasium.make('CartPole-v1')
    assert 'CartPole' in type(inner(ours)).__name__ and isinstance(inner(ours), gym.Env)
    assert ours.action_space == other.action_space and ours.observation_space.shape == (4,)
    for env in (ours, other):
        env.action_space.seed(3)
    np.testing.assert_array_equal(ours.reset(seed=7)[0], other.reset(seed=7)[0])
    for _ in range(8):
        got, expected = ours.step(1)[:4], other.step(1)[:4]
        np.testing.assert_allclose(got[0], expected[0], rtol=1e-6)
        assert got[1:] == expected[1:]


def test_the_time_limit_truncates_and_max_t_comes_before_it():
    for max_t, expected in ((None, 3), (2, 2)):
        env = make_single('LegacyWalk-v0', max_t=max_t)
        assert env.spec.max_episode_steps == expected
        env.reset(seed=0)
        ends = [env.step(0)[2:4] for _ in range(expected)]
        assert ends == [(False, False)] * (expected - 1) + [(False, True)]


def test_an_end_of_its_own_terminates():
    env = make_single('LegacyWalk-v0')
    env.reset(seed=0)
    assert env.step(1)[2:4] == (True, False)


def test_a_seed_gives_one_episode_and_keywords_arrive():
    once, scaled = make_single('LegacyWalk-v0'), make_single('LegacyWalk-v0', kwargs={'scale': 10.0})
    first = once.reset(seed=5)[0]
    np.testing.assert_array_equal(once.reset(seed=5)[0], first)
    assert once.reset(seed=6)[0] != first
    np.testing.assert_allclose(scaled.reset(seed=5)[0], 10 * first)


def test_four_values_become_five():
    env = make_single('LegacyFour-v0')
    observation, info = env.reset(seed=4)
    assert inner(env).seeds == [4] and info == {}
    assert observation == np.random.RandomState(4).randint(50)
    assert env.step(0)[1:4] == (0.5, False, False)
    assert env.step(1)[1:4] == (0.5, True, False)
    env.reset(seed=4)
    assert env.step(2)[1:] == (0.5, False, True, {'TimeLimit.truncated': True})
    env.reset(seed=4)
    assert [env.step(0)[2:4] for _ in range(4)][-1] == (False, True)
    env.close()
    assert inner(env).closed == 1


def test_the_generator_that_gym_keeps_is_seeded_where_nothing_else_takes_a_seed():
    env = make_single('LegacyUnseeded-v0')
    first = env.reset(seed=3)[0]
    np.testing.assert_array_equal(env.reset(seed=3)[0], first)
    assert env.reset(seed=4)[0] != first


def test_the_old_render_is_called_with_its_mode_and_the_new_one_by_itself():
    old = make_single('LegacyFour-v0', render=True)
    old.reset(seed=0)
    old.step(0)
    assert inner(old).modes == ['human', 'human']
    quiet = make_single('LegacyFour-v0')
    quiet.reset(seed=0)
    assert inner(quiet).modes == []
    new = make_single('LegacyWalk-v0', kwargs={'render_mode': 'rgb_array'})
    new.reset(seed=0)
    assert inner(new).render_mode == 'rgb_array' and new.render().shape == (2, 2, 3)


@pytest.mark.parametrize(
    'legacy, expected',
    [
        (BOX, gymnasium.spaces.Box(np.array([0, -1]), np.array([3, 5]), dtype=np.float32)),
        (gym.spaces.Box(0, 255, (2, 3, 1), np.uint8), gymnasium.spaces.Box(0, 255, (2, 3, 1), np.uint8)),
        (gym.spaces.Discrete(4), gymnasium.spaces.Discrete(4)),
        (gym.spaces.Discrete(4, start=-1), gymnasium.spaces.Discrete(4, start=-1)),
        (gym.spaces.MultiDiscrete([2, 5]), gymnasium.spaces.MultiDiscrete([2, 5])),
        (gym.spaces.MultiBinary(3), gymnasium.spaces.MultiBinary(3)),
    ],
    ids=str,
)
def test_spaces_are_converted(legacy, expected):
    assert legacy_gym.convert_space(legacy) == expected


@pytest.mark.parametrize(
    'action, agents, envs',
    [
        (gym.spaces.Discrete(3, start=5), 2, 7),
        (gym.spaces.MultiDiscrete([2, 5]), [1, 4], [1, 4]),
        (gym.spaces.MultiBinary(3), [1, 0, 1], [1, 0, 1]),
        (BOX, [1.5, 2.0], [1.5, 2.0]),
    ],
    ids=str,
)
def test_the_environment_gets_actions_of_its_own_space(action, agents, envs):
    env = make_env(spec_of('LegacySpaces-v0', observation=BOX, action=action, resume='replay'), seed=0)
    env.reset()
    env.step(np.array([agents]))
    np.testing.assert_array_equal(inner(env.unwrapped.slots[0].env).actions, [envs])


@pytest.mark.parametrize(
    'observation, action, line',
    [
        (gym.spaces.Dict(a=BOX), BOX, "'LegacySpaces-v0' has observations of type Dict.*; supported are Box"),
        (gym.spaces.Discrete(3), BOX, r'has observations of type Discrete\(3\); supported are Box'),
        (BOX, gym.spaces.Tuple([BOX]), 'has actions of type Tuple.*; supported are Discrete, Box, Multi'),
    ],
    ids=['dict', 'discrete', 'tuple'],
)
def test_other_spaces_are_refused(observation, action, line):
    with pytest.raises(SpecError, match=line):
        make_single('LegacySpaces-v0', kwargs={'observation': observation, 'action': action})


@pytest.mark.parametrize('name', ['LegacyCartPole-v0', 'LegacyWalk-v0', 'LegacyFour-v0', 'LegacyUnseeded-v0'])
def test_rewind_and_replay_is_exact(name):
    assert probe(functools.partial(make_single, name), 3) == 'replay'
    spec = spec_of(name, num_envs=2, resume='replay', vector='sync')
    whole, part, resumed = make_env(spec, seed=9), make_env(spec, seed=9), make_env(spec, seed=1)
    whole.reset()
    part.reset()
    expected = play(whole, 0, 30)
    play(part, 0, 14)
    resumed.load_state_dict(through_text(part.state_dict()))
    assert resumed.restarted == []
    for got, wanted in zip(play(resumed, 14, 30), expected[14:], strict=True):
        for key, value in wanted.items():
            np.testing.assert_array_equal(got[key], value, err_msg=key)


def test_a_wrong_keyword_is_named():
    with pytest.raises(SpecError, match=r"env\.0\.gravity: 'LegacyWalk-v0' does not take this keyword"):
        make_single('LegacyWalk-v0', kwargs={'gravity': 1})


def test_an_unknown_name_gets_those_of_gym_as_well():
    with pytest.raises(SpecError, match="did you mean 'LegacyWalk-v0'"):
        make_single('LegacyWalks-v0')


def test_without_gym_an_unknown_name_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(legacy_gym, 'is_installed', lambda: False)
    with pytest.raises(SpecError, match=r"resembles none .* legacy gym: pip install '\.\[gym\]'"):
        make_single('qqqqqqqqqqqqqq')


def test_another_gym_is_refused_with_the_version_that_fits(monkeypatch):
    monkeypatch.setattr(gym, '__version__', '0.21.0')
    with pytest.raises(
        SpecError, match=r"gym 0\.21\.0 is installed; the lab adapts gym 0\.26: pip install '\.\[gym\]'"
    ):
        make_single('LegacyWalk-v0')


def test_a_class_of_gym_that_was_registered_with_gymnasium_is_explained(monkeypatch):
    spec = gymnasium.envs.registration.EnvSpec('Mixed-v0', Walk)
    monkeypatch.setitem(gymnasium.registry, 'Mixed-v0', spec)
    with pytest.raises(SpecError, match="'Mixed-v0' is no gymnasium.Env; one of legacy gym is registered with gym.reg"):
        make_single('Mixed-v0')


FRESH = """
import sys
sys.path[:0] = {path}
from slm_lab.env.registration import make_single
from slm_lab.lib.errors import SpecError
make_single('CartPole-v1')
print('gym' in sys.modules)
print(make_single('LegacyUser-v0', module='legacy_user_env').spec.max_episode_steps)
try:
    make_single('LegacyUsers-v0', module='legacy_user_env')
except SpecError as e:
    print(e)
"""

USERS = """
from slm_lab.env.legacy_gym import import_gym
gym = import_gym()
from gym.envs.classic_control import PendulumEnv
gym.register('LegacyUser-v0', PendulumEnv, max_episode_steps=9)
"""


def test_gym_is_imported_without_a_word_when_it_is_needed_and_a_users_module_may_register_with_it(tmp_path):
    (tmp_path / 'legacy_user_env.py').write_text(USERS)
    code = FRESH.format(path=[str(tmp_path), str(ROOT)])
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    line = (
        "env.0.name: environment 'LegacyUsers-v0' is unknown: module 'legacy_user_env' registers LegacyUser-v0; "
        "did you mean 'LegacyUser-v0'?"
    )
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, ['False', '9', line], '')


def test_nothing_is_logged_on_the_way(caplog, recwarn):
    with caplog.at_level(logging.INFO):
        env = make_env(spec_of('LegacyWalk-v0'), seed=0)
        env.reset()
        env.step([0])
    assert caplog.records == [] and recwarn.list == []
