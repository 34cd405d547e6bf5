"""Action policies: from states (N, …) to actions (N, …), by the names that specs use.

Each takes (states, actor, explore_var, rng): the actor has `logits(states)` (N, A), `distribution` and
`random_actions(n, rng)`.
"""

import numpy as np

from slm_lab.agent import distribution
from slm_lab.lib.registry import POLICIES


@POLICIES.register
def default(states, actor, explore_var, rng):
    """Samples the action distribution."""
    logits = actor.logits(states)
    if actor.distribution is distribution.Argmax:
        return distribution.greedy(logits)
    return actor.distribution(logits).sample().numpy(force=True)


@POLICIES.register
def random(states, actor, explore_var, rng):
    """Samples the action space uniformly."""
    return actor.random_actions(len(states), rng)


@POLICIES.register
def epsilon_greedy(states, actor, explore_var, rng):
    """With probability epsilon = explore_var, drawn for each env, a random action; else the default."""
    explores = rng.random(len(states)) < explore_var
    if explores.all():
        return actor.random_actions(len(states), rng)
    actions = default(states, actor, explore_var, rng)
    if explores.any():
        explores = explores.reshape(-1, *[1] * (actions.ndim - 1))  # an env explores with its whole action
        actions = np.where(explores, actor.random_actions(len(states), rng), actions)
    return actions


@POLICIES.register
def boltzmann(states, actor, explore_var, rng):
    """Samples softmax(logits / tau) of discrete actions, tau = explore_var, whatever the action distribution is."""
    return distribution.Categorical(actor.logits(states) / explore_var).sample().numpy(force=True)


def random_actions(space, n, rng):
    """n uniform samples of a gymnasium space from a numpy Generator: (n,) or (n, d).

    Discrete actions count from 0, as a net's outputs do. Sides of a box without bounds are sampled as gymnasium does:
    normal, or exponential away from the one bound.
    """
    kind = type(space).__name__
    if kind == 'Discrete':
        return rng.integers(0, space.n, n)
    if kind == 'MultiDiscrete':
        return rng.integers(0, space.nvec, (n, *space.nvec.shape))
    if kind == 'MultiBinary':
        return rng.integers(0, 2, (n, *space.shape), dtype=space.dtype)
    low, high = space.low, space.high
    if space.dtype.kind in 'iu':
        return rng.integers(low, high, (n, *space.shape), dtype=space.dtype, endpoint=True)
    sample = np.empty((n, *space.shape))
    bounded, below, above = space.bounded_below & space.bounded_above, space.bounded_below, space.bounded_above
    uniform, exponential = rng.random(sample.shape), rng.exponential(size=sample.shape)
    sample[...] = rng.normal(size=sample.shape)
    sample = np.where(below & ~above, low + exponential, sample)
    sample = np.where(above & ~below, high - exponential, sample)
    with np.errstate(invalid='ignore', over='ignore'):
        sample = np.where(bounded, low + uniform * (high.astype(float) - low), sample)
    return sample.astype(space.dtype)
