"""State trees of a session of which every value is known: the frame and the lineage tell all; and their saves.

lineage: ((first row, who wrote from there on), …)
"""

import json

import numpy as np
import torch

from slm_lab.experiment import checkpoint
from slm_lab.experiment.checkpoint import CheckpointStore
from slm_lab.lib.state import Ring, first_difference, walk

CAPACITY = 7
RING = 'agent.memory.ring'
PATHS = [RING, 'agent.memory.more.0']


def new_ring(capacity=CAPACITY, width=3):
    return Ring({'frame': np.zeros((capacity, width), np.uint8), 'reward': np.zeros(capacity, np.float32)}, 0)


def new_tree():
    """As a freshly built session has it."""
    return {'agent': {'memory': {'ring': new_ring(), 'more': [new_ring(5)]}}}


def write_row(ring, row, lineage):
    writer = next(who for first, who in reversed(lineage) if first <= row)
    ring.arrays['frame'][row % ring.capacity] = (row * 31 + writer * 101) % 256
    ring.arrays['reward'][row % ring.capacity] = row + writer / 1000
    ring.written = row + 1


def state_at(frame, lineage=((0, 0),), rings=None):
    """The tree at a frame, one row per frame; `rings` are carried on from wherever they are."""
    rings = rings or [new_ring(), new_ring(5)]
    for ring in rings:
        for row in range(ring.written, frame):
            write_row(ring, row, lineage)
    return {
        'clock': {'frame': frame, 'wall_t': 0.5 * frame},
        'lineage': tuple(tuple(entry) for entry in lineage),
        'agent': {
            'nets': {'net': {'weight': torch.full((2, 3), float(frame)), 'bias': torch.arange(frame)}},
            'memory': {'ring': rings[0], 'more': [rings[1]], 'priorities': np.arange(frame, dtype=np.float64)},
        },
    }


def rings_of(tree):
    return [leaf for _, leaf in walk(tree) if isinstance(leaf, Ring)]


def is_state_at(tree, frame, lineage=((0, 0),)):
    difference = first_difference(tree, state_at(frame, lineage), ignore=())
    assert difference is None, difference
    return True


def save(store, tree, **more):
    return store.save(tree, frame=tree['clock']['frame'], spec={'spec': 'demo'}, **more)


def restored(folder, generation=None):
    store = CheckpointStore(folder)
    return store.restore(generation or store.find().generation, new_tree())


def frames_on_disk(folder):
    return sorted(json.loads(path.read_bytes())['frame'] for path in folder.glob('*_manifest.json'))


def listed_files(folder):
    """What the manifests in a folder list, and the manifests."""
    names = set()
    for path in folder.glob('*_manifest.json'):
        names |= {path.name, *json.loads(path.read_bytes())['files']}
    return names


def rewrite_manifest(path, change):
    """As someone who knows the format would."""
    manifest = json.loads(path.read_bytes())
    del manifest['sha256']
    change(manifest)
    path.write_text(json.dumps(manifest | {'sha256': checkpoint._checksum(manifest)}))


def nets(value):
    return {'demo_net': {'weight': torch.full((2,), value)}}


def flip(path):
    """Damages a file by one bit in its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
