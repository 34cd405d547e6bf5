"""CrossQ: soft actor-critic without target nets."""

import torch

from slm_lab.agent.algorithm.dqn import q_targets
from slm_lab.agent.algorithm.soft_actor_critic import SoftActorCritic
from slm_lab.lib.registry import ALGORITHMS


@ALGORITHMS.register
class CrossQ(SoftActorCritic):
    """SoftActorCritic whose critics are steadied by batch normalisation instead of target nets. Bhatt et al. 2024.

    The critics see (s, a) and (s', a') in one forward pass, so that the statistics of their normalisation are those of
    both; the second half gives the targets, without a gradient. For the policy they use their running statistics.
    The critics' spec is `critic_net` beside `net`; it should have `batch_norm` or `batch_renorm`.

    Spec example: as SoftActorCritic's, without the target net's keys; agent also has "critic_net": {"type": "MLPNet",
    "hid_layers": [256, 256], "hid_layers_activation": "relu", "batch_renorm": true}
    """

    HAS_CRITIC_SPEC = True
    HAS_TARGET = False

    def build_critic(self):
        return super().build_critic().eval()

    def joint_qs(self, batch, next_actions):
        """Q1 and Q2 of this step and of the next, by one pass in training mode: [q1, q2], [next_q1, next_q2]."""
        states = torch.cat([batch.states, batch.next_states])
        actions = None if self.is_discrete else torch.cat([batch.actions, next_actions])
        for critic in self.critics:
            critic.train()
        halves = [q.chunk(2) for q in self.qs(self.critics, states, actions)]
        for critic in self.critics:
            critic.eval()
        return [now for now, _ in halves], [following.detach() for _, following in halves]

    def critic_values(self, batch):
        with torch.no_grad():
            pd = self.distribution(self.net(batch.next_states))
            actions, log_probs = (None, None) if self.is_discrete else pd.rsample_with_log_prob()
        qs, next_qs = self.joint_qs(batch, actions)
        next_q = self.combined_q(next_qs)
        values = self.soft_value(pd, lambda _: next_q)[0] if self.is_discrete else next_q - self.alpha * log_probs
        targets = q_targets(batch.rewards, batch.terminated, values, self.spec['gamma']).detach()
        return self.qs_taken(qs, batch.actions), targets
