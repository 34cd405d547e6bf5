"""The clock of a session. The frame is the only time that schedules, checkpoints and budgets know."""

import time


class Clock:
    """Counts frames, episodes and optimizer steps.

    Attributes:
        frame: env steps taken, summed over the slots.
        t: for one slot the steps taken in the running episode; for several slots it equals `frame`.
        epi: episodes that ended, summed over the slots.
        opt_step: optimizer steps taken.
        wall_t: seconds spent, summed over the process's and all earlier runs.

    Args:
        max_frame: the training budget in frames.
        num_envs: the number of slots, which is the number of frames that a step takes.
    """

    def __init__(self, max_frame, num_envs=1):
        self.max_frame, self.num_envs = int(max_frame), int(num_envs)
        self.frame, self.t, self.epi, self.opt_step = 0, 0, 0, 0
        self._earlier_wall_t, self._start = 0.0, time.monotonic()

    @property
    def wall_t(self):
        return self._earlier_wall_t + time.monotonic() - self._start

    def tick_step(self, ended):
        """One step of all slots; `ended`: (N,) bool, whose episode terminated or was truncated by it."""
        self.frame += self.num_envs
        if self.num_envs > 1:
            self.t = self.frame
            self.epi += int(ended.sum())
        elif ended[0]:
            self.t = 0
            self.epi += 1
        else:
            self.t += 1

    def tick_opt_step(self, n=1):
        """n optimizer steps were taken."""
        self.opt_step += n

    def new_episode(self):
        """An episode that a resume could not bring back is counted as ended."""
        self.epi += 1
        if self.num_envs == 1:
            self.t = 0

    def state_dict(self):
        return {
            'frame': self.frame,
            't': self.t,
            'epi': self.epi,
            'opt_step': self.opt_step,
            'wall_t': self.wall_t,
        }

    def load_state_dict(self, state):
        self.frame, self.t = int(state['frame']), int(state['t'])
        self.epi, self.opt_step = int(state['epi']), int(state['opt_step'])
        self._earlier_wall_t, self._start = float(state['wall_t']), time.monotonic()
