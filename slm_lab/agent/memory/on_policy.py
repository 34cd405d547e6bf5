"""On-policy memories: transitions of the current policy, used once."""

import numpy as np
import torch

from slm_lab.agent.memory.batch import FIELDS, Batch
from slm_lab.lib.keys import Key, leftover
from slm_lab.lib.registry import MEMORIES

ON_POLICY_KEYS = {
    'name': Key('str'),
    **{
        key: leftover('SIL and PPOSIL, of their replay')
        for key in ('sil_replay_name', 'batch_size', 'max_size', 'use_cer', 'alpha', 'epsilon')
    },
}


class _Growing:
    """Arrays (T, N, …) that double when they are full."""

    def __init__(self, layout, num_envs, length=32):
        self.arrays = layout.allocate((length, num_envs))

    def write(self, t, rows):
        if t == len(self.arrays['rewards']):
            self.arrays = {name: np.concatenate([a, np.zeros_like(a)]) for name, a in self.arrays.items()}
        for name, values in zip(FIELDS, rows, strict=True):
            self.arrays[name][t] = values


@MEMORIES.register
class OnPolicyBatchReplay:
    """The transitions since the last training, handed over every training_frequency env steps as (T, N, …).

    Spec example: {"name": "OnPolicyBatchReplay"}
    """

    KEYS = ON_POLICY_KEYS
    ON_POLICY = True

    def __init__(self, spec, layout, num_envs, rng):
        self.num_envs = num_envs
        self.storage = _Growing(layout, num_envs)
        self.length = 0  # env steps stored
        self.seen_size = 0

    @property
    def size(self):
        return self.length * self.num_envs

    def add(self, states, actions, rewards, next_states, terminated, truncated):
        """Adds one transition of each env: arrays (N, …)."""
        self.storage.write(self.length, (states, actions, rewards, next_states, terminated, truncated))
        self.length += 1
        self.seen_size += self.num_envs

    def cut(self, envs):
        """The running episodes of `envs` end here, as by a time limit: what comes next is of another episode.

        Returns: how many there were to cut.
        """
        if not self.length:
            return 0
        terminated, truncated = (self.storage.arrays[name][self.length - 1] for name in ('terminated', 'truncated'))
        running = [env for env in envs if not terminated[env] and not truncated[env]]
        truncated[running] = 1
        return len(running)

    def is_due(self, training_frequency, training_start_step=0):
        return self.length >= training_frequency

    def sample(self, frame):
        """Returns: a Batch of (T, N, …) tensors with all that is stored; the memory is empty afterwards."""
        batch = Batch(**{name: torch.from_numpy(a[: self.length].copy()) for name, a in self.storage.arrays.items()})
        self.length = 0
        return batch

    def check_valid(self):
        return True, ''

    def state_dict(self):
        rows = {name: a[: self.length] for name, a in self.storage.arrays.items()}
        return {'rows': rows, 'seen_size': self.seen_size}

    def load_state_dict(self, state):
        self.length = 0
        for rows in zip(*(state['rows'][name] for name in FIELDS), strict=True):
            self.storage.write(self.length, rows)
            self.length += 1
        self.seen_size = state['seen_size']


@MEMORIES.register
class OnPolicyReplay(OnPolicyBatchReplay):
    """Whole episodes, handed over once training_frequency of them have ended, one after the other as (B, …).

    Each env has episodes of its own; what belongs to episodes that still run stays for the next time.

    Spec example: {"name": "OnPolicyReplay"}
    """

    def __init__(self, spec, layout, num_envs, rng):
        super().__init__(spec, layout, num_envs, rng)
        self.episodes = 0  # ended and not yet handed over
        self.begins = np.zeros(num_envs, dtype=np.int64)  # per env, the stored step at which its open part begins

    def add(self, states, actions, rewards, next_states, terminated, truncated):
        super().add(states, actions, rewards, next_states, terminated, truncated)
        self.episodes += int(np.count_nonzero(np.logical_or(terminated, truncated)))

    def cut(self, envs):
        num_cut = super().cut(envs)
        self.episodes += num_cut
        return num_cut

    def is_due(self, training_frequency, training_start_step=0):
        return self.episodes >= training_frequency

    def sample(self, frame):
        """Returns: a Batch of (B, …) tensors: the ended episodes of env 0, then of env 1, …"""
        arrays = self.storage.arrays
        ended = (arrays['terminated'] + arrays['truncated'])[: self.length] > 0
        spans = []
        for env, begin in enumerate(self.begins):
            ends = np.flatnonzero(ended[:, env])
            end = max(int(begin), int(ends[-1]) + 1 if len(ends) else 0)
            spans.append((env, int(begin), end))
        batch = {
            name: torch.from_numpy(np.concatenate([a[begin:end, env] for env, begin, end in spans]))
            for name, a in arrays.items()
        }
        self.begins = np.array([end for _, _, end in spans])
        self._drop_used_steps()
        self.episodes = 0
        return Batch(**batch)

    def _drop_used_steps(self):
        """Moves the steps that some env still needs to the front."""
        used = int(self.begins.min())
        for a in self.storage.arrays.values():
            a[: self.length - used] = a[used : self.length].copy()
        self.length -= used
        self.begins -= used

    def state_dict(self):
        return {**super().state_dict(), 'episodes': self.episodes, 'begins': self.begins}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.episodes = state['episodes']
        self.begins = np.array(state['begins'])


@MEMORIES.register
class OnPolicyCrossEntropy(OnPolicyReplay):
    """OnPolicyReplay that hands over the best of the ended episodes alone: the elite of the cross-entropy method.

    An episode stays when its return (the plain sum of its rewards) is at least the `cross_entropy` quantile of the
    returns of all episodes that ended since the last training, with numpy's linear interpolation between two of them:
    0.8 keeps about the best fifth, and always the best one. 1 keeps every episode. Rubinstein & Kroese 2004.

    Spec example: {"name": "OnPolicyCrossEntropy", "cross_entropy": 0.8}
    """

    KEYS = {
        **ON_POLICY_KEYS,
        'cross_entropy': Key('number', 1.0, above=0, high=1, note='quantile of returns to reach; 1: keep all'),
    }

    def __init__(self, spec, layout, num_envs, rng):
        super().__init__(spec, layout, num_envs, rng)
        self.cross_entropy = spec['cross_entropy']

    def sample(self, frame):
        """Returns: a Batch of (B, …) tensors: the ended episodes of env 0 that are good enough, then of env 1, …"""
        batch = super().sample(frame)
        if self.cross_entropy == 1:
            return batch
        ends = ((batch.terminated + batch.truncated) > 0).numpy()
        episodes = np.cumsum(ends) - ends  # of each step the number of its episode
        returns = np.bincount(episodes, weights=batch.rewards.numpy())
        is_elite = returns >= np.percentile(returns, 100 * self.cross_entropy)
        rows = torch.from_numpy(is_elite[episodes])
        return batch._replace(**{name: getattr(batch, name)[rows] for name in FIELDS})
