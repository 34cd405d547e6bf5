"""Uniform experience replay."""

import numpy as np
import torch

from slm_lab.agent.memory.batch import FIELDS, Batch
from slm_lab.lib import rng as rng_lib
from slm_lab.lib.keys import Key
from slm_lab.lib.registry import MEMORIES
from slm_lab.lib.state import Ring


@MEMORIES.register
class Replay:
    """The last max_size transitions, sampled uniformly with replacement. Mnih et al. 2015.

    With use_cer the newest transition is part of every batch (Zhang & Sutton 2017, combined experience replay).

    Spec example: {"name": "Replay", "batch_size": 32, "max_size": 10000, "use_cer": true}
    """

    KEYS = {
        'name': Key('str'),
        'batch_size': Key('int', low=1, note='transitions of a batch'),
        'max_size': Key('int', low=1, note='transitions kept'),
        'use_cer': Key('bool', False, note='always include the newest transition'),
    }
    ON_POLICY = False

    def __init__(self, spec, layout, num_envs, rng):
        """
        Args:
            spec: resolved memory spec
            layout: Layout of a transition
            rng: numpy Generator of its own
        """
        self.batch_size, self.max_size, self.use_cer = spec['batch_size'], spec['max_size'], spec['use_cer']
        self.num_envs, self.rng = num_envs, rng
        self.arrays = layout.allocate((self.max_size,))
        self.seen_size = 0  # transitions ever added
        self._buffers = {name: np.empty((self.batch_size, *a.shape[1:]), a.dtype) for name, a in self.arrays.items()}
        # the tensors share the buffers' memory: a sample is valid until the next one
        self._batch = Batch(**{name: torch.from_numpy(b) for name, b in self._buffers.items()})

    @property
    def size(self):
        return min(self.seen_size, self.max_size)

    @property
    def head(self):
        """Slot of the newest transition, −1 when empty."""
        return (self.seen_size - 1) % self.max_size if self.seen_size else -1

    def add(self, states, actions, rewards, next_states, terminated, truncated):
        """Adds one transition of each env: arrays (N, …), env 0 first."""
        n, start = len(rewards), self.seen_size % self.max_size
        rows = (states, actions, rewards, next_states, terminated, truncated)
        if start + n <= self.max_size:
            for name, values in zip(FIELDS, rows, strict=True):
                self.arrays[name][start : start + n] = values
        else:
            slots = (start + np.arange(n)) % self.max_size
            for name, values in zip(FIELDS, rows, strict=True):
                self.arrays[name][slots] = values
        self.seen_size += n

    def cut(self, envs):
        """The running episodes of `envs` end here: nothing to do, for each transition stands alone."""
        return 0

    def is_due(self, training_frequency, training_start_step):
        """Whether one of the transitions just added completes a training period after the warm-up."""
        for seen in range(self.seen_size - self.num_envs + 1, self.seen_size + 1):
            if seen > training_start_step and (seen - 1) % self.max_size % training_frequency == 0:
                return True
        return False

    def sample(self, frame):
        """Returns: a Batch of (B, …) tensors, overwritten by the next sample."""
        return self._take(self._sample_slots())

    def _sample_slots(self):
        slots = self.rng.integers(0, self.size, self.batch_size)
        if self.use_cer:
            slots[-1] = self.head
        return slots

    def _take(self, slots):
        for name, buffer in self._buffers.items():
            np.take(self.arrays[name], slots, axis=0, out=buffer, mode='clip')
        return self._batch

    def check_valid(self):
        """Returns: (whether the memory is in a state that it can be in, why not)."""
        if self.size and not all(np.isfinite(self.arrays['rewards'][: self.size])):
            return False, 'a stored reward is not finite'
        return True, ''

    def state_dict(self):
        return {'ring': Ring(self.arrays, self.seen_size), 'rng': rng_lib.generator_state(self.rng)}

    def load_state_dict(self, state):
        ring = state['ring']
        for name, array in self.arrays.items():
            if ring.arrays[name] is not array:  # a checkpoint is read straight into these arrays
                array[...] = ring.arrays[name]
        self.seen_size = ring.written
        rng_lib.set_generator_state(self.rng, state['rng'])
