"""Fully connected nets: names of their layers, shapes and values."""

import pytest
import torch
from agent_cases import net_spec

from slm_lab.agent.net.mlp import DuelingMLPNet, MLPNet


def set_weights(net, **values):
    """Sets every entry of the named parameters to one value, all others to 0."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.fill_(values.get(name.replace('.', '_'), 0.0))


def test_layer_names_are_those_that_old_state_dicts_have():
    net = MLPNet(net_spec(hid_layers=[8, 4]), 10, 3)
    assert {name: tuple(p.shape) for name, p in net.state_dict().items()} == {
        'model.0.weight': (8, 10),
        'model.0.bias': (8,),
        'model.2.weight': (4, 8),
        'model.2.bias': (4,),
        'model_tail.0.weight': (3, 4),
        'model_tail.0.bias': (3,),
    }
    dueling = DuelingMLPNet(net_spec('DuelingMLPNet', hid_layers=[8]), 10, 3)
    assert {name: tuple(p.shape) for name, p in dueling.state_dict().items()} == {
        'model_body.0.weight': (8, 10),
        'model_body.0.bias': (8,),
        'v.0.weight': (1, 8),
        'v.0.bias': (1,),
        'adv.0.weight': (3, 8),
        'adv.0.bias': (3,),
    }


@pytest.mark.parametrize('cls', [MLPNet, DuelingMLPNet])
def test_a_batch_of_states_gives_a_value_for_each_action(cls):
    net = cls(net_spec(cls.__name__, hid_layers=[8, 8]), 10, 3)
    assert net(torch.zeros(16, 10)).shape == (16, 3)
    assert net(torch.zeros(5, 2, 10)).shape == (5, 2, 3)  # (T, N, d)


def test_an_mlp_by_hand():
    """Two inputs 1 and 2, weights 1 and bias −1: hidden relu(3 − 1) = 2 twice; tail weights 0.5, bias 1: 3."""
    net = MLPNet(net_spec(hid_layers=[2]), 2, 1)
    set_weights(net, model_0_weight=1.0, model_0_bias=-1.0, model_tail_0_weight=0.5, model_tail_0_bias=1.0)
    assert net(torch.tensor([[1.0, 2.0], [-1.0, 0.0]])).tolist() == [[3.0], [1.0]]


def test_the_output_has_its_own_activation():
    net = MLPNet(net_spec(out_layer_activation='sigmoid'), 2, 1)
    set_weights(net)
    assert net(torch.zeros(1, 2)).item() == 0.5


def test_a_net_without_hidden_layers_is_linear():
    net = MLPNet(net_spec(hid_layers=[]), 2, 3)
    assert list(net.state_dict()) == ['model_tail.0.weight', 'model_tail.0.bias']
    x = torch.tensor([[1.0, -2.0]])
    assert torch.equal(net(x), x @ net.model_tail[0].weight.T + net.model_tail[0].bias)


def test_a_dueling_net_by_hand():
    """Hidden 2; value 2 · 1 + 1 = 3; advantages 0, 2 and 4, of mean 2."""
    net = DuelingMLPNet(net_spec('DuelingMLPNet', hid_layers=[1]), 1, 3)
    set_weights(net, model_body_0_weight=1.0, v_0_weight=1.0, v_0_bias=1.0)
    with torch.no_grad():
        net.adv[0].weight.copy_(torch.tensor([[0.0], [1.0], [2.0]]))
    assert net(torch.tensor([[2.0]])).tolist() == [[1.0, 3.0, 5.0]]


@pytest.mark.parametrize('cls', [MLPNet, DuelingMLPNet])
def test_init_fn_reaches_every_layer(cls):
    net = cls(net_spec(cls.__name__, init_fn='zeros_'), 3, 2)
    assert all((parameter == 0).all() for parameter in net.parameters())
