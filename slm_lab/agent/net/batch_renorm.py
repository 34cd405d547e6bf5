"""Batch normalisation of rows of features, plain and renormalised, where a batch may be a single row."""

import torch
from torch import nn
from torch.nn import functional


class RowBatchNorm1d(nn.BatchNorm1d):
    """Batch norm over all axes but the last: (…, n) -> (…, n).

    A single row has no variance of its own: in training, too, it is normalised by the running statistics, which it
    leaves as they are.
    """

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        if self.training and len(rows) > 1:
            return super().forward(rows).reshape(x.shape)
        normed = functional.batch_norm(
            rows, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
        )
        return normed.reshape(x.shape)


class BatchRenorm1d(nn.Module):
    """Batch renormalisation over all axes but the last: (…, n) -> (…, n).

    Ioffe 2017, Batch Renormalization, algorithm 1: the batch's statistics are corrected towards the running ones by
    r = clip(sigma_B / sigma) and d = clip((mu_B − mu) / sigma), which carry no gradient. The running variance moves
    in place of the running sigma. A single row is normalised by the running statistics, which it leaves as they are.

    Args:
        n: number of features
        eps: added to variances
        momentum: weight of a batch in the running statistics
        r_max, d_max: bounds of the correction: r lies in [1 / r_max, r_max], d in [−d_max, d_max]
        warmup_steps: training batches, from the first, that are normalised as by plain batch norm (r = 1, d = 0)
    """

    def __init__(self, n, eps=1e-5, momentum=0.01, r_max=3, d_max=5, warmup_steps=10000):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.r_max, self.d_max, self.warmup_steps = r_max, d_max, warmup_steps
        self.weight = nn.Parameter(torch.ones(n))
        self.bias = nn.Parameter(torch.zeros(n))
        self.register_buffer('running_mean', torch.zeros(n))
        self.register_buffer('running_var', torch.ones(n))
        self.register_buffer('step', torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        if self.training and len(rows) > 1:
            return self._renormed(rows).reshape(x.shape)
        normed = functional.batch_norm(
            rows, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
        )
        return normed.reshape(x.shape)

    def _renormed(self, rows):
        mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        # torch's own kernel; at momentum 1 its running statistics are those of the batch
        normed = functional.batch_norm(rows, mean, var, training=True, momentum=1.0, eps=self.eps)
        with torch.no_grad():
            var = var * ((len(rows) - 1) / len(rows))  # which torch has divided by n − 1
            r, d = self._correction(mean, torch.sqrt(var + self.eps))
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var, self.momentum)
            self.step += 1
        return torch.addcmul(self.bias + d * self.weight, normed, r * self.weight)

    def _correction(self, mean, sigma):
        running = torch.sqrt(self.running_var + self.eps)
        r = (sigma / running).clamp(1 / self.r_max, self.r_max)
        d = ((mean - self.running_mean) / running).clamp(-self.d_max, self.d_max)
        warm = self.step >= self.warmup_steps  # stays a tensor: a GPU need not be waited for
        return torch.where(warm, r, 1.0), torch.where(warm, d, 0.0)
