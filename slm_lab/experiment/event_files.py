"""TensorBoard's event files of `dev`, for finding out why an agent does not learn: `log/events.out.tfevents.*`.

    tensorboard --logdir data/<run folder>/log

They show what a session did and are no part of its state: after a stop, the actions of the next row are those since.
"""

import math
import os
from pathlib import Path

import numpy as np


class EventFiles:
    """The numbers of each row, and between two rows of training the actions and the weights of the trained nets.

    Args:
        folder: where the files go; one more for each time that a run goes on
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self._writer, self._actions = None, []

    def add_actions(self, actions):
        """Remembers actions (N, …) until the next row."""
        self._actions.append(np.array(actions, dtype=float))

    def add_row(self, df_mode, row, nets):
        """Writes a row of `train` or `eval`.

        Args:
            nets: {name: module}, the trained ones
        """
        frame = row['frame']
        writer = self._writer = self._writer or self._open(frame)
        for key, value in row.items():
            if math.isfinite(value):
                writer.add_scalar(f'{df_mode}/{key}', value, frame)
        if df_mode == 'train':
            for name, net in nets.items():
                for place, parameter in net.named_parameters():
                    self._add_histogram(f'{name}/{place}', parameter.numpy(force=True), frame)
            if self._actions:
                self._add_histogram('actions', np.concatenate(self._actions), frame)
                self._actions.clear()
        writer.flush()

    def _open(self, frame):
        from tensorboardX import SummaryWriter  # which only `dev` needs

        # What a run that was killed wrote past its checkpoint is hidden by what it writes when it goes on. By
        # itself a file's name has only the second to tell it from another.
        return SummaryWriter(str(self.folder), purge_step=frame, filename_suffix=f'.{os.getpid()}.{frame}')

    def _add_histogram(self, name, values, frame):
        if np.isfinite(values).all():
            self._writer.add_histogram(name, values, frame)

    def close(self):
        if self._writer is not None:
            self._writer.close()
