"""Soft actor-critic, for continuous and for discrete actions."""

import math

import numpy as np
import torch
from torch import nn

from slm_lab.agent import distribution
from slm_lab.agent.algorithm.base import COMMON_KEYS, NOT_TRAINED, Algorithm, Trained
from slm_lab.agent.algorithm.dqn import q_targets
from slm_lab.agent.net.optim import Learner, TargetNet, check_target_keys
from slm_lab.lib.errors import SpecError
from slm_lab.lib.keys import Key
from slm_lab.lib.registry import ALGORITHMS, NETS

CRITICS = ('q1_net', 'q2_net')
# of the largest entropy ln n of n discrete actions; higher, the policy can hardly prefer an action
TARGET_OF_MAX_ENTROPY = 0.6


def _check_target_entropy(value, where):
    if isinstance(value, str) and value != 'auto':
        raise SpecError(f"{where}: '{value}' is neither 'auto' nor a number (nats)")


class Temperature(nn.Module):
    """log alpha, the logarithm of the entropy's weight; alpha begins at 1."""

    def __init__(self):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.zeros(()))


def mean_of(losses, weights):
    """The mean of losses (B,), weighted where importance weights (B,) are given."""
    return (losses if weights is None else weights * losses).mean()


def soft_values(q, log_probs, probs, alpha):
    """V = Σ_a π(a) (Q(a) − alpha log π(a)): all (B, A) -> (B,). Christodoulou 2019, equation 10."""
    return (probs * (q - alpha * log_probs)).sum(dim=-1)


def temperature_loss(log_alpha, entropies, target_entropy):
    """mean log_alpha (H − target): alpha grows while the policy's entropy H (B,) is below its target.

    Haarnoja et al. 2018, Soft Actor-Critic Algorithms and Applications, equation 18, in log alpha.
    """
    return (log_alpha * (entropies - target_entropy)).mean()


@ALGORITHMS.register
class SoftActorCritic(Algorithm):
    """Maximises return and entropy with two critics. Haarnoja et al. 2018; discrete actions: Christodoulou 2019.

    1. act at random for training_start_step frames, then by the policy
    2. every training_frequency steps, training_iter times on a batch of its own: both critics towards
       y = r + gamma (1 − terminated) (Q_target(s', a') − alpha log π(a'|s')); every policy_delay-th time also the
       policy towards Q − alpha log π, alpha towards target_entropy, and the target nets towards the critics

    Continuous actions are tanh of a Normal, in (−1, 1) in the memory and to the critics; the env gets them at its
    bounds' scale. Q is the lesser of the two critics'. Of discrete actions the critics give all values, expectations
    over them are exact, and Q is the critics' mean (Zhou et al. 2022, Revisiting Discrete Soft Actor-Critic): they
    differ most where little was tried, which their lesser value would keep from ever being tried.

    Spec example: {"name": "SoftActorCritic", "action_pdtype": "default", "action_policy": "default", "gamma": 0.99,
    "training_frequency": 1, "training_iter": 1, "training_start_step": 1000, "target_entropy": "auto"}; net: one spec
    of the policy and the critics: {"type": "MLPNet", "hid_layers": [256, 256], "hid_layers_activation": "relu",
    "optim_spec": {"name": "Adam", "lr": 0.001}, "update_type": "polyak", "update_frequency": 1, "polyak_coef": 0.005}
    """

    KEYS = {
        **COMMON_KEYS,
        'training_iter': Key('int|null', None, low=1, note='batches of a training; null: num_envs'),
        'training_start_step': Key('int|null', None, low=0, note='frames of random actions; null: batch_size'),
        'policy_delay': Key('int', 1, low=1, note='batches between steps of the policy'),
        'target_entropy': Key(
            'number|str', 'auto', validate=_check_target_entropy, note="nats; 'auto': −d, or 0.6 ln n if discrete"
        ),
        'alpha_lr': Key('number|null', None, above=0, note="learning rate of log alpha; null: the net's"),
    }
    ACTION_TYPES = ('discrete', 'continuous', 'multi_continuous')
    MEMORIES = ('Replay', 'PrioritizedReplay')
    HAS_TARGET = True

    @classmethod
    def check_spec(cls, resolved, raw, where):
        super().check_spec(resolved, raw, where)
        if cls.HAS_TARGET:
            check_target_keys(resolved['net'], f'{where}.net')

    def __init__(self, spec, world, seed, place=0, check=False):
        algorithm = dict(spec['algorithm'])
        if algorithm['training_iter'] is None:
            algorithm['training_iter'] = world.num_envs
        start = algorithm['training_start_step']
        self.warm_up = spec['memory']['batch_size'] if start is None else start
        self.critic_spec = spec['net'] if spec.get('critic_net') is None else spec['critic_net']
        self.iterations = 0  # batches trained on
        super().__init__({**spec, 'algorithm': algorithm}, world, seed, place, check)

    # --- nets

    def init_nets(self):
        space = self.world.action_space
        self.is_discrete = distribution.action_type(space) == 'discrete'
        self._check_distribution()
        if not self.is_discrete:
            self.distribution = distribution.SquashedNormal
        self.target_entropy = self._target_entropy()
        self.net = self._learn('net', self.build_net(self.net_spec, self.distribution.out_dim(space)), self.net_spec)
        for name in CRITICS:
            critic = self._learn(name, self.build_critic(), self.critic_spec)
            if self.HAS_TARGET:
                self.targets[f'target_{name}'] = TargetNet(critic, self.build_critic(), self.critic_spec)
        self.critics = [self.learners[name].net for name in CRITICS]
        self.target_critics = [self.targets[f'target_{name}'].target for name in CRITICS] if self.HAS_TARGET else None
        optim = {**self.net_spec['optim_spec']}
        if self.spec['alpha_lr'] is not None:
            optim['lr'] = self.spec['alpha_lr']
        temperature = Temperature().to(self.device)
        self.log_alpha = self._learn('alpha', temperature, {**self.net_spec, 'optim_spec': optim}).log_alpha

    def _learn(self, name, net, spec):
        self.learners[name] = Learner(net, spec, self.check)
        return net

    def _check_distribution(self):
        where, space = 'agent.0.algorithm', self.world.action_space
        fitting = ('Categorical', 'GumbelSoftmax') if self.is_discrete else ('Normal', 'MultivariateNormal')
        name = self.distribution.__name__
        if name not in fitting:
            raise SpecError(f"{where}.action_pdtype: {type(self).__name__} takes {' or '.join(fitting)}, not '{name}'")
        if not self.is_discrete and not np.isfinite([space.low, space.high]).all():
            raise SpecError(f'{where}.name: {type(self).__name__} needs actions with bounds; this env has {space}')

    def _target_entropy(self):
        target, space = self.spec['target_entropy'], self.world.action_space
        if target != 'auto':
            if self.is_discrete and not 0 <= target <= math.log(space.n):
                raise SpecError(
                    f'agent.0.algorithm.target_entropy: {target} cannot be reached by {space.n} discrete actions, '
                    f'whose entropy lies between 0 and ln n = {math.log(space.n):.3g} nats'
                )
            if not self.is_discrete and target >= (bound := math.log(2) * space.shape[0]):
                raise SpecError(
                    f'agent.0.algorithm.target_entropy: {target} cannot be reached by {space.shape[0]} actions in '
                    f"(−1, 1), whose entropy is below d ln 2 = {bound:.3g} nats; the usual one is −d, 'auto'"
                )
            return float(target)
        return TARGET_OF_MAX_ENTROPY * math.log(space.n) if self.is_discrete else -float(np.prod(space.shape))

    def build_critic(self):
        """Discrete: states -> Q of each action (B, A). Continuous: states and actions -> Q (B, 1)."""
        space, spec = self.world.action_space, self.critic_spec
        if self.is_discrete:
            return self.build_net(spec, int(space.n))
        net_class = NETS.get(f'Q{spec["type"]}', f'agent.0.net.type: the critics of {spec["type"]}')
        return net_class(spec, (self.state_dim, space.shape[0]), 1).to(self.device)

    # --- acting

    def random_actions(self, n, rng):
        if self.is_discrete:
            return super().random_actions(n, rng)
        return rng.uniform(-1, 1, (n, *self.world.action_space.shape)).astype(np.float32)

    def to_env(self, actions):
        return self.distribution.to_env(actions, self.world.action_space)

    def act(self, states, evaluating=False):
        if self.acts_randomly and not evaluating:
            return self.random_actions(len(states), self.rng)
        return super().act(states, evaluating)

    def _set_scheduled(self, frame):
        super()._set_scheduled(frame)
        self.acts_randomly = frame < self.warm_up

    def update(self, frame):
        self._set_scheduled(frame)  # the target nets follow each step of the critics, in `train`

    # --- training

    @property
    def alpha(self):
        return self.log_alpha.detach().exp()

    def qs(self, nets, states, actions):
        """Q1 and Q2: of all actions (B, A) if discrete, else of `actions`, (B,)."""
        if self.is_discrete:
            return [net(states) for net in nets]
        return [net(states, actions).squeeze(-1) for net in nets]

    def combined_q(self, qs):
        """Q of both critics' values of the same actions, all of one shape."""
        return (qs[0] + qs[1]) / 2 if self.is_discrete else torch.min(*qs)

    def soft_value(self, pd, q_of):
        """V (B,) of states by a policy `pd`, and the policy's entropies (B,): expected if discrete, else of a sample.

        Args:
            q_of: function of actions (None if discrete) that gives their `combined_q`
        """
        if self.is_discrete:
            values = soft_values(q_of(None), pd.logits, pd.probs, self.alpha)
            return values, pd.entropy()
        actions, log_probs = pd.rsample_with_log_prob()
        return q_of(actions) - self.alpha * log_probs, -log_probs

    @torch.no_grad()
    def calc_targets(self, batch):
        pd = self.distribution(self.net(batch.next_states))
        values, _ = self.soft_value(pd, lambda a: self.combined_q(self.qs(self.target_critics, batch.next_states, a)))
        return q_targets(batch.rewards, batch.terminated, values, self.spec['gamma'])

    def critic_values(self, batch):
        """Q1 and Q2 of the batch's actions, each (B,), and their fixed targets (B,)."""
        qs = self.qs(self.critics, batch.states, batch.actions)
        return self.qs_taken(qs, batch.actions), self.calc_targets(batch)

    def qs_taken(self, qs, actions):
        return [q.gather(1, actions.unsqueeze(1)).squeeze(1) for q in qs] if self.is_discrete else qs

    def train(self, memory, frame):
        if not self.trains_from(memory):
            return NOT_TRAINED
        for learner in self.learners.values():
            learner.set_frame(frame)
        losses, entropies, num_steps = [], [], 0
        frames = self.frames_stood_for(frame)
        for _ in range(self.spec['training_iter']):
            batch = self.sample(memory, frame)
            taken = self.train_critics(batch, memory)
            if self.iterations % self.spec['policy_delay'] == 0:
                policy_losses, entropy = self.train_policy(batch)
                taken += policy_losses
                entropies.append(entropy)
                for target in self.targets.values():
                    target.update(*frames)
            self.iterations += 1
            taken = [loss for loss in taken if loss is not None]  # None: not finite, and left out
            losses.append(sum(taken))
            num_steps += len(taken)
        if not num_steps:
            return NOT_TRAINED
        return Trained(float(np.mean(losses)), num_steps, float(np.mean(entropies)) if entropies else float('nan'))

    def frames_stood_for(self, frame):
        """The frames from one training to the next, as `TargetNet.update` takes them: (the last one, how many)."""
        period, num_envs = self.spec['training_frequency'], self.world.num_envs
        if period <= num_envs:
            return frame, num_envs
        return (frame - 1) // period * period + 1, period  # trainings are due at 1, 1 + period, …

    def train_critics(self, batch, memory):
        """One optimizer step of each critic. Returns: their losses"""
        qs, targets = self.critic_values(batch)
        losses = [
            self.learners[name].step(mean_of(self.loss_fn(q, targets), batch.weights))
            for name, q in zip(CRITICS, qs, strict=True)
        ]
        if hasattr(memory, 'update_priorities'):
            memory.update_priorities((self.combined_q(qs) - targets).abs().numpy(force=True))
        return losses

    def train_policy(self, batch):
        """One optimizer step of the policy and one of alpha. Returns: their losses, and the mean entropy"""
        pd = self.distribution(self.net(batch.states))
        values, entropies = self.soft_value(pd, lambda a: self.combined_q(self.qs(self.critics, batch.states, a)))
        losses = [self.learners['net'].step(-values.mean())]
        entropies = entropies.detach()
        losses.append(self.learners['alpha'].step(temperature_loss(self.log_alpha, entropies, self.target_entropy)))
        return losses, entropies.mean().item()

    # --- state

    def state_dict(self):
        return {**super().state_dict(), 'iterations': self.iterations, 'acts_randomly': self.acts_randomly}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.iterations, self.acts_randomly = state['iterations'], state['acts_randomly']
