"""Values that follow the frame, against formulas and against torch's own stepping."""

import math
import random

import pytest
import torch

from slm_lab.lib.errors import SpecError
from slm_lab.lib.schedule import DECAYS, LearningRate, Schedule, check_learning_rate, fill_spec, scheduler_names

pytestmark = pytest.mark.filterwarnings('ignore:The epoch parameter', 'ignore:Detected call of')


def schedule(name='linear_decay', start_val=1.0, end_val=0.2, start_step=100, end_step=200):
    spec = {'name': name, 'start_val': start_val, 'end_val': end_val, 'start_step': start_step, 'end_step': end_step}
    return Schedule(spec)


@pytest.mark.parametrize(
    ('frame', 'value'), [(0, 1.0), (99, 1.0), (100, 1.0), (125, 0.8), (150, 0.6), (199, 0.208), (200, 0.2), (9999, 0.2)]
)
def test_linear_decay_goes_down(frame, value):
    assert schedule()(frame) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(('frame', 'value'), [(0, 0.4), (100, 0.4), (150, 0.7), (200, 1.0), (300, 1.0)])
def test_linear_decay_goes_up(frame, value):
    assert schedule(start_val=0.4, end_val=1.0)(frame) == pytest.approx(value, abs=1e-12)


def test_a_final_value_of_0_is_0():
    down = schedule(end_val=0)
    assert (down(200), down.final) == (0, 0)
    assert down(175) == pytest.approx(0.25)


@pytest.mark.parametrize('name', ['linear_decay', 'rate_decay', 'periodic_decay', 'no_decay'])
@pytest.mark.parametrize('end', [{}, {'end_val': None}])
def test_an_absent_final_value_is_the_first_one(name, end):
    still = Schedule({'name': name, 'start_val': 0.3, 'start_step': 0, 'end_step': 100, **end})
    assert [still(frame) for frame in (0, 100, 1000)] == [0.3] * 3
    assert still.final == 0.3


@pytest.mark.parametrize(
    ('frame', 'value'),
    [(0, 1.0), (5, 0.9), (10, 0.81), (25, 0.59049), (50, 0.3486784401), (100, 0.0), (101, 0.0)],
)
def test_rate_decay(frame, value):
    decay = schedule('rate_decay', end_val=0.0, start_step=0, end_step=100)
    assert decay(frame) == pytest.approx(value, abs=1e-12)


def test_rate_decay_is_never_below_its_end():
    decay = schedule('rate_decay', end_val=0.5, start_step=10, end_step=110)
    assert decay(9) == decay(10) == 1.0
    assert decay(10 + 30) == pytest.approx(0.9**6)  # 0.531
    assert decay(10 + 35) == decay(10 + 90) == decay(110) == 0.5


@pytest.mark.parametrize('name', ['linear_decay', 'rate_decay', 'periodic_decay'])
def test_a_decay_goes_from_its_start_to_its_end(name):
    decay = DECAYS[name]
    assert decay(1.0, 0.0, 0.0) == 1.0
    assert decay(1.0, 0.0, 1.0) == 0.0


def test_periodic_decay_is_a_cosine_under_a_falling_line():
    end_step = 6_000_000  # so that frame / 100_000 is the angle
    wave = schedule('periodic_decay', start_val=2.0, end_val=1.0, start_step=0, end_step=end_step)
    assert wave(0) == 2.0
    assert wave(round(math.pi * 1e5)) == pytest.approx(1.0, abs=1e-6)
    assert wave(round(2 * math.pi * 1e5)) == pytest.approx(1 + (1 - 2 * math.pi / 60), abs=1e-6)
    assert wave(1_000_000) == pytest.approx(1 + 0.5 * (1 + math.cos(10)) * (50 / 60))
    assert wave(end_step) == wave.final == 1.0


def test_no_decay_is_its_first_value_whatever_the_last():
    still = schedule('no_decay', start_val=0.2, end_val=0.0, start_step=0, end_step=0)
    assert [still(frame) for frame in (0, 1, 10**9)] == [0.2] * 3
    assert still.final == 0.2


def test_a_schedule_of_no_length_jumps():
    jump = schedule(start_step=50, end_step=50)
    assert [jump(frame) for frame in (0, 49, 50, 51)] == [1.0, 1.0, 0.2, 0.2]


def test_no_schedule_is_nan():
    nothing = Schedule(None)
    assert math.isnan(nothing(0)) and math.isnan(nothing(10)) and math.isnan(nothing.final)


@pytest.mark.parametrize(
    ('spec', 'line'),
    [
        (
            {'name': 'linear_deay', 'start_val': 1, 'end_step': 9},
            "here.name: 'linear_deay' is unknown; did you mean 'linear_decay'? "
            'Known: linear_decay, no_decay, periodic_decay, rate_decay',
        ),
        ({'name': 'no_decay'}, "here: key 'start_val' is missing (number: the value up to start_step)"),
        (
            {'name': 'rate_decay', 'start_val': 1},
            "here: key 'end_step' is missing (frames; rate_decay ends there)",
        ),
        (
            {'name': 'linear_decay', 'start_val': 1, 'start_step': 9, 'end_step': 8},
            'here.end_step: 8 lies before start_step 9',
        ),
        (
            {'name': 'linear_decay', 'start_val': 1, 'start_step': -1, 'end_step': 8},
            'here.start_step: -1 is too small; the least is 0',
        ),
        (
            {'name': 'no_decay', 'start_val': 1, 'end_vall': 8},
            "here.end_vall: key 'end_vall' is unknown; did you mean 'end_val'? "
            'Known: end_step, end_val, name, start_step, start_val',
        ),
    ],
)
def test_a_wrong_schedule_is_refused(spec, line):
    with pytest.raises(SpecError) as e:
        fill_spec(spec, 'here')
    assert str(e.value) == line


def test_filling_a_schedule_in_changes_none_of_its_values():
    short = {'name': 'linear_decay', 'start_val': 0.5, 'end_step': 1e3}
    filled = fill_spec(short)
    full = {'name': 'linear_decay', 'start_val': 0.5, 'end_val': 0.5, 'start_step': 0, 'end_step': 1000}
    assert filled == full and type(filled['end_step']) is int
    assert fill_spec(full) == full


# --- learning rates

RATES = {
    'LinearToZero': {'frame': 40},
    'ConstantLR': {'factor': 0.5, 'total_iters': 7},
    'CosineAnnealingLR': {'T_max': 60, 'eta_min': 0.01},
    'CosineAnnealingWarmRestarts': {'T_0': 6, 'T_mult': 2},
    'CyclicLR': {'base_lr': 0.1, 'max_lr': 1.0, 'step_size_up': 5},
    'ExponentialLR': {'gamma': 0.97},
    'LinearLR': {'start_factor': 0.25, 'total_iters': 20},
    'MultiStepLR': {'milestones': [5, 9, 30], 'gamma': 0.3},
    'OneCycleLR': {'max_lr': 1.0, 'total_steps': 50},
    'PolynomialLR': {'total_iters': 30, 'power': 2},
    'StepLR': {'step_size': 7, 'gamma': 0.9},
}
FRAMES = range(60)


def test_every_scheduler_that_may_be_named_is_tested_here():
    assert scheduler_names() == sorted(RATES)


@pytest.mark.parametrize('name', RATES)
def test_the_rate_is_a_function_of_the_frame_alone(name):
    spec = {'name': name, **RATES[name]}
    forth, back, mixed = (LearningRate(spec, 0.5) for _ in range(3))
    rates = {frame: forth(frame) for frame in FRAMES}
    assert {frame: back(frame) for frame in reversed(FRAMES)} == rates
    shuffled = random.Random(0).sample([*FRAMES, *FRAMES], 120)
    assert all(mixed(frame) == rates[frame] for frame in shuffled)
    assert len(set(rates.values())) > 1


@pytest.mark.parametrize('name', sorted({*RATES} - {'LinearToZero'}))
def test_the_rate_is_that_of_torch_stepped_frame_by_frame(name):
    """OneCycleLR refuses to be stepped past its end, and so stays there."""
    rate = LearningRate({'name': name, **RATES[name]}, 0.5)
    optim = torch.optim.SGD([torch.zeros(1)], lr=0.5, momentum=0.9)
    scheduler = getattr(torch.optim.lr_scheduler, name)(optim, **RATES[name])
    for frame in FRAMES:
        assert rate(frame) == pytest.approx(optim.param_groups[0]['lr'], rel=1e-12)
        if frame < getattr(scheduler, 'total_steps', math.inf):
            optim.step()
            scheduler.step()


def test_linear_to_zero_is_never_negative():
    rate = LearningRate({'name': 'LinearToZero', 'frame': 40}, 0.5)
    assert [rate(frame) for frame in (0, 10, 40, 41, 10**9)] == [0.5, 0.375, 0.0, 0.0, 0.0]


def test_no_scheduler_keeps_the_rate():
    rate = LearningRate(None, 0.5)
    assert rate(0) == rate(10**9) == 0.5


@pytest.mark.parametrize(
    ('spec', 'line'),
    [
        ({'name': 'StepLr', 'step_size': 1}, "here.name: scheduler 'StepLr' is unknown; did you mean 'StepLR'?"),
        ({'name': 'ReduceLROnPlateau'}, "here.name: scheduler 'ReduceLROnPlateau' is unknown"),
        ({'step_size': 1}, "here.name: scheduler 'None' is unknown"),
        ({'name': ['StepLR']}, "here.name: scheduler '['StepLR']' is unknown"),
        ({'name': 'StepLR'}, 'here: torch refuses StepLR with {}'),
        ({'name': 'StepLR', 'step': 5}, "here: torch refuses StepLR with {'step': 5}"),
        ({'name': 'StepLR', 'step_size': 0}, "here: torch refuses StepLR with {'step_size': 0}"),
        ({'name': 'StepLR', 'step_size': '5'}, "here: torch refuses StepLR with {'step_size': '5'}"),
        ({'name': 'StepLR', 'step_size': 5, 'last_epoch': 4}, 'here: torch refuses StepLR'),
        ({'name': 'CosineAnnealingLR', 'T_max': 0}, 'here: torch refuses CosineAnnealingLR'),
        ({'name': 'MultiStepLR', 'milestones': 5}, 'here: torch refuses MultiStepLR'),
        ({'name': 'LinearToZero'}, "here: key 'frame' is missing"),
        ({'name': 'LinearToZero', 'frame': 0}, 'here.frame: 0 is too small; it must be above 0'),
    ],
)
def test_a_wrong_scheduler_is_refused(spec, line):
    with pytest.raises(SpecError) as e:
        LearningRate(spec, 0.5, 'here')
    assert str(e.value).startswith(line) and '\n' not in str(e.value)


@pytest.mark.parametrize(
    ('spec', 'line'),
    [
        # 1e30 ** 10 = 1e300 is a number yet, 1e30 ** 20 is none
        ({'name': 'StepLR', 'step_size': 100, 'gamma': 1e30}, 'has no learning rate at frame 2000: '),
        ({'name': 'StepLR', 'step_size': -1}, 'has no learning rate at frame 1000: '),  # 0.1 ** -1000
        ({'name': 'PolynomialLR', 'total_iters': 5000, 'power': -1}, 'has no learning rate at frame 5000: '),  # 0 ** -1
        (
            {'name': 'MultiStepLR', 'milestones': [1500], 'gamma': math.nan},
            'rate nan times its first value at frame 2000',
        ),
        ({'name': 'MultiStepLR', 'milestones': [1500], 'gamma': -2.0}, 'rate -2 times its first value at frame 2000'),
    ],
)
def test_a_rate_that_fails_far_into_the_run_is_refused_before_it(spec, line):
    check_learning_rate(spec, 0, 'here')
    with pytest.raises(SpecError) as e:
        check_learning_rate(spec, 10_000, 'here')
    assert str(e.value).startswith(f'here: {spec} ') and line in str(e.value) and '\n' not in str(e.value)


@pytest.mark.parametrize('name', RATES)
def test_a_rate_that_lasts_for_the_run_is_not_refused(name):
    check_learning_rate({'name': name, **RATES[name]}, 10**6)
