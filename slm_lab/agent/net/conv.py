"""Convolutional nets for images (B, C, H, W)."""

import torch
from torch import nn

from slm_lab.agent.net.base import NET_KEYS, build_activation, build_layers, check_sizes
from slm_lab.agent.net.headed import DuelingHeads, HeadedNet
from slm_lab.lib.errors import SpecError
from slm_lab.lib.keys import Key, leftover
from slm_lab.lib.registry import NETS


def _check_conv_layers(rows, where):
    for i, row in enumerate(rows):
        if not isinstance(row, (list, tuple)) or not 2 <= len(row) <= 5:
            raise SpecError(f'{where}.{i}: {row} is no layer [out_channels, kernel, stride, padding, dilation]')
    if not rows:
        raise SpecError(f'{where}: it must have a layer [out_channels, kernel, stride, padding, dilation]')


CONV_KEYS = {
    **{k: v for k, v in NET_KEYS.items() if k not in ('hid_layers', 'normalize', 'batch_norm')},
    'conv_hid_layers': Key(
        'list', validate=_check_conv_layers, note='[out_channels, kernel, stride, padding, dilation]'
    ),
    'fc_hid_layers': Key('list', validate=check_sizes, note='sizes of the layers after the convolutions; may be []'),
    'normalize': Key('bool', False, note='divide the image by 255'),
    'batch_norm': Key('bool', True, note='after every convolution but the first'),
    'hid_layers': leftover('fully connected nets only'),
}


def _tuple(value):
    return tuple(value) if isinstance(value, (list, tuple)) else value


def build_convolutions(rows, channels, activation, batch_norm):
    """Convolutions with an activation each, and batch normalisation after all but the first."""
    layers = []
    for i, row in enumerate(rows):
        out_channels, kernel, stride, padding, dilation = (*row, *(1, 0, 1)[len(row) - 2 :])
        layers.append(
            nn.Conv2d(channels, out_channels, _tuple(kernel), _tuple(stride), _tuple(padding), _tuple(dilation))
        )
        if activation is not None:
            layers.append(build_activation(activation))
        if batch_norm and i > 0:
            layers.append(nn.BatchNorm2d(out_channels))
        channels = out_channels
    return nn.Sequential(*layers)


@NETS.register
class ConvNet(HeadedNet):
    """Convolutions, then hidden layers, then heads: images (B, C, H, W) -> (B, out_dim), or a list of such.

    Spec example: {"type": "ConvNet", "conv_hid_layers": [[32, 8, 4, 0, 1], [64, 4, 2, 0, 1]], "fc_hid_layers": [256],
    "hid_layers_activation": "relu", "normalize": true, "batch_norm": false}
    """

    KEYS = {**CONV_KEYS, 'out_layer_activation': Key('str|null', None, validate=build_activation)}

    def build_torso(self, spec, in_dim):
        return self.build_image_layers(spec, in_dim, 0)

    def build_image_layers(self, spec, image_shape, n_extra):
        """Args: n_extra: further inputs that join the features between the convolutions and the hidden layers."""
        if isinstance(image_shape, int) or len(image_shape) != 3:
            raise SpecError(
                f'{type(self).__name__} takes images (channels, height, width); the env gives {image_shape}'
            )
        self.scale = 1 / 255 if spec['normalize'] else None
        activation = spec['hid_layers_activation']
        self.conv_model = build_convolutions(spec['conv_hid_layers'], image_shape[0], activation, spec['batch_norm'])
        with torch.no_grad():
            n = self.conv_model.eval()(torch.zeros(1, *image_shape)).numel()
        self.conv_model.train()
        sizes = [n + n_extra, *spec['fc_hid_layers']]
        if spec['fc_hid_layers']:
            self.fc_model = build_layers(sizes, activation)
        return sizes[-1]

    def flat_image(self, images):
        if images.device.type == 'cpu':  # there the convolutions are faster with the channels last in memory
            images = images.contiguous(memory_format=torch.channels_last)
        if self.scale is not None:
            images = images * self.scale
        return self.conv_model(images).flatten(1)

    def hidden(self, features):
        return self.fc_model(features) if hasattr(self, 'fc_model') else features

    def features(self, images):
        return self.hidden(self.flat_image(images))


@NETS.register
class DuelingConvNet(DuelingHeads, ConvNet):
    """ConvNet with dueling heads: images (B, C, H, W) -> Q values (B, out_dim)."""

    KEYS = {**CONV_KEYS, 'batch_norm': Key('bool', False, note='after every convolution but the first')}


@NETS.register
class QConvNet(ConvNet):
    """Q(s, a) of images and actions: the action joins the flattened image before the hidden layers.

    Forward takes images (B, C, H, W) and actions (B, n_actions); in_dim is (image shape, n_actions).
    """

    TAKES_ACTIONS = True

    def build_torso(self, spec, in_dim):
        image_shape, n_actions = in_dim
        return self.build_image_layers(spec, image_shape, n_actions)

    def features(self, images, actions):
        return self.hidden(torch.cat([self.flat_image(images), actions], dim=-1))


@NETS.register
class FiLMQConvNet(ConvNet):
    """Q(s, a) in which the action scales and shifts the image's features. Perez et al. 2018, FiLM, equation 1.

    Scale and shift are sigmoids of linear layers of the action, as many as there are features.
    Forward takes images (B, C, H, W) and actions (B, n_actions); in_dim is (image shape, n_actions).
    """

    TAKES_ACTIONS = True

    def build_torso(self, spec, in_dim):
        image_shape, n_actions = in_dim
        n = self.build_image_layers(spec, image_shape, 0)
        self.action_scale = build_layers([n_actions, n], 'sigmoid')
        self.action_shift = build_layers([n_actions, n], 'sigmoid')
        return n

    def features(self, images, actions):
        return self.action_scale(actions) * self.hidden(self.flat_image(images)) + self.action_shift(actions)
