"""Fully connected nets: names of their layers, shapes and values."""

import pytest
import torch
from agent_cases import net_spec
from torch import nn
from torch.nn import functional

from slm_lab.agent.net.batch_renorm import BatchRenorm1d
from slm_lab.agent.net.mlp import DuelingMLPNet, MLPNet, QMLPNet
from slm_lab.lib.errors import SpecError


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


# --- normalisation

NORMS = ['layer_norm', 'batch_norm', 'batch_renorm']


def test_without_normalisation_there_is_none():
    kinds = [type(layer) for layer in MLPNet(net_spec(hid_layers=[8, 4]), 3, 2).model]
    assert kinds == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU]


@pytest.mark.parametrize('norm', NORMS)
@pytest.mark.parametrize(('cls', 'torso'), [(MLPNet, 'model'), (DuelingMLPNet, 'model_body')])
def test_normalisation_stands_between_a_linear_layer_and_its_activation(cls, torso, norm):
    """Batch renorm is batch norm at first, so both normalise a first batch alike."""
    torch.manual_seed(0)
    net = cls(net_spec(cls.__name__, hid_layers=[8, 4], **{norm: True}), 3, 2)
    layers = getattr(net, torso)
    assert [type(layers[i]) for i in (0, 2, 3, 5)] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU] and len(layers) == 6
    x = torch.randn(16, 3)
    expected = x
    for i in (0, 3):
        hidden = functional.linear(expected, layers[i].weight, layers[i].bias)
        if norm == 'layer_norm':
            hidden = functional.layer_norm(hidden, hidden.shape[-1:])
        else:
            hidden = functional.batch_norm(hidden, None, None, training=True)
        expected = torch.relu(hidden)
    torch.testing.assert_close(net.features(x), expected)


@pytest.mark.parametrize('norm', NORMS)
def test_a_critic_normalises_states_and_actions_together(norm):
    torch.manual_seed(0)
    spec = {'hid_layers': [8], norm: True}
    critic, plain = QMLPNet(net_spec('QMLPNet', **spec), (3, 2), 1), MLPNet(net_spec(**spec), 5, 1)
    plain.load_state_dict(critic.state_dict())
    states, actions = torch.randn(6, 3), torch.randn(6, 2)
    assert torch.equal(critic(states, actions), plain(torch.cat([states, actions], dim=1)))


@pytest.mark.parametrize('norm', NORMS)
@pytest.mark.parametrize('cls', [MLPNet, DuelingMLPNet])
def test_normalised_nets_take_one_state_and_steps_of_several_envs(cls, norm):
    net = cls(net_spec(cls.__name__, **{norm: True}), 3, 2)
    assert net(torch.randn(1, 3)).shape == (1, 2)
    assert net(torch.randn(5, 4, 3)).shape == (5, 4, 2)


def test_the_settings_of_batch_renorm_reach_it():
    chosen = {'momentum': 0.5, 'r_max': 2, 'warmup_steps': 7}
    layer = MLPNet(net_spec(batch_renorm=chosen), 3, 2).model[1]
    assert isinstance(layer, BatchRenorm1d)
    assert (layer.momentum, layer.r_max, layer.d_max, layer.warmup_steps, layer.eps) == (0.5, 2, 5, 7, 1e-5)
    plain = MLPNet(net_spec(batch_renorm={}), 3, 2).model[1]
    assert isinstance(plain, BatchRenorm1d) and plain.warmup_steps == 10000
    assert not net_spec(batch_renorm=False)['batch_renorm']


@pytest.mark.parametrize(
    ('value', 'wanted'),
    [
        ({'r_maxx': 2}, "batch_renorm.r_maxx: key 'r_maxx' is unknown.*r_max"),
        ({'r_max': 0.5}, 'batch_renorm.r_max: 0.5 is too small'),
        ({'momentum': 0}, 'batch_renorm.momentum: 0 is too small'),
        ({'eps': 0}, 'batch_renorm.eps: 0 is too small'),
        ('renorm', "batch_renorm: 'renorm' is not of the type"),
    ],
)
def test_wrong_settings_of_batch_renorm_are_refused(value, wanted):
    with pytest.raises(SpecError, match=wanted):
        net_spec(batch_renorm=value)


@pytest.mark.parametrize('pair', [('layer_norm', 'batch_norm'), ('layer_norm', 'batch_renorm'), NORMS[1:]])
def test_two_normalisations_are_refused(pair):
    with pytest.raises(SpecError, match=f'MLPNet: {pair[0]} and {pair[1]} exclude each other'):
        MLPNet(net_spec(**dict.fromkeys(pair, True)), 3, 2)
