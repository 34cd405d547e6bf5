"""Formulas against values worked out by hand."""

import pytest
import torch

from slm_lab.lib.maths import discounted_returns, dueling_q, generalized_advantages, standardize


def test_dueling_q_takes_the_mean_advantage_off():
    v = torch.tensor([[1.0], [2.0], [3.0]])
    adv = torch.tensor([[0.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
    assert dueling_q(v, adv).tolist() == [[0.5, 1.5], [2.0, 2.0], [3.5, 2.5]]


def column(*values):
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


def test_gae_by_the_values_that_users_know():
    rewards, ended = column(1, 0, 1, 1, 0, 1, 1, 1), column(0, 0, 1, 1, 0, 0, 0, 0)
    v = torch.tensor([1.1, 0.1, 1.1, 1.1, 0.1, 1.1, 1.1, 1.1, 1.1]).unsqueeze(1)
    never = torch.zeros_like(ended)
    expected = [0.84070045, 0.89495, -0.1, -0.1, 3.616724, 2.7939649, 1.9191545, 0.989]
    advantages = generalized_advantages(rewards, ended, never, v[:-1], v[1:], 0.99, 0.95)
    assert advantages.flatten().tolist() == pytest.approx(expected, rel=1e-5)


def test_gae_ends_at_lambda_1_in_returns_and_at_0_in_one_step_errors():
    torch.manual_seed(0)
    rewards, values, next_values = torch.randn(3, 7, 2)
    terminated, truncated = torch.zeros(7, 2), torch.zeros(7, 2)
    terminated[2, 0], truncated[4, 1] = 1, 1
    # values that belong together: a step's successor is the next step, unless a time limit comes between
    next_values[:-1] = torch.where(truncated[:-1] > 0, next_values[:-1], values[1:])
    steps = (rewards, terminated, truncated)
    returns = discounted_returns(*steps, next_values, 0.9)
    torch.testing.assert_close(generalized_advantages(*steps, values, next_values, 0.9, 1.0), returns - values)
    deltas = rewards + 0.9 * (1 - terminated) * next_values - values
    torch.testing.assert_close(generalized_advantages(*steps, values, next_values, 0.9, 0.0), deltas)


def test_returns_bootstrap_at_time_limits_and_at_the_end_but_never_through_a_termination():
    """gamma 0.5: 1 + 5 | 1 | 1 + 0.5 · (1 + 0.5 · 20)."""
    steps = column(1, 1, 1, 1), column(0, 1, 0, 0), column(1, 0, 0, 0)
    assert discounted_returns(*steps, column(10, 99, 99, 20), 0.5).flatten().tolist() == [6, 1, 6.5, 11]


def test_standardize():
    assert standardize(torch.tensor([1.0, 3.0])).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
    assert standardize(torch.tensor([5.0])).tolist() == [0]
