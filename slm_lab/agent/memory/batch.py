"""What a memory hands to an algorithm."""

from typing import NamedTuple

import numpy as np
import torch


class Batch(NamedTuple):
    """Transitions as tensors. Axes: (B, …) from replays; (T, N, …), time then env, from on-policy batches.

    `terminated` and `truncated` are 0 or 1 in float: targets bootstrap on 1 − terminated.
    """

    states: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor
    next_states: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor
    weights: torch.Tensor | None = None  # importance weights (B,) of a prioritized sample


FIELDS = ('states', 'actions', 'rewards', 'next_states', 'terminated', 'truncated')


class Layout(NamedTuple):
    """Shapes and types of one transition of one env.

    Of `frames_per_state` k > 1 a state is the last k frames, oldest first, joined along its first axis: each step of an
    episode adds one, and the first state of an episode is its first frame k times.
    """

    state_shape: tuple
    state_dtype: np.dtype
    action_shape: tuple
    action_dtype: np.dtype
    frames_per_state: int = 1

    @classmethod
    def of(cls, observation_space, action_space, frames_per_state=1):
        """That of an env: 64-bit states are kept in 32 bits, as nets read them."""
        is_discrete = type(action_space).__name__ in ('Discrete', 'MultiDiscrete', 'MultiBinary')
        return cls(
            tuple(observation_space.shape),
            np.dtype(np.float32 if observation_space.dtype == np.float64 else observation_space.dtype),
            tuple(action_space.shape),
            np.dtype(np.int64 if is_discrete else np.float32),
            frames_per_state,
        )

    def allocate(self, leading, fields=FIELDS):
        """{field: array of shape (*leading, …)}; untouched pages cost no memory until they are written."""
        shapes = {
            'states': (self.state_shape, self.state_dtype),
            'actions': (self.action_shape, self.action_dtype),
            'rewards': ((), np.float32),
            'next_states': (self.state_shape, self.state_dtype),
            'terminated': ((), np.float32),
            'truncated': ((), np.float32),
        }
        return {name: np.zeros((*leading, *shapes[name][0]), shapes[name][1]) for name in fields}
