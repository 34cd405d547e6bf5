"""SARSA: on-policy temporal differences."""

import torch

from slm_lab.agent.algorithm.base import COMMON_KEYS, NOT_TRAINED, Algorithm, Trained
from slm_lab.agent.algorithm.dqn import q_loss, q_targets
from slm_lab.agent.net.optim import Learner
from slm_lab.lib.registry import ALGORITHMS


@ALGORITHMS.register
class SARSA(Algorithm):
    """On-policy Q-learning of the action that the policy itself takes next. Rummery & Niranjan 1994.

    1. act by the policy for training_frequency steps
    2. one optimizer step towards y = r + gamma (1 − terminated) Q(s', a')

    a' is the action taken in s'. Where the batch does not hold it (its last step, and steps at which a time limit cut
    the episode) the policy is asked for one, so that no step bootstraps on an action it would not take.

    Spec example: {"name": "SARSA", "action_pdtype": "Argmax", "action_policy": "epsilon_greedy", "explore_var_spec":
    {"name": "linear_decay", "start_val": 1.0, "end_val": 0.05, "start_step": 0, "end_step": 10000},
    "gamma": 0.99, "training_frequency": 32}
    """

    KEYS = COMMON_KEYS
    ACTION_TYPES = ('discrete',)
    MEMORIES = ('OnPolicyBatchReplay', 'OnPolicyReplay')

    def init_nets(self):
        self.learners['net'] = Learner(
            self.build_net(self.net_spec, int(self.world.action_space.n)), self.net_spec, self.check
        )
        self.net = self.learners['net'].net

    def next_actions(self, batch):
        """The actions a' of a batch (T, …): those of the next step, or drawn where that is not known."""
        unknown = batch.truncated.bool()
        unknown[-1] = True
        actions = torch.zeros_like(batch.actions)
        actions[:-1] = batch.actions[1:]
        asked = batch.next_states[unknown]
        drawn = self.act(asked.numpy(force=True))
        actions[unknown] = torch.as_tensor(drawn, dtype=actions.dtype, device=actions.device)
        return actions

    @torch.no_grad()
    def calc_targets(self, batch, next_actions):
        next_q = self.net(batch.next_states).gather(-1, next_actions.unsqueeze(-1)).squeeze(-1)
        return q_targets(batch.rewards, batch.terminated, next_q, self.spec['gamma'])

    def train(self, memory, frame):
        if not memory.is_due(self.spec['training_frequency']):
            return NOT_TRAINED
        learner = self.learners['net']
        learner.set_frame(frame)
        batch = self.sample(memory, frame)
        targets = self.calc_targets(batch, self.next_actions(batch)).flatten()
        states, actions = batch.states.flatten(0, batch.actions.ndim - 1), batch.actions.flatten()
        loss, _ = q_loss(self.net, self.loss_fn, states, actions, targets)
        value = learner.step(loss)
        return NOT_TRAINED if value is None else Trained(value, 1)
