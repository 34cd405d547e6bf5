"""One training pass of a ConvNet with its images laid out by channel, as they come, and with the channels last:

    python bench/conv_layout.py [--batch 256] [--rounds 15]

The passes take turns; medians of CPU time on one thread and their ratio are printed, for the nets of the DQN papers of
2013 and 2015.
"""

import argparse
import statistics
import time

import torch

from slm_lab.agent.net.conv import ConvNet
from slm_lab.lib.keys import read_values

NETS = {
    '2013': ([[16, 8, 4], [32, 4, 2]], [256]),
    '2015': ([[32, 8, 4], [64, 4, 2], [64, 3, 1]], [512]),
}


def build(conv, fc):
    spec = {'type': 'ConvNet', 'conv_hid_layers': conv, 'fc_hid_layers': fc, 'hid_layers_activation': 'relu'}
    return ConvNet(read_values(ConvNet.KEYS, {**spec, 'normalize': True, 'batch_norm': False}, 'net'), (4, 84, 84), 6)


def by_channel(net, images):
    return net.model_tail(net.hidden(net.conv_model(images * net.scale).flatten(1)))


def channels_last(net, images):
    return net(images)


def cpu_seconds(forward, net, images):
    start = time.process_time()
    forward(net, images).square().mean().backward()
    return time.process_time() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
    parser.add_argument('--batch', type=int, default=256)
    parser.add_argument('--rounds', type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    images = torch.randint(0, 256, (args.batch, 4, 84, 84), dtype=torch.uint8)
    for year, layers in NETS.items():
        net, times = build(*layers), {by_channel: [], channels_last: []}
        for _ in range(args.rounds):
            for forward, seconds in times.items():
                seconds.append(cpu_seconds(forward, net, images))
        plain, last = (1000 * statistics.median(seconds[1:]) for seconds in times.values())
        print(
            f'net of {year}: by channel {plain:.1f} ms, channels last {last:.1f} ms, {plain / last:.2f} times as fast'
        )


if __name__ == '__main__':
    main()
