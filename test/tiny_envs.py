"""Small deterministic environments for what gymnasium's own lack: images, and actions of several parts.

Importing this registers them. Everything random is drawn from `np_random`, which `reset(seed)` seeds, also while an
episode goes on; episodes end by termination after 10 to 25 steps, as drawn at the reset, or at the time limit before.
"""

import os

import gymnasium
import numpy as np
from gymnasium import spaces

SIZE = 12
MOVES = ((0, 1), (1, 0), (0, -1), (-1, 0))


class TinyImage(gymnasium.Env):
    """A walker seeks a goal on a board that goes round. Images (channels, 12, 12) of uint8: the walker and the time
    left in the first channel, what flickers at random in the last; the goal's place is never shown.

    Args:
        channels: 1 or 2
    """

    def __init__(self, channels=1):
        self.observation_space = spaces.Box(0, 255, (channels, SIZE, SIZE), np.uint8)
        self.action_space = spaces.Discrete(len(MOVES))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(10, 26))
        self.walker, self.goal = self.np_random.integers(SIZE, size=(2, 2))
        return self._image(), {}

    def step(self, action):
        self.left -= 1
        slips = self.np_random.random() < 0.1
        self.walker = (self.walker + (0 if slips else MOVES[action])) % SIZE
        distance = np.abs(self.walker - self.goal)
        reward = 1.0 - np.minimum(distance, SIZE - distance).sum() / SIZE
        return self._image(), float(reward), self.left == 0, False, {}

    def _image(self):
        image = np.zeros(self.observation_space.shape, np.uint8)
        image[0, 0, : self.left // 2] = 90
        image[-1].flat[self.np_random.integers(SIZE * SIZE, size=3)] = self.np_random.integers(30, 60, size=3)
        image[0, self.walker[0], self.walker[1]] = 255
        return image


class _TinyVector(gymnasium.Env):
    """A point that actions push and chance shakes; rewarded for being near the origin. Observations (4,) of float32:
    place and speed."""

    observation_space = spaces.Box(-10.0, 10.0, (4,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(10, 26))
        self.place, self.speed = self.np_random.normal(size=(2, 2))
        return self._observation(), {}

    def step(self, action):
        self.left -= 1
        self.speed = 0.8 * self.speed + self.push(action) + self.np_random.normal(scale=0.1, size=2)
        self.place = np.clip(self.place + 0.3 * self.speed, -10.0, 10.0)
        return self._observation(), float(1.0 - np.abs(self.place).sum()), self.left == 0, False, {}

    def _observation(self):
        return np.concatenate([self.place, np.clip(self.speed, -10.0, 10.0)]).astype(np.float32)


class TinyMultiDiscrete(_TinyVector):
    """Pushed left, not at all or right, and up or down."""

    action_space = spaces.MultiDiscrete([3, 2])

    def push(self, action):
        across, along = action
        return np.array([0.5 * (across - 1.0), along - 0.5])


class TinyMultiBinary(_TinyVector):
    """Three jets: one to each of two sides, and one that goes against both."""

    action_space = spaces.MultiBinary(3)

    def push(self, action):
        return 0.5 * np.array([action[0] - action[2], action[1] - action[2]], dtype=np.float64)


class TinyUnseeded(_TinyVector):
    """Draws from the operating system, whatever the seed."""

    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=int.from_bytes(os.urandom(4)))

    def push(self, action):
        return np.full(2, action - 0.5)


for env_class in (TinyImage, TinyMultiDiscrete, TinyMultiBinary, TinyUnseeded):
    gymnasium.register(f'{env_class.__name__}-v0', env_class, max_episode_steps=20)
