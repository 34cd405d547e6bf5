"""Fully connected nets."""

from functools import partial

import torch
from torch import nn

from slm_lab.agent.net.base import NET_KEYS, build_activation, build_layers
from slm_lab.agent.net.batch_renorm import BatchRenorm1d, RowBatchNorm1d
from slm_lab.agent.net.headed import DuelingHeads, HeadedNet
from slm_lab.lib.errors import SpecError
from slm_lab.lib.keys import Key, read_values
from slm_lab.lib.registry import NETS

RENORM_KEYS = {
    'momentum': Key('number', 0.01, above=0, high=1, note='weight of a batch in the running statistics'),
    'r_max': Key('number', 3, low=1, note='the largest correction of the scale'),
    'd_max': Key('number', 5, low=0, note='the largest correction of the mean, in standard deviations'),
    'warmup_steps': Key('int', 10000, low=0, note='training batches before the correction begins'),
    'eps': Key('number', 1e-5, above=0, note='added to variances'),
}


def _fill_renorm(value, where):
    return read_values(RENORM_KEYS, {} if value is True else value, where) if value is not False else False


# at most one of the three
NORM_KEYS = {
    'layer_norm': Key('bool', False, note='after every hidden linear layer, before its activation'),
    'batch_norm': Key('bool', False, note='after every hidden linear layer, before its activation'),
    'batch_renorm': Key(
        'bool|dict', False, fill=_fill_renorm, note=f'as batch_norm; a dict of {", ".join(RENORM_KEYS)}'
    ),
}
MLP_KEYS = {**NET_KEYS, **NORM_KEYS}


def norm_of(net, spec):
    """What makes the normalisation of n features that a spec asks for, or None.

    Raises: SpecError if it asks for two.
    """
    wanted = [key for key in NORM_KEYS if spec[key]]
    if len(wanted) > 1:
        raise SpecError(f'{type(net).__name__}: {" and ".join(wanted)} exclude each other; set one of them')
    if spec['batch_renorm']:
        return partial(BatchRenorm1d, **spec['batch_renorm'])
    return {'layer_norm': nn.LayerNorm, 'batch_norm': RowBatchNorm1d}[wanted[0]] if wanted else None


def layer_sizes(net, spec, in_dim):
    if not isinstance(in_dim, int):
        raise SpecError(f'{type(net).__name__} takes states of one axis; the env gives {in_dim} (frame_op "concat"?)')
    return [in_dim, *spec['hid_layers']]


@NETS.register
class MLPNet(HeadedNet):
    """Hidden layers, then heads: (B, in_dim) -> (B, out_dim), or a list of such for a list of out_dim.

    Spec example: {"type": "MLPNet", "hid_layers": [64], "hid_layers_activation": "selu",
    "optim_spec": {"name": "Adam", "lr": 0.02}}
    """

    KEYS = {
        **MLP_KEYS,
        'out_layer_activation': Key('str|null', None, validate=build_activation),
    }

    def build_torso(self, spec, in_dim):
        sizes = layer_sizes(self, spec, in_dim)
        self.model = build_layers(sizes, spec['hid_layers_activation'], norm_of(self, spec))
        return sizes[-1]

    def features(self, states):
        return self.model(states)


@NETS.register
class DuelingMLPNet(DuelingHeads, HeadedNet):
    """Hidden layers, then dueling heads: (B, in_dim) -> Q values (B, out_dim)."""

    KEYS = MLP_KEYS

    def build_torso(self, spec, in_dim):
        sizes = layer_sizes(self, spec, in_dim)
        self.model_body = build_layers(sizes, spec['hid_layers_activation'], norm_of(self, spec))
        return sizes[-1]

    def features(self, states):
        return self.model_body(states)


@NETS.register
class QMLPNet(MLPNet):
    """Q(s, a): states (B, state_dim) and actions (B, n_actions), joined -> (B, out_dim).

    in_dim is (state_dim, n_actions).
    """

    TAKES_ACTIONS = True

    def build_torso(self, spec, in_dim):
        state_dim, n_actions = in_dim
        # a state of more axes is refused as it is by every fully connected net
        return super().build_torso(spec, state_dim + n_actions if isinstance(state_dim, int) else state_dim)

    def features(self, states, actions):
        return super().features(torch.cat([states, actions], dim=-1))
