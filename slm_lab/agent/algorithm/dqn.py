"""The DQN family: Q-learning with a replay memory, with and without a target net."""

import numpy as np
import torch

from slm_lab.agent.algorithm.base import COMMON_KEYS, NOT_TRAINED, Algorithm, Trained, policy_key
from slm_lab.agent.net.optim import TARGET_KEYS, Learner, TargetNet, check_target_keys
from slm_lab.lib.errors import SpecError
from slm_lab.lib.keys import Key
from slm_lab.lib.registry import ALGORITHMS

DQN_KEYS = {
    **COMMON_KEYS,
    'action_pdtype': Key('str|null', 'Argmax', note='action distribution'),
    'action_policy': policy_key('epsilon_greedy'),
    'training_iter': Key('int', low=1, note='batches of a training'),
    'training_batch_iter': Key('int', low=1, note='optimizer steps on each batch'),
    'training_start_step': Key('int|null', None, low=0, note='transitions before training begins; null: batch_size'),
}


def q_targets(rewards, terminated, next_q, gamma):
    """y = r + gamma (1 − terminated) Q(s', a'); all (B,)."""
    return rewards + gamma * (1 - terminated) * next_q


def q_loss(q_net, loss_fn, states, actions, targets, weights=None):
    """The loss of Q(s, a) against fixed targets.

    Args:
        states (B, d), actions (B,) whole numbers, targets (B,), weights (B,) or None
        loss_fn: element-wise loss of two (B,) tensors
    Returns: the mean (weighted) loss, and Q(s, a) (B,)
    """
    q = q_net(states).gather(1, actions.unsqueeze(1)).squeeze(1)
    losses = loss_fn(q, targets)
    if weights is not None:
        losses = weights * losses
    return losses.mean(), q


@ALGORITHMS.register
class VanillaDQN(Algorithm):
    """Q-learning from a replay memory, bootstrapping on the net itself. Mnih et al. 2013.

    1. act, epsilon-greedily, and remember the transition
    2. every training_frequency steps: training_iter batches, training_batch_iter optimizer steps on each, towards
       y = r + gamma (1 − terminated) max_a Q(s', a)

    Spec example: {"name": "VanillaDQN", "action_pdtype": "Argmax", "action_policy": "epsilon_greedy",
    "explore_var_spec": {"name": "linear_decay", "start_val": 1.0, "end_val": 0.1, "start_step": 0, "end_step": 1000},
    "gamma": 0.99, "training_batch_iter": 8, "training_iter": 4, "training_frequency": 4, "training_start_step": 32}
    """

    KEYS = DQN_KEYS
    ACTION_TYPES = ('discrete',)
    MEMORIES = ('Replay', 'PrioritizedReplay')
    # whether each optimizer step on a batch changes the batch's targets
    TARGETS_FOLLOW_NET = True

    @classmethod
    def check_spec(cls, resolved, raw, where):
        super().check_spec(resolved, raw, where)
        named = [key for key in TARGET_KEYS if key in raw['net']]
        if cls.HAS_TARGET:
            check_target_keys(resolved['net'], f'{where}.net')
        elif named:
            raise SpecError(f'{where}.net.{named[0]}: {cls.__name__} has no target net; remove the key or use DQN')

    def init_nets(self):
        self.learners['net'] = Learner(
            self.build_net(self.net_spec, int(self.world.action_space.n)), self.net_spec, self.check
        )
        self.net = self.learners['net'].net
        if self.HAS_TARGET:
            self.target_net = self.build_net(self.net_spec, int(self.world.action_space.n))
            self.targets['target_net'] = TargetNet(self.net, self.target_net, self.net_spec)

    def next_q(self, next_states):
        """Q(s', a') with which targets bootstrap: (B, d) -> (B,)."""
        return self.net(next_states).max(dim=1).values

    @torch.no_grad()
    def calc_targets(self, batch):
        return q_targets(batch.rewards, batch.terminated, self.next_q(batch.next_states), self.spec['gamma'])

    def train(self, memory, frame):
        if not self.trains_from(memory):
            return NOT_TRAINED
        learner = self.learners['net']
        learner.set_frame(frame)
        losses, is_prioritized = [], hasattr(memory, 'update_priorities')
        for _ in range(self.spec['training_iter']):
            batch = self.sample(memory, frame)
            targets = None
            for _ in range(self.spec['training_batch_iter']):
                if targets is None or self.TARGETS_FOLLOW_NET:
                    targets = self.calc_targets(batch)
                loss, q = q_loss(self.net, self.loss_fn, batch.states, batch.actions, targets, batch.weights)
                value = learner.step(loss)
                if value is None:
                    break  # the same batch would give it again
                losses.append(value)
                if is_prioritized:
                    memory.update_priorities((targets - q).abs().numpy(force=True))
        return Trained(float(np.mean(losses)), len(losses)) if losses else NOT_TRAINED


@ALGORITHMS.register
class DQN(VanillaDQN):
    """VanillaDQN that bootstraps on a target net: y = r + gamma (1 − terminated) max_a Q_target(s', a).

    Mnih et al. 2015. Spec example: VanillaDQN's, with "update_type", "update_frequency" and, for "polyak",
    "polyak_coef" in the net.
    """

    HAS_TARGET = True
    TARGETS_FOLLOW_NET = False

    def next_q(self, next_states):
        return self.target_net(next_states).max(dim=1).values


@ALGORITHMS.register
class DoubleDQN(DQN):
    """DQN whose next action is picked by the net and valued by the target net. van Hasselt et al. 2016, equation 4.

    y = r + gamma (1 − terminated) Q_target(s', argmax_a Q(s', a))
    """

    TARGETS_FOLLOW_NET = True

    def next_q(self, next_states):
        actions = self.net(next_states).argmax(dim=1, keepdim=True)
        return self.target_net(next_states).gather(1, actions).squeeze(1)
