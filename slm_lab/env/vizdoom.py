"""ViZDoom's environments as images, channels first, and the id that old specs have for all of them.

Its wheel registers `Vizdoom<Scenario>-v1` (one button at a time) and `Vizdoom<Scenario>-MultiBinary-v1` at import. All
its settings are keywords, e.g. `"screen_resolution": "RES_160X120", "screen_format": "GRAY8", "frame_skip": 4`.
"""

import contextlib
import os
import tempfile

import gymnasium
import numpy as np
from gymnasium import spaces

from slm_lab.lib.errors import SpecError, suggest

OLD_ID = 'vizdoom-v0'

# `cfg_name` of an old spec -> the scenario's name in today's id
SCENARIOS = {
    'basic': 'Basic',
    'deadly_corridor': 'DeadlyCorridor',
    'defend_the_center': 'DefendCenter',
    'defend_the_line': 'DefendLine',
    'health_gathering': 'HealthGathering',
    'health_gathering_supreme': 'HealthGatheringSupreme',
    'my_way_home': 'MyWayHome',
    'predict_position': 'PredictPosition',
    'take_cover': 'TakeCover',
}


def current_scenario(cfg_name, where):
    """(id, keywords) of today for an old spec, with its actions: every button on or off, by itself.

    Raises: SpecError for a missing or unknown `cfg_name`.
    """
    if cfg_name is None:
        raise SpecError(f"{where}: '{OLD_ID}' needs the key 'cfg_name'; known: {', '.join(SCENARIOS)}")
    scenario = SCENARIOS.get(cfg_name.removesuffix('.cfg'))
    if scenario is None:
        raise SpecError(f"{where}.cfg_name: '{cfg_name}' is unknown{suggest(cfg_name, SCENARIOS)}")
    return f'Vizdoom{scenario}-MultiBinary-v1', {'use_multi_binary_action_space': False}


def is_vizdoom(name):
    return name.startswith('Vizdoom')


def make_vizdoom(name, max_t, kwargs):
    """One environment that observes the screen alone: (channels, height, width) uint8."""
    import vizdoom.gymnasium_wrapper  # noqa: F401  registers the ids

    return Screen(gymnasium.make(name, max_episode_steps=max_t, disable_env_checker=True, **kwargs))


class Screen(gymnasium.Wrapper):
    """The image out of the dict of observations.

    Doom shows nothing after the last step of an episode, so the screen before it stands for it: where the time limit
    cut the episode, the value of that screen is what goes on. The game's own time limit, which it reports as both,
    truncates and does not terminate.
    """

    def __init__(self, env):
        super().__init__(env)
        height, width, channels = env.observation_space['screen'].shape
        self.observation_space = spaces.Box(0, 255, (channels, height, width), np.uint8)
        self._screen = None
        self._folder = tempfile.TemporaryDirectory(prefix='vizdoom_', ignore_cleanup_errors=True)

    def reset(self, *, seed=None, options=None):
        if self.env.unwrapped.game.is_running():
            observation, info = self.env.reset(seed=seed, options=options)
        else:
            # the game begins as a process of its own, which leaves settings and a folder in its current directory
            with _current_directory(self._folder.name):
                observation, info = self.env.reset(seed=seed, options=options)
        self._screen = observation['screen'].transpose(2, 0, 1)
        return self._screen, info

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        if self.env.unwrapped.state is not None:
            self._screen = observation['screen'].transpose(2, 0, 1)
        return self._screen, reward, terminated and not truncated, truncated, info

    def close(self):
        self.env.close()
        self._folder.cleanup()


@contextlib.contextmanager
def _current_directory(folder):
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
