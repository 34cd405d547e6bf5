"""From the name in a spec to a gymnasium environment, with errors that say what to do."""

import difflib
import logging
import os
import re
import sys
import warnings

import gymnasium
from gymnasium import spaces

from slm_lab.lib.errors import SpecError

logger = logging.getLogger('slm_lab.env')

# ids that gymnasium no longer makes -> the same task today
CURRENT_IDS = {
    'Pendulum-v0': 'Pendulum-v1',
    'Acrobot-v0': 'Acrobot-v1',
    'LunarLander-v2': 'LunarLander-v3',
    'LunarLanderContinuous-v2': 'LunarLanderContinuous-v3',
    'BipedalWalker-v2': 'BipedalWalker-v3',
    'BipedalWalkerHardcore-v2': 'BipedalWalkerHardcore-v3',
    'CarRacing-v0': 'CarRacing-v3',
    'CarRacing-v1': 'CarRacing-v3',
    'CarRacing-v2': 'CarRacing-v3',
    'Taxi-v3': 'Taxi-v4',
}

ACTION_SPACES = (spaces.Discrete, spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)

_REFUSED_KEYWORD = re.compile(r"(?:unexpected keyword argument|multiple values for (?:keyword )?argument) '(\w+)'")
_PIP_EXTRA = re.compile(r'gymnasium\[[\w-]+\]')
_ATARI = re.compile(r'^ALE/|NoFrameskip-v\d+$')


def current_id(name):
    """The id to make for the name in a spec; an old one is mapped to today's, with one log line."""
    current = CURRENT_IDS.get(name)
    if current is None or name in gymnasium.registry:
        return name
    logger.info("env '%s' is an old id, running '%s'", name, current)
    return current


def can_display():
    """Whether a window can be opened here."""
    if sys.platform in ('darwin', 'win32'):
        return True
    return bool(os.environ.get('DISPLAY') or os.environ.get('WAYLAND_DISPLAY'))


def make_single(name, max_t=None, kwargs=None, render=False, where='env.0'):
    """Makes one environment.

    Args:
        name: a gymnasium id, also as `module:id`, where the module registers it.
        max_t: steps after which an episode is truncated; None leaves what the id was registered with.
        kwargs: keyword arguments for `gymnasium.make`.
        render: open a window.
        where: the place of the env spec, for errors.
    Raises: SpecError for an unknown id, a missing package, a refused keyword or a space that is not supported.
    """
    kwargs = dict(kwargs or {})
    if render:
        kwargs.setdefault('render_mode', 'human')
    try:
        with warnings.catch_warnings():
            # a spec names its version on purpose
            warnings.filterwarnings('ignore', message='.*is out of date', category=DeprecationWarning)
            env = gymnasium.make(name, max_episode_steps=max_t, disable_env_checker=True, **kwargs)
    except gymnasium.error.DeprecatedEnv as e:
        raise SpecError(f"{where}.name: environment '{name}' is no longer made: {e}") from None
    except gymnasium.error.UnregisteredEnv as e:
        raise SpecError(_unknown(name, where)) from e
    except gymnasium.error.DependencyNotInstalled as e:
        raise SpecError(_missing_package(name, str(e), where)) from e
    except ImportError as e:
        raise SpecError(f"{where}.name: environment '{name}' cannot be imported: {_one_line(e)}") from e
    except gymnasium.error.Error as e:
        raise SpecError(f"{where}.name: environment '{name}' cannot be made: {_one_line(e)}") from e
    except TypeError as e:
        refused = _REFUSED_KEYWORD.search(str(e))
        if refused is None or refused.group(1) not in kwargs:
            raise
        raise SpecError(f"{where}.{refused.group(1)}: '{name}' does not take this keyword") from e
    try:
        check_spaces(env, name, where)
    except SpecError:
        env.close()
        raise
    return env


def check_spaces(env, name, where):
    """Raises: SpecError for spaces that the lab has no use for."""
    observation, action = env.observation_space, env.action_space
    if not isinstance(observation, spaces.Box) or not 1 <= len(observation.shape) <= 3:
        raise SpecError(
            f"{where}.name: '{name}' has observations of type {observation}; supported are Box spaces: vectors "
            f'(one axis) and images (two or three)'
        )
    if not isinstance(action, ACTION_SPACES):
        known = ', '.join(space.__name__ for space in ACTION_SPACES)
        raise SpecError(f"{where}.name: '{name}' has actions of type {action}; supported are {known}")


def _unknown(name, where):
    if _ATARI.search(name):
        return f"{where}.name: '{name}' is an Atari game; these are not supported yet"
    module, _, bare = name.rpartition(':')
    prefix = f'{module}:' if module else ''
    lowered = {known.lower(): known for known in gymnasium.registry}
    close = difflib.get_close_matches(bare.lower(), lowered, n=6, cutoff=0.6)
    line = f"{where}.name: environment '{name}' is unknown"
    if not close:
        return f'{line} and resembles none of the {len(lowered)} that gymnasium has registered'
    others = ', '.join(lowered[c] for c in close)
    return f"{line}; did you mean '{prefix}{lowered[close[0]]}'? Close ones: {others}"


def _missing_package(name, message, where):
    extra = _PIP_EXTRA.search(message)
    if extra is None:
        return f"{where}.name: environment '{name}' needs a package that is not installed: {_one_line(message)}"
    return f"{where}.name: environment '{name}' needs a package that is not installed: pip install '{extra.group()}'"


def _one_line(message):
    return ' '.join(str(message).split())
