"""Critics over states and actions: shapes, values by hand, and what the action reaches."""

import math

import pytest
import torch

from slm_lab.agent.net.conv import ConvNet, FiLMQConvNet, QConvNet
from slm_lab.agent.net.mlp import MLPNet, QMLPNet
from slm_lab.lib.errors import SpecError
from slm_lab.lib.keys import read_values
from slm_lab.lib.registry import NETS

IMAGE = (2, 6, 6)
MLP = {'hid_layers': [8], 'hid_layers_activation': 'relu'}
CONV = {
    'conv_hid_layers': [[3, 3, 1]],
    'fc_hid_layers': [5],
    'hid_layers_activation': 'relu',
    'batch_norm': False,
}
Q_NETS = [(QMLPNet, MLP, 4), (QConvNet, CONV, IMAGE), (FiLMQConvNet, CONV, IMAGE)]


def build(cls, in_dim, out_dim, **spec):
    return cls(read_values(cls.KEYS, {'type': cls.__name__, **spec}, 'net'), in_dim, out_dim)


def states_of(shape, n):
    return torch.rand(n, *((shape,) if isinstance(shape, int) else shape))


def fill(net, **values):
    """Sets every entry of the named parameters to one value, all others to 0."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.fill_(values.get(name.replace('.', '_'), 0.0))


@pytest.mark.parametrize(('cls', 'spec', 'shape'), Q_NETS)
def test_a_batch_of_states_and_actions_gives_values(cls, spec, shape):
    assert build(cls, (shape, 3), 1, **spec)(states_of(shape, 7), torch.rand(7, 3)).shape == (7, 1)
    two = build(cls, (shape, 3), [1, 2], **spec)(states_of(shape, 7), torch.rand(7, 3))
    assert [out.shape for out in two] == [(7, 1), (7, 2)]


@pytest.mark.parametrize(('cls', 'spec', 'shape'), Q_NETS)
def test_the_value_has_a_gradient_by_every_action(cls, spec, shape):
    torch.manual_seed(1)
    net = build(cls, (shape, 3), 1, **{**spec, 'hid_layers_activation': 'tanh'})
    actions = torch.rand(2, 3, requires_grad=True)
    net(states_of(shape, 2), actions).sum().backward()
    assert (actions.grad != 0).all()


@pytest.mark.parametrize(('cls', 'plain'), [(QMLPNet, MLPNet), (QConvNet, ConvNet), (FiLMQConvNet, ConvNet)])
def test_critics_take_the_keys_of_the_net_of_states(cls, plain):
    assert cls.KEYS == plain.KEYS and NETS.get(cls.__name__) is cls
    assert cls.TAKES_ACTIONS and not plain.TAKES_ACTIONS


def test_a_q_mlp_by_hand():
    """State (1, 2) and action 4, weights 1 and bias −1: hidden relu(7 − 1) = 6 twice; tail weights 0.5: 6."""
    net = build(QMLPNet, (2, 1), 1, hid_layers=[2], hid_layers_activation='relu')
    fill(net, model_0_weight=1.0, model_0_bias=-1.0, model_tail_0_weight=0.5)
    assert net(torch.tensor([[1.0, 2.0]]), torch.tensor([[4.0]])).tolist() == [[6.0]]


def image_case(cls, n_actions=2):
    """A 1x1 image 3 through one kernel of weight 2: 6. The hidden layer is one linear unit without activation."""
    spec = {'conv_hid_layers': [[1, 1, 1]], 'fc_hid_layers': [1], 'hid_layers_activation': None, 'batch_norm': False}
    return build(cls, ((1, 1, 1), n_actions), 1, **spec), torch.full((1, 1, 1, 1), 3.0)


def test_in_a_q_conv_net_the_action_joins_the_flat_image():
    """Flat image 6 and actions 1 and 4: sum 11; tail weight 2, bias 1: 23."""
    net, image = image_case(QConvNet)
    fill(net, conv_model_0_weight=2.0, fc_model_0_weight=1.0, model_tail_0_weight=2.0, model_tail_0_bias=1.0)
    assert net(image, torch.tensor([[1.0, 4.0]])).tolist() == [[23.0]]


def test_in_a_film_net_the_action_scales_and_shifts_the_features():
    """Feature 6; scale sigmoid(ln 3 · 1) = 3/4, shift sigmoid(0) = 1/2: 6 · 3/4 + 1/2 = 5."""
    net, image = image_case(FiLMQConvNet, 1)
    fill(net, conv_model_0_weight=2.0, fc_model_0_weight=1.0, model_tail_0_weight=1.0, action_scale_0_weight=1.0)
    assert net(image, torch.tensor([[math.log(3)]])).item() == pytest.approx(5.0, abs=1e-5)
    fill(net, conv_model_0_weight=2.0, fc_model_0_weight=1.0, model_tail_0_weight=1.0, action_shift_0_weight=1.0)
    # scale sigmoid(0) = 1/2, shift 3/4
    assert net(image, torch.tensor([[math.log(3)]])).item() == pytest.approx(3.75, abs=1e-5)


def test_a_q_conv_net_without_hidden_layers_joins_the_action_before_its_head():
    net = build(QConvNet, (IMAGE, 3), 1, **{**CONV, 'fc_hid_layers': []})
    assert net.model_tail[0].in_features == 3 * 4 * 4 + 3
    assert net(states_of(IMAGE, 2), torch.rand(2, 3)).shape == (2, 1)


def test_init_fn_reaches_the_layers_of_the_action():
    net = build(FiLMQConvNet, (IMAGE, 3), 1, init_fn='zeros_', **CONV)
    assert all((parameter == 0).all() for parameter in net.parameters())


@pytest.mark.parametrize(
    ('cls', 'spec', 'shape', 'wanted'),
    [
        (QMLPNet, MLP, (2, 3), 'QMLPNet takes states of one axis'),
        (QConvNet, CONV, 4, 'QConvNet takes images'),
        (FiLMQConvNet, CONV, (4, 3), 'FiLMQConvNet takes images'),
    ],
)
def test_states_of_the_wrong_shape_are_refused(cls, spec, shape, wanted):
    with pytest.raises(SpecError, match=wanted):
        build(cls, (shape, 3), 1, **spec)
