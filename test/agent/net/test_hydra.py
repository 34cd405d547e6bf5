"""A net of several inputs and outputs: shapes, names of layers, and values by hand."""

import pytest
import torch
from agent_cases import net_spec

from slm_lab.agent.net.headed import set_log_std
from slm_lab.agent.net.hydra import HydraMLPNet
from slm_lab.lib.errors import SpecError


def build(in_dim, out_dim, hid_layers, **keys):
    return HydraMLPNet(net_spec('HydraMLPNet', hid_layers=hid_layers, **keys), in_dim, out_dim)


def shapes(net):
    return {name: tuple(p.shape) for name, p in net.state_dict().items() if name.endswith('weight')}


def test_heads_are_joined_into_the_body_and_part_into_tails():
    net = build([2, 3], [4, 5], [[[6], [7, 8]], [9], [[10], []]])
    assert shapes(net) == {
        'model_heads.0.0.weight': (6, 2),
        'model_heads.1.0.weight': (7, 3),
        'model_heads.1.2.weight': (8, 7),
        'model_body.0.weight': (9, 6 + 8),
        'model_tails.0.0.weight': (10, 9),
        'model_tails.0.2.weight': (4, 10),
        'model_tails.1.0.weight': (5, 9),
    }
    assert [out.shape for out in net([torch.zeros(3, 2), torch.zeros(3, 3)])] == [(3, 4), (3, 5)]


def test_one_head_or_tail_that_is_given_stands_for_all():
    net = build([2, 3], [4, 5], [[[6]], [9], [[7]]])
    assert shapes(net) == {
        'model_heads.0.0.weight': (6, 2),
        'model_heads.1.0.weight': (6, 3),
        'model_body.0.weight': (9, 12),
        'model_tails.0.0.weight': (7, 9),
        'model_tails.0.2.weight': (4, 7),
        'model_tails.1.0.weight': (7, 9),
        'model_tails.1.2.weight': (5, 7),
    }


def test_without_heads_and_tails_the_inputs_are_joined_as_they_are():
    assert shapes(build([2, 3], [4], [[], [9], []])) == {
        'model_body.0.weight': (9, 5),
        'model_tails.0.0.weight': (4, 9),
    }


def test_values_by_hand():
    """Heads relu(1 + 2) = 3 and relu(−4) = 0; body relu(3 + 0 + 1) = 4; tails 2 · 4 = 8 and sigmoid(0 · 4) = 0.5."""
    net = build([2, 1], [1, 1], [[[1], [1]], [1], []], out_layer_activation=[None, 'sigmoid'])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
        for layer, weight in ((net.model_heads[0], 1.0), (net.model_heads[1], 1.0), (net.model_body, 1.0)):
            layer[0].weight.fill_(weight)
        net.model_body[0].bias.fill_(1.0)
        net.model_tails[0][0].weight.fill_(2.0)
    assert [out.item() for out in net([torch.tensor([[1.0, 2.0]]), torch.tensor([[-4.0]])])] == [8.0, 0.5]


def test_one_state_and_one_output_are_tensors_as_in_every_net():
    net = build(3, 2, [[[4]], [5], [[6]]])
    assert net(torch.zeros(7, 3)).shape == (7, 2)
    assert net.model_tail[-1].out_features == 2 and not hasattr(net, 'model_tails')


def test_init_fn_reaches_every_layer():
    net = build([2, 3], [4, 5], [[[6]], [9], [[7]]], init_fn='zeros_')
    assert all((parameter == 0).all() for parameter in net.parameters())


def test_a_log_std_starts_in_the_last_layer_of_its_tail():
    net = build([2], [3, 3], [[], [9], [[7]]])
    set_log_std(net, -1.0)
    assert net.model_tails[1][2].bias.tolist() == [-1.0] * 3
    assert -1.0 not in net.model_tails[1][0].bias.tolist()


@pytest.mark.parametrize(
    ('layers', 'wanted'),
    [
        ([[[4]], [5]], 'must be .layers of each head'),
        ([[[4]], 5, []], 'must be .layers of each head'),
        ([[4], [5], []], 'hid_layers.0.0: 4 must be a list'),
        ([[], [5], [[0]]], 'hid_layers.2.0: .0. must be a list of layer sizes'),
        ([[], [-1], []], 'hid_layers.1: .-1. must be a list of layer sizes'),
    ],
)
def test_layers_of_another_form_are_refused(layers, wanted):
    with pytest.raises(SpecError, match=wanted):
        net_spec('HydraMLPNet', hid_layers=layers)


@pytest.mark.parametrize(
    ('in_dim', 'layers', 'keys', 'wanted'),
    [
        ([2, 3, 4], [[[4], [4]], [5], []], {}, '2 heads are given for 3'),
        ([2, 3], [[], [5], [[4], [4], [4]]], {}, '3 tails are given for 2'),
        ([2, 3], [[], [5], []], {'out_layer_activation': ['relu'] * 3}, '3 output activations are given for 2'),
        ((4, 84, 84), [[], [5], []], {}, 'takes states of one axis'),
    ],
)
def test_what_does_not_fit_is_refused(in_dim, layers, keys, wanted):
    with pytest.raises(SpecError, match=wanted):
        build(in_dim, [1, 1], layers, **keys)


def test_an_unknown_output_activation_in_a_list_is_refused():
    with pytest.raises(SpecError, match="activation 'reluu' is unknown"):
        net_spec('HydraMLPNet', hid_layers=[[], [5], []], out_layer_activation=['relu', 'reluu'])
