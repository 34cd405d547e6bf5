"""Where a replay keeps its transitions: whole, or every frame of stacked states once.

Rows count the transitions ever added, and row r lies in slot r % max_size of the replay, whatever keeps it.
"""

import numpy as np

from slm_lab.agent.memory.batch import FIELDS
from slm_lab.lib.state import Ring


def make_storage(layout, max_size, num_envs):
    """The storage that fits the states of a layout."""
    if layout.frames_per_state == 1:
        return WholeTransitions(layout, max_size)
    return SharedFrames(layout, max_size, num_envs)


def _slots(start, n, capacity):
    """Where rows [start, start + n) lie in a ring: a slice, or an array where they go over its end."""
    slot = start % capacity
    return slice(slot, slot + n) if slot + n <= capacity else (slot + np.arange(n)) % capacity


class WholeTransitions:
    """Each transition with its two states."""

    def __init__(self, layout, max_size):
        self.max_size = max_size
        self.arrays = layout.allocate((max_size,))

    def buffers(self, batch_size):
        """{field: array (B, …)} for `take`."""
        return {name: np.empty((batch_size, *a.shape[1:]), a.dtype) for name, a in self.arrays.items()}

    def add(self, start, rows):
        """Adds transitions from row `start` on; `rows` holds an array (n, …) for each of FIELDS."""
        slots = _slots(start, len(rows[0]), self.max_size)
        for name, values in zip(FIELDS, rows, strict=True):
            self.arrays[name][slots] = values

    def cut(self, envs):
        """Nothing to do: each transition stands alone."""

    def take(self, slots, seen_size, buffers):
        """Fills the buffers with the transitions in `slots` (B,)."""
        for name, buffer in buffers.items():
            np.take(self.arrays[name], slots, axis=0, out=buffer, mode='clip')

    def state_dict(self, seen_size):
        return {'ring': Ring(self.arrays, seen_size)}

    def load_state_dict(self, state):
        """Returns: how many transitions were ever added."""
        _load_ring(state['ring'], self.arrays)
        return state['ring'].written


class SharedFrames:
    """Transitions whose states are stacks of k frames: each frame is kept once, and stacks are put together by index.

    One transition of each of N envs is added at a time, so row r is of env r % N, and row r − N is what that env did
    before. A row has the newest frame of its state. The older ones are those of the same env's rows before it, as far
    as its `ages` says that they are of the same stack; before those the first one stands repeated, as it does in an
    env. The next state is the same stack moved on by one frame: that of row r + N where the stack went on. Where it
    did not, for an episode ended or was cut, the last frame was moved to `finals`, at the place that row r + N tells.
    The last frames of the N newest transitions are in `newest`, until the step that comes next shows what they are.

    So no row changes after it was written, which a checkpoint relies on. `finals` is a ring of its own, made longer
    whenever it would overwrite a frame of a transition that is still there.

    Args:
        layout: Layout with `frames_per_state` k > 1: states of (k·d, …), k frames of (d, …), oldest first
        max_size: transitions that can be drawn
        num_envs: N
    """

    def __init__(self, layout, max_size, num_envs):
        self.max_size, self.num_envs, self.k = max_size, num_envs, layout.frames_per_state
        self.depth = layout.state_shape[0] // self.k  # d
        self.frame_shape = (self.depth, *layout.state_shape[1:])
        # the oldest transition's stack reaches back over k − 1 rows of its env
        self.capacity = max_size + (self.k - 1) * num_envs
        self._plain = [name for name in FIELDS if not name.endswith('states')]
        fields = layout.allocate((self.capacity,), self._plain)
        self.arrays = {
            'frames': np.zeros((self.capacity, *self.frame_shape), layout.state_dtype),
            **fields,
            'ages': np.zeros(self.capacity, np.min_scalar_type(self.k)),  # frames before it in its stack, at most k − 1
            'finals': np.zeros(self.capacity, np.int64),  # the row in `finals` of its predecessor's last frame, or −1
        }
        self.newest = np.zeros((num_envs, *self.frame_shape), layout.state_dtype)
        self._allocate_finals(64)
        self._begin_empty()
        self._steps_back = np.arange(self.k - 1, -2, -1)  # of each frame of a stack and the one after it

    def _allocate_finals(self, capacity):
        self.finals = {
            'frames': np.zeros((capacity, *self.frame_shape), self.newest.dtype),
            'rows': np.zeros(capacity, np.int64),  # of which transition it is the last frame
        }

    def _begin_empty(self):
        self.num_finals = 0  # rows of `finals` ever written
        self._grown_at = 0  # its oldest row when it was made longer
        self.ages = np.zeros(self.num_envs, np.int64)  # of the newest transitions
        self.over = np.ones(self.num_envs, bool)  # whether the stack of each env ends with its newest transition

    def buffers(self, batch_size):
        """{field: array (B, …)} for `take`; states and next states are parts of one window of k + 1 frames."""
        window = np.empty((batch_size, (self.k + 1) * self.depth, *self.frame_shape[1:]), self.newest.dtype)
        arrays = {name: self.arrays[name] for name in self._plain}
        return {
            'window': window,
            'states': window[:, : -self.depth],
            'next_states': window[:, self.depth :],
            **{name: np.empty((batch_size, *a.shape[1:]), a.dtype) for name, a in arrays.items()},
        }

    def add(self, start, rows):
        """Adds one transition of each env from row `start` on; `rows` holds an array (N, …) for each of FIELDS."""
        rows = dict(zip(FIELDS, rows, strict=True))
        slots = _slots(start, self.num_envs, self.capacity)
        self.arrays['finals'][slots] = self._move_finals(start)
        self.ages = np.where(self.over, 0, np.minimum(self.ages + 1, self.k - 1))
        self.arrays['ages'][slots] = self.ages
        self.arrays['frames'][slots] = rows['states'][:, -self.depth :]
        for name in self._plain:
            self.arrays[name][slots] = rows[name]
        self.newest[...] = rows['next_states'][:, -self.depth :]
        self.over = np.logical_or(rows['terminated'], rows['truncated'])

    def _move_finals(self, start):
        """Moves the last frames of stacks that are over to `finals`. Returns: their rows there (N,), −1 elsewhere."""
        places = np.full(self.num_envs, -1)
        envs = np.flatnonzero(self.over)
        if start and len(envs):
            self._make_room(len(envs), start + self.num_envs - self.max_size)
            places[envs] = self.num_finals + np.arange(len(envs))
            slots = places[envs] % len(self.finals['rows'])
            self.finals['frames'][slots] = self.newest[envs]
            self.finals['rows'][slots] = start - self.num_envs + envs
            self.num_finals += len(envs)
        return places

    def _make_room(self, n, oldest):
        """Makes sure that n more frames in `finals` overwrite none of a transition from row `oldest` on."""
        old, capacity = self.finals, len(self.finals['rows'])
        overwritten = self.num_finals + n - 1 - capacity  # the newest that would be; those before it are of older ones
        if overwritten < self.first_final or old['rows'][overwritten % capacity] < oldest:
            return
        kept = np.arange(self.first_final, self.num_finals)
        self._grown_at = self.first_final
        # by little, since what is more than needed fills up as well; a frame is then copied about eight times
        self._allocate_finals(capacity + max(n, capacity // 8))
        for name, array in self.finals.items():
            array[kept % len(array)] = old[name][kept % capacity]

    @property
    def first_final(self):
        """The oldest row that is there in `finals`."""
        return max(self._grown_at, self.num_finals - len(self.finals['rows']))

    def cut(self, envs):
        """The stacks of `envs` end here, though their episodes did not: the next states begin anew."""
        self.over[envs] = True

    def take(self, slots, seen_size, buffers):
        """Fills the buffers with the transitions in `slots` (B,)."""
        rows = seen_size - 1 - (seen_size - 1 - slots) % self.max_size
        places = rows % self.capacity
        for name in self._plain:
            np.take(self.arrays[name], places, axis=0, out=buffers[name], mode='clip')
        back = np.minimum(self._steps_back, self.arrays['ages'][places].astype(np.int64)[:, None])
        frames = (rows[:, None] - self.num_envs * back) % self.capacity
        window = buffers['window'].reshape(-1, *self.frame_shape)
        np.take(self.arrays['frames'], frames.reshape(-1), axis=0, out=window, mode='clip')
        self._take_finals(rows, seen_size, buffers['next_states'][:, -self.depth :])

    def _take_finals(self, rows, seen_size, last_frames):
        """Fills in those last frames (B, d, …) that are in no row."""
        is_newest = rows >= seen_size - self.num_envs
        finals = self.arrays['finals'][(rows + self.num_envs) % self.capacity]
        last_frames[is_newest] = self.newest[rows[is_newest] % self.num_envs]
        is_final = (finals >= 0) & ~is_newest
        last_frames[is_final] = self.finals['frames'][finals[is_final] % len(self.finals['rows'])]

    def state_dict(self, seen_size):
        return {
            'ring': Ring(self.arrays, seen_size),
            'finals': Ring(self.finals, self.num_finals, self.first_final),
            'newest': self.newest,
            'ages': self.ages,
            'over': self.over,
        }

    def load_state_dict(self, state):
        """Returns: how many transitions were ever added. Where they were lost, so is all else."""
        finals = state['finals']
        _load_ring(state['ring'], self.arrays)
        if finals.capacity != len(self.finals['rows']):
            self._allocate_finals(finals.capacity)
        _load_ring(finals, self.finals)
        self._begin_empty()
        self.newest[...] = 0
        if state['ring'].written:
            self.num_finals, self._grown_at = finals.written, finals.first_row
            self.newest[...] = state['newest']
            self.ages[:], self.over[:] = state['ages'], state['over']
        return state['ring'].written


def _load_ring(ring, arrays):
    for name, array in arrays.items():
        if ring.arrays[name] is not array:  # a checkpoint is read straight into these arrays
            array[...] = ring.arrays[name]
