"""Optimizers by name, one learning step, and target nets."""

import copy
import inspect
import json
import logging
import math

import pytest
import torch
from agent_cases import net_spec
from torch import nn

from slm_lab.agent.net.optim import OPTIMIZERS, Learner, TargetNet, build_optimizer, check_spec, check_target_keys
from slm_lab.lib.errors import SpecError
from slm_lab.lib.schedule import LearningRate
from slm_lab.lib.state import first_difference, snapshot

pytestmark = pytest.mark.filterwarnings('ignore:The epoch parameter', 'ignore:Detected call of')


def linear(weight=1.0, bias=0.0):
    net = nn.Linear(2, 1)
    with torch.no_grad():
        net.weight.fill_(weight)
        net.bias.fill_(bias)
    return net


def learner(optim=None, check=False, **keys):
    return Learner(linear(), net_spec(optim_spec=optim or {'name': 'SGD', 'lr': 0.1}, **keys), check)


def weights(learner):
    return torch.cat([p.detach().flatten() for p in learner.net.parameters()])


# --- optimizers


def test_an_optimizer_by_name_with_its_arguments():
    optim = build_optimizer(linear().parameters(), {'name': 'RMSprop', 'lr': 0.3, 'alpha': 0.7})
    assert isinstance(optim, torch.optim.RMSprop)
    assert (optim.param_groups[0]['lr'], optim.param_groups[0]['alpha']) == (0.3, 0.7)


@pytest.mark.parametrize(('keys', 'fused'), [({}, True), ({'foreach': True}, None), ({'fused': False}, False)])
def test_adam_is_fused_unless_the_spec_says_how(keys, fused):
    assert build_optimizer(linear().parameters(), {'name': 'Adam', **keys}).param_groups[0]['fused'] is fused


@pytest.mark.parametrize(
    ('spec', 'line'),
    [
        ({'name': 'Adamm'}, "here.name: optimizer 'Adamm' is unknown; did you mean 'Adam'? Known: "),
        ({'lr': 1}, "here.name: optimizer 'None' is unknown"),
        ({'name': 'LBFGS'}, "here.name: optimizer 'LBFGS' is unknown"),
        ({'name': 'Adam', 'beta': 1}, "here.beta: Adam takes no 'beta'; did you mean 'betas'? Known: amsgrad, betas"),
        ({'name': 'Adam', 'params': []}, "here.params: Adam takes no 'params'"),
        ({'name': 'Adam', 'lr': 'x'}, "here.lr: 'x' is not of the type wanted here: number"),
        ({'name': 'SGD', 'lr': 0.1, 'momentum': -1}, 'here: torch refuses SGD with'),
    ],
)
def test_a_wrong_optimizer_is_refused(spec, line):
    with pytest.raises(SpecError) as e:
        build_optimizer(linear().parameters(), spec, 'here')
    assert str(e.value).startswith(line) and 'params' not in str(e.value).partition('Known: ')[2]


_NUMBER = 'is not of the type wanted here: number'


@pytest.mark.parametrize(
    ('spec', 'line'),
    [
        ({'name': 'Adam', 'betas': [0.9]}, 'here.betas: [0.9] must be a list of 2 values, such as [0.9, 0.999]'),
        ({'name': 'Adam', 'betas': [0.9, 0.9, 0.9]}, 'here.betas: [0.9, 0.9, 0.9] must be a list of 2'),
        ({'name': 'Adam', 'betas': [0.9, 'x']}, f"here.betas.1: 'x' {_NUMBER}"),
        ({'name': 'Adam', 'betas': 0.9}, 'here.betas: 0.9 is not of the type wanted here: list'),
        ({'name': 'Rprop', 'etas': [0.5]}, 'here.etas: [0.5] must be a list of 2'),
        ({'name': 'Rprop', 'step_sizes': [1]}, 'here.step_sizes: [1] must be a list of 2'),
        ({'name': 'Adafactor', 'eps': [1]}, 'here.eps: [1] must be a list of 2'),
        ({'name': 'Adam', 'amsgrad': 'yes'}, "here.amsgrad: 'yes' is not of the type wanted here: bool"),
        ({'name': 'Adam', 'fused': 'yes'}, "here.fused: 'yes' is not of the type wanted here: bool or null"),
        ({'name': 'Adam', 'lr': True}, f'here.lr: True {_NUMBER}'),
        ({'name': 'SGD', 'momentum': 0.9, 'dampening': 'x'}, f"here.dampening: 'x' {_NUMBER}"),
        ({'name': 'Adam', 'lr': 10**400}, "here: torch refuses Adam with {'lr': 1000"),
        # refused by the first step alone
        ({'name': 'Adam', 'capturable': True}, "here: torch refuses Adam with {'capturable': True}: If capturable="),
        ({'name': 'Adam', 'differentiable': True}, "here: torch refuses Adam with {'differentiable': True}: a leaf"),
        ({'name': 'Adafactor', 'eps': ['x', 1e-3]}, "here: torch refuses Adafactor with {'eps': ['x', 0.001]}"),
        # the lab's own
        ({'name': 'GlobalAdam', 'betas': [0.9]}, 'here.betas: [0.9] must be a list of 2'),
        ({'name': 'GlobalRMSprop', 'alpha': None}, f'here.alpha: None {_NUMBER}'),
        ({'name': 'Lookahead', 'betas': [0.9]}, 'here.betas: [0.9] must be a list of 2'),
        ({'name': 'Lookahead', 'differentiable': True}, "here: torch refuses Lookahead with {'differentiable': True}"),
        ({'name': 'Lookahead', 'optimizer': 'Rprop', 'etas': [1]}, 'here.etas: [1] must be a list of 2'),
    ],
)
def test_what_an_optimizer_cannot_step_with_is_refused_by_the_check(spec, line):
    with pytest.raises(SpecError) as e:
        check_spec(spec, 'here')
    assert str(e.value).startswith(line) and '\n' not in str(e.value)


@pytest.mark.parametrize('name', sorted(OPTIMIZERS.keys() - {'Muon'}))  # which takes no biases
def test_every_argument_at_its_default_passes_the_check(name):
    arguments = {} if name == 'Lookahead' else inspect.signature(OPTIMIZERS[name]).parameters
    defaults = {key: p.default for key, p in arguments.items() if key != 'params'}
    before = copy.deepcopy(spec := {'name': name, **json.loads(json.dumps(defaults))})
    state = torch.get_rng_state()
    check_spec(spec)
    assert spec == before and torch.equal(torch.get_rng_state(), state)


# --- steps


def test_a_step_goes_down_the_gradient():
    """Loss 1 · w1 + 2 · w2 + b at lr 0.1: weights 1 − 0.1, 1 − 0.2, bias −0.1."""
    one = learner()
    loss = one.net(torch.tensor([1.0, 2.0])).sum()
    assert one.step(loss) == 3.0
    assert weights(one).tolist() == pytest.approx([0.9, 0.8, -0.1])


def test_each_step_has_a_gradient_of_its_own():
    one = learner()
    for _ in range(3):
        one.step(one.net(torch.tensor([1.0, 2.0])).sum())
    assert weights(one).tolist() == pytest.approx([0.7, 0.4, -0.3])


def test_the_norm_of_the_gradient_is_clipped_not_its_entries():
    """The gradient (2, 4, 4) of norm 6 becomes (0.5, 1, 1) of norm 1.5."""
    one = learner(clip_grad_val=1.5)
    one.step(one.net(torch.tensor([0.5, 1.0])).sum() * 4)
    assert weights(one).tolist() == pytest.approx([0.95, 0.9, -0.1], rel=1e-5)
    small = learner(clip_grad_val=100.0)
    small.step(small.net(torch.tensor([1.0, 2.0])).sum())
    assert weights(small).tolist() == pytest.approx([0.9, 0.8, -0.1])


def test_the_rate_of_a_step_is_that_of_its_frame():
    one = learner(lr_scheduler_spec={'name': 'StepLR', 'step_size': 10, 'gamma': 0.5})
    rates = []
    for frame in (0, 25, 9, 10):
        one.set_frame(frame)
        rates.append(one.lr)
    assert rates == pytest.approx([0.1, 0.025, 0.1, 0.05])
    one.step(one.net(torch.tensor([1.0, 2.0])).sum())
    assert weights(one).tolist() == pytest.approx([0.95, 0.9, -0.05])
    assert LearningRate(None, 0.1)(25) == 0.1


# --- losses that are not finite


@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize('clip_grad_val', [None, 0.5])
def test_a_loss_that_is_not_finite_touches_nothing(bad, clip_grad_val, caplog):
    one = learner({'name': 'Adam', 'lr': 0.1}, clip_grad_val=clip_grad_val)
    one.step(one.net(torch.tensor([1.0, 2.0])).sum())
    before = snapshot([one.net.state_dict(), one.optim.state_dict()])
    with caplog.at_level(logging.WARNING):
        assert one.step(one.net(torch.tensor([1.0, 2.0])).sum() * bad) is None
    assert first_difference([one.net.state_dict(), one.optim.state_dict()], before) is None
    assert one.skipped_steps == 1
    assert len(caplog.messages) == 1 and '\n' not in caplog.text.strip()
    assert caplog.messages[0].startswith(f'the loss of Linear is {bad}: its optimizer steps are left out')


def test_steps_go_on_after_it_and_the_warning_comes_once(caplog):
    one = learner()
    with caplog.at_level(logging.WARNING):
        for factor in (math.nan, 1.0, math.inf, 1.0):
            one.step(one.net(torch.tensor([1.0, 2.0])).sum() * factor)
    assert weights(one).tolist() == pytest.approx([0.8, 0.6, -0.2])
    assert one.skipped_steps == 2 and len(caplog.messages) == 1


@pytest.mark.parametrize('bad', [math.nan, math.inf])
def test_dev_mode_stops_at_a_loss_that_is_not_finite(bad):
    one = learner(check=True)
    before = weights(one)
    with pytest.raises(FloatingPointError, match=f'the loss of Linear is {bad}'):
        one.step(one.net(torch.tensor([1.0, 2.0])).sum() * bad)
    assert torch.equal(weights(one), before) and one.skipped_steps == 0


# --- the check of dev mode


def test_dev_mode_measures_the_gradient():
    """Mean over the parameters of their norms: sqrt(3² + 4²) of the weights and 1 of the bias."""
    one = learner(check=True)
    assert math.isnan(one.grad_norm)
    one.step(one.net(torch.tensor([3.0, 4.0])).sum())
    assert one.grad_norm == pytest.approx((5 + 1) / 2)
    plain = learner()
    plain.step(plain.net(torch.tensor([3.0, 4.0])).sum())
    assert math.isnan(plain.grad_norm) and torch.equal(weights(plain), weights(one))


def test_dev_mode_stops_when_a_step_changes_no_weight():
    one = learner({'name': 'SGD', 'lr': 1e-30}, check=True)  # too small a step for weights of 1
    one.net.bias.data.fill_(1.0)
    with pytest.raises(RuntimeError, match='a train step left every weight of Linear as it was'):
        one.step(one.net(torch.tensor([1.0, 2.0])).sum())


def test_dev_mode_lets_a_step_without_gradient_or_rate_pass():
    one = learner(check=True)
    one.step((one.net(torch.tensor([1.0, 2.0])) * 0).sum())
    still = learner({'name': 'SGD', 'lr': 0.0}, check=True)
    still.step(still.net(torch.tensor([1.0, 2.0])).sum())
    assert torch.equal(weights(one), weights(still))


# --- loading


@pytest.mark.parametrize('name', ['Adam', 'RMSprop', 'SGD', 'Adagrad', 'RAdam'])
def test_an_optimizer_goes_on_from_its_state(name):
    spec = {'name': name, 'lr': 0.05, **({'momentum': 0.9} if name in ('SGD', 'RMSprop') else {})}
    one = learner(spec)
    for _ in range(3):
        one.step(one.net(torch.tensor([1.0, 2.0])).square().sum())
    other = learner(spec)
    other.net.load_state_dict(one.net.state_dict())
    other.load_optim(copy.deepcopy(one.optim.state_dict()))
    for x in (one, other):
        for _ in range(3):
            x.step(x.net(torch.tensor([1.0, 2.0])).square().sum())
    assert first_difference(one.net.state_dict(), other.net.state_dict()) is None
    assert first_difference(one.optim.state_dict(), other.optim.state_dict()) is None


def test_the_state_of_an_old_torch_loads_and_how_to_compute_stays():
    """Whole numbers as step counts, and none of the keys that came later."""
    one = learner({'name': 'Adam', 'lr': 0.05})
    moments = {'exp_avg': torch.ones(1, 2), 'exp_avg_sq': torch.ones(1, 2)}
    bias = {'exp_avg': torch.ones(1), 'exp_avg_sq': torch.ones(1)}
    group = {'lr': 0.01, 'betas': (0.9, 0.999), 'eps': 1e-8, 'weight_decay': 0, 'amsgrad': False, 'params': [11, 12]}
    one.load_optim({'state': {11: {'step': 7, **moments}, 12: {'step': 7, **bias}}, 'param_groups': [group]})
    assert one.lr == 0.01 and one.optim.param_groups[0]['fused'] is True
    one.step(one.net(torch.tensor([1.0, 2.0])).sum())
    assert one.optim.state[one.net.weight]['step'] == 8


# --- target nets


def target(**keys):
    source, follower = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    with torch.no_grad():
        source.weight.fill_(1.0)
        source.running_mean.fill_(2.0)
    return source, TargetNet(source, follower, net_spec(**keys))


def test_a_target_starts_equal_and_takes_no_gradient():
    source, net = target()
    assert first_difference(net.target.state_dict(), source.state_dict()) is None
    assert not any(p.requires_grad for p in net.target.parameters())
    assert all(p.requires_grad for p in source.parameters())


@pytest.mark.parametrize(
    ('keys', 'expected'),
    [
        ({'update_type': 'replace'}, 5.0),
        ({'update_type': 'polyak', 'polyak_coef': 0.25}, 2.0),  # 0.25 · 5 + 0.75 · 1
        ({'update_type': 'polyak', 'polyak_coef': 1.0}, 5.0),
    ],
)
def test_an_update_takes_over_the_source_and_always_its_buffers(keys, expected):
    source, net = target(**keys)
    with torch.no_grad():
        source.weight.fill_(5.0)
        source.running_mean.fill_(7.0)
        source.num_batches_tracked.fill_(3)
    net.update(frame=1, num_frames=1)
    assert net.target.weight.tolist() == [expected] * 2
    assert net.target.running_mean.tolist() == [7.0] * 2 and net.target.num_batches_tracked == 3
    with torch.no_grad():
        source.weight.fill_(0.0)
    assert net.target.weight.tolist() == [expected] * 2  # a copy, not the same tensor


def test_polyak_steps_add_up():
    source, net = target(update_type='polyak', polyak_coef=0.1)
    with torch.no_grad():
        source.weight.fill_(0.0)
    for frame in range(1, 21):
        net.update(frame, num_frames=1)
    assert net.target.weight.tolist() == pytest.approx([0.9**20] * 2, rel=1e-5)


@pytest.mark.parametrize('update_type', ['replace', 'polyak'])
@pytest.mark.parametrize('num_envs', [1, 3, 4])
@pytest.mark.parametrize('frequency', [1, 8, 10])
def test_updates_happen_when_a_step_crosses_a_multiple(update_type, num_envs, frequency):
    source, net = target(update_type=update_type, polyak_coef=1.0, update_frequency=frequency)
    updated = []
    for frame in range(num_envs, 61, num_envs):
        with torch.no_grad():
            source.weight.fill_(100 + frame)
        net.update(frame, num_envs)
        updated.append(net.target.weight[0].item() == 100 + frame)
    crossed = [(frame // frequency) > (frame - num_envs) // frequency for frame in range(num_envs, 61, num_envs)]
    assert updated == crossed and any(crossed)


@pytest.mark.parametrize('coef', [None, 0, 0.0])
def test_a_polyak_target_that_never_moves_is_refused(coef):
    with pytest.raises(SpecError, match=f'net.polyak_coef: {coef} would never move the target net'):
        check_target_keys(net_spec(update_type='polyak', polyak_coef=coef), 'net')


def test_target_keys_that_are_allowed():
    check_target_keys(net_spec(update_type='polyak', polyak_coef=0.001), 'net')
    check_target_keys(net_spec(update_type='polyak', polyak_coef=1), 'net')
    check_target_keys(net_spec(), 'net')
    with pytest.raises(SpecError, match='net.polyak_coef: -0.5 is too small; the least is 0'):
        check_target_keys(net_spec(update_type='polyak', polyak_coef=-0.5), 'net')
    with pytest.raises(SpecError, match='polyak_coef: 1.5 is too large'):
        net_spec(update_type='polyak', polyak_coef=1.5)
