"""Damaged checkpoints: what is named, what is used instead, and what is refused."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_trees import (
    RING,
    flip,
    frames_on_disk,
    is_state_at,
    listed_files,
    nets,
    new_ring,
    new_tree,
    restored,
    rewrite_manifest,
    rings_of,
    save,
    state_at,
)

from slm_lab.experiment import checkpoint
from slm_lab.experiment.checkpoint import CheckpointStore
from slm_lab.lib.errors import LabError


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
