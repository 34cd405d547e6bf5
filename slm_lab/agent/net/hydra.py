"""A net with several inputs and several outputs around one body."""

import torch
from torch import nn

from slm_lab.agent.net.base import NET_KEYS, build_activation, build_layers, check_sizes
from slm_lab.agent.net.headed import HeadedNet
from slm_lab.lib.errors import SpecError
from slm_lab.lib.keys import Key
from slm_lab.lib.registry import NETS


def _check_hydra_layers(layers, where):
    if len(layers) != 3 or not all(isinstance(part, (list, tuple)) for part in layers):
        raise SpecError(f'{where}: {layers} must be [layers of each head, layers of the body, layers of each tail]')
    heads, body, tails = layers
    check_sizes(body, f'{where}.1')
    for part, all_sizes in ((0, heads), (2, tails)):
        for i, sizes in enumerate(all_sizes):
            if not isinstance(sizes, (list, tuple)):
                raise SpecError(f'{where}.{part}.{i}: {sizes!r} must be a list of layer sizes, such as [32]')
            check_sizes(sizes, f'{where}.{part}.{i}')


def _check_activations(names, where):
    for name in names if isinstance(names, (list, tuple)) else [names]:
        if name is not None:
            build_activation(name, where)


def _for_each(given, n, default, what):
    """As many as are given; one stands for all n, none means the default for all."""
    given = given or [default]
    if len(given) not in (1, n):
        raise SpecError(f'HydraMLPNet: {len(given)} {what} are given for {n}; give {n}, or 1 for all')
    return given if len(given) == n else list(given) * n


@NETS.register
class HydraMLPNet(HeadedNet):
    """Hidden layers for each input (a head), joined into one body, then hidden layers for each output (a tail).

    For a list in_dim, forward takes a list of (B, n), else one (B, in_dim); for a list out_dim, it gives a list of
    (B, n), else one (B, out_dim). No heads or no tails, `[]`, means that theirs have no hidden layers.

    Spec example: {"type": "HydraMLPNet", "hid_layers": [[[32], [32]], [64], []], "hid_layers_activation": "relu"}
    """

    KEYS = {
        **NET_KEYS,
        'hid_layers': Key('list', validate=_check_hydra_layers, note='[layers of heads, of the body, of tails]'),
        'out_layer_activation': Key(
            'str|list|null', None, validate=_check_activations, note='one for all tails, or a list'
        ),
    }

    def build_torso(self, spec, in_dim):
        dims = in_dim if isinstance(in_dim, list) else [in_dim]
        if not all(isinstance(n, int) for n in dims):
            raise SpecError(f'HydraMLPNet takes states of one axis; the env gives {in_dim} (frame_op "concat"?)')
        heads, body, _ = spec['hid_layers']
        activation = spec['hid_layers_activation']
        sizes = [[n, *layers] for n, layers in zip(dims, _for_each(heads, len(dims), [], 'heads'), strict=True)]
        self.model_heads = nn.ModuleList(build_layers(each, activation) for each in sizes)
        joined = [sum(each[-1] for each in sizes), *body]
        self.model_body = build_layers(joined, activation)
        return joined[-1]

    def build_heads(self, spec, n, out_dim):
        dims = out_dim if isinstance(out_dim, list) else [out_dim]
        hidden = _for_each(spec['hid_layers'][2], len(dims), [], 'tails')
        given = spec['out_layer_activation']
        given = given if isinstance(given, (list, tuple)) else [given]
        activations = _for_each(given, len(dims), None, 'output activations')
        tails = [
            nn.Sequential(*build_layers([n, *layers], spec['hid_layers_activation']), *build_layers([last, size], act))
            for layers, size, act in zip(hidden, dims, activations, strict=True)
            for last in [[n, *layers][-1]]
        ]
        if isinstance(out_dim, list):
            self.model_tails = nn.ModuleList(tails)
        else:
            self.model_tail = tails[0]

    def features(self, inputs):
        inputs = [inputs] if isinstance(inputs, torch.Tensor) else inputs
        heads = [head(x) for head, x in zip(self.model_heads, inputs, strict=True)]
        return self.model_body(torch.cat(heads, dim=-1))
