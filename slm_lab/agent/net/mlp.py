"""Fully connected nets."""

from slm_lab.agent.net.base import NET_KEYS, build_activation, build_layers
from slm_lab.agent.net.headed import DuelingHeads, HeadedNet
from slm_lab.lib.errors import SpecError
from slm_lab.lib.keys import Key
from slm_lab.lib.registry import NETS


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
        **NET_KEYS,
        'out_layer_activation': Key('str|null', None, validate=build_activation),
    }

    def build_torso(self, spec, in_dim):
        sizes = layer_sizes(self, spec, in_dim)
        self.model = build_layers(sizes, spec['hid_layers_activation'])
        return sizes[-1]

    def features(self, states):
        return self.model(states)


@NETS.register
class DuelingMLPNet(DuelingHeads, HeadedNet):
    """Hidden layers, then dueling heads: (B, in_dim) -> Q values (B, out_dim)."""

    KEYS = NET_KEYS

    def build_torso(self, spec, in_dim):
        sizes = layer_sizes(self, spec, in_dim)
        self.model_body = build_layers(sizes, spec['hid_layers_activation'])
        return sizes[-1]

    def features(self, states):
        return self.model_body(states)
