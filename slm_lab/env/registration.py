"""From the name in a spec to an environment, with errors that say what to do.

A name is looked for in this order: Atari games, ViZDoom's scenarios, what gymnasium knows (after the user's `module`
was imported), what an installed legacy gym knows.
"""

import difflib
import errno
import importlib
import logging
import os
import re
import sys
import traceback
import warnings
from pathlib import Path

import gymnasium
from gymnasium import spaces

from slm_lab.env import atari, legacy_gym, vizdoom
from slm_lab.lib.errors import LabError, MachineError, SpecError

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

# MuJoCo: gymnasium still lists v1 to v3, which needed mujoco-py, but only says where they went
for _task in ('Ant', 'HalfCheetah', 'Hopper', 'Humanoid', 'Swimmer', 'Walker2d'):
    CURRENT_IDS.update({f'{_task}-v{version}': f'{_task}-v5' for version in (1, 2, 3)})
for _task in ('HumanoidStandup', 'InvertedDoublePendulum', 'InvertedPendulum', 'Pusher', 'Reacher'):
    CURRENT_IDS.update({f'{_task}-v{version}': f'{_task}-v5' for version in (1, 2)})
CURRENT_IDS['Pusher-v4'] = 'Pusher-v5'  # mujoco 3 changed what v4 relies on

# environments that no longer exist -> the nearest that does
GONE = {
    'RoboschoolAnt': 'Ant-v5',
    'RoboschoolHalfCheetah': 'HalfCheetah-v5',
    'RoboschoolHopper': 'Hopper-v5',
    'RoboschoolHumanoid': 'Humanoid-v5',
    'RoboschoolHumanoidFlagrun': 'Humanoid-v5',
    'RoboschoolHumanoidFlagrunHarder': 'Humanoid-v5',
    'RoboschoolAtlasForwardWalk': 'Humanoid-v5',
    'RoboschoolInvertedDoublePendulum': 'InvertedDoublePendulum-v5',
    'RoboschoolInvertedPendulum': 'InvertedPendulum-v5',
    'RoboschoolInvertedPendulumSwingup': 'InvertedPendulum-v5',
    'RoboschoolPong': 'PongNoFrameskip-v4',
    'RoboschoolReacher': 'Reacher-v5',
    'RoboschoolWalker2d': 'Walker2d-v5',
}

ACTION_SPACES = (spaces.Discrete, spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)

# packages of the lab's extras, as they are imported
EXTRA_OF = {
    'ale_py': 'atari',
    'cv2': 'atari',
    'Box2D': 'box2d',
    'mujoco': 'mujoco',
    'imageio': 'mujoco',
    'vizdoom': 'vizdoom',
    'gym': 'gym',
}

_REFUSED_KEYWORD = re.compile(r"(?:unexpected keyword argument|multiple values for (?:keyword )?argument) '(\w+)'")
_PIP_EXTRA = re.compile(r'gymnasium\[([\w-]+)\]')
_UNITY = re.compile(r'^Unity|^(?:gridworld|3dball|2DBall|tennis)$')


def current_id(name):
    """The id to make for the name in a spec: an old one is mapped to today's where nothing makes the old one here."""
    return CURRENT_IDS[name] if name in CURRENT_IDS and not _is_made(name) else name


def _is_made(name):
    registered = gymnasium.registry.get(name)
    if registered is None or name == 'Pusher-v4':
        return False
    # where gymnasium only lists an id still, a function of its own raises the error
    return getattr(registered.entry_point, '__module__', None) != 'gymnasium.envs'


def can_display():
    """Whether a window can be opened here."""
    if sys.platform in ('darwin', 'win32'):
        return True
    return bool(os.environ.get('DISPLAY') or os.environ.get('WAYLAND_DISPLAY'))


def make_single(name, max_t=None, kwargs=None, render=False, where='env.0', module=None, life_loss=False):
    """Makes one environment.

    Args:
        name: an id, for gymnasium and gym also as `module:id`, where the module registers it.
        max_t: steps after which an episode is truncated; None leaves what the id was registered with.
        kwargs: keyword arguments for `make`.
        render: open a window.
        where: the place of the env spec, for errors.
        module: a module to import first, which registers the id.
        life_loss: Atari: the loss of a life ends the agent's episode.
    Raises: SpecError for an unknown id, a missing package, a refused keyword or value, an error in the environment's
        own code or a space that is not supported; MachineError, MemoryError where the machine is short of something.
    """
    asked, kwargs = kwargs or {}, dict(kwargs or {})
    if module is not None:
        import_module(module, where)
    try:
        with warnings.catch_warnings():
            # a spec names its version on purpose
            warnings.filterwarnings('ignore', message='.*is out of date', category=DeprecationWarning)
            env = _make(name, max_t, kwargs, render, life_loss)
    except (SpecError, MemoryError):  # who has estimated the memory tells of it
        raise
    except gymnasium.error.DeprecatedEnv as e:
        raise SpecError(f"{where}.name: environment '{name}' is no longer made: {e}") from None
    except gymnasium.error.UnregisteredEnv as e:
        raise SpecError(_unknown(name, module, where)) from e
    except gymnasium.error.DependencyNotInstalled as e:
        raise SpecError(_missing_package(name, str(e), where)) from e
    except ImportError as e:
        raise SpecError(_failed_import(name, e, where)) from e
    except (gymnasium.error.Error, LabError) as e:
        raise SpecError(f"{where}.name: environment '{name}' cannot be made: {_one_line(e)}") from e
    except TypeError as e:
        refused = _REFUSED_KEYWORD.search(str(e))
        if refused is not None and refused.group(1) in kwargs:
            raise SpecError(f"{where}.{refused.group(1)}: '{name}' does not take this keyword") from e
        if 'gymnasium.Env' in str(e):
            raise SpecError(
                f"{where}.name: environment '{name}' is no gymnasium.Env; one of legacy gym is registered with "
                f'gym.register'
            ) from e
        raise SpecError(_not_made(name, asked, e.__cause__ or e, where)) from e  # gymnasium has added to its text
    except Exception as e:  # it is the environment's code, which may do anything
        error_class = MachineError if _is_of_machine(e) else SpecError
        raise error_class(_not_made(name, asked, e, where)) from e
    try:
        check_spaces(env, name, where)
    except SpecError:
        env.close()
        raise
    return env


def _make(name, max_t, kwargs, render, life_loss):
    if atari.is_atari(name, kwargs):
        return atari.make_atari(name, max_t, kwargs, life_loss, render)
    if render:
        kwargs.setdefault('render_mode', 'human')
    if vizdoom.is_vizdoom(name):
        return vizdoom.make_vizdoom(name, max_t, kwargs)
    try:
        return gymnasium.make(name, max_episode_steps=max_t, disable_env_checker=True, **kwargs)
    except gymnasium.error.UnregisteredEnv:
        legacy = legacy_gym.find_spec(name)
        if legacy is None:
            raise
    logger.debug("env '%s' is one of legacy gym", name)
    return gymnasium.make(legacy, max_episode_steps=max_t, disable_env_checker=True, **kwargs)


_registered_by = {}  # {module: ids that its import added}


def import_module(module, where):
    """Imports the module that registers a user's environments; the current directory counts as a place for it.

    Raises: SpecError for one that is not found, lacks a package or fails.
    """
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    before = set(_known_ids())
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name is None or not f'{module}.'.startswith(f'{e.name}.'):
            raise SpecError(f"{where}.module: '{module}' imports '{e.name}', which is not installed") from e
        places = ', '.join(place for place in sys.path if place not in ('', folder))
        raise SpecError(
            f"{where}.module: module '{module}' is neither in the current directory ({folder}) nor in {places}"
        ) from e
    except Exception as e:  # it is the user's code, which may do anything
        raise SpecError(f"{where}.module: '{module}' fails at import: {type(e).__name__}: {_one_line(e)}") from e
    _registered_by.setdefault(module, []).extend(sorted(set(_known_ids()) - before))


def _known_ids():
    return [*gymnasium.registry, *legacy_gym.added_ids()]


def check_spaces(env, name, where):
    """Raises: SpecError for spaces that the lab has no use for, or that are not there."""
    absent = [key for key in ('observation_space', 'action_space') if getattr(env, key, None) is None]
    if absent:
        raise SpecError(f"{where}.name: '{name}' has no {absent[0]}, which its __init__ or its class has to set")
    observation, action = env.observation_space, env.action_space
    if not isinstance(observation, spaces.Box) or not 1 <= len(observation.shape) <= 3:
        raise SpecError(
            f"{where}.name: '{name}' has observations of type {observation}; supported are Box spaces: vectors "
            f'(one axis) and images (two or three)'
        )
    if not isinstance(action, ACTION_SPACES):
        known = ', '.join(space.__name__ for space in ACTION_SPACES)
        raise SpecError(f"{where}.name: '{name}' has actions of type {action}; supported are {known}")


def _unknown(name, module, where):
    line = f"{where}.name: environment '{name}' is unknown"
    prefix, bare = name[: name.rfind(':') + 1], name[name.rfind(':') + 1 :]
    if module is not None:
        ids = _registered_by.get(module)
        if not ids:
            return f"{line}: module '{module}' registers no environment (with gymnasium.register at its top level)"
        return f"{line}: module '{module}' registers {', '.join(ids)}{_nearest(bare, ids)}"
    task = bare.rpartition('-v')[0]
    if task in GONE:
        return f"{where}.name: environment '{name}' no longer exists; its place is taken by '{GONE[task]}'"
    if _UNITY.search(bare):
        return (
            f"{where}.name: environment '{name}' is one of Unity, which the lab does not run; MuJoCo's tasks, e.g. "
            f"'Ant-v5', take their place, and a wrapper of your own can be named by the key 'module'"
        )
    known = {i.lower(): i for i in _known_ids()}
    close = difflib.get_close_matches(bare.lower(), known, n=6, cutoff=0.6)
    if not close:
        hint = '' if legacy_gym.is_installed() else "; for environments of legacy gym: pip install '.[gym]'"
        return f'{line} and resembles none of the {len(known)} registered ones{hint}'
    others = ', '.join(known[c] for c in close)
    return f"{line}; did you mean '{prefix}{known[close[0]]}'? Close ones: {others}"


def _nearest(name, ids):
    lowered = {i.lower(): i for i in ids}
    close = difflib.get_close_matches(name.lower(), lowered, n=1)
    return f"; did you mean '{lowered[close[0]]}'?" if close else ''


def pip_command(extra):
    """How a package that an environment needs is installed, as the end of an error line."""
    return f"pip install '.[{extra}]' (in the lab's folder)"


def _missing_package(name, message, where):
    line = f"{where}.name: environment '{name}' needs a package that is not installed"
    extra = _PIP_EXTRA.search(message)
    if extra is None:
        return f'{line}: {_one_line(message)}'
    if extra.group(1) in EXTRA_OF.values():
        return f'{line}: {pip_command(extra.group(1))}'
    return f"{line}: pip install '{extra.group()}'"


def _failed_import(name, e, where):
    package = (e.name or '').partition('.')[0]
    if isinstance(e, ModuleNotFoundError) and package in EXTRA_OF:
        return f"{where}.name: environment '{name}' needs '{package}': {pip_command(EXTRA_OF[package])}"
    return f"{where}.name: environment '{name}' cannot be imported: {_one_line(e)}"


# what a wrong path in a spec gives; an OSError without a number is one that an environment raises itself
_OF_PATHS = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)


def _is_of_machine(e):
    """Whether the machine is to blame, e.g. for too many open files, and not the spec."""
    return isinstance(e, OSError) and e.errno not in _OF_PATHS


def _not_made(name, kwargs, e, where):
    keywords = ', '.join(f'{key} {value!r}' for key, value in kwargs.items())
    made = f"{where}.name: environment '{name}' cannot be made" + (f' with {keywords}' if keywords else '')
    return f'{made}: {describe_error(e)}'


def describe_error(e):
    """An error of an environment's own code, in one line: its type and text, and where it was raised."""
    at = traceback.extract_tb(e.__traceback__)[-1]
    text = f': {_one_line(e)}' if str(e) else ''
    return f'{type(e).__name__}{text} ({Path(at.filename).name}:{at.lineno} in {at.name})'


def _one_line(message):
    return ' '.join(str(message).split())
