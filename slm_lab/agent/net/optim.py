"""Optimizers by name, and one optimizer step."""

import inspect
import logging
import math

import torch

from slm_lab.agent.net.optimizers import GlobalAdam, GlobalRMSprop, Lookahead
from slm_lab.lib.errors import SpecError, suggest
from slm_lab.lib.keys import Key
from slm_lab.lib.schedule import LearningRate

logger = logging.getLogger('slm_lab.agent')

# they need closures or sparse gradients, which no algorithm here gives them
_UNUSABLE = {'Optimizer', 'LBFGS', 'SparseAdam'}

OPTIMIZERS = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and name not in _UNUSABLE
}
OPTIMIZERS.update({cls.__name__: cls for cls in (GlobalAdam, GlobalRMSprop, Lookahead)})


def check_spec(spec, where='optim_spec'):
    """Builds the optimizer and takes a step, for some arguments are refused only when they are used.

    Raises: SpecError
    """
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = build_optimizer([parameter], spec, where)
    parameter.grad = torch.ones(1)
    try:
        optimizer.step()
    except Exception as e:
        raise _refusal(spec['name'], {k: v for k, v in spec.items() if k != 'name'}, e, where) from None


def _refusal(name, kwargs, error, where):
    reason = [*str(error).splitlines(), type(error).__name__][0]
    return SpecError(f'{where}: torch refuses {name} with {kwargs}: {reason}')


def build_optimizer(params, spec, where='optim_spec'):
    """An optimizer by name; all other keys of the spec are its keyword arguments.

    It takes torch's fused path where the optimizer has one (1 kernel per step instead of one per parameter).
    Lookahead keeps `alpha`, `k` and `optimizer` (RAdam), the name of its inner optimizer, which gets all other keys;
    an inner optimizer that has an `alpha` too keeps its default.
    Raises: SpecError for an unknown name or arguments that the optimizer refuses.
    """
    kwargs = {k: v for k, v in spec.items() if k != 'name'}
    name = spec.get('name')
    _check_name(name, OPTIMIZERS, f'{where}.name')
    if name != 'Lookahead':
        return _build(params, name, kwargs, where)
    inner_name = kwargs.pop('optimizer', 'RAdam')
    _check_name(inner_name, OPTIMIZERS.keys() - {'Lookahead'}, f'{where}.optimizer')
    own = {k: kwargs.pop(k) for k in _LOOKAHEAD_KEYS if k in kwargs}
    inner = _build(params, inner_name, kwargs, where, {*_LOOKAHEAD_KEYS, 'optimizer'})
    try:
        return Lookahead(inner, **own)
    except ValueError as e:
        raise SpecError(f'{where}.{e}') from None


_LOOKAHEAD_KEYS = ('alpha', 'k')


def _check_name(name, known, where):
    if not isinstance(name, str) or name not in known:
        raise SpecError(f"{where}: optimizer '{name}' is unknown{suggest(name, known)}")


def _build(params, name, kwargs, where, other_keys=frozenset()):
    """other_keys: what the spec may hold besides, for the error line on an unknown key."""
    cls = OPTIMIZERS[name]
    defaults = {key: p.default for key, p in inspect.signature(cls).parameters.items() if key != 'params'}
    accepted = defaults.keys()
    unknown = [key for key in kwargs if key not in accepted]
    if unknown:
        known = accepted | other_keys
        raise SpecError(f"{where}.{unknown[0]}: {name} takes no '{unknown[0]}'{suggest(unknown[0], known)}")
    for key, value in kwargs.items():
        _check_argument(key, value, defaults[key], f'{where}.{key}')
    if 'fused' in accepted and not kwargs.keys() & {'fused', 'foreach', 'differentiable', 'capturable'}:
        kwargs = {**kwargs, 'fused': True}
    try:
        return cls(params, **kwargs)
    except Exception as e:  # torch does not check all that it reads
        raise _refusal(name, kwargs, e, where) from None


def _check_argument(key, value, default, where):
    """Checks an argument against the type of its default: a list is one of as many."""
    if isinstance(default, (list, tuple)):
        Key('list').check(value, where)
        if len(value) != len(default):
            raise SpecError(f'{where}: {value} must be a list of {len(default)} values, such as {list(default)}')
        for i, pair in enumerate(zip(value, default, strict=True)):
            _check_argument(key, *pair, f'{where}.{i}')
    elif key in ('foreach', 'fused'):
        Key('bool|null').check(value, where)
    elif isinstance(default, (bool, int, float)):
        Key('bool' if isinstance(default, bool) else 'number').check(value, where)


class Learner:
    """One net with its optimizer and learning rate: turns a loss into one step.

    A loss that is not finite would make every weight NaN: its step is left out and counted in `skipped_steps`.

    Args:
        net: the torch module
        spec: the resolved net spec
        check: dev mode: verify that each step changes the weights and that the loss is finite
    """

    def __init__(self, net, spec, check=False):
        self.net = net
        self.params = [p for p in net.parameters() if p.requires_grad]
        self.optim = build_optimizer(self.params, spec['optim_spec'])
        self.rate = LearningRate(spec['lr_scheduler_spec'], self.lr)
        self.clip_grad_val = spec['clip_grad_val']
        self.check = check
        self.grad_norm = float('nan')
        self.skipped_steps = 0
        self.global_params = None
        self._has_warned = False

    @property
    def lr(self):
        return self.optim.param_groups[0]['lr']

    def set_frame(self, frame):
        """Sets the learning rate of the steps to come; the frame is the only time."""
        lr = self.rate(frame)
        for group in self.optim.param_groups:
            group['lr'] = lr

    def follow(self, global_params):
        """From here on each step is one of these tensors, which other processes step too; then the net gets a copy.

        Args:
            global_params: tensors like the net's trained parameters, in their order
        """
        self.global_params = global_params

    def step(self, loss):
        """Steps the optimizer once along the gradient of a scalar loss.

        Returns: the loss as a float; None when it is not finite and no step was taken.
        """
        value = loss.item()
        if not math.isfinite(value):
            return self._skip(value)
        for parameter in self.params:  # what zero_grad does, without its profiling hooks
            parameter.grad = None
        loss.backward(inputs=self.params)  # nets that the loss passes through on its way keep no gradient
        if self.clip_grad_val is not None:
            torch.nn.utils.clip_grad_norm_(self.params, self.clip_grad_val, foreach=True)
        if self.check:
            self._checked_step()
        else:
            self._step_optimizer()
        return value

    def _step_optimizer(self):
        if self.global_params is None:
            self.optim.step()
            return
        own = [p.data for p in self.params]
        for p, theirs in zip(self.params, self.global_params, strict=True):
            p.data = theirs  # the gradient stays
        self.optim.step()
        for p, mine in zip(self.params, own, strict=True):
            mine.copy_(p.data)
            p.data = mine

    def _skip(self, value):
        name = type(self.net).__name__
        if self.check:
            raise FloatingPointError(f'the loss of {name} is {value}')
        self.skipped_steps += 1
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                'the loss of %s is %s: its optimizer steps are left out until it is finite again, to keep the weights; '
                'look for rewards or observations that are not finite, or lower the learning rate (lr %g)',
                name,
                value,
                self.lr,
            )

    def _checked_step(self):
        norms = [p.grad.norm() for p in self.params if p.grad is not None]
        self.grad_norm = float(torch.stack(norms).mean())
        before = [p.detach().clone() for p in self.params]
        self._step_optimizer()
        changed = any(not torch.equal(b, p) for b, p in zip(before, self.params, strict=True))
        if not changed and self.grad_norm > 0 and self.lr > 0:
            raise RuntimeError(f'a train step left every weight of {type(self.net).__name__} as it was')

    def load_optim(self, state):
        """Loads an optimizer's moments and step counts; how it computes (fused, foreach) stays as it was built."""
        own = self.optim.param_groups[0]
        how = {k: own[k] for k in ('fused', 'foreach') if k in own}
        # before loading, for torch puts step counts where the way of computing wants them
        self.optim.load_state_dict({**state, 'param_groups': [{**group, **how} for group in state['param_groups']]})


class TargetNet:
    """A net that follows its source at a distance, and takes no gradient.

    Args:
        source, target: modules of the same shape; the target starts as a copy.
        update_type: `replace` copies every update_frequency frames; `polyak` mixes in polyak_coef of the source.
    """

    def __init__(self, source, target, spec):
        self.source, self.target = source, target
        self.update_type, self.update_frequency = spec['update_type'], spec['update_frequency']
        self.coef = spec['polyak_coef']
        self.target.load_state_dict(self.source.state_dict())
        for parameter in self.target.parameters():
            parameter.requires_grad_(False)
        self._parameters = list(zip(target.parameters(), source.parameters(), strict=True))
        self._buffers = list(zip(target.buffers(), source.buffers(), strict=True))

    @torch.no_grad()
    def update(self, frame, num_frames):
        """Acts when one of the last `num_frames` frames was a multiple of update_frequency.

        Called so that each frame is one of them once.
        """
        if frame % self.update_frequency >= num_frames:
            return
        for mine, theirs in self._parameters:
            if self.update_type == 'replace':
                mine.copy_(theirs)
            else:
                mine.lerp_(theirs, self.coef)
        for mine, theirs in self._buffers:
            mine.copy_(theirs)


TARGET_KEYS = ('update_type', 'update_frequency', 'polyak_coef')


def check_target_keys(net, where):
    """Raises SpecError for a target that would never move."""
    if net['update_type'] == 'polyak' and not net['polyak_coef']:
        raise SpecError(
            f'{where}.polyak_coef: {net["polyak_coef"]!r} would never move the target net; it is the weight of the '
            'source in (0, 1] (old specs wrote 0 for a full copy: write 1.0)'
        )
