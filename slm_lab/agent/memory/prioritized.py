"""Prioritized experience replay, and the sum tree that draws from it."""

import numpy as np
import torch

from slm_lab.agent.memory.replay import Replay
from slm_lab.lib.keys import Key
from slm_lab.lib.registry import MEMORIES
from slm_lab.lib.schedule import Schedule, fill_spec


class SumTree:
    """A binary tree whose leaves are priorities and whose nodes are the sums of their children, in one array.

    Node 1 is the root, the children of node i are 2i and 2i + 1, slot s is the leaf `width + s`. Each node is always
    computed from its two children, so sums do not drift, and the nodes are a pure function of the leaves.
    """

    def __init__(self, capacity):
        self.depth = max(1, (capacity - 1).bit_length())
        self.width, self.capacity = 2**self.depth, capacity
        self.nodes = np.zeros(2 * self.width)

    @property
    def total(self):
        return self.nodes[1]

    @property
    def leaves(self):
        return self.nodes[self.width : self.width + self.capacity]

    def set(self, slots, priorities):
        """Sets the leaves of `slots` (B,) and all the sums above; of a slot that comes twice the last one holds."""
        nodes = slots + self.width
        self.nodes[nodes] = priorities
        for _ in range(self.depth):
            nodes = nodes >> 1
            self.nodes[nodes] = self.nodes[2 * nodes] + self.nodes[2 * nodes + 1]

    def set_all(self, leaves):
        """Sets every leaf (capacity,) and rebuilds the sums."""
        self.nodes[:] = 0
        self.leaves[:] = leaves
        for level in range(self.depth - 1, -1, -1):
            children = self.nodes[2 ** (level + 1) : 2 ** (level + 2)]
            self.nodes[2**level : 2 ** (level + 1)] = children[0::2] + children[1::2]

    def find(self, masses):
        """The slots in which the running sum of priorities passes each of `masses` (B,), all below `total`."""
        nodes = np.ones(len(masses), dtype=np.int64)
        masses = masses.copy()
        for _ in range(self.depth):
            left = 2 * nodes
            sums = self.nodes[left]
            # a node without mass on its right is never left for it, whatever rounding says
            goes_right = (masses >= sums) & (self.nodes[left + 1] > 0)
            masses -= sums * goes_right
            nodes = left + goes_right
        return nodes - self.width


@MEMORIES.register
class PrioritizedReplay(Replay):
    """Replay that draws in proportion to priority (|error| + epsilon) ** alpha. Schaul et al. 2016, section 3.3.

    New transitions get the largest priority so far. The batch carries importance weights when `beta_spec`, a schedule
    that should end at 1, is given; null leaves them out, as specs that do not name it expect.

    Spec example: {"name": "PrioritizedReplay", "alpha": 0.6, "epsilon": 0.0001, "batch_size": 32, "max_size": 10000,
    "use_cer": false, "beta_spec": {"name": "linear_decay", "start_val": 0.4, "end_val": 1.0, "end_step": 100000}}
    """

    KEYS = {
        **Replay.KEYS,
        'alpha': Key('number', low=0, note='0 is uniform'),
        'epsilon': Key('number', low=0, note='added to every error'),
        'beta_spec': Key('dict|null', None, fill=fill_spec, note='importance weights'),
    }

    def __init__(self, spec, layout, num_envs, rng):
        super().__init__(spec, layout, num_envs, rng)
        self.alpha, self.epsilon = spec['alpha'], spec['epsilon']
        self.beta = None if spec['beta_spec'] is None else Schedule(spec['beta_spec'])
        self.tree = SumTree(self.max_size)
        self.max_priority = 1.0
        self.batch_slots = None  # of the last sample, for update_priorities
        self._summed_size = 0  # the seen_size up to which the tree's sums count the leaves

    def add(self, states, actions, rewards, next_states, terminated, truncated):
        slots = (self.seen_size + np.arange(len(rewards))) % self.max_size
        super().add(states, actions, rewards, next_states, terminated, truncated)
        self.tree.leaves[slots] = self.max_priority

    def _sum_up(self):
        """Brings the sums up to date with the leaves that `add` has written since: together, not one by one."""
        num_new = min(self.seen_size - self._summed_size, self.max_size)
        if num_new:
            slots = (self.seen_size - num_new + np.arange(num_new)) % self.max_size
            self.tree.set(slots, self.tree.leaves[slots])
        self._summed_size = self.seen_size

    def sample(self, frame):
        """Returns: a Batch of (B, …) tensors, overwritten by the next sample.

        One draw from each of B equal parts of the total priority (Schaul et al. 2016, appendix B.2.1).
        """
        self.batch_slots = slots = self._sample_slots()
        batch = self._take(slots)
        return batch if self.beta is None else batch._replace(weights=self._weights(slots, frame))

    def _sample_slots(self):
        self._sum_up()
        if not self.tree.total:  # without epsilon, when every error was 0: none is preferred
            return super()._sample_slots()
        parts = (np.arange(self.batch_size) + self.rng.random(self.batch_size)) / self.batch_size
        slots = self.tree.find(parts * self.tree.total)
        if self.use_cer:
            slots[-1] = self.head
        return slots

    def _weights(self, slots, frame):
        """(size · P(i)) ** −beta, scaled so that the largest is 1. Schaul et al. 2016, section 3.4.

        As the largest is that of the least priority p, this is (p(i) / p) ** −beta. What was drawn without regard to
        a priority of 0 counts as p.
        """
        priorities = self.tree.leaves[slots]
        positive = priorities[priorities > 0]
        least = positive.min() if len(positive) else 1.0
        weights = (np.maximum(priorities, least) / least) ** -self.beta(frame)
        return torch.from_numpy(weights.astype(np.float32))

    def update_priorities(self, errors):
        """Sets the priorities of the last sample from its absolute errors (B,).

        What has an error that is not finite keeps its priority: one in a sum would make every draw the same.
        """
        finite = np.isfinite(errors)
        if not finite.all():
            errors, self.batch_slots = errors[finite], self.batch_slots[finite]
            if not len(errors):
                return
        priorities = (np.abs(errors) + self.epsilon) ** self.alpha
        self.tree.set(self.batch_slots, priorities)
        self.max_priority = max(self.max_priority, float(priorities.max()))

    def check_valid(self):
        self._sum_up()
        if not np.isfinite(self.tree.leaves).all():
            return False, 'a priority is not finite'
        if (self.tree.leaves[self.size :] != 0).any():
            return False, 'an empty slot has a priority'
        rebuilt = SumTree(self.max_size)
        rebuilt.set_all(self.tree.leaves)
        if not np.array_equal(rebuilt.nodes, self.tree.nodes):
            return False, 'a sum of the tree differs from its leaves'
        return super().check_valid()

    def state_dict(self):
        return {**super().state_dict(), 'priorities': self.tree.leaves, 'max_priority': self.max_priority}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        # where the transitions were lost (an empty ring), so are their priorities
        self.tree.set_all(state['priorities'] if self.seen_size else 0)
        self._summed_size = self.seen_size
        self.max_priority = state['max_priority']
