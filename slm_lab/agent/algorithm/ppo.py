"""Proximal policy optimization with a clipped objective."""

import numpy as np
import torch

from slm_lab.agent.algorithm.actor_critic import ActorCritic
from slm_lab.agent.algorithm.base import NOT_TRAINED, Trained, schedule_key
from slm_lab.lib import rng as rng_lib
from slm_lab.lib.errors import SpecError
from slm_lab.lib.keys import REQUIRED, Key, leftover
from slm_lab.lib.registry import ALGORITHMS

# exp of more than this overflows to infinity and would turn weights into NaN
MAX_LOG_RATIO = 20.0


def clipped_policy_loss(log_probs, old_log_probs, advantages, clip_eps):
    """−mean min(r A, clip(r, 1 − eps, 1 + eps) A), r = π / π_old. Schulman et al. 2017, equation 7. All (B,)."""
    ratios = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return -torch.min(ratios * advantages, ratios.clamp(1 - clip_eps, 1 + clip_eps) * advantages).mean()


@ALGORITHMS.register
class PPO(ActorCritic):
    """Several epochs of minibatches on each batch, with the policy held near the one that acted. Schulman et al. 2017.

    1. act by the policy for time_horizon env steps
    2. advantages by GAE(lam), standardised over the batch; log-probs of the policy that acted
    3. training_epoch times: all transitions, shuffled, in minibatches of minibatch_size; an optimizer step on each
       along the clipped policy loss, the entropy and the value loss

    Spec example: {"name": "PPO", "action_pdtype": "default", "action_policy": "default", "gamma": 0.99, "lam": 0.95,
    "clip_eps_spec": {"name": "no_decay", "start_val": 0.2}, "entropy_coef_spec": null, "val_loss_coef": 0.5,
    "minibatch_size": 64, "time_horizon": 32, "training_epoch": 4}
    """

    KEYS = {
        **{k: v for k, v in ActorCritic.KEYS.items() if k != 'num_step_returns'},
        'lam': Key('number', REQUIRED, low=0, high=1, note='lambda of GAE'),
        'clip_eps_spec': schedule_key(REQUIRED, note='how far the policy may move'),
        'clip_vloss': Key('bool', False, note='hold values near the old ones too, within clip_eps'),
        'minibatch_size': Key('int', 4, low=1, note='transitions'),
        'time_horizon': Key('int', low=1, note='env steps of each env between trainings'),
        'training_epoch': Key('int', low=1, note='passes over each batch'),
        'training_frequency': leftover('time_horizon is it'),
        'training_batch_iter': leftover('training_epoch is it'),
        'policy_loss_coef': leftover(),
        'sil_policy_loss_coef': leftover('PPOSIL only'),
        'sil_val_loss_coef': leftover('PPOSIL only'),
        'training_iter': leftover('PPOSIL only'),
    }
    MEMORIES = ('OnPolicyBatchReplay',)
    SCHEDULED = ('explore_var', 'entropy_coef', 'clip_eps')

    @classmethod
    def check_spec(cls, resolved, raw, where):
        super().check_spec(resolved, raw, where)
        if resolved['algorithm']['clip_eps_spec'] is None:
            raise SpecError(f'{where}.algorithm.clip_eps_spec: PPO needs a schedule, not null')

    @staticmethod
    def frequency_of(algorithm):
        return algorithm['time_horizon']

    def __init__(self, spec, world, seed, place=0, check=False):
        self.shuffle_rng = rng_lib.generator(seed, 'shuffle')
        super().__init__(spec, world, seed, place, check)

    def train_on(self, batch):
        advantages, targets = self.flat_advantages(batch)
        states, actions = batch.states.flatten(0, 1), batch.actions.flatten(0, 1)
        with torch.no_grad():
            old_log_probs = self.distribution(self.policy_output(states)).log_prob(actions)
            old_values = self.values(states) if self.spec['clip_vloss'] else None
        losses, entropies, num_steps = [], [], 0
        for _ in range(self.spec['training_epoch']):
            for rows in self._minibatches(len(states)):
                pd = self.distribution(self.policy_output(states[rows]))
                entropy = pd.entropy().mean()
                policy_loss = clipped_policy_loss(
                    pd.log_prob(actions[rows]), old_log_probs[rows], advantages[rows], self.clip_eps
                )
                policy_loss = policy_loss - self.entropy_weight * entropy
                old = None if old_values is None else old_values[rows]
                taken = self.step(policy_loss, self.value_loss(states[rows], targets[rows], old))
                num_steps += len(taken)
                losses.append(sum(taken))
                entropies.append(entropy.item())
        return Trained(float(np.mean(losses)), num_steps, float(np.mean(entropies))) if num_steps else NOT_TRAINED

    def value_loss(self, states, targets, old_values=None):
        """With the old values, the larger of the losses of V and of V held within clip_eps of its old value.

        A move of V beyond that range brings nothing. Engstrom et al. 2020, section 3, "value function clipping".
        """
        if old_values is None:
            return super().value_loss(states, targets)
        values = self.values(states)
        held = old_values + (values - old_values).clamp(-self.clip_eps, self.clip_eps)
        errors = torch.max(self.value_errors(values, targets), self.value_errors(held, targets))
        return self.spec['val_loss_coef'] * errors.mean()

    def _minibatches(self, size):
        """The rows of each minibatch, shuffled; the last may be smaller."""
        order = torch.from_numpy(self.shuffle_rng.permutation(size)).to(self.device)
        return order.split(self.spec['minibatch_size'])

    def state_dict(self):
        return {
            **super().state_dict(),
            'shuffle_rng': rng_lib.generator_state(self.shuffle_rng),
        }

    def load_state_dict(self, state):
        super().load_state_dict(state)
        rng_lib.set_generator_state(self.shuffle_rng, state['shuffle_rng'])
