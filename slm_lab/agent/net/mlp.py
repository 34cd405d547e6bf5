"""Fully connected nets."""

from torch import nn

from slm_lab.agent.net.base import NET_KEYS, build_activation, build_layers, init_weights
from slm_lab.lib.keys import Key
from slm_lab.lib.maths import dueling_q
from slm_lab.lib.registry import NETS


@NETS.register
class MLPNet(nn.Module):
    """Hidden layers and one linear head: states (B, in_dim) -> (B, out_dim).

    Spec example: {"type": "MLPNet", "hid_layers": [64], "hid_layers_activation": "selu",
    "optim_spec": {"name": "Adam", "lr": 0.02}}
    """

    KEYS = {
        **NET_KEYS,
        'out_layer_activation': Key('str|null', None, validate=build_activation),
    }

    def __init__(self, spec, in_dim, out_dim):
        super().__init__()
        sizes = [in_dim, *spec['hid_layers']]
        self.model = build_layers(sizes, spec['hid_layers_activation'])
        self.model_tail = build_layers([sizes[-1], out_dim], spec['out_layer_activation'])
        init_weights(self, spec['init_fn'], spec['hid_layers_activation'])

    def forward(self, states):
        return self.model_tail(self.model(states))


@NETS.register
class DuelingMLPNet(nn.Module):
    """Hidden layers, then a state value and action advantages: states (B, in_dim) -> Q values (B, out_dim).

    Wang et al. 2016, Dueling Network Architectures for Deep Reinforcement Learning, equation 9.
    """

    KEYS = NET_KEYS

    def __init__(self, spec, in_dim, out_dim):
        super().__init__()
        sizes = [in_dim, *spec['hid_layers']]
        self.model_body = build_layers(sizes, spec['hid_layers_activation'])
        self.v = build_layers([sizes[-1], 1], None)
        self.adv = build_layers([sizes[-1], out_dim], None)
        init_weights(self, spec['init_fn'], spec['hid_layers_activation'])

    def forward(self, states):
        hidden = self.model_body(states)
        return dueling_q(self.v(hidden), self.adv(hidden))
