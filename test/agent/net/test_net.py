"""What all nets share: activations, losses, initialisation and device by name."""

import math

import pytest
import torch
from agent_cases import algorithm, net_spec, world
from torch import nn

from slm_lab.agent.net.base import (
    ACTIVATIONS,
    LOSSES,
    build_activation,
    build_layers,
    build_loss,
    init_weights,
    pick_device,
)
from slm_lab.agent.net.headed import set_log_std
from slm_lab.agent.net.mlp import DuelingMLPNet, MLPNet
from slm_lab.lib.errors import SpecError


@pytest.mark.parametrize(
    ('name', 'cls'),
    [
        ('relu', nn.ReLU),
        ('ReLU', nn.ReLU),
        ('SELU', nn.SELU),
        ('selu', nn.SELU),
        ('leaky_relu', nn.LeakyReLU),
        ('leakyrelu', nn.LeakyReLU),
        ('LeakyReLU', nn.LeakyReLU),
        ('tanh', nn.Tanh),
        ('log_sigmoid', nn.LogSigmoid),
    ],
)
def test_activations_go_by_name_whatever_the_case(name, cls):
    assert type(build_activation(name)) is cls


@pytest.mark.filterwarnings('ignore:Implicit dimension choice')
@pytest.mark.parametrize('name', ACTIVATIONS)
def test_every_activation_that_may_be_named_keeps_the_shape(name):
    assert build_activation(name)(torch.zeros(3, 4)).shape == (3, 4)


@pytest.mark.parametrize('name', ['reluu', 'Threshold', 'Module', '', 'GLU'])
def test_an_unknown_activation_is_refused(name):
    with pytest.raises(SpecError, match=f"here: activation '{name}' is unknown.* Known: .*ReLU"):
        build_activation(name, 'here')


def test_losses_are_left_unreduced():
    x, y = torch.tensor([0.0, 3.0]), torch.tensor([1.0, 1.0])
    assert build_loss({'name': 'MSELoss'})(x, y).tolist() == [1.0, 4.0]
    assert build_loss({'name': 'SmoothL1Loss', 'beta': 2.0})(x, y).tolist() == [0.25, 1.0]  # d² / 2 beta, d − beta / 2
    assert build_loss({'name': 'mseloss', 'reduction': 'mean'})(x, y).tolist() == [1.0, 4.0]


@pytest.mark.parametrize('reduction', ['sum', 'none', None])
def test_a_reduction_other_than_the_mean_that_algorithms_take_is_refused(reduction):
    with pytest.raises(SpecError, match=f"here.reduction: '{reduction}' is not done here, but the mean; omit the key"):
        build_loss({'name': 'MSELoss', 'reduction': reduction}, 'here')


@pytest.mark.parametrize('name', LOSSES)
def test_a_loss_fits_item_by_item_or_is_refused(name):
    try:
        loss = build_loss({'name': name}, 'here')
    except SpecError as e:
        assert str(e).startswith('here: ') and name in str(e)
        assert name not in ('MSELoss', 'L1Loss', 'SmoothL1Loss', 'HuberLoss')
    else:
        assert loss(torch.zeros(5), torch.ones(5)).shape == (5,)


# --- layers


def test_layers_are_named_by_their_index_an_activation_after_each():
    names = [(name, type(layer).__name__) for name, layer in build_layers([3, 8, 4], 'relu').named_children()]
    assert names == [('0', 'Linear'), ('1', 'ReLU'), ('2', 'Linear'), ('3', 'ReLU')]
    assert list(build_layers([3, 8, 4], None).state_dict()) == ['0.weight', '0.bias', '1.weight', '1.bias']


@pytest.mark.parametrize(
    ('activation', 'gain'),
    [
        ('relu', math.sqrt(2)),
        ('ReLU', math.sqrt(2)),
        ('tanh', 5 / 3),
        ('selu', 3 / 4),
        ('leaky_relu', math.sqrt(2 / (1 + 0.01**2))),
        ('LeakyReLU', math.sqrt(2 / (1 + 0.01**2))),
        ('ELU', 1.0),  # torch recommends none
        (None, 1.0),
    ],
)
def test_orthogonal_weights_have_the_gain_of_the_activation(activation, gain):
    net = build_layers([8, 8], activation)
    init_weights(net, 'orthogonal_', activation)
    weight = net[0].weight.detach()
    assert torch.allclose(weight @ weight.T, gain**2 * torch.eye(8), atol=1e-5)
    assert net[0].bias.tolist() == [0.0] * 8


@pytest.mark.parametrize(
    ('activation', 'gain'),
    [('relu', math.sqrt(2)), ('leaky_relu', math.sqrt(2)), ('tanh', 1.0), ('selu', 1.0), (None, 1.0)],
)
def test_kaiming_weights_lie_within_the_bound_of_the_activation(activation, gain):
    """U(−b, b) with b = gain · sqrt(3 / n_in); tried on 100,000 weights, which come close to the bound."""
    net = build_layers([1000, 100], activation)
    init_weights(net, 'kaiming_uniform_', activation)
    bound = gain * math.sqrt(3 / 1000)
    assert net[0].weight.abs().max().item() == pytest.approx(bound, rel=1e-3)


def test_without_an_init_fn_torch_s_own_stays():
    torch.manual_seed(3)
    expected = build_layers([4, 4], 'relu').state_dict()
    torch.manual_seed(3)
    net = build_layers([4, 4], 'relu')
    init_weights(net, None, 'relu')
    assert all(torch.equal(net.state_dict()[k], v) for k, v in expected.items())


# --- log standard deviations


@pytest.mark.parametrize(
    ('out_dim', 'head', 'rows'),
    [
        ([3, 3], 1, [0, 1, 2]),
        ([2, 2], 1, [0, 1]),
        ([3, 3, 1], 1, [0, 1, 2]),  # shared with a critic
        (2, 0, [1]),
        ([2, 1], 0, [1]),  # one action, shared with a critic
    ],
)
def test_log_std_init_sets_the_second_parameter_of_a_continuous_policy(out_dim, head, rows):
    net = MLPNet(net_spec(), 5, out_dim)
    tails = list(net.model_tails) if isinstance(out_dim, list) else [net.model_tail]
    before = [(tail[0].weight.detach().clone(), tail[0].bias.detach().clone()) for tail in tails]
    set_log_std(net, -1.5)
    for i, (tail, (weight, bias)) in enumerate(zip(tails, before, strict=True)):
        if i == head:
            weight[rows] /= 100
            bias[rows] = -1.5
        torch.testing.assert_close(tail[0].weight, weight)
        assert torch.equal(tail[0].bias, bias)
    assert all(parameter.requires_grad for parameter in net.parameters())


@pytest.mark.parametrize('out_dim', [3, 1, [3, 1], [1]])
def test_heads_without_a_log_std_are_refused(out_dim):
    with pytest.raises(SpecError, match='log_std_init: heads of .* have no log standard deviation'):
        set_log_std(MLPNet(net_spec(), 5, out_dim), 0.0)


@pytest.mark.parametrize('out_dim', [1, 2, 3])
def test_dueling_heads_have_no_log_std(out_dim):
    with pytest.raises(SpecError, match='log_std_init: DuelingMLPNet has no head of a log standard deviation'):
        set_log_std(DuelingMLPNet(net_spec('DuelingMLPNet'), 5, out_dim), 0.0)


def test_log_std_init_is_refused_before_an_output_activation():
    with pytest.raises(SpecError, match='out_layer_activation would change'):
        set_log_std(MLPNet(net_spec(out_layer_activation='tanh'), 5, [3, 3]), 0.0)


# --- device


def test_without_a_gpu_or_without_the_wish_nets_live_on_the_cpu(monkeypatch):
    for gpu in (True, None, 'auto'):
        monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
        assert pick_device(gpu).type == 'cpu'
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    assert pick_device(False).type == 'cpu'


def test_sessions_go_round_the_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 3)
    devices = [str(pick_device(gpu, place)) for place in range(5) for gpu in (True,)]
    assert devices == ['cuda:0', 'cuda:1', 'cuda:2', 'cuda:0', 'cuda:1']


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_a_net_on_a_gpu_acts_and_learns():
    from agent_cases import fill, memory

    dqn = algorithm('DQN', world(1), net_spec(gpu=True, update_type='polyak', polyak_coef=0.5), training_start_step=0)
    assert {p.device.type for net in dqn.nets.values() for p in net.parameters()} == {'cuda'}
    replay = memory('PrioritizedReplay', epsilon=0.1)
    fill(replay, 10)
    before = [p.clone() for p in dqn.net.parameters()]
    assert dqn.train(replay, 10).opt_steps == 1
    assert any(not torch.equal(a, b) for a, b in zip(before, dqn.net.parameters(), strict=True))
    assert dqn.act(replay.arrays['states'][:3]).shape == (3,)
    state = {k: v.cpu() for k, v in dqn.net.state_dict().items()}
    on_cpu = algorithm('DQN', world(1), net_spec(update_type='polyak', polyak_coef=0.5))
    on_cpu.net.load_state_dict(state)
    x = torch.linspace(-1, 1, 5).unsqueeze(1)
    assert torch.allclose(on_cpu.net(x), dqn.net(x.cuda()).cpu(), atol=1e-5)
