"""Action distributions over a net's output, by the names that specs use.

A distribution says how wide the policy heads are (`out_dim`), is built from their output, and maps its actions to those
of the env (`to_env`). Its log-probs and entropies are those of whole actions: summed over an action's components.
"""

import math

import numpy as np
import torch
from torch import distributions
from torch.nn import functional

from slm_lab.lib.errors import SpecError, suggest
from slm_lab.lib.registry import DISTRIBUTIONS

# bounds of a log standard deviation: beyond them samples or densities lose all meaning in float32
LOG_SCALE_MIN, LOG_SCALE_MAX = -20.0, 2.0


class _AsTheyAre:
    """Actions that the env takes as they are drawn."""

    @staticmethod
    def to_env(actions, space):
        return actions


class _DiscreteActions(_AsTheyAre):
    """One logit for each action: (B, A) -> actions (B,)."""

    @staticmethod
    def out_dim(space):
        return int(space.n)


@DISTRIBUTIONS.register
class Categorical(_DiscreteActions, distributions.Categorical):
    """softmax(logits): (B, A) -> actions (B,)."""

    def __init__(self, logits):
        super().__init__(logits=logits, validate_args=False)


@DISTRIBUTIONS.register
class GumbelSoftmax(Categorical):
    """The name under which specs of SAC ask for discrete actions; a Categorical, of which SAC takes expectations."""


@DISTRIBUTIONS.register
class Argmax(_DiscreteActions, distributions.Categorical):
    """All mass on the largest entry; ties share it equally: (B, A) -> actions (B,)."""

    def __init__(self, logits):
        is_max = logits == logits.max(dim=-1, keepdim=True).values
        super().__init__(probs=is_max / is_max.sum(dim=-1, keepdim=True), validate_args=False)


@DISTRIBUTIONS.register
class MultiCategorical(_AsTheyAre):
    """One softmax for each component of the action: a list of (B, A_i) -> actions (B, components)."""

    def __init__(self, logits):
        self.components = [Categorical(each) for each in logits]

    @staticmethod
    def out_dim(space):
        return [int(n) for n in space.nvec]

    @property
    def logits(self):
        return [component.logits for component in self.components]

    @property
    def probs(self):
        return [component.probs for component in self.components]

    def sample(self):
        return torch.stack([component.sample() for component in self.components], dim=-1)

    def log_prob(self, actions):
        """actions (B, components) -> (B,)"""
        return sum(component.log_prob(actions[..., i]) for i, component in enumerate(self.components))

    def entropy(self):
        return sum(component.entropy() for component in self.components)


@DISTRIBUTIONS.register
class Bernoulli(_AsTheyAre, distributions.Independent):
    """An independent switch for each component: logits (B, n) -> actions (B, n) of 0 and 1."""

    def __init__(self, logits):
        super().__init__(distributions.Bernoulli(logits=logits, validate_args=False), 1, validate_args=False)

    def log_prob(self, actions):
        """actions (B, n), whole numbers as memories keep them -> (B,)"""
        return super().log_prob(actions.to(self.base_dist.logits.dtype))

    @staticmethod
    def out_dim(space):
        return int(space.n)


class _ContinuousActions(distributions.Independent):
    """Independent components, each with two parameters: [first (B, d), second (B, d)], or (B, 2) when d is 1."""

    @staticmethod
    def out_dim(space):
        d = space.shape[0]
        return 2 if d == 1 else [d, d]

    @staticmethod
    def to_env(actions, space):
        """Actions beyond the bounds are cut, whole numbers are the nearest; log-probs are of what was drawn."""
        if _is_whole(space):
            actions = np.rint(actions)
        return np.clip(actions, space.low, space.high)

    def __init__(self, output):
        first, second = output.split(1, dim=-1) if isinstance(output, torch.Tensor) else output
        super().__init__(self.build(first, second), 1, validate_args=False)


def _is_whole(space):
    return np.issubdtype(space.dtype, np.integer)


def _between_bounds(fractions, space):
    """The actions that lie `fractions`, of 0 to 1, of the way up a space; its whole numbers have equal shares of it."""
    if _is_whole(space):
        steps = np.floor(fractions * (space.high - space.low.astype(float) + 1))
        return np.minimum(space.low + steps, space.high).astype(space.dtype)
    return (space.low + fractions * (space.high - space.low)).astype(space.dtype)


def _scale(log_scale):
    return log_scale.clamp(LOG_SCALE_MIN, LOG_SCALE_MAX).exp()


class LocScale(_ContinuousActions):
    """Locations and log scales of independent components, each distributed as `OF_ONE`."""

    @classmethod
    def build(cls, loc, log_scale):
        return cls.OF_ONE(loc, _scale(log_scale), validate_args=False)


@DISTRIBUTIONS.register
class Normal(LocScale):
    """Independent normals: means and log standard deviations."""

    OF_ONE = distributions.Normal


class SquashedNormal(Normal):
    """tanh of independent normals: actions (B, d) in (−1, 1), which the env gets stretched to its bounds.

    No name of a spec: it is what SAC makes of a Normal.
    """

    LOG_SCALE_MIN = -5.0  # narrower, the density of an action in float32 is noise

    @classmethod
    def build(cls, loc, log_scale):
        return super().build(loc, log_scale.clamp(min=cls.LOG_SCALE_MIN))

    def sample(self):
        return super().sample().tanh()

    def rsample_with_log_prob(self):
        """Actions (B, d) through which gradients flow, and their log-probs (B,).

        log π(a) = Σ log N(u) − log(1 − tanh²(u)), a = tanh(u); the latter in the form 2 (log 2 − u − softplus(−2u)),
        which is exact for large u. Haarnoja et al. 2018, appendix C, equation 21.
        """
        u = self.rsample()
        log_slopes = 2 * (math.log(2) - u - functional.softplus(-2 * u))
        return u.tanh(), self.log_prob(u) - log_slopes.sum(-1)

    @staticmethod
    def to_env(actions, space):
        return _between_bounds((actions + 1) / 2, space)


@DISTRIBUTIONS.register
class MultivariateNormal(Normal):
    """A normal with a diagonal covariance, which is what independent normals are."""


@DISTRIBUTIONS.register
class LogNormal(LocScale):
    """Independent log-normals: mean and log standard deviation of the logarithm; actions above 0."""

    OF_ONE = distributions.LogNormal


@DISTRIBUTIONS.register
class Gumbel(LocScale):
    """Independent Gumbels: locations and log scales."""

    OF_ONE = distributions.Gumbel


@DISTRIBUTIONS.register
class Beta(_ContinuousActions):
    """Independent Betas with one mode (Chou et al. 2017): both parameters 1 + softplus; actions in (0, 1).

    The env gets them stretched to its bounds.
    """

    @staticmethod
    def build(alpha, beta):
        return distributions.Beta(1 + functional.softplus(alpha), 1 + functional.softplus(beta), validate_args=False)

    def log_prob(self, actions):
        # float32 rounds samples to the very ends, where the density is not defined
        return super().log_prob(actions.clamp(1e-6, 1 - 1e-6))

    @staticmethod
    def to_env(actions, space):
        if not np.isfinite([space.low, space.high]).all():
            raise SpecError(f'Beta needs actions with bounds; this env has {space}')
        return _between_bounds(actions, space)


# by the action space, the distributions that fit it; the first is the default
FITTING = {
    'continuous': ('Normal', 'Beta', 'Gumbel', 'LogNormal', 'MultivariateNormal'),
    'multi_continuous': ('Normal', 'MultivariateNormal', 'Beta', 'Gumbel', 'LogNormal'),
    'discrete': ('Categorical', 'Argmax', 'GumbelSoftmax'),
    'multi_discrete': ('MultiCategorical',),
    'multi_binary': ('Bernoulli',),
}


def action_type(space):
    """One of continuous, multi_continuous, discrete, multi_discrete, multi_binary, by a gymnasium space."""
    kinds = {
        'Box': 'continuous' if space.shape == (1,) else 'multi_continuous',
        'Discrete': 'discrete',
        'MultiDiscrete': 'multi_discrete',
        'MultiBinary': 'multi_binary',
    }
    kind = type(space).__name__
    if kind not in kinds:
        raise SpecError(f'action space {space} is not supported; supported: {", ".join(kinds)}')
    if kind != 'Discrete' and len(space.shape) != 1:
        raise SpecError(f'action space {space}: only those of one axis are supported; flatten it with a wrapper')
    return kinds[kind]


def pick(name, space, where):
    """The distribution class for an action space. Raises: SpecError naming those that fit."""
    kind = action_type(space)
    fitting = FITTING[kind]
    name = fitting[0] if name in (None, 'default') else name
    if name not in fitting:
        raise SpecError(f"{where}: '{name}' does not fit {kind} actions{suggest(name, fitting)}")
    return DISTRIBUTIONS.get(name)


def greedy(logits):
    """The actions that Argmax would draw, as numpy; it is built only where entries tie. (B, A) -> (B,)"""
    values = logits.numpy(force=True)
    if np.count_nonzero(values == values.max(axis=-1, keepdims=True)) == len(values):
        return values.argmax(axis=-1)
    if np.isnan(values).any():
        raise FloatingPointError('the net gives no numbers (nan): look for observations or rewards that are not finite')
    return Argmax(logits).sample().numpy(force=True)
