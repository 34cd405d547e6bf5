"""Advantage actor-critic: a policy and the value of states, in one net or in two."""

import torch

from slm_lab.agent.algorithm.base import NOT_TRAINED, Trained
from slm_lab.agent.algorithm.reinforce import POLICY_KEYS, Reinforce
from slm_lab.agent.net.optim import Learner
from slm_lab.lib.errors import SpecError
from slm_lab.lib.keys import Key, leftover, read_values
from slm_lab.lib.maths import discounted_returns, generalized_advantages, standardize
from slm_lab.lib.registry import ALGORITHMS, NETS

# what an actor-critic reads of a net spec beside the net class's own keys
NET_KEYS = {
    'shared': Key('bool', note='one net with two heads, or two nets'),
    'use_same_optim': Key('bool', False, note="the critic takes the actor's keys"),
    'gpu': Key('bool|str|null', False, choices=(False, True, None, 'auto')),
}


def has_one_spec(net):
    """Whether the actor's keys are all that is read: of the one net, or of both nets."""
    return bool(net['shared'] or net.get('use_same_optim'))


def split_net_spec(net):
    """A net spec as (actor's, critic's): `actor_optim_spec` is the actor's `optim_spec` alone, and so on."""
    common = {k: v for k, v in net.items() if not k.startswith(('actor_', 'critic_'))}
    actor, critic = (
        {**common, **{k.removeprefix(p): v for k, v in net.items() if k.startswith(p)}} for p in ('actor_', 'critic_')
    )
    if has_one_spec(net):
        return (_without(actor, NET_KEYS),) * 2
    # only values are compared with targets, and only the actor draws actions
    return _without(actor, {*NET_KEYS, 'loss_spec'}), _without(critic, {*NET_KEYS, 'log_std_init'})


def _without(spec, keys):
    return {k: v for k, v in spec.items() if k not in keys}


class TargetScale:
    """The running standard deviation of all value targets so far, by which values and targets are divided.

    Means and squared deviations of batches are merged as in Chan et al. 1979.
    """

    LIMIT = 10.0  # of what is divided

    def __init__(self):
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def add(self, targets):
        """Counts targets (B,)."""
        targets = targets.double()
        n, mean = targets.numel(), targets.mean().item()
        squares = (targets - mean).square().sum().item()
        total, delta = self.count + n, mean - self.mean
        self.squares += squares + delta**2 * self.count * n / total
        self.mean += delta * n / total
        self.count = total

    def __call__(self, x):
        """x over the deviation, which counts as at least 1; cut at ±LIMIT."""
        deviation = (self.squares / self.count) ** 0.5 if self.count else 1.0
        return (x / max(deviation, 1.0)).clamp(-self.LIMIT, self.LIMIT)

    def state_dict(self):
        return {'count': self.count, 'mean': self.mean, 'squares': self.squares}

    def load_state_dict(self, state):
        self.count, self.mean, self.squares = state['count'], state['mean'], state['squares']


@ALGORITHMS.register
class ActorCritic(Reinforce):
    """A2C. Mnih et al. 2016; advantages by GAE (Schulman et al. 2016) or n-step returns.

    1. act by the policy until the memory is due
    2. advantages: GAE(lam), standardised over the batch, or, with lam null, n-step returns less V; num_step_returns
       then also is the training frequency. Without either: returns to the batch's end
    3. one optimizer step along the policy gradient and the value loss, together (shared) or each in its net

    Values are bootstrapped on the true successor of each step, never through a termination.

    Spec example: {"name": "ActorCritic", "action_pdtype": "default", "action_policy": "default", "gamma": 0.99,
    "lam": 0.95, "entropy_coef_spec": {"name": "no_decay", "start_val": 0.01}, "val_loss_coef": 0.5,
    "training_frequency": 32}; net: {"type": "MLPNet", "shared": false, "use_same_optim": false,
    "hid_layers": [64], "hid_layers_activation": "tanh", "actor_optim_spec": {"name": "Adam", "lr": 0.002},
    "critic_optim_spec": {"name": "Adam", "lr": 0.005}}
    """

    KEYS = {
        **POLICY_KEYS,
        'lam': Key('number|null', None, low=0, high=1, note='lambda of GAE; null: n-step returns'),
        'num_step_returns': Key('int|null', None, low=1, note='env steps of n-step returns'),
        'val_loss_coef': Key('number', 1.0, note='weight of the value loss'),
        'normalize_v_targets': Key('bool', False, note='divide values and targets by the running deviation of targets'),
        'training_frequency': Key('int|null', None, low=1, note='env steps or episodes between trainings'),
    }
    HAS_LOSS = True

    @classmethod
    def resolve_net(cls, net, where):
        values = read_values(NET_KEYS, {k: v for k, v in net.items() if k in NET_KEYS}, where)
        read = set(NET_KEYS)
        if values['shared']:
            values['use_same_optim'] = False
            read.remove('use_same_optim')
        for name, part in zip(('actor', 'critic'), split_net_spec(net), strict=True):
            checked, ignored = super().resolve_net(part, where)
            values[name] = _without(checked, NET_KEYS)
            prefix = 'actor_' if has_one_spec(net) else f'{name}_'
            for key in part:
                if f'{where}.{key}' not in ignored:
                    read.add(prefix + key if prefix + key in net else key)
        if has_one_spec(net):  # of what would be the critic's, nothing but the names is checked
            table = {key: leftover() for key in NETS.get(values['actor']['type']).KEYS}
            critic = {k.removeprefix('critic_'): v for k, v in net.items() if k.startswith('critic_')}
            read_values(table, critic, where)
        return values, [f'{where}.{key}' for key in net if key not in read]

    @classmethod
    def check_spec(cls, resolved, raw, where):
        super().check_spec(resolved, raw, where)
        algorithm = resolved['algorithm']
        if algorithm.get('training_frequency') is None and not cls.frequency_of(algorithm):
            raise SpecError(
                f"{where}.algorithm: key 'training_frequency' is missing (env steps or episodes between trainings)"
            )

    @staticmethod
    def frequency_of(algorithm):
        """n-step returns are taken every n steps."""
        if algorithm['lam'] is None and algorithm['num_step_returns'] is not None:
            return algorithm['num_step_returns']
        return algorithm['training_frequency']

    def __init__(self, spec, world, seed, place=0, check=False):
        algorithm = {**spec['algorithm'], 'training_frequency': self.frequency_of(spec['algorithm'])}
        self.critic_spec, self.shared = spec['net']['critic'], spec['net']['shared']
        net = {**spec['net']['actor'], 'gpu': spec['net']['gpu'], 'loss_spec': self.critic_spec['loss_spec']}
        self.target_scale = TargetScale() if algorithm['normalize_v_targets'] else None
        super().__init__({**spec, 'algorithm': algorithm, 'net': net}, world, seed, place, check)

    def init_nets(self):
        out_dim = self.distribution.out_dim(self.world.action_space)
        if self.shared:
            heads = [*(out_dim if isinstance(out_dim, list) else [out_dim]), 1]
            self.learners['net'] = Learner(self.build_net(self.net_spec, heads), self.net_spec, self.check)
            self.net = self.critic_net = self.learners['net'].net
            return
        super().init_nets()
        self.learners['critic_net'] = Learner(self.build_net(self.critic_spec, 1), self.critic_spec, self.check)
        self.critic_net = self.learners['critic_net'].net

    def policy_output(self, states):
        output = self.net(states)
        if not self.shared:
            return output
        return output[0] if len(output) == 2 else output[:-1]

    def values(self, states):
        """V of states (B, …) -> (B,)."""
        output = self.critic_net(states)
        return (output[-1] if self.shared else output).squeeze(-1)

    @torch.no_grad()
    def calc_values(self, batch):
        """V of each step's state and of its true successor: both (T, N)."""
        t, n = batch.rewards.shape
        values = self.values(batch.states.flatten(0, 1)).reshape(t, n)
        # a successor is the next step's state, but for the last step and for episodes that a time limit has cut
        apart = batch.truncated.bool()
        apart[-1] = True
        next_values = torch.cat([values[1:], values[-1:]])
        next_values[apart] = self.values(batch.next_states[apart])
        return values, next_values

    def calc_advantages(self, batch):
        """Returns: advantages and value targets, both (T, N) and fixed."""
        values, next_values = self.calc_values(batch)
        steps, gamma = (batch.rewards, batch.terminated, batch.truncated), self.spec['gamma']
        if self.spec['lam'] is None:
            targets = discounted_returns(*steps, next_values, gamma)
            return targets - values, targets
        advantages = generalized_advantages(*steps, values, next_values, gamma, self.spec['lam'])
        return standardize(advantages), advantages + values

    def value_loss(self, states, targets):
        return self.spec['val_loss_coef'] * self.value_errors(self.values(states), targets).mean()

    def value_errors(self, values, targets):
        """The element-wise loss of values against targets, both (B,)."""
        if self.target_scale is not None:
            values, targets = self.target_scale(values), self.target_scale(targets)
        return self.loss_fn(values, targets)

    def flat_advantages(self, batch):
        """Advantages and value targets of all steps, both (B,)."""
        advantages, targets = (x.flatten() for x in self.calc_advantages(batch))
        if self.target_scale is not None:
            self.target_scale.add(targets)
        return advantages, targets

    def train_on(self, batch):
        advantages, targets = self.flat_advantages(batch)
        states, actions = batch.states.flatten(0, 1), batch.actions.flatten(0, 1)
        policy_loss, entropy = self.policy_loss(states, actions, advantages)
        losses = self.step(policy_loss, self.value_loss(states, targets))
        return Trained(sum(losses), len(losses), entropy.item()) if losses else NOT_TRAINED

    def step(self, policy_loss, value_loss):
        """One optimizer step of a shared net, or one of each. Returns: the losses of the steps that were taken."""
        if self.shared:
            losses = [self.learners['net'].step(policy_loss + value_loss)]
        else:
            losses = [self.learners['net'].step(policy_loss), self.learners['critic_net'].step(value_loss)]
        return [loss for loss in losses if loss is not None]

    def state_dict(self):
        scale = None if self.target_scale is None else self.target_scale.state_dict()
        return {**super().state_dict(), 'target_scale': scale}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if self.target_scale is not None:
            self.target_scale.load_state_dict(state['target_scale'])
