"""The checkpoint store. Run as a program, this file is the writer that the kill tests kill."""

import builtins
import errno
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from slm_lab.experiment import checkpoint, segment_log
from slm_lab.experiment.checkpoint import CheckpointStore, pack_tree, unpack_tree
from slm_lab.lib.errors import LabError, ResumeError
from slm_lab.lib.state import Ring, first_difference, walk

ROOT = Path(__file__).parents[2]
CAPACITY = 7
RING = 'agent.memory.ring'
PATHS = [RING, 'agent.memory.more.0']


# --- A session of which every value is known: the frame and the lineage tell all.
# lineage: ((first row, who wrote from there on), ...)


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


@pytest.fixture
def folder(tmp_path):
    return tmp_path / 'checkpoint' / 'demo_t0_s0'


# --- what comes back


def test_restored_tree_equals_the_saved_one(folder):
    store = CheckpointStore(folder)
    saved = save(store, state_at(10))
    assert (saved.frame, saved.generation) == (10, 1)
    assert saved.bytes_written == sum(path.stat().st_size for path in folder.iterdir())
    assert 0 < saved.seconds < 60
    found = CheckpointStore(folder).find()
    assert (found.generation.number, found.generation.frame, found.generation.final) == (1, 10, False)
    assert (found.generation.spec, found.skipped) == ({'spec': 'demo'}, [])
    assert is_state_at(restored(folder), 10)


def test_manifest_tells_what_wrote_it(folder):
    save(CheckpointStore(folder), state_at(3), final=True)
    generation = CheckpointStore(folder).find().generation
    assert generation.final is True
    assert generation.manifest['format'] == 1
    assert set(generation.manifest['versions']) == {'python', 'torch', 'numpy', 'gymnasium', 'slm_lab'}
    assert generation.manifest['versions']['torch'] == torch.__version__
    assert generation.manifest['host'] and generation.manifest['time']


@pytest.mark.parametrize('there', [False, True])
def test_nothing_is_found_in_a_folder_without_checkpoints(folder, there):
    if there:
        folder.mkdir(parents=True)
    assert CheckpointStore(folder).find() == (None, [])


DTYPES = ['bool', 'int8', 'uint8', 'int16', 'uint16', 'int32', 'uint32', 'int64', 'uint64']
DTYPES += ['float16', 'float32', 'float64', 'complex64']
LEAVES = {
    'nothing': None,
    'no': False,
    'int': -3,
    'beyond 64 bits': 2**127 + 12345,
    'float': 0.1,
    'nan': float('nan'),
    'inf': float('-inf'),
    'text': 'ä\n',
    'list': [1, [2.5, None], []],
    'tuple': (1, (2, 'x'), ()),
    'empty': {},
    'optimizer state': {0: {'step': torch.tensor(3.0)}, 1: {}},
    'bfloat16': torch.tensor([1.5, -2.5], dtype=torch.bfloat16),
    'torch uint16': torch.tensor([1, 65535], dtype=torch.uint16),
    'torch bool': torch.tensor([True, False]),
    'torch 0-d': torch.tensor(2),
    'torch empty': torch.empty(0, 3),
    'parameter': torch.nn.Parameter(torch.ones(2)).detach(),
    'transposed': torch.arange(6).reshape(2, 3).T,
    'fortran': np.asfortranarray(np.arange(6).reshape(2, 3)),
    'strided': np.arange(10)[::3],
    '0-d': np.array(7, np.int16),
    'numpy empty': np.empty((0, 4), np.float16),
    'numpy float': np.float64(0.1),
    'numpy int': np.int32(-4),
    'numpy text': np.array(['a', 'bc']),
    'big endian': np.arange(3, dtype='>i4'),
    'record': np.array([(1, 2.0)], dtype=[('a', 'i4'), ('b', 'f8')]),
    'pcg64': np.random.PCG64(1).state,
    **{f'numpy {name}': np.array([0, 1, 200]).astype(name) for name in DTYPES},
}


@pytest.mark.parametrize('name', LEAVES)
def test_leaf_keeps_type_dtype_shape_and_bits(name, folder):
    store = CheckpointStore(folder)
    store.save({'x': LEAVES[name]}, frame=1, spec='')
    back = store.restore(store.find().generation, {})
    assert first_difference(back, {'x': LEAVES[name]}) is None
    assert type(back['x']) is type(LEAVES[name])
    for path in folder.glob('*.pt'):
        torch.load(path, weights_only=True)


def test_restored_arrays_can_be_written(folder):
    read_only = np.arange(3)
    read_only.flags.writeable = False
    store = CheckpointStore(folder)
    store.save({'x': read_only}, frame=1, spec='')
    back = store.restore(store.find().generation, {})['x']
    back += 1
    assert list(back) == [1, 2, 3]


def test_part_of_a_tensor_does_not_drag_the_whole_along(folder):
    saved = CheckpointStore(folder).save({'x': torch.zeros(1_000_000)[:2]}, frame=1, spec='')
    assert saved.bytes_written < 10_000


@pytest.mark.parametrize('leaf', [object(), {1, 2}, b'bytes', np.array([None]), {('a',): 1}, {'\0ring': 'x'}])
def test_leaf_that_a_tree_may_not_hold_is_refused_by_its_place(leaf, folder):
    with pytest.raises(TypeError, match=r'agent\.body'):
        CheckpointStore(folder).save({'agent': {'body': leaf}}, frame=1, spec='')
    assert not folder.exists()


def test_packing_does_not_copy_arrays():
    array = np.zeros(1000)
    packed, _ = pack_tree({'x': array})
    array[5] = 3
    assert unpack_tree(packed, {})['x'][5] == 3


# --- rings


def test_ring_rows_are_restored_into_the_live_arrays(folder):
    save(CheckpointStore(folder), state_at(10))
    store, live = CheckpointStore(folder), new_tree()
    tree = store.restore(store.find().generation, live)
    for ours, theirs in zip(rings_of(tree), rings_of(live), strict=True):
        assert all(ours.arrays[name] is theirs.arrays[name] for name in theirs.arrays)
        assert ours.written == 10
        assert theirs.written == 0  # adopting the counters is the memory's own affair


@pytest.mark.parametrize('step', range(1, 2 * CAPACITY + 3))
def test_every_save_of_a_ring_that_wraps_comes_back(step, folder):
    store, rings = CheckpointStore(folder), [new_ring(), new_ring(5)]
    for frame in range(0, 3 * CAPACITY + 3, step):
        save(store, state_at(frame, rings=rings))
        assert is_state_at(restored(folder), frame)
        assert {path.name for path in folder.iterdir()} == listed_files(folder)


def test_segments_are_pruned_only_when_no_kept_generation_lists_them(folder):
    def segments():
        return sorted(path.name for path in folder.glob('*_ring0.seg'))

    store, rings = CheckpointStore(folder), [new_ring(), new_ring(5)]
    for frame in (3, 6, 9):  # at frame 9 rows 2 to 8 are in the ring
        save(store, state_at(frame, rings=rings))
    assert segments() == ['000001_3_ring0.seg', '000002_6_ring0.seg', '000003_9_ring0.seg']
    save(store, state_at(10, rings=rings))  # the first segment is overwritten, but frame 9 needs it
    assert segments() == ['000001_3_ring0.seg', '000002_6_ring0.seg', '000003_9_ring0.seg', '000004_10_ring0.seg']
    save(store, state_at(11, rings=rings))
    assert segments() == ['000002_6_ring0.seg', '000003_9_ring0.seg', '000004_10_ring0.seg', '000005_11_ring0.seg']
    assert frames_on_disk(folder) == [10, 11]


def test_save_after_a_restore_writes_new_rows_alone(folder):
    save(CheckpointStore(folder), state_at(4))
    store = CheckpointStore(folder)
    rings = rings_of(store.restore(store.find().generation, new_tree()))
    save(store, state_at(6, rings=rings))
    assert [(s['start'], s['stop']) for s in store.find().generation.manifest['rings'][RING]['segments']] == [
        (0, 4),
        (4, 6),
    ]
    assert is_state_at(restored(folder), 6)


def test_save_that_has_not_restored_builds_upon_nothing(folder):
    save(CheckpointStore(folder), state_at(4, ((0, 1),)))
    save(CheckpointStore(folder), state_at(6, ((0, 2),)))
    assert is_state_at(restored(folder), 6, ((0, 2),))


def growing(capacity, written=0, first_row=0):
    """A ring that grows; row r holds r."""
    ring = Ring({'x': np.zeros(capacity, np.int64)}, written, first_row)
    rows = np.arange(first_row, written)
    ring.arrays['x'][rows % capacity] = rows
    return ring


def test_ring_that_grew_comes_back_in_its_own_capacity(folder):
    store = CheckpointStore(folder)
    cases = [
        (4, 3, 0, [(0, 3)]),
        (4, 7, 4, [(4, 7)]),
        (6, 10, 4, [(4, 7), (7, 10)]),  # that it grew is no reason to write rows 4 to 6 again
        (9, 12, 5, [(4, 7), (7, 10), (10, 12)]),
        (9, 12, 12, []),
    ]
    for capacity, written, first_row, expected in cases:
        store.save({'ring': growing(capacity, written, first_row)}, frame=written, spec='')
        reader, live = CheckpointStore(folder), {'ring': growing(4)}
        ring = reader.restore(reader.find().generation, live)['ring']
        assert first_difference({'ring': growing(capacity, written, first_row)}, {'ring': ring}) is None
        assert (ring.capacity, ring.first_row, ring.grows) == (capacity, first_row, True)
        assert (ring.arrays['x'] is live['ring'].arrays['x']) == (capacity == 4)
        segments = reader.find().generation.manifest['rings']['ring']['segments']
        assert [(s['start'], s['stop']) for s in segments] == expected


def test_ring_is_lost_with_those_beside_it(folder):
    """They are of one part, which needs all of them; and it does not build upon what it has no longer."""

    def tree(written, part=growing):
        return {'a': {'ring': part(9, written), 'finals': part(9, written)}, 'b': {'ring': part(9, written)}}

    CheckpointStore(folder).save(tree(5), frame=5, spec='')
    flip(folder / '000001_5_ring1.seg')
    store = CheckpointStore(folder)
    found = store.find()
    assert found.generation.lost_rings == ['a.ring', 'a.finals']
    back = store.restore(found.generation, tree(0))
    assert [(ring.written, ring.first_row) for ring in rings_of(back)] == [(0, 0), (0, 0), (5, 0)]
    store.save(tree(8), frame=8, spec='')
    rings = store.find().generation.manifest['rings']
    starts = {path: [s['start'] for s in ring['segments']] for path, ring in rings.items()}
    assert starts == {'a.ring': [0], 'a.finals': [0], 'b.ring': [0, 5]}


def test_segments_stay_few(folder, monkeypatch):
    monkeypatch.setattr(segment_log, 'MAX_SEGMENTS', 3)
    store, rings = CheckpointStore(folder), [new_ring(), new_ring(5)]
    for frame in range(1, 12):
        save(store, state_at(frame, rings=rings))
        assert all(len(ring['segments']) <= 3 for ring in store.find().generation.manifest['rings'].values())
        assert is_state_at(restored(folder), frame)


def other(change):
    tree = new_tree()
    change(tree['agent']['memory'])
    return tree


@pytest.mark.parametrize(
    ('live', 'words'),
    [
        (other(lambda m: m.update(ring=new_ring(8))), [RING, 'capacity 7, but 8']),
        (other(lambda m: m.update(ring=new_ring(width=4))), [RING, 'layout', '[3]', '[4]']),
        (other(lambda m: m.pop('ring')), [f'has the ring {RING}']),
        (other(lambda m: m.update(spare=new_ring())), ['has no ring agent.memory.spare']),
    ],
    ids=['capacity', 'layout', 'absent', 'added'],
)
def test_ring_that_does_not_fit_is_refused_by_name_before_anything_changes(live, words, folder):
    save(CheckpointStore(folder), state_at(10))
    store = CheckpointStore(folder)
    with pytest.raises(ResumeError) as refused:
        store.restore(store.find().generation, live)
    assert all(word in str(refused.value) for word in [*words, 'frame 10'])
    assert not any(array.any() for ring in rings_of(live) for array in ring.arrays.values())


def test_extra_memory_is_a_chunk_at_most(folder):
    def ring():
        return Ring({'frame': np.zeros((9000, 84, 84), np.uint8)}, 0)

    full = ring()
    # the first half cannot be compressed at all, the second very well
    full.arrays['frame'][:4500] = np.random.default_rng(0).integers(0, 256, (4500, 84, 84), np.uint8)
    full.arrays['frame'][4500:] = 5
    full.written = 9000 + 4000
    empty, store = ring(), CheckpointStore(folder)
    assert full.arrays['frame'].nbytes > 63e6

    def peak(work):
        tracemalloc.start()
        try:
            work()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    chunk = 256 * 84 * 84
    assert peak(lambda: store.save({'ring': full}, frame=1, spec='')) < chunk + 1e6
    generation = store.find().generation
    assert peak(lambda: store.restore(generation, {'ring': empty})) < chunk + 1e6
    assert (empty.arrays['frame'] == full.arrays['frame']).all()


# --- best


def test_best_stays_until_there_is_a_new_one(folder):
    store = CheckpointStore(folder)
    save(store, state_at(1))
    assert store.best(store.find().generation) is None
    save(store, state_at(2), best={'frame': 2, 'value': 0.1 + 0.2, 'nets': nets(2.0)})
    for frame in (3, 4, 5):
        save(store, state_at(frame))
    best = CheckpointStore(folder).best(CheckpointStore(folder).find().generation)
    assert (best['frame'], best['value']) == (2, 0.1 + 0.2)
    assert first_difference(best['nets'], nets(2.0)) is None

    store = CheckpointStore(folder)  # another process goes on
    rings = rings_of(store.restore(store.find().generation, new_tree()))
    save(store, state_at(6, rings=rings))
    assert store.best(store.find().generation)['frame'] == 2
    save(store, state_at(7, rings=rings), best={'frame': 7, 'value': 9, 'nets': nets(7.0)})
    assert sorted(path.name for path in folder.glob('*_best.pt')) == ['000002_2_best.pt', '000007_7_best.pt']
    save(store, state_at(8, rings=rings))
    assert sorted(path.name for path in folder.glob('*_best.pt')) == ['000007_7_best.pt']


# --- damage


def two_generations(folder):
    """Frames 4 and 6, each with files of every kind."""
    store, rings = CheckpointStore(folder), [new_ring(), new_ring(5)]
    for frame in (4, 6):
        save(store, state_at(frame, rings=rings), best={'frame': frame, 'value': frame, 'nets': nets(1.0 * frame)})


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b'')


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def make_folder(path):
    path.unlink()
    path.mkdir()


KINDS = ['manifest.json', 'state.pt', 'best.pt', 'ring0.seg', 'ring1.seg']
DAMAGES = [truncate, empty, zero, flip, Path.unlink, make_folder]


@pytest.mark.parametrize('damage', DAMAGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize('kind', KINDS)
def test_damaged_file_of_the_newest_generation_is_named_and_the_one_before_used(kind, damage, folder):
    two_generations(folder)
    damage(folder / f'000002_6_{kind}')
    found = CheckpointStore(folder).find()
    assert found.generation.frame == 4
    assert not found.generation.lost_rings and not found.generation.lost_best
    (line,) = found.skipped
    assert f'000002_6_{kind}' in line and 'frame 6' in line and '\n' not in line
    assert is_state_at(restored(folder), 4)


def test_every_flipped_bit_of_a_manifest_is_noticed(folder):
    two_generations(folder)
    path = folder / '000002_6_manifest.json'
    content = path.read_bytes()
    for i in range(0, len(content), 3):
        path.write_bytes(content[:i] + bytes([content[i] ^ 1 << i % 8]) + content[i + 1 :])
        found = CheckpointStore(folder).find()
        whole = found.generation.frame == 6 and found.generation.manifest == checkpoint._read_manifest(path)
        # a bit of white space may turn into other white space
        assert found.generation.frame == 4 or (whole and content[i : i + 1].isspace()), content[: i + 1][-40:]


def test_save_after_damage_counts_on_and_sweeps(folder):
    two_generations(folder)
    flip(folder / '000002_6_state.pt')
    store = CheckpointStore(folder)
    rings = rings_of(store.restore(store.find().generation, new_tree()))
    assert save(store, state_at(6, rings=rings)).generation == 3
    # the sound generation of frame 4 stays as the second; nothing of the damaged one does
    assert frames_on_disk(folder) == [4, 6]
    assert {path.name for path in folder.iterdir()} == listed_files(folder)
    assert not list(folder.glob('000002*'))


def test_histories_that_part_at_a_lost_generation_are_not_mixed(folder):
    first, second = ((0, 1),), ((0, 1), (4, 2))
    store, rings = CheckpointStore(folder), [new_ring(), new_ring(5)]
    for frame in (4, 6, 8):
        save(store, state_at(frame, first, rings))
    flip(folder / '000003_8_state.pt')
    flip(folder / '000002_6_state.pt')
    assert CheckpointStore(folder).find().generation is None  # keep=2: frame 4 is gone, so nothing is left
    shutil.rmtree(folder)

    store, rings = CheckpointStore(folder, keep=3), [new_ring(), new_ring(5)]
    for frame in (4, 6, 8):
        save(store, state_at(frame, first, rings))
    flip(folder / '000003_8_state.pt')
    flip(folder / '000002_6_state.pt')
    store = CheckpointStore(folder, keep=3)
    found = store.find()
    assert found.generation.frame == 4 and len(found.skipped) == 2
    rings = rings_of(store.restore(found.generation, new_tree()))
    for frame in (6, 7, 8):
        save(store, state_at(frame, second, rings))
        assert is_state_at(restored(folder), frame, second)


def test_history_that_parts_at_an_older_sound_generation_is_not_mixed(folder):
    store, rings = CheckpointStore(folder), [new_ring(), new_ring(5)]
    for frame in (4, 6):
        save(store, state_at(frame, ((0, 1),), rings))
    store = CheckpointStore(folder)
    older = store.find(before=store.find().generation.number).generation
    assert older.frame == 4
    rings = rings_of(store.restore(older, new_tree()))
    second = ((0, 1), (4, 2))
    save(store, state_at(6, second, rings))
    assert is_state_at(restored(folder), 6, second)
    assert is_state_at(restored(folder, CheckpointStore(folder).find(before=3).generation), 6, ((0, 1),))


@pytest.mark.parametrize('damage', DAMAGES, ids=lambda f: f.__name__)
def test_without_a_complete_generation_a_ring_alone_is_lost(damage, folder):
    two_generations(folder)
    damage(folder / '000001_4_ring0.seg')  # rows of both generations
    store = CheckpointStore(folder)
    found = store.find()
    assert (found.generation.frame, found.generation.lost_rings) == (6, [RING])
    assert ['000001_4_ring0.seg' in line for line in found.skipped] == [True, True]
    assert f'used without {RING}' in found.skipped[0] and 'used without' not in found.skipped[1]
    live = new_tree()
    tree = store.restore(found.generation, live)
    assert [ring.written for ring in rings_of(tree)] == [0, 6]
    assert not live['agent']['memory']['ring'].arrays['frame'].any()
    assert tree['agent']['nets']['net']['weight'][0, 0] == 6
    # the memory fills anew; what is saved then is whole again
    tree = state_at(8, rings=[new_ring(), rings_of(tree)[1]])
    save(store, tree)
    assert is_state_at(restored(folder), 8)
    assert CheckpointStore(folder).find().skipped == []


def test_complete_older_generation_is_preferred_to_a_newer_one_that_lost_a_ring(folder):
    two_generations(folder)
    flip(folder / '000002_6_ring0.seg')
    assert CheckpointStore(folder).find().generation.frame == 4


def test_without_a_complete_generation_the_best_alone_is_lost(folder):
    store, rings = CheckpointStore(folder), [new_ring(), new_ring(5)]
    save(store, state_at(4, rings=rings), best={'frame': 4, 'value': 1, 'nets': nets(4.0)})
    save(store, state_at(6, rings=rings))
    flip(folder / '000001_4_best.pt')  # of both generations
    store = CheckpointStore(folder)
    found = store.find()
    assert (found.generation.frame, found.generation.lost_rings, found.generation.lost_best) == (6, [], True)
    assert 'used without the best nets' in found.skipped[0]
    assert store.best(found.generation) is None
    tree = store.restore(found.generation, new_tree())
    assert is_state_at(tree, 6)
    save(store, state_at(7, rings=rings_of(tree)))
    assert CheckpointStore(folder).find().skipped == []


def test_older_generation_that_lost_its_best_is_preferred_to_a_newer_one_that_lost_a_ring(folder):
    two_generations(folder)
    flip(folder / '000001_4_best.pt')
    flip(folder / '000002_6_ring0.seg')
    found = CheckpointStore(folder).find()
    assert (found.generation.frame, found.generation.lost_rings, found.generation.lost_best) == (4, [], True)
    assert len(found.skipped) == 2


def test_manifest_of_a_newer_format_is_skipped_with_a_line_and_its_files_stay(folder):
    two_generations(folder)
    rewrite_manifest(folder / '000002_6_manifest.json', lambda m: m.update(format=2))
    names = {path.name for path in folder.glob('000002*')}
    store = CheckpointStore(folder)
    found = store.find()
    assert found.generation.frame == 4
    assert 'has format 2, and this version of the lab reads format 1' in found.skipped[0]
    rings = rings_of(store.restore(found.generation, new_tree()))
    for frame in (6, 8, 10):
        assert save(store, state_at(frame, rings=rings)).generation == frame / 2
    assert names <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize('content', ['[]', '{}', 'null', '{"format": 1, "sha256": 3}', '{"format": []}'])
def test_manifest_that_is_other_json_is_damage(content, folder):
    two_generations(folder)
    (folder / '000002_6_manifest.json').write_text(content)
    found = CheckpointStore(folder).find()
    assert found.generation.frame == 4 and len(found.skipped) == 1


class Attack:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, 'w')


@pytest.mark.filterwarnings('ignore:Detected pickle protocol')
@pytest.mark.parametrize('form', ['torch', 'pickle'])
def test_file_that_would_execute_code_is_refused(form, folder, tmp_path):
    save(CheckpointStore(folder), state_at(6), best={'frame': 6, 'value': 1, 'nets': nets(1.0)})
    marker, live = tmp_path / 'executed', new_tree()
    for name in ('000001_6_state.pt', '000001_6_best.pt'):
        if form == 'torch':
            torch.save({'x': Attack(marker)}, folder / name)
        else:
            (folder / name).write_bytes(pickle.dumps(Attack(marker)))
        content = (folder / name).read_bytes()

        def list_it(manifest, name=name, content=content):
            manifest['files'][name] = {'size': len(content), 'sha256': checkpoint.hashlib.sha256(content).hexdigest()}

        rewrite_manifest(folder / '000001_6_manifest.json', list_it)
    store = CheckpointStore(folder)
    generation = store.find().generation
    for read in (lambda: store.restore(generation, live), lambda: store.best(generation)):
        with pytest.raises(LabError, match='was not read') as refused:
            read()
        assert '\n' not in str(refused.value)
    assert not marker.exists()
    assert not any(array.any() for ring in rings_of(live) for array in ring.arrays.values())


def test_listed_file_outside_the_folder_is_refused(folder, tmp_path):
    save(CheckpointStore(folder), state_at(6))
    shutil.copy(folder / '000001_6_state.pt', folder.parent / 'state.pt')

    def point_outside(manifest):
        manifest['files']['../state.pt'] = manifest['files'].pop(manifest['state'])
        manifest['state'] = '../state.pt'

    rewrite_manifest(folder / '000001_6_manifest.json', point_outside)
    found = CheckpointStore(folder).find()
    assert found.generation is None and 'outside' in found.skipped[0]


# --- pruning


def test_newest_generations_are_kept(folder):
    store, rings = CheckpointStore(folder, keep=3), [new_ring(), new_ring(5)]
    for frame in range(1, 7):
        save(store, state_at(frame, rings=rings))
    assert frames_on_disk(folder) == [4, 5, 6]
    with pytest.raises(ValueError, match='keep'):
        CheckpointStore(folder, keep=0)


def test_prune_counts_complete_generations_only(folder):
    store, rings = CheckpointStore(folder), [new_ring(), new_ring(5)]
    for frame in (4, 6):
        save(store, state_at(frame, rings=rings))
    flip(folder / '000002_6_state.pt')
    save(CheckpointStore(folder), state_at(8))  # a process that never looked
    assert frames_on_disk(folder) == [4, 8]


def test_prune_leaves_all_where_nothing_is_complete(folder):
    save(CheckpointStore(folder), state_at(4))
    flip(folder / '000001_4_ring0.seg')
    names = sorted(os.listdir(folder))
    CheckpointStore(folder).prune()
    assert sorted(os.listdir(folder)) == names


def test_prune_sweeps_orphans_and_temporary_files_of_dead_writers_but_nothing_foreign(folder):
    dead = subprocess.Popen([sys.executable, '-c', 'pass'])
    dead.wait()
    save(CheckpointStore(folder), state_at(4))
    swept = [
        '000009_7_state.pt',
        '000009_7_ring0.seg',
        '000000_7_best.pt',
        f'.000009_7_manifest.json.{dead.pid}.tmp',
        f'.000009_7_manifest.json.{os.getpid()}.tmp',
    ]
    left = ['notes.txt', '9_7_state.pt', f'.000009_7_manifest.json.{os.getppid()}.tmp']
    for name in swept + left:
        (folder / name).touch()
    assert save(CheckpointStore(folder), state_at(5)).generation == 10  # no number twice
    assert {path.name for path in folder.iterdir()} == listed_files(folder) | set(left)


# --- failing and dying while saving


class Steps:
    """Counts what a save does to the disk, and calls `at_step` before and after each."""

    def __init__(self, at_step):
        self.at_step, self.count, self.armed = at_step, 0, False
        self.originals = builtins.open, os.fsync, os.replace, os.unlink

    def step(self, name):
        if self.armed:
            self.count += 1
            self.at_step(self.count, name)

    def around(self, name, function):
        def stepped(*args, **kwargs):
            self.step(name)
            result = function(*args, **kwargs)
            self.step(name)
            return result

        return stepped

    def open(self, file, mode='r', *args, **kwargs):
        if not set(mode) & set('wax'):
            return self.originals[0](file, mode, *args, **kwargs)
        self.step('open')
        opened = io.BufferedWriter(SteppedFile(file, mode, self), buffer_size=1024)
        try:
            self.step('open')
        except BaseException:
            opened.close()
            raise
        return opened

    def __enter__(self):
        builtins.open = self.open
        os.fsync = self.around('fsync', self.originals[1])
        os.replace = self.around('replace', self.originals[2])
        os.unlink = self.around('unlink', self.originals[3])
        self.armed = True
        return self

    def __exit__(self, *_):
        self.armed = False
        builtins.open, os.fsync, os.replace, os.unlink = self.originals


class SteppedFile(io.FileIO):
    """Writes in two halves, with a step between them."""

    def __init__(self, path, mode, steps):
        super().__init__(path, mode.replace('b', ''))
        self.steps = steps

    def write(self, content):
        content = bytes(content)
        half = len(content) // 2
        super().write(content[:half])
        self.steps.step('write')
        super().write(content[half:])
        return len(content)


BEST_20 = {'frame': 20, 'value': 2.0, 'nets': nets(20.0)}


def prepared_save(folder, before):
    """A store with generations at `before`, and the save of frame 20 that is to be disturbed."""
    store, rings = CheckpointStore(folder), [new_ring(), new_ring(5)]
    for frame in before:
        save(store, state_at(frame, rings=rings), best={'frame': frame, 'value': 1.0, 'nets': nets(1.0 * frame)})
    tree = state_at(20, rings=rings)
    return lambda: save(store, tree, best=BEST_20)


def die_at_every_step(root, before):
    """Program: in folder root/n a forked process is killed at the n-th step of a save."""
    n, status = 0, signal.SIGKILL
    while status != 0:
        n += 1
        child = os.fork()
        if child == 0:

            def kill(count, _, n=n):
                if count == n:
                    os.kill(os.getpid(), signal.SIGKILL)

            disturbed = prepared_save(Path(root) / str(n), before)
            with Steps(kill):
                disturbed()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL), status
    print(n)


def run_program(*args):
    result = subprocess.run(
        [sys.executable, __file__, *map(str, args)],
        env={**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize('before', [[], [12, 15]], ids=['first save', 'third save'])
def test_kill_at_any_step_of_a_save_leaves_the_old_or_the_new_generation(before, tmp_path):
    last = int(run_program('die_at_every_step', tmp_path, json.dumps(before)))
    assert last > 20
    frames = []
    for n in range(1, last + 1):
        folder = tmp_path / str(n)
        store = CheckpointStore(folder)
        generation = store.find().generation
        frames.append(generation.frame if generation else 0)
        if generation:
            tree = store.restore(generation, new_tree())
            assert is_state_at(tree, generation.frame)
            best = store.best(generation)
            assert best['frame'] == generation.frame
            assert first_difference(best['nets'], nets(1.0 * generation.frame)) is None
            tree = state_at(23, rings=rings_of(tree))
        else:
            tree = state_at(23)
        save(store, tree)
        assert is_state_at(restored(folder), 23)
        assert {path.name for path in folder.iterdir()} == listed_files(folder)
    # the old one until the manifest is renamed, the new one ever after
    assert sorted(frames) == frames
    assert set(frames) == {before[-1] if before else 0, 20}


@pytest.mark.parametrize('stays_full', [True, False], ids=['stays full', 'for a moment'])
def test_full_disk_at_any_step_leaves_no_trace_and_one_line(stays_full, folder):
    n = 0
    while True:
        n += 1
        shutil.rmtree(folder, ignore_errors=True)
        disturbed = prepared_save(folder, [12, 15])
        before = {path.name: path.read_bytes() for path in folder.iterdir()}

        def full_disk(count, name, n=n):
            # deleting works on a full disk
            if (count >= n if stays_full else count == n) and name != 'unlink':
                raise OSError(errno.ENOSPC, 'No space left on device')

        with Steps(full_disk) as steps:
            try:
                disturbed()
                failed = False
            except LabError as e:
                failed = True
                assert 'No space left on device' in str(e) and 'frame 20' in str(e) and '\n' not in str(e)
        if failed:
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
            assert is_state_at(restored(folder), 15)
            disturbed()  # there is room again
        elif steps.count < n:
            break
        assert is_state_at(restored(folder), 20)
        assert {path.name for path in folder.iterdir()} == listed_files(folder)
    assert n > 20


def test_files_are_durable_before_the_manifest_and_the_manifest_before_anything_is_deleted(folder, monkeypatch):
    disturbed, tape = prepared_save(folder, [12, 15]), []
    fsync, replace, unlink = os.fsync, os.replace, os.unlink

    def recorded_fsync(descriptor):
        inode = os.fstat(descriptor).st_ino
        tape.append(('fsync', next(p.name for p in [folder, *folder.iterdir()] if p.stat().st_ino == inode)))
        fsync(descriptor)

    def recorded_replace(source, target):
        tape.append(('rename', Path(source).name, Path(target).name))
        replace(source, target)

    def recorded_unlink(path):
        tape.append(('delete', Path(path).name))
        unlink(path)

    monkeypatch.setattr(os, 'fsync', recorded_fsync)
    monkeypatch.setattr(os, 'replace', recorded_replace)
    monkeypatch.setattr(os, 'unlink', recorded_unlink)
    disturbed()
    manifest, temporary = '000003_20_manifest.json', f'.000003_20_manifest.json.{os.getpid()}.tmp'
    renamed = tape.index(('rename', temporary, manifest))
    new = ['000003_20_best.pt', '000003_20_ring0.seg', '000003_20_ring1.seg', '000003_20_state.pt']
    assert sorted(tape[: renamed - 1]) == [('fsync', name) for name in new]
    assert tape[renamed - 1] == ('fsync', temporary)
    assert tape[renamed + 1] == ('fsync', folder.name)
    # an older generation loses its manifest first; all its rows were overwritten by frame 20
    assert tape[renamed + 2] == ('delete', '000001_12_manifest.json')
    assert {name for _, name in tape[renamed + 3 :]} == {'000001_12_best.pt', '000001_12_state.pt'}


def test_file_size_limit_of_the_system_is_one_line(folder):
    disturbed = prepared_save(folder, [15])
    names = sorted(os.listdir(folder))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(LabError, match='frame 20 could not be written: File too large'):
            disturbed()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(os.listdir(folder)) == names
    disturbed()
    assert is_state_at(restored(folder), 20)


def test_interrupt_inside_a_save_leaves_no_trace(folder):
    disturbed = prepared_save(folder, [15])
    names = sorted(os.listdir(folder))

    def interrupt(count, _):
        if count == 15:
            raise KeyboardInterrupt

    with Steps(interrupt), pytest.raises(KeyboardInterrupt):
        disturbed()
    assert sorted(os.listdir(folder)) == names


def test_old_generation_that_cannot_be_deleted_does_not_fail_the_save(folder, caplog):
    disturbed = prepared_save(folder, [12, 15])

    def read_only(_, name):
        if name == 'unlink':
            raise OSError(errno.EACCES, 'Permission denied')

    with Steps(read_only):
        disturbed()
    assert 'Permission denied' in caplog.text
    assert is_state_at(restored(folder), 20)
    assert frames_on_disk(folder) == [12, 15, 20]


def test_spec_that_is_not_json_is_refused_and_leaves_no_trace(folder):
    with pytest.raises(TypeError):
        CheckpointStore(folder).save(state_at(3), frame=3, spec={1, 2})
    assert os.listdir(folder) == []


def test_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / 'checkpoint').touch()
    with pytest.raises(LabError, match='frame 3 could not be written'):
        save(CheckpointStore(tmp_path / 'checkpoint' / 'demo'), state_at(3))


def save_until_killed(folder, kills):
    """Program: a forked process restores, checks what it got, and saves in a loop until it is killed; again and again.

    Each process writes rows of its own kind, so that rows of lost generations would show.
    """
    chance = random.Random(0)
    for attempt in range(1, int(kills) + 1):
        news, report = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(news)
            _save_until_killed(Path(folder), attempt, report)
        os.close(report)
        frame = os.read(news, 8)
        assert frame, f'attempt {attempt} could not restore'
        saves, duration = chance.randrange(3), 0.02
        for _ in range(saves):
            began = time.perf_counter()
            assert os.read(news, 8), f'attempt {attempt} could not save'
            duration = time.perf_counter() - began
        time.sleep(chance.uniform(0, duration))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        os.close(news)
        print(int(frame))


def _save_until_killed(folder, attempt, report):
    try:
        store, tree, frame, lineage = CheckpointStore(folder), {}, 0, ()
        generation = store.find().generation
        if generation:
            tree = store.restore(generation, new_tree())
            frame, lineage = generation.frame, tree['lineage']
            is_state_at(tree, frame, lineage)
            assert store.best(generation)['frame'] == frame
        lineage = (*lineage, (frame, attempt))
        rings = rings_of(tree)
        while True:
            os.write(report, b'%8d' % frame)
            frame += 3
            tree = state_at(frame, lineage, rings)
            rings = rings_of(tree)
            save(store, tree, best={'frame': frame, 'value': 1.0, 'nets': nets(1.0)})
    except BaseException as e:
        print(repr(e), file=sys.stderr, flush=True)
        os._exit(1)


def test_fifty_kills_at_random_times_lose_nothing_that_was_saved(folder):
    frames = [int(line) for line in run_program('save_until_killed', folder, 50).split()]
    assert len(frames) == 50
    assert frames == sorted(frames)
    assert frames[-1] >= 3 * 40  # one save each on average, and the first of each may be lost
    tree = restored(folder)
    assert is_state_at(tree, tree['clock']['frame'], tree['lineage'])
    assert len(tree['lineage']) > 10


if __name__ == '__main__':
    torch.set_num_threads(1)
    program, *arguments = sys.argv[1:]
    if program == 'die_at_every_step':
        die_at_every_step(arguments[0], json.loads(arguments[1]))
    else:
        save_until_killed(*arguments)
