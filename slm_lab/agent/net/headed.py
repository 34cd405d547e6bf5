"""A net is a torso, which turns its input into features, and linear heads on top."""

import torch
from torch import nn

from slm_lab.agent.net.base import build_layers, init_weights
from slm_lab.lib.errors import SpecError
from slm_lab.lib.maths import dueling_q


class HeadedNet(nn.Module):
    """One linear head for an int `out_dim`, and one for each entry of a list.

    A subclass builds its torso in `build_torso`, which returns the number of features, and runs it in `features`.

    Args:
        spec: resolved net spec
        in_dim: what `build_torso` takes: a number of inputs, or the shape of an image or a sequence
        out_dim: int -> forward gives (B, out_dim); list -> a list of (B, n)

    `TAKES_ACTIONS` marks the critics whose forward takes actions beside states; such a net cannot act.
    """

    TAKES_ACTIONS = False

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
        if isinstance(out_dim, list):
            raise SpecError(
                f'agent.0.net.type: {type(self).__name__} joins its heads to one output and cannot give {out_dim} side '
                'by side; use a net without dueling heads, such as MLPNet or ConvNet'
            )
        self.v = build_layers([n, 1], None)
        self.adv = build_layers([n, out_dim], None)

    def forward(self, *inputs):
        features = self.features(*inputs)
        return dueling_q(self.v(features), self.adv(features))


@torch.no_grad()
def set_log_std(net, log_std):
    """Starts the log standard deviation of a continuous policy near `log_std` in every state.

    The output's biases become `log_std`, and its weights a hundredth of what they were, so that states still part.

    Args:
        net: its heads are those of a continuous policy, [mean (B, d), log std (B, d)], or one (B, 2) when d is 1;
            further heads, such as the value of a shared net, may follow.
        log_std: natural logarithm of the standard deviation
    Raises: SpecError where the heads are no such pair, or an activation follows them.
    """
    if isinstance(net, DuelingHeads):
        raise SpecError(f'log_std_init: {type(net).__name__} has no head of a log standard deviation; omit the key')
    tails = list(net.model_tails) if hasattr(net, 'model_tails') else [net.model_tail]
    linear = [[layer for layer in tail if isinstance(layer, nn.Linear)][-1] for tail in tails]
    if len(linear) > 1 and linear[0].out_features == linear[1].out_features:
        head, rows = 1, slice(None)
    elif linear[0].out_features == 2:
        head, rows = 0, slice(1, 2)
    else:
        widths = [layer.out_features for layer in linear]
        raise SpecError(f'log_std_init: heads of {widths} outputs have no log standard deviation; omit the key')
    if tails[head][-1] is not linear[head]:
        raise SpecError('log_std_init: out_layer_activation would change the log standard deviation; omit one of them')
    linear[head].bias[rows] = log_std
    linear[head].weight[rows] *= 0.01
