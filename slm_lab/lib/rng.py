"""Random streams: every consumer of random numbers has a generator of its own, derived by name from one seed.

Names make streams independent of the order in which parts are built: adding a part never shifts another's numbers.
"""

import hashlib
import random

import numpy as np
import torch


def derive_seed(seed, *names):
    """A 63-bit seed for the stream `names` (strings or whole numbers) of a run's seed."""
    text = '/'.join(str(name) for name in names)
    digest = hashlib.sha256(f'{int(seed)}:{text}'.encode()).digest()
    return int.from_bytes(digest[:8], 'little') >> 1


def generator(seed, *names):
    """A numpy Generator (PCG64) for the stream `names`."""
    return np.random.Generator(np.random.PCG64(derive_seed(seed, *names)))


def generator_state(rng):
    return rng.bit_generator.state


def set_generator_state(rng, state):
    rng.bit_generator.state = state


class GlobalStreams:
    """The process-wide generators (python, numpy, torch, torch.cuda) as one part with a state.

    Used as a context manager it lends its own streams to a block and puts the process's back afterwards, so that
    evaluating draws nothing from the streams of training.
    """

    def __init__(self, seed, *names):
        self._seed = derive_seed(seed, *names)
        self._state = _seeded_state(self._seed)
        self._outer = None

    def install(self):
        """Makes these the process's streams from here on: `state_dict` then reads the process."""
        _set_process_state(self._state)
        if not self._state['cuda']:
            torch.cuda.manual_seed_all(self._seed)  # kept by torch until it first touches a GPU
        self._state = None

    def __enter__(self):
        self._outer = _process_state()
        _set_process_state(self._state)
        if torch.cuda.is_initialized() and not self._state['cuda']:
            torch.cuda.manual_seed_all(self._seed)
        return self

    def __exit__(self, *_):
        self._state = _process_state()
        _set_process_state(self._outer)
        self._outer = None

    def state_dict(self):
        return _process_state() if self._state is None else dict(self._state)

    def load_state_dict(self, state):
        if self._state is None:
            _set_process_state(state)
        else:
            self._state = dict(state)


def _process_state():
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return _as_tree(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)


def _seeded_state(seed):
    """What seeding the process would give, without touching it. A GPU's generator cannot be made apart from it."""
    numpy_state = np.random.RandomState(seed % 2**32).get_state()
    return _as_tree(random.Random(seed).getstate(), numpy_state, torch.Generator().manual_seed(seed).get_state(), [])


def _as_tree(python_state, numpy_state, torch_state, cuda_states):
    version, keys, gauss = python_state
    name, words, position, has_gauss, cached = numpy_state
    return {
        'python': {'version': version, 'keys': np.array(keys, dtype=np.int64), 'gauss': gauss},
        'numpy': {
            'name': name,
            'words': words.astype(np.int64),
            'position': position,
            'has_gauss': has_gauss,
            'cached': cached,
        },
        'torch': torch_state,
        'cuda': cuda_states,
    }


def _set_process_state(state):
    python, numpy = state['python'], state['numpy']
    random.setstate((python['version'], tuple(int(k) for k in python['keys']), python['gauss']))
    words = np.asarray(numpy['words']).astype(np.uint32)
    np.random.set_state((numpy['name'], words, numpy['position'], numpy['has_gauss'], numpy['cached']))
    torch.set_rng_state(state['torch'])
    # a run moved to a machine with fewer devices (or none) keeps what that machine has
    if state['cuda'] and torch.cuda.is_available():
        for device, cuda_state in enumerate(state['cuda'][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(cuda_state, device)
