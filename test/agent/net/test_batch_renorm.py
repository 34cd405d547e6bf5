"""Batch norm and batch renorm of rows: against torch's own, and by hand."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from slm_lab.agent.net.batch_renorm import BatchRenorm1d, RowBatchNorm1d

TWO_ROWS = torch.tensor([[0.0], [4.0]])  # mean 2, variance 4


def plain_batch_norm(x):
    return functional.batch_norm(x, None, None, training=True)


def test_while_warming_up_renorm_is_batch_norm():
    torch.manual_seed(0)
    norm = BatchRenorm1d(3, warmup_steps=2)
    for _ in range(2):
        x = 5 * torch.randn(8, 3) + 2
        torch.testing.assert_close(norm(x), plain_batch_norm(x))
    assert norm.step.item() == 2 and norm.step.dtype == torch.int64
    x = 5 * torch.randn(8, 3) + 2
    assert not torch.allclose(norm(x), plain_batch_norm(x), atol=0.1)  # the third batch is corrected


def test_running_statistics_by_hand():
    """Mean 0 -> 0.1 · 2 = 0.2 -> 0.9 · 0.2 + 0.1 · 2 = 0.38; variance 1 -> 0.9 + 0.1 · 4 = 1.3 -> 1.57."""
    norm = BatchRenorm1d(1, momentum=0.1)
    norm(TWO_ROWS)
    assert (norm.running_mean.item(), norm.running_var.item()) == pytest.approx((0.2, 1.3))
    norm(TWO_ROWS)
    assert (norm.running_mean.item(), norm.running_var.item()) == pytest.approx((0.38, 1.57))


@pytest.mark.parametrize(
    ('r_max', 'd_max', 'expected'),
    [
        (3, 5, (0.0, 4.0)),  # r = 2 / 1, d = (2 − 0) / 1, neither is clipped: the running statistics' own values
        (1.5, 5, (0.5, 3.5)),  # normed −1 and 1, times 1.5, plus 2
        (3, 0.5, (-1.5, 2.5)),  # times 2, plus 0.5
        (1, 0, (-1.0, 1.0)),  # batch norm
    ],
)
def test_the_correction_by_hand(r_max, d_max, expected):
    norm = BatchRenorm1d(1, eps=1e-12, r_max=r_max, d_max=d_max, warmup_steps=0)
    assert norm(TWO_ROWS).flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_the_correction_is_clipped_from_below():
    """Running sigma 8, mean 42: r = 2 / 8 is clipped to 1/2, d = (2 − 42) / 8 = −5 to −3; −1 · 0.5 − 3 and 0.5 − 3."""
    norm = BatchRenorm1d(1, eps=1e-12, r_max=2, d_max=3, warmup_steps=0)
    norm.running_var.fill_(64.0)
    norm.running_mean.fill_(42.0)
    assert norm(TWO_ROWS).flatten().tolist() == pytest.approx([-3.5, -2.5], abs=1e-6)


def test_no_gradient_flows_through_the_correction():
    """With r = 2 held still, the gradient is twice that of batch norm; d is added and changes none."""
    weights = torch.tensor([[1.0], [-2.0], [4.0]])
    x = torch.tensor([[0.0], [1.0], [5.0]], requires_grad=True)  # mean 2, variance 14 / 3
    (functional.batch_norm(x, None, None, training=True) * weights).sum().backward()
    plain, x.grad = x.grad.clone(), None
    norm = BatchRenorm1d(1, warmup_steps=0)
    norm.running_var.fill_((14 / 3 + norm.eps) / 4 - norm.eps)
    (norm(x) * weights).sum().backward()
    torch.testing.assert_close(x.grad, 2 * plain)


def test_evaluation_uses_the_running_statistics_and_leaves_them():
    """(5 − 1) / sqrt(4) · 3 + 0.5 = 6.5."""
    norm = BatchRenorm1d(1, eps=0.0).eval()
    with torch.no_grad():
        for tensor, value in ((norm.running_mean, 1.0), (norm.running_var, 4.0), (norm.weight, 3.0), (norm.bias, 0.5)):
            tensor.fill_(value)
    assert norm(torch.tensor([[5.0], [1.0]])).flatten().tolist() == [6.5, 0.5]
    assert (norm.running_mean.item(), norm.running_var.item(), norm.step.item()) == (1.0, 4.0, 0)


@pytest.mark.parametrize('cls', [RowBatchNorm1d, BatchRenorm1d])
def test_a_single_row_in_training_is_normalised_by_the_running_statistics(cls):
    norm = cls(2)
    norm.running_var.fill_(4.0)
    before = {k: v.clone() for k, v in norm.state_dict().items()}
    for x in (torch.tensor([[2.0, -4.0]]), torch.tensor([2.0, -4.0]), torch.tensor([[[2.0, -4.0]]])):
        torch.testing.assert_close(norm(x), x / math.sqrt(4 + 1e-5))
    assert all(torch.equal(v, before[k]) for k, v in norm.state_dict().items())


@pytest.mark.parametrize('cls', [RowBatchNorm1d, BatchRenorm1d])
def test_steps_and_envs_are_rows_alike(cls):
    torch.manual_seed(0)
    x = torch.randn(3, 2, 4)
    torch.testing.assert_close(cls(4)(x), plain_batch_norm(x.reshape(6, 4)).reshape(3, 2, 4))


def test_row_batch_norm_is_torch_s_own_for_a_batch():
    torch.manual_seed(0)
    mine, theirs = RowBatchNorm1d(3), nn.BatchNorm1d(3)
    for _ in range(3):
        x = torch.randn(5, 3) * 2 + 1
        assert torch.equal(mine(x), theirs(x))
    x = torch.randn(5, 3)
    assert torch.equal(mine.eval()(x), theirs.eval()(x))
    assert all(torch.equal(v, theirs.state_dict()[k]) for k, v in mine.state_dict().items())


def test_a_restored_renorm_goes_on_as_the_first():
    torch.manual_seed(0)
    first, second = BatchRenorm1d(2, warmup_steps=2), BatchRenorm1d(2, warmup_steps=2)
    for _ in range(3):
        first(torch.randn(4, 2))
    second.load_state_dict(first.state_dict())
    x = torch.randn(4, 2) + 3
    assert torch.equal(first(x), second(x))
