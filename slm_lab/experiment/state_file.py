"""State trees as files: into plain data that `torch.load(weights_only=True)` reads, and hashed while it is written."""

import hashlib
import os
import pickle

import numpy as np
import torch

from slm_lab.lib.errors import LabError
from slm_lab.lib.state import Ring

# keys that mark, in a packed tree, what stands for an array, a numpy scalar or a ring
_ARRAY, _SCALAR, _RING = '\0array', '\0scalar', '\0ring'


def pack_tree(tree):
    """Turns a state tree into what `torch.load(weights_only=True)` reads back exactly.

    Arrays are not copied where they lie in one piece.
    Returns: (packed tree, {path: Ring} of its rings, which are packed as their paths alone).
    Raises: TypeError naming the place of a leaf that a state tree may not hold.
    """
    rings = {}
    return _pack(tree, '', rings), rings


def _pack(leaf, path, rings):
    def below(key, value):
        return _pack(value, f'{path}.{key}' if path else str(key), rings)

    if isinstance(leaf, dict):
        for key in leaf:
            if type(key) not in (str, int) or key in (_ARRAY, _SCALAR, _RING):
                raise TypeError(f'state tree: {path} has the key {key!r}')
        return {key: below(key, value) for key, value in leaf.items()}
    if isinstance(leaf, (list, tuple)):
        items = [below(i, value) for i, value in enumerate(leaf)]
        return tuple(items) if isinstance(leaf, tuple) else items
    if isinstance(leaf, Ring):
        rings[path] = leaf
        return {_RING: path}
    if isinstance(leaf, torch.Tensor):
        return _own_storage(leaf.detach().cpu())
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return {_ARRAY: _pack_array(leaf)}
    if isinstance(leaf, np.generic) and not leaf.dtype.hasobject:
        return {_SCALAR: _pack_array(np.asarray(leaf))}
    if leaf is not None and type(leaf) not in (bool, int, float, str):
        raise TypeError(f'state tree: {path} holds a {type(leaf).__name__}')
    return leaf


def _own_storage(tensor):
    """torch saves the whole memory behind a view: a part of something larger is copied out first."""
    if tensor.layout == torch.strided and tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _pack_array(array):
    """(dtype, shape, its bytes as a tensor): torch lacks some of numpy's dtypes, and would lose byte order."""
    flat = np.ascontiguousarray(array).reshape(-1)
    content = flat.view(np.uint8) if flat.nbytes else np.empty(0, np.uint8)
    if not content.flags.writeable:
        content = content.copy()
    return np.lib.format.dtype_to_descr(array.dtype), tuple(array.shape), torch.from_numpy(content)


def _unpack_array(packed):
    descr, shape, content = packed
    dtype = np.lib.format.descr_to_dtype(descr)
    if content.numel() == 0:
        return np.empty(shape, dtype)
    return content.numpy().view(dtype).reshape(shape)


def unpack_tree(packed, rings):
    """Undoes `pack_tree`, putting `rings` ({path: Ring}) in their places."""
    if isinstance(packed, dict):
        if _ARRAY in packed:
            return _unpack_array(packed[_ARRAY])
        if _SCALAR in packed:
            return _unpack_array(packed[_SCALAR])[()]
        if _RING in packed:
            return rings[packed[_RING]]
        return {key: unpack_tree(value, rings) for key, value in packed.items()}
    if isinstance(packed, (list, tuple)):
        return type(packed)(unpack_tree(value, rings) for value in packed)
    return packed


def save_plain(file, packed):
    torch.save(packed, file)


def load_plain(path):
    """Reads a packed tree; executes nothing.

    Raises: LabError for a file that is damaged, or that holds more than tensors and plain data.
    """
    try:
        return torch.load(path, map_location='cpu', weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as e:
        if isinstance(e, OSError) and e.strerror:
            raise LabError(f'{path} was not read: {e.strerror}') from None
        raise LabError(f'{path} was not read: it is damaged, or holds more than tensors and plain data') from None


class HashedFile:
    """A new file that is hashed while it is written, so that its checksum costs no second read.

    `torch.save` cannot carry an exception of its file object, so an error is kept, and raised by `finish`.
    """

    def __init__(self, path):
        self._file = open(path, 'xb')  # noqa: SIM115 (`__exit__` closes it)
        self._sha, self._size, self._error = hashlib.sha256(), 0, None

    def write(self, content):
        size = memoryview(content).nbytes
        if self._error is None:
            try:
                self._file.write(content)
                self._sha.update(content)
                self._size += size
            except OSError as e:
                self._error = e
        return size

    def flush(self):
        """torch calls it; `finish` does the work."""

    def finish(self):
        """Makes the content durable. Returns {'size', 'sha256'}."""
        if self._error is not None:
            raise self._error
        self._file.flush()
        os.fsync(self._file.fileno())
        return {'size': self._size, 'sha256': self._sha.hexdigest()}

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            self._file.close()
        except OSError:  # closing writes what is still buffered: on a full disk that fails once more
            if kind is None:
                raise
