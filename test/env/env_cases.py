"""Environments and runs that the tests of this room share; as a script it continues runs in a fresh process.

- Count: observation [t], reward t, ended by action 1: all values can be worked out by hand.
- Carried: counts its resets, so a used one plays differently from a new one.
- Noisy: draws from the system's entropy, so no two play alike.
- Game: three lives, each lost with chance 1/5 at a step of action 1; OneLife makes each an episode and has a state.
"""

import json
import sys

import gymnasium
import numpy as np
from gymnasium import spaces

from slm_lab.env import make_env


class Count(gymnasium.Env):
    """The observation lies in the same memory at every step, as some simulators do it."""

    metadata = {'render_modes': ['human']}
    observation_space = spaces.Box(0, 100, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode=None, start=0):
        self.start = start
        self.memory = np.zeros(1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.memory[0] = self.start
        return self.memory, {}

    def step(self, action):
        assert type(action) is int
        self.memory[0] += 1
        return self.memory, float(self.memory[0]), action == 1, False, {}


class Carried(gymnasium.Env):
    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.resets, self.t = 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets, self.t = self.resets + 1, 0
        return self._observe(), {}

    def step(self, action):
        self.t += 1
        return self._observe(), 1.0, self.t == 7, False, {}

    def _observe(self):
        return np.array([self.resets, self.np_random.random()], dtype=np.float32)


class Noisy(gymnasium.Env):
    observation_space = spaces.Box(0, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.t = 0

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self._observe(), {}

    def step(self, action):
        self.t += 1
        return self._observe(), 1.0, self.t == 9, False, {}

    def _observe(self):
        return np.random.default_rng().random(2).astype(np.float32)


class GloballyNoisy(Noisy):
    """Draws from the process's own stream."""

    def _observe(self):
        return np.random.random(2).astype(np.float32)


class Game(gymnasium.Env):
    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.lives, self.t = 3, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.lives, self.t = 3, 0
        return self._observe(), {}

    def step(self, action):
        self.t += 1
        self.lives -= int(self.np_random.random() < 0.2 and action)
        return self._observe(), float(action), self.lives == 0, False, {}

    def _observe(self):
        return np.array([self.lives, self.t, self.np_random.random()])


class OneLife(gymnasium.Wrapper):
    """The next life begins by a step of its own."""

    def step(self, action):
        lives = self.unwrapped.lives
        observation, reward, terminated, truncated, info = self.env.step(action)
        life_lost = self.unwrapped.lives < lives and not terminated
        return observation, reward, terminated or life_lost, truncated, {**info, 'life_lost': life_lost}

    def next_life(self):
        return self.env.step(0)[0]

    def native_state(self):
        game = self.unwrapped
        return {'lives': game.lives, 't': game.t, 'rng': game.np_random.bit_generator.state}

    def load_native_state(self, state):
        game = self.unwrapped
        self.env.reset(seed=0)
        game.lives, game.t = state['lives'], state['t']
        game.np_random.bit_generator.state = state['rng']
        game.np_random.bit_generator.advance(-1)  # the observation shows the number that was drawn last
        return game._observe()


class Forgetful(OneLife):
    """The observation comes back, but not what is drawn next."""

    def load_native_state(self, state):
        observation = super().load_native_state(state)
        self.env.reset(seed=0)
        return observation


def one_life(wrapper=OneLife):
    return wrapper(gymnasium.make('Game-v0', disable_env_checker=True))


class Tabular(gymnasium.Env):
    observation_space = spaces.Discrete(16)
    action_space = spaces.Discrete(2)


for env_class in (Count, Carried, Noisy, GloballyNoisy, Game, Tabular):
    gymnasium.register(f'{env_class.__name__}-v0', env_class)
gymnasium.register('OldCount-v0', Count, max_episode_steps=3)


def spec_of(name, net=None, **env):
    return {'name': 'tested', 'agent': [{'net': net or {}}], 'env': [{'name': name, 'max_frame': 100, **env}]}


def actions_at(env, step):
    """The actions of a step of a run: any, but the same in every process."""
    rng = np.random.default_rng(1000 + step)
    shape = (env.num_envs, *env.action_space.shape)
    if isinstance(env.action_space, spaces.Discrete):
        return rng.integers(env.action_space.n, size=shape)
    return rng.uniform(-2, 2, size=shape)


def play(env, start, stop):
    """Steps `start` to `stop` of a run; returns all that came out of them as a tree."""
    steps = []
    for step in range(start, stop):
        outcome = env.step(actions_at(env, step))
        steps.append({**outcome._asdict(), 'total_reward': env.total_reward})
    return steps


def encode(tree):
    """A state tree as JSON holds it."""
    if isinstance(tree, dict):
        return {k: encode(v) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [encode(v) for v in tree]
    if isinstance(tree, np.ndarray):
        return {'dtype': str(tree.dtype), 'shape': list(tree.shape), 'hex': tree.tobytes().hex()}
    return tree


def decode(tree):
    if isinstance(tree, dict) and tree.keys() == {'dtype', 'shape', 'hex'}:
        return np.frombuffer(bytes.fromhex(tree['hex']), tree['dtype']).reshape(tree['shape'])
    if isinstance(tree, dict):
        return {k: decode(v) for k, v in tree.items()}
    return [decode(v) for v in tree] if isinstance(tree, list) else tree


def through_text(tree):
    return decode(json.loads(json.dumps(encode(tree))))


def resume(case):
    """Continues a run that `case` describes: {spec, seed, state, start, stop}; returns its steps and its state."""
    env = make_env(case['spec'], case['seed'])
    env.load_state_dict(decode(case['state']))
    state = env.state.copy()
    steps = play(env, case['start'], case['stop'])
    return {'restored': state, 'restarted': env.restarted, 'steps': steps, 'state': env.state_dict()}


if __name__ == '__main__':
    json.dump([encode(resume(case)) for case in json.load(sys.stdin)], sys.stdout)
