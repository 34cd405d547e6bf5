"""The checkpoint store: what comes back, rings and their segments, the best nets, what is pruned."""

import os
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from checkpoint_trees import (
    CAPACITY,
    RING,
    flip,
    frames_on_disk,
    is_state_at,
    listed_files,
    nets,
    new_ring,
    new_tree,
    restored,
    rings_of,
    save,
    state_at,
)

from slm_lab.experiment import segment_log
from slm_lab.experiment.checkpoint import CheckpointStore, pack_tree, unpack_tree
from slm_lab.lib.errors import ResumeError
from slm_lab.lib.state import Ring, first_difference

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
