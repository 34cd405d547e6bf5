"""Environments that only an installed legacy `gym` (0.26) knows, behind gymnasium's interface.

gym's own `make` wraps them in checks that numpy 2 breaks, and refuses those of the four-value API. So gym gives the
class alone, `LegacyGym` adapts it, and gymnasium's `make` adds its own time limit and keywords.
"""

import contextlib
import functools
import importlib.util
import inspect
import io
import sys
import warnings

import gymnasium
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from slm_lab.lib.errors import LabError

VERSION = '0.26'


def is_installed():
    return importlib.util.find_spec('gym') is not None


def import_gym():
    """The gym package, without the notice that it prints. Raises: LabError for another version than 0.26."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter('ignore')
        import gym
    if not gym.__version__.startswith(f'{VERSION}.'):
        raise LabError(f"gym {gym.__version__} is installed; the lab adapts gym {VERSION}: pip install '.[gym]'")
    return gym


def registered():
    """{id: gym's EnvSpec} of all that an installed gym knows; empty without one. Raises: LabError, see `import_gym`."""
    return import_gym().envs.registration.registry if is_installed() else {}


def added_ids():
    """Ids that were registered with gym by others than itself, where it is imported already."""
    if 'gym' not in sys.modules:
        return []
    entry_points = {i: legacy.entry_point for i, legacy in registered().items()}
    return [i for i, e in entry_points.items() if not (isinstance(e, str) and e.startswith('gym.envs.'))]


def find_spec(name):
    """What `gymnasium.make` takes to make an environment of gym: an EnvSpec, or None where gym has no such id."""
    bare = name.rpartition(':')[2]
    legacy = registered().get(bare)
    if legacy is None:
        return None
    return EnvSpec(
        bare,
        entry_point=functools.partial(LegacyGym, legacy),
        max_episode_steps=legacy.max_episode_steps,
        reward_threshold=legacy.reward_threshold,
        kwargs=dict(legacy.kwargs),
    )


class LegacyGym(gymnasium.Env):
    """One environment of gym 0.26 or of the older four-value API.

    Episodes that gym's own TimeLimit cut inside of it (`info['TimeLimit.truncated']`) are truncated, not terminated.
    A reset's seed goes to `reset(seed=…)` where the environment takes one there, else to its `seed(…)`, else to the
    generator `np_random` that gym keeps for it.

    Args:
        legacy_spec: gym's EnvSpec.
        render_mode: handed on where the constructor takes it, else to each call of the old `render(mode=…)`.
        kwargs: for the environment's constructor.
    """

    def __init__(self, legacy_spec, render_mode=None, **kwargs):
        gym = import_gym()
        creator = legacy_spec.entry_point
        creator = creator if callable(creator) else gym.envs.registration.load(creator)
        self._takes_mode = _takes(creator, 'render_mode')
        if render_mode is not None and self._takes_mode:
            kwargs['render_mode'] = render_mode
        self.env = creator(**kwargs)
        self.env.unwrapped.spec = legacy_spec
        self.render_mode = render_mode
        self.metadata = {'render_modes': [], **(getattr(self.env, 'metadata', None) or {})}
        self.observation_space = convert_space(self.env.observation_space)
        self.action_space = convert_space(self.env.action_space)
        self._reset_takes_seed = all(_takes(layer.reset, 'seed') for layer in _layers(self.env))
        self._make_generator = gym.utils.seeding.np_random

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self._reset_takes_seed:
            outcome = self.env.reset(seed=seed)
        else:
            if seed is not None:
                self._seed(seed)
            outcome = self.env.reset()
        # observations are arrays, so a pair is what 0.26 gives
        observation, info = outcome if isinstance(outcome, tuple) else (outcome, {})
        self._show()
        return observation, info

    def _seed(self, seed):
        if callable(getattr(self.env, 'seed', None)):
            self.env.seed(seed)
        else:
            self.env.unwrapped.np_random = self._make_generator(seed)[0]

    def step(self, action):
        outcome = self.env.step(action)
        if len(outcome) == 5:
            observation, reward, terminated, truncated, info = outcome
        else:
            observation, reward, done, info = outcome
            truncated = bool(done and info.get('TimeLimit.truncated', False))
            terminated = bool(done and not truncated)
        self._show()
        return observation, reward, terminated, truncated, info

    def _show(self):
        """A window of the old API shows nothing by itself."""
        if self.render_mode == 'human' and not self._takes_mode:
            self.env.render(mode='human')

    def render(self):
        return self.env.render() if self._takes_mode else self.env.render(mode=self.render_mode or 'human')

    def close(self):
        self.env.close()


def convert_space(space):
    """gymnasium's space for gym's; one of another kind comes back as it is, for the caller to refuse by its name."""
    legacy = import_gym().spaces
    if isinstance(space, legacy.Box):
        return spaces.Box(space.low, space.high, dtype=space.dtype.type)
    if isinstance(space, legacy.Discrete):
        return spaces.Discrete(int(space.n), start=int(space.start))
    if isinstance(space, legacy.MultiDiscrete):
        return spaces.MultiDiscrete(space.nvec, dtype=space.dtype.type)
    if isinstance(space, legacy.MultiBinary):
        return spaces.MultiBinary(space.n)
    return space


def _takes(function, parameter):
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == parameter or p.kind is p.VAR_KEYWORD for p in parameters)


def _layers(env):
    """The environment and what its wrappers wrap, from the outside in."""
    layers = [env]
    while layers[-1] is not env.unwrapped:
        layers.append(layers[-1].env)
    return layers
