"""Saves that fail or are killed. Run as a program, this file is the writer that the kill tests kill."""

import builtins
import errno
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoint_trees import (
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

from slm_lab.experiment.checkpoint import CheckpointStore
from slm_lab.lib.errors import LabError
from slm_lab.lib.state import first_difference

ROOT = Path(__file__).parents[2]


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
