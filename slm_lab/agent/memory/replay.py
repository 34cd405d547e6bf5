"""Uniform experience replay."""

import numpy as np
import torch

from slm_lab.agent.memory.batch import FIELDS, Batch
from slm_lab.agent.memory.storage import make_storage
from slm_lab.lib import rng as rng_lib
from slm_lab.lib.keys import Key
from slm_lab.lib.registry import MEMORIES


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
        self.transitions = make_storage(layout, self.max_size, num_envs)
        self.seen_size = 0  # transitions ever added
        self._buffers = self.transitions.buffers(self.batch_size)
        # the tensors share the buffers' memory: a sample is valid until the next one
        self._batch = Batch(**{name: torch.from_numpy(self._buffers[name]) for name in FIELDS})

    @property
    def arrays(self):
        """{name: array} of what is stored, one row per transition."""
        return self.transitions.arrays

    @property
    def size(self):
        return min(self.seen_size, self.max_size)

    @property
    def head(self):
        """Slot of the newest transition, −1 when empty."""
        return (self.seen_size - 1) % self.max_size if self.seen_size else -1

    def add(self, states, actions, rewards, next_states, terminated, truncated):
        """Adds one transition of each env: arrays (N, …), env 0 first."""
        self.transitions.add(self.seen_size, (states, actions, rewards, next_states, terminated, truncated))
        self.seen_size += len(rewards)

    def cut(self, envs):
        """The running episodes of `envs` end here. Returns: 0, for what is stored is as it was."""
        self.transitions.cut(envs)
        return 0

    def is_due(self, training_frequency, training_start_step):
        """Whether one of the transitions just added completes a training period after the warm-up."""
        for seen in range(self.seen_size - self.num_envs + 1, self.seen_size + 1):
            if seen > training_start_step and (seen - 1) % training_frequency == 0:
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
        self.transitions.take(slots, self.seen_size, self._buffers)
        return self._batch

    def check_valid(self):
        """Returns: (whether the memory is in a state that it can be in, why not)."""
        if self.size and not all(np.isfinite(self.arrays['rewards'][: self.seen_size])):
            return False, 'a stored reward is not finite'
        return True, ''

    def state_dict(self):
        return {**self.transitions.state_dict(self.seen_size), 'rng': rng_lib.generator_state(self.rng)}

    def load_state_dict(self, state):
        self.seen_size = self.transitions.load_state_dict(state)
        rng_lib.set_generator_state(self.rng, state['rng'])
