"""Formulas that need no object."""

import torch


def dueling_q(v, adv):
    """Q = V + A − mean over actions of A. v (B, 1), adv (B, A) -> (B, A). Wang et al. 2016, equation 9."""
    return v + adv - adv.mean(dim=-1, keepdim=True)


def discounted_returns(rewards, terminated, truncated, next_values, gamma):
    """Returns bootstrapped where the rewards end: at a time limit, and after the last step.

    R_t = r_t + gamma · R_{t+1}, where the next term is 0 at a termination, gamma · V(s_{t+1}) at a truncation and after
    the last step T − 1. With next_values 0 these are plain Monte-Carlo returns.

    Args:
        rewards, terminated, truncated: (T, N); the latter two 0 or 1
        next_values: (T, N), V of each step's true successor
    Returns: (T, N)
    """
    returns = torch.empty_like(rewards)
    following = next_values[-1]
    for t in range(len(rewards) - 1, -1, -1):
        following = truncated[t] * next_values[t] + (1 - truncated[t]) * following
        following = returns[t] = rewards[t] + gamma * (1 - terminated[t]) * following
    return returns


def generalized_advantages(rewards, terminated, truncated, values, next_values, gamma, lam):
    """GAE(gamma, lambda). Schulman et al. 2016, equation 16: A_t = delta_t + gamma · lambda · A_{t+1}.

    delta_t = r_t + gamma · V(s_{t+1}) · (1 − terminated) − V(s_t); the sum is cut where an episode terminated or was
    truncated. lambda 1 gives returns minus values, lambda 0 the one-step errors.

    Args:
        rewards, terminated, truncated, values, next_values: (T, N); next_values are V of the true successors
    Returns: (T, N)
    """
    deltas = rewards + gamma * (1 - terminated) * next_values - values
    carries = gamma * lam * (1 - terminated) * (1 - truncated)
    advantages = torch.empty_like(rewards)
    following = 0 * rewards[-1]
    for t in range(len(rewards) - 1, -1, -1):
        following = advantages[t] = deltas[t] + carries[t] * following
    return advantages


def standardize(x):
    """(x − mean) / (std + 1e-8), by the sample's standard deviation; of fewer than two values only the mean goes."""
    return (x - x.mean()) / ((x.std() if x.numel() > 1 else 0.0) + 1e-8)
