"""Nets over sequences and images: shapes, layer names, initialisation."""

import pytest
import torch

from slm_lab.agent.net.conv import ConvNet, DuelingConvNet
from slm_lab.agent.net.recurrent import CELLS, RecurrentNet
from slm_lab.lib.errors import SpecError
from slm_lab.lib.keys import read_values

IMAGE = (4, 84, 84)
CONV = {'conv_hid_layers': [[32, 8, 4, 0, 1], [64, 4, 2, 0, 1], [64, 3, 1]], 'hid_layers_activation': 'relu'}
RNN = {'fc_hid_layers': [], 'rnn_hidden_size': 5, 'seq_len': 4, 'hid_layers_activation': 'relu'}


def build(cls, in_dim, out_dim, **spec):
    return cls(read_values(cls.KEYS, {'type': cls.__name__, **spec}, 'net'), in_dim, out_dim)


@pytest.mark.parametrize('fc', [[], [16]])
def test_a_conv_net_has_the_shapes_and_names_that_users_know(fc):
    net = build(ConvNet, IMAGE, 3, fc_hid_layers=fc, batch_norm=False, **CONV)
    assert net(torch.zeros(2, *IMAGE)).shape == (2, 3)
    assert hasattr(net, 'fc_model') == bool(fc) and hasattr(net, 'model_tail') and not hasattr(net, 'model_tails')
    assert 'conv_model.0.weight' in net.state_dict()
    # 84 -> (84 − 8) / 4 + 1 = 20 -> 9 -> 7
    last = 16 if fc else 64 * 7 * 7
    assert net.model_tail[0].in_features == last


def test_a_list_of_outputs_is_a_list_of_heads():
    net = build(ConvNet, IMAGE, [3, 4], fc_hid_layers=[8], **CONV)
    assert [out.shape for out in net(torch.zeros(2, *IMAGE))] == [(2, 3), (2, 4)]
    assert len(net.model_tails) == 2 and not hasattr(net, 'model_tail')


def test_images_are_divided_by_255_where_asked():
    spec = {'fc_hid_layers': [8], 'batch_norm': False, **CONV}
    torch.manual_seed(0)
    plain = build(ConvNet, IMAGE, 3, **spec)
    torch.manual_seed(0)
    scaled = build(ConvNet, IMAGE, 3, normalize=True, **spec)
    images = torch.randint(0, 256, (2, *IMAGE)).float()
    torch.testing.assert_close(scaled(images), plain(images / 255))


def test_features_lie_by_channel_then_row_then_column_however_the_image_lies_in_memory():
    net = build(ConvNet, IMAGE, 3, fc_hid_layers=[], batch_norm=False, **CONV)
    images = torch.rand(2, *IMAGE)
    plain = net.conv_model(images)
    by_hand = torch.stack([plain[:, c, y, x] for c in range(64) for y in range(7) for x in range(7)], dim=1)
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.testing.assert_close(net.features(images.contiguous(memory_format=layout)), by_hand)


def test_batch_norm_follows_every_convolution_but_the_first():
    kinds = [type(layer).__name__ for layer in build(ConvNet, IMAGE, 3, fc_hid_layers=[], **CONV).conv_model]
    assert kinds == ['Conv2d', 'ReLU', 'Conv2d', 'ReLU', 'BatchNorm2d', 'Conv2d', 'ReLU', 'BatchNorm2d']


def test_a_dueling_conv_net():
    net = build(DuelingConvNet, IMAGE, 3, fc_hid_layers=[8], **CONV)
    q = net(torch.rand(2, *IMAGE))
    features = net.features(torch.zeros(1, *IMAGE))
    assert q.shape == (2, 3) and features.shape == (1, 8)
    v = net.v(net.features(torch.ones(1, *IMAGE)))
    assert net(torch.ones(1, *IMAGE)).mean().item() == pytest.approx(v.item(), abs=1e-5)  # advantages have mean 0
    with pytest.raises(
        SpecError, match=r'agent.0.net.type: DuelingConvNet joins its heads .* give \[3, 1\] side by side'
    ):
        build(DuelingConvNet, IMAGE, [3, 1], fc_hid_layers=[8], **CONV)


@pytest.mark.parametrize('cell', CELLS)
@pytest.mark.parametrize('bidirectional', [False, True])
@pytest.mark.parametrize('fc', [[], [6]])
def test_a_recurrent_net(cell, bidirectional, fc):
    spec = {**RNN, 'fc_hid_layers': fc, 'cell_type': cell, 'bidirectional': bidirectional, 'rnn_num_layers': 2}
    net = build(RecurrentNet, (4, 3), 2, **spec)
    assert net(torch.rand(7, 4, 3)).shape == (7, 2)
    assert net.model_tail[0].in_features == (10 if bidirectional else 5)


def test_both_directions_have_seen_the_whole_sequence():
    net = build(RecurrentNet, (4, 3), 2, **{**RNN, 'bidirectional': True})
    first, last = torch.zeros(1, 4, 3), torch.zeros(1, 4, 3)
    first[0, 0], last[0, -1] = 1, 1
    still = net.features(torch.zeros(1, 4, 3))
    for moved in (net.features(first), net.features(last)):
        assert (moved != still).all()


@pytest.mark.parametrize('cell', CELLS)
def test_init_fn_reaches_every_kind_of_cell(cell):
    spec = {**RNN, 'fc_hid_layers': [6], 'rnn_num_layers': 2, 'bidirectional': True, 'cell_type': cell}
    assert all((p == 0).all() for p in build(RecurrentNet, (4, 3), 2, init_fn='zeros_', **spec).parameters())
    own = dict(build(RecurrentNet, (4, 3), 2, init_fn='ones_', **spec).rnn_model.named_parameters())
    assert len(own) == 2 * 2 * 4  # layers, directions, weights and biases of inputs and hidden states
    assert all((p == (1 if name.startswith('weight') else 0)).all() for name, p in own.items())


def test_init_fn_reaches_convolutions_and_gru_weights():
    conv = build(ConvNet, IMAGE, 3, fc_hid_layers=[8], init_fn='zeros_', **CONV)
    assert all((p == 0).all() for name, p in conv.named_parameters() if 'BatchNorm' not in name and 'conv' not in name)
    gru = build(RecurrentNet, (4, 3), 2, init_fn='orthogonal_', **RNN)
    weight = gru.rnn_model.weight_hh_l0
    torch.testing.assert_close(weight.T @ weight, 2 * torch.eye(5), atol=1e-5, rtol=0)  # gain sqrt(2) for relu
    assert (gru.rnn_model.bias_hh_l0 == 0).all()


@pytest.mark.parametrize(
    ('cls', 'in_dim', 'spec', 'wanted'),
    [
        (ConvNet, 4, {'fc_hid_layers': [], **CONV}, 'ConvNet takes images'),
        (RecurrentNet, 4, RNN, 'RecurrentNet takes sequences'),
        (ConvNet, IMAGE, {'fc_hid_layers': [], **CONV, 'conv_hid_layers': [[32]]}, 'is no layer'),
        (RecurrentNet, (4, 3), {**RNN, 'cell_type': 'GRUU'}, "did you mean 'GRU'"),
    ],
)
def test_what_does_not_fit_is_refused(cls, in_dim, spec, wanted):
    with pytest.raises(SpecError, match=wanted):
        build(cls, in_dim, 2, **spec)
