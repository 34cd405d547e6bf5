"""REINFORCE: the policy gradient by Monte-Carlo returns."""

import torch

from slm_lab.agent import distribution
from slm_lab.agent.algorithm.base import COMMON_KEYS, NOT_TRAINED, Algorithm, Trained, schedule_key
from slm_lab.agent.net.optim import Learner
from slm_lab.lib.errors import SpecError
from slm_lab.lib.keys import Key
from slm_lab.lib.maths import discounted_returns
from slm_lab.lib.registry import ALGORITHMS

POLICY_KEYS = {
    **COMMON_KEYS,
    'entropy_coef_spec': schedule_key(note='weight of the entropy; null: none'),
    'policy_loss_coef': Key('number', 1.0, note='weight of the policy loss'),
}


def policy_loss(pd, actions, advantages, coef, entropy_coef):
    """−coef · mean(log π(a|s) · A) − entropy_coef · mean entropy.

    Args:
        pd: distribution over a batch (B,); actions (B, …); advantages (B,), fixed
    Returns: the loss, and the mean entropy
    """
    entropy = pd.entropy().mean()
    return -coef * (pd.log_prob(actions) * advantages).mean() - entropy_coef * entropy, entropy


def time_major(batch):
    """A batch of episodes one after the other (B, …) as one env's (B, 1, …); (T, N, …) stays as it is."""
    if batch.rewards.ndim > 1:
        return batch
    return batch._replace(**{f: getattr(batch, f).unsqueeze(1) for f in batch._fields if getattr(batch, f) is not None})


@ALGORITHMS.register
class Reinforce(Algorithm):
    """The policy gradient with the return of each step to its episode's end. Williams 1992.

    1. act by the policy until training_frequency episodes have ended (OnPolicyReplay) or steps are stored
    2. one optimizer step along −mean(log π(a|s) R) − entropy_coef · entropy; with center_return the batch's mean
       return is its baseline

    Spec example: {"name": "Reinforce", "action_pdtype": "default", "action_policy": "default",
    "center_return": true, "entropy_coef_spec": null, "gamma": 0.99, "training_frequency": 1}
    """

    KEYS = {**POLICY_KEYS, 'center_return': Key('bool', False, note="subtract the batch's mean return")}
    MEMORIES = ('OnPolicyReplay', 'OnPolicyBatchReplay', 'OnPolicyCrossEntropy')
    HAS_LOSS = False
    SCHEDULED = ('explore_var', 'entropy_coef')

    def _check_policy(self):
        super()._check_policy()
        if self.distribution is distribution.Argmax:
            where = 'agent.0.algorithm.action_pdtype'
            raise SpecError(f"{where}: 'Argmax' has no gradient that {type(self).__name__} could follow; use 'default'")

    def init_nets(self):
        out_dim = self.distribution.out_dim(self.world.action_space)
        self.learners['net'] = Learner(self.build_net(self.net_spec, out_dim), self.net_spec, self.check)
        self.net = self.learners['net'].net

    def policy_output(self, states):
        """What the distribution is built from, for states (B, …) as a tensor."""
        return self.net(states)

    def logits(self, states):
        return self.policy_output(self.to_tensor(states))

    def to_env(self, actions):
        return self.distribution.to_env(actions, self.world.action_space)

    @property
    def entropy_weight(self):
        """The entropy's weight in the loss: 0 without a schedule, whose value is NaN."""
        return 0.0 if self.spec['entropy_coef_spec'] is None else self.entropy_coef

    def policy_loss(self, states, actions, advantages):
        pd = self.distribution(self.policy_output(states))
        return policy_loss(pd, actions, advantages, self.spec['policy_loss_coef'], self.entropy_weight)

    def calc_returns(self, batch):
        """(T, N), without a bootstrap: what an unfinished episode would still bring is unknown here."""
        unknown = torch.zeros_like(batch.rewards)
        returns = discounted_returns(batch.rewards, batch.terminated, batch.truncated, unknown, self.spec['gamma'])
        return returns - returns.mean() if self.spec['center_return'] else returns

    def train(self, memory, frame):
        if not memory.is_due(self.spec['training_frequency']):
            return NOT_TRAINED
        for learner in self.learners.values():
            learner.set_frame(frame)
        return self.train_on(time_major(self.sample(memory, frame)))

    def train_on(self, batch):
        """Trains on a batch (T, N, …). Returns: Trained"""
        advantages = self.calc_returns(batch).flatten()
        loss, entropy = self.policy_loss(batch.states.flatten(0, 1), batch.actions.flatten(0, 1), advantages)
        value = self.learners['net'].step(loss)
        return NOT_TRAINED if value is None else Trained(value, 1, entropy.item())
