"""Atari games with the preprocessing of the DQN paper (Mnih et al. 2015, Methods).

A random number of no-ops at the start, each action repeated with the maximum over the last two screens, grayscale
84x84, FIRE where a game waits for it, and in training an episode per life. Sticky actions (Machado et al. 2018,
section 5.2) are drawn here, for every screen as the emulator would: which action it holds on to is no part of its
state. ale-py and cv2 are imported when a game is made, not before.
"""

import re

import gymnasium
import numpy as np

from slm_lab.lib.errors import SpecError
from slm_lab.lib.rng import generator_state, set_generator_state

NOOP_MAX = 30
FRAME_SKIP = 4
SIDE = 84
NOOP, FIRE = 0, 1  # indices of actions; not every game has FIRE there
_ENTRY_POINT = 'ale_py.env:AtariEnv'
_LOOKS_ATARI = re.compile(r'^ALE/|NoFrameskip-v\d+$')
# what makes observations or actions that the preprocessing does not fit
_REFUSED = ('continuous', 'sound_obs', 'render_obs')


def register():
    """Makes the games known to gymnasium; returns False where ale-py is not installed."""
    try:
        import ale_py
    except ImportError:
        return False
    gymnasium.register_envs(ale_py)
    return True


def is_atari(name, kwargs=None):
    """Whether an id (also `module:id`) with these keywords is an Atari game that is seen as images.

    Raises: SpecError for a game where ale-py is not installed.
    """
    bare = name.rpartition(':')[2]
    if bare not in gymnasium.registry and not register() and _LOOKS_ATARI.search(bare):
        raise SpecError(f"environment '{name}' is an Atari game, which needs a package: pip install '.[atari]'")
    spec = gymnasium.registry.get(bare)
    if spec is None or spec.entry_point != _ENTRY_POINT:
        return False
    return {**spec.kwargs, **(kwargs or {})}.get('obs_type') != 'ram'


def make_atari(name, max_t=None, kwargs=None, life_loss=False, render=False):
    """Makes a game. Returns: an `Atari`

    Args:
        max_t: steps of the agent after which a game is truncated; the emulator truncates it after 108,000 screens.
        kwargs: for the environment inside; `frameskip` is how often an action is repeated.
        life_loss: end an episode with each life.
    Raises: SpecError for keywords that do not go with the preprocessing.
    """
    kwargs = dict(kwargs or {})
    skip = kwargs.pop('frameskip', FRAME_SKIP)
    if type(skip) is not int or skip < 1:
        raise SpecError(f"frameskip of '{name}' is {skip!r}; it is a whole number from 1 on")
    refused = [key for key in _REFUSED if key in kwargs]
    if refused or kwargs.pop('obs_type', 'grayscale') not in ('rgb', 'grayscale'):
        key = refused[0] if refused else 'obs_type'
        raise SpecError(f"{key} of '{name}' does not go with the preprocessing of Atari games: remove it")
    if render:
        kwargs.setdefault('render_mode', 'human')
    sticky = kwargs.pop('repeat_action_probability', gymnasium.spec(name).kwargs['repeat_action_probability'])
    if type(sticky) not in (int, float) or not 0 <= sticky < 1:
        raise SpecError(f"repeat_action_probability of '{name}' is {sticky!r}; it is a number in [0, 1)")
    kwargs.update(frameskip=1, obs_type='grayscale', repeat_action_probability=0.0)
    env = gymnasium.make(name, disable_env_checker=True, **kwargs)
    return Atari(env, max_t, skip, life_loss, sticky)


class Atari(gymnasium.Wrapper):
    """A game as agents see it. Observations (1, 84, 84) of uint8, a new array each; rewards summed over the repeats.

    The emulator is asked directly for what gymnasium's environment around it would do with every single screen.

    Args:
        env: the environment of ale-py, with `frameskip` 1.
        max_t: steps after which a game is truncated, or None.
        skip: how often an action is repeated.
        life_loss: whether an episode ends with a life; `info['life_lost']` says so, and `next_life` goes on.
        sticky: the probability with which a screen takes the action of the screen before it.
    """

    def __init__(self, env, max_t, skip, life_loss, sticky):
        import cv2

        super().__init__(env)
        cv2.setNumThreads(1)  # one small image at a time
        self._resize = lambda screen: cv2.resize(screen, (SIDE, SIDE), interpolation=cv2.INTER_AREA)
        self.max_t, self._skip, self._life_loss, self.sticky = max_t, skip, life_loss, sticky
        self._ale, self._actions = env.unwrapped.ale, list(env.unwrapped._action_set)
        meanings = env.unwrapped.get_action_meanings()
        self._needs_fire = len(meanings) >= 3 and meanings[FIRE] == 'FIRE'
        self._screens = np.zeros((2, *self._ale.getScreenDims()), dtype=np.uint8)  # the last one, the one before
        self._t, self._lives, self._held = 0, 0, NOOP  # `held`: the action of the last screen
        self._unpaid = 0.0  # what was scored between two lives, for the step that comes next
        self.observation_space = gymnasium.spaces.Box(0, 255, (1, SIDE, SIDE), np.uint8)

    @property
    def spec(self):
        spec = super().spec
        spec.max_episode_steps = self.max_t
        return spec

    def reset(self, *, seed=None, options=None):
        """Begins a game. Without a seed it goes on from the generators as they are, which takes no time."""
        _, info = self.env.reset(seed=seed, options=options)
        self._held = NOOP
        for _ in range(int(self.unwrapped.np_random.integers(1, NOOP_MAX + 1))):
            self._repeat(NOOP, 1)
            self._restart_if_over()
        self._fire()
        self._restart_if_over()
        self._t, self._unpaid, self._lives = 0, 0.0, self._ale.lives()
        return self._observe(), info

    def step(self, action):
        reward = self._repeat(int(action), self._skip) + self._unpaid
        self._t, self._unpaid = self._t + 1, 0.0
        lives = self._ale.lives()
        terminated = self._ale.game_over(with_truncation=False)
        truncated = not terminated and (self._ale.game_truncated() or self._t == self.max_t)
        life_lost = self._life_loss and lives < self._lives and not terminated and not truncated
        self._lives = lives
        return self._observe(), reward, terminated or life_lost, truncated, {'lives': lives, 'life_lost': life_lost}

    def next_life(self):
        """Goes on with the game after a lost life; returns the first observation of the next one.

        Should the game end at once, the step that comes next tells.
        """
        self._unpaid += self._repeat(NOOP, self._skip)
        self._fire()
        self._lives = self._ale.lives()
        return self._observe()

    def _fire(self):
        if self._needs_fire:
            self._unpaid += self._repeat(FIRE, self._skip)

    def _restart_if_over(self):
        if self._ale.game_over():
            self._ale.reset_game()
            self._held = NOOP
            self._ale.getScreenGrayscale(self._screens[0])

    def _repeat(self, action, times):
        """Acts, and keeps the last two screens. Returns: the sum of rewards"""
        ale, reward = self._ale, 0.0
        last, before = self._screens
        before.fill(0)
        sticks = self.unwrapped.np_random.random(times) < self.sticky if self.sticky else None
        for left in range(times - 1, -1, -1):
            if sticks is None or not sticks[left]:
                self._held = action
            reward += ale.act(self._actions[self._held])
            over = ale.game_over()
            if over or left == 0:
                ale.getScreenGrayscale(last)
                break
            if left == 1:
                ale.getScreenGrayscale(before)
        return reward

    def _observe(self):
        return self._resize(np.maximum(*self._screens))[np.newaxis]

    def native_state(self):
        """The emulator with its generators, that of no-ops and sticky actions, and what this wrapper holds."""
        emulator = self._ale.cloneState(include_rng=True).serialize()
        return {
            'emulator': np.frombuffer(emulator, dtype=np.uint8),
            'rng': generator_state(self.unwrapped.np_random),
            'screens': self._screens,
            't': self._t,
            'lives': self._lives,
            'held': self._held,
            'unpaid': self._unpaid,
        }

    def load_native_state(self, state):
        """Brings the game back; returns the observation that it stood at."""
        from ale_py import ALEState

        self._ale.restoreState(ALEState(np.asarray(state['emulator'], dtype=np.uint8).tobytes()))
        set_generator_state(self.unwrapped.np_random, state['rng'])
        self._screens[...] = state['screens']
        self._t, self._lives, self._held = int(state['t']), int(state['lives']), int(state['held'])
        self._unpaid = float(state['unpaid'])
        return self._observe()
