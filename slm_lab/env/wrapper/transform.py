"""Wrappers without state.

- `ScaleReward`: the reward's sign, or the reward times a number.
- `ApplyStatistics`: standardises observations with statistics that it only reads.
"""

import numpy as np
from gymnasium import spaces

from slm_lab.env.vector import ended_slots
from slm_lab.env.wrapper.base import VectorWrapper


class ScaleReward(VectorWrapper):
    """The reward that training sees; returns are tracked further inside, on the raw reward.

    Args:
        scale: 'sign', or the number that rewards are multiplied by.
    """

    def __init__(self, env, scale):
        super().__init__(env)
        self.scale = scale

    def step(self, actions):
        step = self.env.step(actions)
        self.state = step.state
        return step._replace(reward=np.sign(step.reward) if self.scale == 'sign' else step.reward * self.scale)


class ApplyStatistics(VectorWrapper):
    """Observations standardised per dimension, as float32, with statistics that others gather.

    Args:
        statistics: a `RunningStatistics`: of the training env, or one to be filled by `load_statistics`.
    """

    def __init__(self, env, statistics):
        super().__init__(env)
        self.statistics = statistics
        self.observation_space = spaces.Box(-np.inf, np.inf, env.observation_space.shape, np.float32)

    def reset(self):
        self.state = self.statistics.normalize(self.env.reset())
        return self.state

    def step(self, actions):
        return self._standardize(self.env.step(actions))

    def _standardize(self, step):
        next_state = self.state = self.statistics.normalize(step.next_state)
        if step.state is not step.next_state:
            ended = ended_slots(step)
            self.state = next_state.copy()
            self.state[ended] = self.statistics.normalize(step.state[ended])
        return step._replace(next_state=next_state, state=self.state)

    def load_state_dict(self, tree):
        self.env.load_state_dict(tree)
        self._normalize_inner_state()

    def _normalize_inner_state(self):
        self.state = None if self.env.state is None else self.statistics.normalize(self.env.state)

    def load_statistics(self, tree):
        self.statistics.load_state_dict(tree['NormalizeState'])
        self.env.load_statistics(tree)
