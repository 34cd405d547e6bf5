"""Wrappers whose state is part of a checkpoint.

- `TrackReturn`: returns of the episodes, from the raw reward.
- `RunningStatistics`: count, mean and variance per dimension of all that it was shown.
- `NormalizeState`: standardises observations with the statistics of all of them so far.
- `FrameStack`: the last k observations as one.
"""

import numpy as np
from gymnasium import spaces

from slm_lab.env.vector import ended_slots
from slm_lab.env.wrapper.base import StatefulWrapper
from slm_lab.env.wrapper.transform import ApplyStatistics
from slm_lab.lib.errors import LabError


class TrackReturn(StatefulWrapper):
    """Sums up each slot's reward; `total_reward` is the mean over the slots of their last finished episode's return,
    of those slots that have finished one; NaN before the first. An episode that ends with a life while the game goes on
    is no end here: returns are those of whole games."""

    def __init__(self, env):
        super().__init__(env)
        self._running = np.zeros(self.num_envs)
        self._finished = np.full(self.num_envs, np.nan)

    @property
    def total_reward(self):
        finished = self._finished[~np.isnan(self._finished)]
        return float(finished.mean()) if len(finished) else float('nan')

    def reset(self):
        self._running[:] = 0.0
        return super().reset()

    def step(self, actions):
        step = self.env.step(actions)
        self._running += step.reward
        if step.state is not step.next_state:
            ended = ended_slots(step)
            if step.lives_on is not None:
                ended = ended[~step.lives_on[ended]]
            self._finished[ended] = self._running[ended]
            self._running[ended] = 0.0
        self.state = step.state
        return step

    def forget_episodes(self):
        self._running[:] = 0.0
        super().forget_episodes()

    def own_state(self):
        return {'running': self._running, 'finished': self._finished}

    def load_own_state(self, state):
        self._running[:] = state['running']
        self._finished[:] = state['finished']

    def restart(self, i):
        self._running[i] = 0.0


class RunningStatistics:
    """Count, mean and sum of squared deviations per dimension, in float64.

    Batches are merged by the parallel update of Chan, Golub & LeVeque (1979), eq. 2.1: with d = mean_b − mean,
    n = count + count_b: mean += d·count_b/n and m2 += m2_b + d²·count·count_b/n.

    Args:
        shape: of one observation.
    """

    def __init__(self, shape):
        self.count = 0
        self.mean, self.m2 = np.zeros(shape), np.zeros(shape)

    def update(self, batch):
        """batch: (B, *shape)."""
        batch = np.asarray(batch, dtype=np.float64)
        count = len(batch)
        total = self.count + count
        if count == 1:
            mean, m2 = batch[0], 0.0
        else:
            mean = batch.mean(axis=0)
            m2 = np.square(batch - mean).sum(axis=0)
        delta = mean - self.mean
        self.mean += delta * (count / total)
        self.m2 += m2 + np.square(delta) * (self.count * count / total)
        self.count = total

    def normalize(self, batch):
        """(batch − mean) / √(variance + 1e-8), with the variance of the population; (B, *shape) as float32."""
        if not self.count:
            raise LabError(
                'normalize_state: there are no observation statistics yet; an env for evaluation needs those of the '
                'training run (train_env, or load_statistics)'
            )
        return ((batch - self.mean) / np.sqrt(self.m2 / self.count + 1e-8)).astype(np.float32)

    def state_dict(self):
        return {'count': self.count, 'mean': self.mean, 'm2': self.m2}

    def load_state_dict(self, state):
        self.count = int(state['count'])
        self.mean[...] = state['mean']
        self.m2[...] = state['m2']


class NormalizeState(StatefulWrapper, ApplyStatistics):
    """Observations standardised per dimension, as float32, with the statistics of all observations of all slots so
    far, first and final ones included; those of the step itself are counted before it is standardised."""

    def __init__(self, env):
        super().__init__(env, RunningStatistics(env.observation_space.shape))

    def reset(self):
        state = self.env.reset()
        self.statistics.update(state)
        self.state = self.statistics.normalize(state)
        return self.state

    def step(self, actions):
        step = self.env.step(actions)
        self.statistics.update(step.next_state)
        if step.state is not step.next_state:
            self.statistics.update(step.state[ended_slots(step)])
        return self._standardize(step)

    def own_state(self):
        return self.statistics.state_dict()

    def load_own_state(self, state):
        self.statistics.load_state_dict(state)
        # nothing was counted since it was standardised last, so this gives the same bits
        self._normalize_inner_state()

    def restart(self, i):
        """Nothing here belongs to one episode."""


class FrameStack(StatefulWrapper):
    """The last k observations of each slot as one; at the beginning of an episode the first one k times.

    Stacks are windows of one array of many frames per slot, so that a step writes one frame of each slot and copies
    none. What was handed out is never written into: where a slot's episode ended, or the array is full, the stacks
    are copied to where nothing was handed out yet.

    Args:
        op: 'concat' joins them along the first axis (k·d0, …), 'stack' along a new first one (k, d0, …); oldest first.
        k: how many.
    """

    # stacks that fit into one array side by side: with 16 a copied frame comes to every 16 written ones
    STACKS = 16

    def __init__(self, env, op, k):
        super().__init__(env)
        inner = env.observation_space
        self.frames_per_state = k
        self._frame_shape = (1, *inner.shape) if op == 'stack' else inner.shape  # as it lies in a state
        self._depth = self._frame_shape[0]
        self._length = k * self._depth  # of a state along its first axis
        self._frames_shape = (self.num_envs, k, *inner.shape)
        shape = (self._length, *self._frame_shape[1:])
        low, high = (np.broadcast_to(b, self._frames_shape[1:]).reshape(shape) for b in (inner.low, inner.high))
        self.observation_space = spaces.Box(low, high, dtype=inner.dtype)
        self._array = None  # (N, STACKS · k · depth, …)
        self._end = 0  # of the window, and of what was handed out, along its second axis

    def reset(self):
        return self._begin(np.repeat(self.env.reset()[:, None], self.frames_per_state, axis=1))

    def step(self, actions):
        step = self.env.step(actions)
        if self._end == self._array.shape[1]:
            self._begin(self.state)
        frames = step.next_state.reshape(self.num_envs, *self._frame_shape)
        self._array[:, self._end : self._end + self._depth] = frames
        self._end += self._depth
        next_state = self.state = self._window()
        if step.state is not step.next_state:
            self._begin(next_state)
            for i in ended_slots(step):
                self._repeat_first(i, step.state[i])
        return step._replace(next_state=next_state, state=self.state)

    def _begin(self, frames):
        """Goes on with stacks of (N, k, *frame) or (N, *state), in memory that was not handed out yet."""
        if self._array is None or self._end + self._length > self._array.shape[1]:
            shape = (self.num_envs, self.STACKS * self._length, *self._frame_shape[1:])
            self._array, self._end = np.empty(shape, self.observation_space.dtype), 0
        self._end += self._length
        self.state = self._window()
        self.state[...] = frames.reshape(self.state.shape)
        return self.state

    def _window(self):
        return self._array[:, self._end - self._length : self._end]

    def _repeat_first(self, i, observation):
        self.state[i].reshape(self._frames_shape[1:])[...] = observation

    def forget_episodes(self):
        self._array, self._end = None, 0
        super().forget_episodes()

    def own_state(self):
        return {'frames': None if self.state is None else self.state.reshape(self._frames_shape)}

    def load_own_state(self, state):
        self._array, self._end = None, 0
        if state['frames'] is None:
            self.state = None
        else:
            self._begin(np.asarray(state['frames']))

    def restart(self, i):
        self._repeat_first(i, self.env.state[i])
