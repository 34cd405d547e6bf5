"""A net is a torso, which turns its input into features, and linear heads on top."""

from torch import nn

from slm_lab.agent.net.base import build_layers, init_weights
from slm_lab.lib.maths import dueling_q


class HeadedNet(nn.Module):
    """One linear head for an int `out_dim`, and one for each entry of a list.

    A subclass builds its torso in `build_torso`, which returns the number of features, and runs it in `features`.

    Args:
        spec: resolved net spec
        in_dim: what `build_torso` takes: a number of inputs, or the shape of an image or a sequence
        out_dim: int -> forward gives (B, out_dim); list -> a list of (B, n)
    """

    def __init__(self, spec, in_dim, out_dim):
        super().__init__()
        n = self.build_torso(spec, in_dim)
        self.build_heads(spec, n, out_dim)
        init_weights(self, spec['init_fn'], spec['hid_layers_activation'])

    def build_heads(self, spec, n, out_dim):
        activation = spec.get('out_layer_activation')
        if isinstance(out_dim, int):
            self.model_tail = build_layers([n, out_dim], activation)
            return
        activations = activation if isinstance(activation, (list, tuple)) else [activation] * len(out_dim)
        self.model_tails = nn.ModuleList(
            build_layers([n, size], act) for size, act in zip(out_dim, activations, strict=True)
        )

    def forward(self, *inputs):
        features = self.features(*inputs)
        if hasattr(self, 'model_tail'):
            return self.model_tail(features)
        return [tail(features) for tail in self.model_tails]


class DuelingHeads:
    """In place of plain heads: a state value and action advantages, joined to Q values (B, out_dim).

    Wang et al. 2016, Dueling Network Architectures for Deep Reinforcement Learning, equation 9.
    """

    def build_heads(self, spec, n, out_dim):
        self.v = build_layers([n, 1], None)
        self.adv = build_layers([n, out_dim], None)

    def forward(self, *inputs):
        features = self.features(*inputs)
        return dueling_q(self.v(features), self.adv(features))
