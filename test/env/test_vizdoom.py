"""ViZDoom through the lab; the games themselves are played only where its package is installed."""

import importlib.util
import logging

import numpy as np
import pytest
from env_cases import spec_of

from slm_lab.env import check_env_spec, make_env, what_is_made
from slm_lab.env.vizdoom import SCENARIOS, current_scenario
from slm_lab.lib.errors import SpecError

needs_vizdoom = pytest.mark.skipif(importlib.util.find_spec('vizdoom') is None, reason='needs vizdoom')
SMALL = {'screen_resolution': 'RES_160X120', 'frame_skip': 4}


def test_an_old_spec_is_one_of_todays_with_the_old_actions():
    old = {'name': 'vizdoom-v0', 'cfg_name': 'defend_the_center', 'max_t': 50, 'frame_skip': 2}
    kwargs = {'use_multi_binary_action_space': False, 'frame_skip': 2}
    assert what_is_made(old) == ('VizdoomDefendCenter-MultiBinary-v1', 50, kwargs)
    assert current_scenario('basic.cfg', 'env.0')[0] == 'VizdoomBasic-MultiBinary-v1'


@pytest.mark.parametrize(
    'env, line',
    [
        ({}, "x: 'vizdoom-v0' needs the key 'cfg_name'; known: basic, deadly_corridor"),
        ({'cfg_name': 'take_covers'}, r"x\.cfg_name: 'take_covers' is unknown; did you mean 'take_cover'"),
    ],
)
def test_a_scenario_that_is_not_there_is_refused(env, line):
    with pytest.raises(SpecError, match=line):
        check_env_spec({'name': 'vizdoom-v0', 'max_frame': 10, **env}, 'x')


@needs_vizdoom
def test_every_scenario_of_old_specs_is_registered():
    import gymnasium
    import vizdoom.gymnasium_wrapper  # noqa: F401

    assert [name for name in SCENARIOS if current_scenario(name, 'x')[0] not in gymnasium.registry] == []


@needs_vizdoom
def test_the_screen_comes_channels_first_and_an_episode_under_way_comes_back(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    spec = spec_of('vizdoom-v0', cfg_name='basic', resume='replay', **SMALL)
    with caplog.at_level(logging.INFO, logger='slm_lab.env'):
        env = make_env(spec, seed=1)
    assert "env 'vizdoom-v0' is an old id, running 'VizdoomBasic-MultiBinary-v1'" in caplog.text
    assert env.observation_space.shape == (3, 120, 160) and env.observation_space.dtype == np.uint8
    assert env.action_space.nvec.tolist() == [2, 2, 2]
    first = env.reset()
    assert first.shape == (1, 3, 120, 160) and first.std() > 0
    actions = np.array([[[1, 0, 0]], [[0, 1, 0]], [[0, 0, 0]]])
    for action in actions:
        env.step(action)
    again = make_env(spec, seed=2)
    again.load_state_dict(env.state_dict())
    assert again.restarted == []
    np.testing.assert_array_equal(again.state, env.state)
    expected, got = (e.step(actions[0]).next_state for e in (env, again))
    np.testing.assert_array_equal(got, expected)
    env.close()
    again.close()
    assert list(tmp_path.iterdir()) == []


@needs_vizdoom
def test_the_games_time_limit_truncates_and_keeps_the_last_screen():
    env = make_env(spec_of('VizdoomBasic-v1', resume='replay', episode_timeout=20, **SMALL), seed=1)
    env.reset()
    for _ in range(20):
        before = env.state
        step = env.step([0])
        if step.truncated[0] or step.terminated[0]:
            break
    assert (step.truncated[0], step.terminated[0]) == (True, False)
    np.testing.assert_array_equal(step.next_state, before)
    env.close()
