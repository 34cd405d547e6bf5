"""The state protocol: whoever changes during training answers `state_dict()` and `load_state_dict(tree)`.

The protocol is structural: there is no base class and there are no default bodies, so that a part which forgets its
state fails a test and is not saved as nothing. A parent nests its children by name and adds only what it changes
itself. A tree holds `None, bool, int, float, str, list, tuple, dict[str, …], torch.Tensor, numpy array` and `Ring`.

Trees hold live references, as in torch: whoever keeps one past the next training step copies it first.
"""

import math
import struct
from typing import Protocol, runtime_checkable

import numpy as np
import torch


@runtime_checkable
class Stateful(Protocol):
    def state_dict(self): ...

    def load_state_dict(self, state): ...


class Ring:
    """Preallocated arrays that are written round and round; a leaf of a state tree.

    Row r, counted from the first row ever written, lies in slot `r % capacity`; the rows before the last `capacity`
    are gone. A checkpoint therefore needs to write only the rows since the one before.

    A ring that grows is one whose owner gives it a larger capacity, and its rows other slots, before it would overwrite
    a row that is needed. It tells the oldest row that it has, for it has fewer than its capacity when it has just
    grown; and what loads it takes over its capacity.

    Args:
        arrays: {name: array of shape (capacity, …)}
        written: rows written so far
        first_row: of a ring that grows, the oldest row that is there; it never goes back
    """

    def __init__(self, arrays, written, first_row=None):
        self.arrays, self.written = arrays, int(written)
        self.capacity = len(next(iter(arrays.values())))
        self.grows = first_row is not None
        self._first_row = first_row

    @property
    def first_row(self):
        """The oldest row that is still there."""
        return int(self._first_row) if self.grows else max(0, self.written - self.capacity)

    def layout(self):
        """{name: [dtype, shape of one row]}: what two rings must share for one to be read into the other."""
        return {name: [str(a.dtype), [int(n) for n in a.shape[1:]]] for name, a in self.arrays.items()}

    def slots(self, start, stop):
        """Splits rows [start, stop) at the end of the ring: a list of slices of slots, in the order of the rows."""
        slices = []
        while start < stop:
            slot = start % self.capacity
            n = min(stop - start, self.capacity - slot)
            slices.append(slice(slot, slot + n))
            start += n
        return slices


def walk(tree, path=''):
    """Yields (path, leaf) for every leaf of a tree, e.g. ('agent.algorithm.nets.net.model.0.weight', tensor).

    An empty dict, list or tuple is a leaf.
    """
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from walk(value, f'{path}.{key}' if path else str(key))
    elif isinstance(tree, (list, tuple)) and tree:
        for i, value in enumerate(tree):
            yield from walk(value, f'{path}.{i}' if path else str(i))
    else:
        yield path, tree


def check_tree(tree):
    """Raises TypeError with the place of the first leaf that a state tree may not hold."""
    for path, leaf in walk(tree):
        is_scalar = leaf is None or type(leaf) in (bool, int, float, str)  # numpy's scalars are none of these
        if not is_scalar and not isinstance(leaf, (torch.Tensor, np.ndarray, Ring, dict, list, tuple)):
            raise TypeError(f'state tree: {path} holds a {type(leaf).__name__}')
        if isinstance(leaf, np.ndarray) and leaf.dtype.hasobject:
            raise TypeError(f'state tree: {path} holds a numpy object array')


def snapshot(tree):
    """A copy that later training steps do not touch."""
    if isinstance(tree, dict):
        return {k: snapshot(v) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(snapshot(v) for v in tree)
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, np.ndarray):
        return tree.copy()
    if isinstance(tree, Ring):
        return Ring({k: a.copy() for k, a in tree.arrays.items()}, tree.written, tree.first_row if tree.grows else None)
    return tree


# measured by the clock on the wall: the only values in which two equal runs may differ
WALL_CLOCK = ('wall_t', 'fps')


def first_difference(a, b, ignore=WALL_CLOCK):
    """Compares two trees bit for bit.

    Returns: None when they are equal, else (path, what a holds, what b holds) of the first leaf that differs.
    Leaves whose own name is in `ignore` are passed over.
    """
    left, right = _leaves(a, ignore), _leaves(b, ignore)
    for path in [*left, *(p for p in right if p not in left)]:
        if path not in left or path not in right:
            return path, left.get(path, 'nothing'), right.get(path, 'nothing')
        if not _same(left[path], right[path]):
            return path, _describe(left[path], right[path]), _describe(right[path], left[path])
    return None


def _leaves(tree, ignore):
    leaves = {}
    for path, leaf in walk(tree):
        if path.rsplit('.', 1)[-1] in ignore:
            continue
        if isinstance(leaf, Ring):
            leaves[f'{path}.written'] = leaf.written
            rows = leaf.slots(leaf.first_row, leaf.written)
            for name, array in leaf.arrays.items():
                leaves[f'{path}.{name}'] = np.concatenate([array[s] for s in rows]) if rows else array[:0]
        else:
            leaves[path] = leaf
    return leaves


def _same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
        return a.dtype == b.dtype and a.shape == b.shape and _bytes(a) == _bytes(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack('<d', a) == struct.pack('<d', b) or (math.isnan(a) and math.isnan(b))
    return a == b


def _bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b''


def _describe(leaf, other):
    """A scalar as it is; an array by its first element that differs from the other's."""
    if not isinstance(leaf, (torch.Tensor, np.ndarray)) or type(leaf) is not type(other):
        return leaf
    if leaf.dtype != other.dtype or leaf.shape != other.shape:
        return f'{leaf.dtype} of shape {tuple(leaf.shape)}'
    arrays = (v.detach().cpu().numpy() if isinstance(v, torch.Tensor) else v for v in (leaf, other))
    x, y = (np.ascontiguousarray(a).reshape(-1) for a in arrays)
    width = x.dtype.itemsize
    differs = (x.view(np.uint8) != y.view(np.uint8)).reshape(len(x), width).any(axis=1)
    index = int(np.flatnonzero(differs)[0])
    return f'{x[index]} at [{index}] of {len(x)}, {int(differs.sum())} differ'
