"""Optimizers that torch lacks: slow weights over any optimizer, and those whose state processes can share."""

import torch

from slm_lab.lib.errors import ResumeError, SpecError


class _SharedState:
    """State tensors that exist from the start and stay the same tensors, so that processes can share them (Hogwild).

    torch allocates them at the first step, when every process would get its own.
    """

    def _allocate(self, *names):
        for group in self.param_groups:
            for p in group['params']:
                # the fused kernel reads the step count where the weights are, the others on the CPU
                device = p.device if group.get('fused') else 'cpu'
                self.state[p]['step'] = torch.zeros((), dtype=torch.float32, device=device)
                for name in names:
                    self.state[p][name] = torch.zeros_like(p, memory_format=torch.preserve_format)

    def share_memory(self):
        """Moves every state tensor to memory that child processes share."""
        for tensors in self.state.values():
            for tensor in tensors.values():
                tensor.share_memory_()

    def load_state_dict(self, state_dict):
        """Copies into the tensors that are there; what the state does not hold becomes 0, as before the first step."""
        own = dict(self.state)
        super().load_state_dict(state_dict)
        for p, tensors in own.items():
            loaded = self.state[p]
            for name, tensor in tensors.items():
                if name in loaded:
                    tensor.copy_(loaded[name])
                else:
                    tensor.zero_()
            self.state[p] = tensors


class GlobalAdam(_SharedState, torch.optim.Adam):
    """torch's Adam (Kingma and Ba 2015) with state that can be shared."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, *, fused=None):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)
        self._allocate('exp_avg', 'exp_avg_sq')


class GlobalRMSprop(_SharedState, torch.optim.RMSprop):
    """torch's RMSprop with state that can be shared."""

    def __init__(self, params, lr=1e-2, alpha=0.99, eps=1e-8, weight_decay=0):
        super().__init__(params, lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay)
        self._allocate('square_avg')


class Lookahead:
    """Slow weights that follow the fast ones of another optimizer (Zhang et al. 2019, algorithm 1).

    The inner optimizer steps the weights of the net. Every k steps: slow ← slow + alpha (fast − slow), fast ← slow.

    Args:
        inner: the optimizer of the fast weights; its parameter groups, and so the learning rate, are Lookahead's
        alpha: in (0, 1]
        k: steps from one synchronization to the next
    Raises: ValueError, which starts with the name of the argument.
    """

    def __init__(self, inner, alpha=0.5, k=5):
        if type(alpha) not in (int, float) or not 0 < alpha <= 1:
            raise ValueError(f'alpha: {alpha!r} is no number in (0, 1]')
        if type(k) is not int or k < 1:
            raise ValueError(f'k: {k!r} is no whole number of steps from 1 on')
        self.inner, self.alpha, self.k = inner, alpha, k
        self._fast = [p for group in inner.param_groups for p in group['params']]
        self._slow = [p.detach().clone() for p in self._fast]
        self._steps = torch.zeros((), dtype=torch.int64)  # a tensor, for processes to share

    @property
    def param_groups(self):
        return self.inner.param_groups

    @torch.no_grad()
    def step(self):
        if self._steps == 0:
            # not before: weights may be loaded into the net after its optimizer was built
            for slow, fast in zip(self._slow, self._fast, strict=True):
                slow.copy_(fast)
        self.inner.step()
        self._steps += 1
        if self._steps % self.k == 0:
            for slow, fast in zip(self._slow, self._fast, strict=True):
                slow.lerp_(fast, self.alpha)
                fast.copy_(slow)

    def state_dict(self):
        """The inner optimizer's, and under `lookahead` the step count and the slow weights in the order of params."""
        return {**self.inner.state_dict(), 'lookahead': {'steps': self._steps, 'slow': list(self._slow)}}

    def load_state_dict(self, state_dict):
        """Raises: ResumeError for the state of an optimizer without these slow weights; nothing is changed then."""
        own = state_dict.get('lookahead')
        if own is None:
            raise ResumeError(
                "the optimizer's state holds no slow weights, so Lookahead cannot go on from it; start a new run from "
                'its nets with "load_net" in the agent spec'
            )
        shapes = [tuple(slow.shape) for slow in own['slow']]
        wanted = [tuple(slow.shape) for slow in self._slow]
        if shapes != wanted:
            raise ResumeError(
                f'the slow weights of Lookahead have shapes {shapes} in the state and {wanted} by the spec'
            )
        self.inner.load_state_dict({k: v for k, v in state_dict.items() if k != 'lookahead'})
        self._steps.copy_(own['steps'])
        for slow, saved in zip(self._slow, own['slow'], strict=True):
            slow.copy_(saved)

    def share_memory(self):
        """Moves the step count, the slow weights and the inner state to memory that child processes share.

        Raises: SpecError when the inner optimizer cannot share its state.
        """
        if not hasattr(self.inner, 'share_memory'):
            raise SpecError(
                f'Lookahead over {type(self.inner).__name__} cannot be shared by processes: '
                "write 'GlobalAdam' or 'GlobalRMSprop' as its optimizer"
            )
        self.inner.share_memory()
        for tensor in (self._steps, *self._slow):
            tensor.share_memory_()
