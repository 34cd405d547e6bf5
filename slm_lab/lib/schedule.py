"""Values that change with the frame: exploration, entropy, clipping, learning rates. All are pure functions of it."""

import math
import warnings

import torch

from slm_lab.lib.errors import SpecError, suggest
from slm_lab.lib.keys import Key, read_values

# stepping torch's schedulers to a given point is what makes them functions of the frame
warnings.filterwarnings('ignore', message='The epoch parameter in `scheduler.step', category=UserWarning)
warnings.filterwarnings('ignore', message='Detected call of `lr_scheduler.step', category=UserWarning)


def no_decay(start, end, fraction):
    return start


def linear_decay(start, end, fraction):
    """A straight line from start to end, up or down."""
    return start + (end - start) * fraction


def rate_decay(start, end, fraction, rate=0.9, steps=20):
    """start shrinks by `rate` each twentieth of the way, is never below end, and is end at the end."""
    return end if fraction >= 1 else max(rate ** (fraction * steps) * start, end)


def periodic_decay(start, end, fraction, waves=60):
    """A cosine around a falling middle: end + (start − end)/2 · (1 + cos x)(1 − x/60), x from 0 to 60."""
    x = fraction * waves
    return end + 0.5 * (start - end) * (1 + math.cos(x)) * (1 - x / waves)


DECAYS = {f.__name__: f for f in (no_decay, linear_decay, rate_decay, periodic_decay)}

KEYS = {
    'name': Key('str', choices=tuple(DECAYS)),
    'start_val': Key('number', note='the value up to start_step'),
    'end_val': Key('number|null', None, note='the value from end_step on; absent means start_val'),
    'start_step': Key('int', 0, low=0, note='frames'),
    'end_step': Key('int|null', None, low=0, note='frames'),
}


class Schedule:
    """`schedule(frame)` is the value at a frame; `schedule.final` the one that evaluation uses.

    A null spec is the schedule of a variable that the agent does not use: NaN.
    """

    def __init__(self, spec, where='schedule'):
        if spec is None:
            spec = {'name': 'no_decay', 'start_val': 0}
            nan = float('nan')
            self.start_val, self.end_val = nan, nan
            values = read_values(KEYS, spec, where)
        else:
            values = read_values(KEYS, spec, where)
            self.start_val = values['start_val']
            self.end_val = self.start_val if values['end_val'] is None else values['end_val']
        self.decay = DECAYS[values['name']]
        self.start_step = values['start_step']
        self.end_step = self.start_step if values['end_step'] is None else values['end_step']
        if values['name'] != 'no_decay':
            if values['end_step'] is None:
                raise SpecError(f"{where}: key 'end_step' is missing (frames; {values['name']} ends there)")
            if self.end_step < self.start_step:
                raise SpecError(f'{where}.end_step: {self.end_step} lies before start_step {self.start_step}')
        self.final = self.start_val if self.decay is no_decay else self.end_val

    def __call__(self, frame):
        if frame < self.start_step:
            return self.start_val
        if frame >= self.end_step:  # also where both steps are equal
            return self.final
        return self.decay(self.start_val, self.end_val, (frame - self.start_step) / (self.end_step - self.start_step))


def fill_spec(spec, where='schedule'):
    """Checks the spec of a schedule. Returns: the spec with its defaults filled in. Raises: SpecError"""
    schedule = Schedule(spec, where)
    return {**read_values(KEYS, spec, where), 'end_val': schedule.end_val, 'end_step': schedule.end_step}


# their rate depends on more than the frame: on a loss, on code, or on other schedulers
_NOT_A_FUNCTION_OF_FRAME = {
    'LRScheduler',
    'LambdaLR',
    'MultiplicativeLR',
    'ReduceLROnPlateau',
    'SequentialLR',
    'ChainedScheduler',
    'SWALR',
}


LINEAR_TO_ZERO_KEYS = {'frame': Key('number', above=0, note='frames until the rate is 0')}


def scheduler_names():
    names = [
        name
        for name, cls in vars(torch.optim.lr_scheduler).items()
        if not name.startswith('_') and isinstance(cls, type) and issubclass(cls, torch.optim.lr_scheduler.LRScheduler)
    ]
    return sorted({'LinearToZero', *names} - _NOT_A_FUNCTION_OF_FRAME)


class LearningRate:
    """`rate(frame)`: the learning rate as a pure function of the frame.

    Args:
        spec: `lr_scheduler_spec`: null, `LinearToZero` with `frame`, or any torch scheduler by name with its keyword
            arguments; what torch counts in epochs is counted in frames here.
        base_lr: the optimizer's learning rate.
    """

    def __init__(self, spec, base_lr, where='lr_scheduler_spec'):
        self.base_lr = base_lr
        self.total_frame, self.scheduler = None, None
        if spec is None:
            return
        name = spec.get('name')
        kwargs = {k: v for k, v in spec.items() if k != 'name'}
        if name not in scheduler_names():
            raise SpecError(f"{where}.name: scheduler '{name}' is unknown{suggest(name, scheduler_names())}")
        if name == 'LinearToZero':
            self.total_frame = read_values(LINEAR_TO_ZERO_KEYS, kwargs, where)['frame']
            return
        # torch's scheduler runs on an optimizer of its own: the rate is read off it, no state is shared
        probe = torch.optim.SGD([torch.zeros(1)], lr=base_lr, momentum=0.9)
        try:
            self.scheduler = getattr(torch.optim.lr_scheduler, name)(probe, **kwargs)
            self(1)  # some arguments are refused only when they are used
        except (TypeError, ValueError, KeyError, ArithmeticError) as e:
            reason = str(e).splitlines()[0]
            raise SpecError(f'{where}: torch refuses {name} with {kwargs}: {reason}') from None

    def __call__(self, frame):
        if self.total_frame is not None:
            return self.base_lr * max(0.0, 1.0 - frame / self.total_frame)
        if self.scheduler is None:
            return self.base_lr
        frame = min(frame, getattr(self.scheduler, 'total_steps', frame))  # OneCycleLR refuses to go past its end
        self.scheduler.step(frame)
        return self.scheduler.optimizer.param_groups[0]['lr']


def check_learning_rate(spec, max_frame, where='lr_scheduler_spec'):
    """Tries the rates of a whole run: some schedules grow past all numbers, or fall below 0, only far into it.

    Args:
        spec: `lr_scheduler_spec`, as of `LearningRate`
        max_frame: the last frame of the run
    Raises: SpecError with the first frame, of those tried, that has no rate
    """
    rate = LearningRate(spec, 1.0, where)
    for tenth in range(11):
        frame = max_frame * tenth // 10
        try:
            factor = rate(frame)
        except ArithmeticError as e:
            raise SpecError(f'{where}: {spec} has no learning rate at frame {frame}: {e.args[-1]}') from None
        if not 0 <= factor < math.inf:
            raise SpecError(
                f'{where}: {spec} makes the learning rate {factor:g} times its first value at frame {frame}'
            )
