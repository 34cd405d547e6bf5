"""Recurrent nets for stacks of the last frames (B, seq_len, d)."""

from torch import nn

from slm_lab.agent.net.base import NET_KEYS, build_activation, build_layers, check_sizes
from slm_lab.agent.net.headed import HeadedNet
from slm_lab.lib.errors import SpecError
from slm_lab.lib.keys import Key, leftover
from slm_lab.lib.registry import NETS

CELLS = ('GRU', 'LSTM', 'RNN')


@NETS.register
class RecurrentNet(HeadedNet):
    """Hidden layers for each frame, a recurrent layer over the frames, heads on its last hidden state.

    The env stacks the last seq_len observations, so nothing is carried from step to step: the state of an agent is
    its weights alone. Forward takes (B, seq_len, d).

    Spec example: {"type": "RecurrentNet", "cell_type": "GRU", "fc_hid_layers": [], "rnn_hidden_size": 64,
    "rnn_num_layers": 1, "bidirectional": false, "seq_len": 4, "hid_layers_activation": "relu"}
    """

    KEYS = {
        **{k: v for k, v in NET_KEYS.items() if k != 'hid_layers'},
        'out_layer_activation': Key('str|null', None, validate=build_activation),
        'fc_hid_layers': Key('list', validate=check_sizes, note='sizes of the layers before the recurrent one'),
        'cell_type': Key('str', 'GRU', choices=CELLS),
        'rnn_hidden_size': Key('int', low=1),
        'rnn_num_layers': Key('int', 1, low=1),
        'bidirectional': Key('bool', False),
        'seq_len': Key('int', low=1, note='frames that the env stacks'),
        'hid_layers': leftover('fully connected nets only'),
    }

    def build_torso(self, spec, in_dim):
        if isinstance(in_dim, int) or len(in_dim) != 2:
            raise SpecError(f'RecurrentNet takes sequences of vectors (seq_len, d); the env gives {in_dim}')
        sizes = [in_dim[1], *spec['fc_hid_layers']]
        if spec['fc_hid_layers']:
            self.fc_model = build_layers(sizes, spec['hid_layers_activation'])
        self.rnn_model = getattr(nn, spec['cell_type'])(
            input_size=sizes[-1],
            hidden_size=spec['rnn_hidden_size'],
            num_layers=spec['rnn_num_layers'],
            batch_first=True,
            bidirectional=spec['bidirectional'],
        )
        return spec['rnn_hidden_size'] * (2 if spec['bidirectional'] else 1)

    def features(self, sequences):
        if hasattr(self, 'fc_model'):
            sequences = self.fc_model(sequences)
        _, hidden = self.rnn_model(sequences)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden  # LSTM also gives its cells
        if not self.rnn_model.bidirectional:
            return hidden[-1]
        return hidden[-2:].transpose(0, 1).flatten(1)  # the last layer's two directions side by side
