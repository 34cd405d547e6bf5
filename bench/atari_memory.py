"""A full Atari replay memory, measured: `python bench/atari_memory.py [--rows 1000000] [--env ALE/Pong-v5]`.

A session of DQN (spec `dqn_pong`) plays at random until its memory of `--rows` transitions is full, then goes on for
some checkpoints of 10,000 new frames each. Printed, beside what single frames of 84x84 bytes need:

- RAM that the memory takes
- bytes and seconds of a checkpoint, of its memory part alone too, beside the new frames compressed bare; the RAM that
  saving takes on top; what the whole memory takes on disk
- seconds to restore in a new process, beside bare zstd decompressing the same frames
- with `--sb3 ROWS`: the same for `save_replay_buffer` of Stable-Baselines3, where it is installed, and for ours at the
  same size, in turn
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import zstandard

from slm_lab.experiment.checkpoint import CheckpointStore
from slm_lab.experiment.session import Session
from slm_lab.lib.state import Ring, walk
from slm_lab.spec import spec_util

FRAME_BYTES = 84 * 84
PER_CHECKPOINT = 10_000
GB, MB = 1e9, 1e6


def random_play_spec(env, rows, num_envs=8):
    """DQN with a memory of `rows`, which acts at random and never trains."""
    spec = spec_util.get('benchmark/dqn/dqn_pong.json', 'dqn_pong')
    agent, env_spec = spec['agent'][0], spec['env'][0]
    agent['memory']['max_size'] = rows
    agent['algorithm'].update(
        training_start_step=10**9,
        explore_var_spec={'name': 'no_decay', 'start_val': 1.0, 'end_val': 1.0, 'start_step': 0, 'end_step': 0},
    )
    env_spec.update(name=env, num_envs=num_envs, max_frame=10**9)
    spec['meta'].update(max_session=1, random_seed=1, log_frequency=10**9, eval_frequency=10**9, rigorous_eval=0)
    spec_util.check(spec)
    return spec_util.session_spec(spec, 0)


def play(session, frames):
    """Steps the session without rows or checkpoints of its own."""
    session.clock.max_frame = session.clock.frame + frames
    session.run_rl()


class PeakMemory:
    """The most memory that the process had while the block ran, above what it had before, in bytes."""

    def __enter__(self):
        self._process = psutil.Process()
        self._before = self._most = self._process.memory_info().rss
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._done.wait(0.002):
            self._most = max(self._most, self._process.memory_info().rss)

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()
        self.extra = self._most - self._before


def frames_ring(session):
    """The ring of the memory's frames: the one with the largest rows."""
    rings = [leaf for _, leaf in walk(session.agent.memory.state_dict()) if isinstance(leaf, Ring)]
    return max(rings, key=lambda ring: max(a[0].nbytes for a in ring.arrays.values()))


def largest_array(ring):
    return max(ring.arrays.values(), key=lambda array: array[0].nbytes)


def compress_bare(ring, start, stop, chunk=256):
    """zstd level 1 of rows [start, stop) in chunks, as little as it takes. Returns: the chunks"""
    compressor, array = zstandard.ZstdCompressor(level=1), largest_array(ring)
    return [
        compressor.compress(np.ascontiguousarray(array[slots][i : i + chunk]))
        for slots in ring.slots(start, stop)
        for i in range(0, slots.stop - slots.start, chunk)
    ]


def disk_bytes(folder, suffix=''):
    return sum(path.stat().st_size for path in folder.iterdir() if path.name.endswith(suffix))


def save_once(session, store):
    """Returns: (seconds, bytes of new segments, bytes in all, extra RAM)"""
    before = {path.name for path in store.folder.iterdir()} if store.folder.is_dir() else set()
    with PeakMemory() as peak:
        saved = store.save(session.state_dict(), frame=session.clock.frame, spec={})
    segments = sum(p.stat().st_size for p in store.folder.iterdir() if p.suffix == '.seg' and p.name not in before)
    return saved.seconds, segments, saved.bytes_written, peak.extra


def fill_and_save(env, rows, checkpoints, folder):
    process = psutil.Process()
    session = Session(random_play_spec(env, rows), store=False)
    session.env.reset()
    play(session, 64)
    empty = process.memory_info().rss
    began = time.perf_counter()
    play(session, rows + 1000 - session.clock.frame)
    took = time.perf_counter() - began
    grown, raw = process.memory_info().rss - empty, rows * FRAME_BYTES
    print(f'{env}, {rows:,} transitions, random play at {rows / took:,.0f} frames/s')
    print(f'RAM of the memory: {grown / GB:.3f} GB, single frames alone {raw / GB:.3f} GB: {grown / raw - 1:+.1%}')
    store = CheckpointStore(folder)
    seconds, segments, _, extra = save_once(session, store)
    print(f'first checkpoint: {segments / MB:.1f} MB of memory in {seconds:.2f} s, extra RAM {extra / raw:.1%}')
    for _ in range(checkpoints):
        start = frames_ring(session).written
        play(session, PER_CHECKPOINT)
        ring = frames_ring(session)
        bare = sum(len(chunk) for chunk in compress_bare(ring, start, ring.written))
        seconds, segments, size, extra = save_once(session, store)
        print(
            f'checkpoint of {ring.written - start:,} new frames: memory {segments / MB:.3f} MB, '
            f'{segments / bare:.2f} x the frames compressed bare; with nets and optimizer {size / MB:.1f} MB; '
            f'{seconds:.3f} s; extra RAM {extra / MB:.1f} MB, {extra / raw:.2%}'
        )
    on_disk = disk_bytes(folder, '.seg')
    write_bare(session, folder.with_name('bare'))
    print(f'the whole memory on disk: {on_disk / MB:.1f} MB, 1/{raw / on_disk:.0f} of its frames')
    session.close()


def write_bare(session, path):
    """Keeps the frames as bare zstd chunks, each behind its length, and before them how many there are."""
    ring = frames_ring(session)
    with open(path, 'wb') as file:
        file.write((ring.written - ring.first_row).to_bytes(8, 'little'))
        for chunk in compress_bare(ring, ring.first_row, ring.written):
            file.write(len(chunk).to_bytes(8, 'little') + chunk)


def stopwatch():
    """(seconds on the clock, of which this process computed, of which the system worked for it), to be subtracted."""
    cpu = resource.getrusage(resource.RUSAGE_SELF)
    return np.array([time.perf_counter(), cpu.ru_utime, cpu.ru_stime])


def have_at_hand(size):
    """Touches memory and gives it back at once: what is asked for next costs no more than the kernel's zeros.

    A virtual machine that reports free pages to its host has to fetch them again a second or two later: 3 GB took
    0.35 s right after they were freed, and 4.5 to 7 s after a pause of two seconds or more.
    """
    np.ones(size, np.uint8)


def read_bare(path):
    """Seconds (wall, user, system) that bare zstd takes to decompress the frames into memory asked for anew."""
    decompressor, slot = zstandard.ZstdDecompressor(), 0
    with open(path, 'rb') as file:
        num_rows = int.from_bytes(file.read(8), 'little')
        have_at_hand(num_rows * FRAME_BYTES)
        began = stopwatch()
        target = np.zeros((num_rows, FRAME_BYTES), np.uint8)
        while length := int.from_bytes(file.read(8), 'little'):
            chunk = file.read(length)
            num_rows = zstandard.frame_content_size(chunk) // FRAME_BYTES
            with decompressor.stream_reader(chunk) as reader:
                reader.readinto(target[slot : slot + num_rows].reshape(-1))
            slot += num_rows
    return stopwatch() - began


def read_ours(env, rows, folder):
    """Restores a checkpoint into a session built anew. Returns: (bytes of frames, seconds as `read_bare` has them)"""
    session = Session(random_play_spec(env, rows), store=False)
    template, store = session.state_dict(), CheckpointStore(folder)
    have_at_hand(rows * FRAME_BYTES)
    began = stopwatch()
    tree = store.restore(store.find().generation, template)
    took = stopwatch() - began
    session.load_state_dict(tree)
    ring = frames_ring(session)
    session.close()
    return (ring.written - ring.first_row) * FRAME_BYTES, took


def restore(env, rows, folder, times=5):
    """In a process of its own: bare zstd decompresses the frames and a checkpoint is restored, in turn.

    The first turn is not counted: memory that a virtual machine has never touched is slow to get.
    """
    bare_path, turns = folder.with_name('bare'), []
    for _ in range(1 + times):
        bare = read_bare(bare_path)
        size, ours = read_ours(env, rows, folder)
        turns.append((ours, bare))
    ours, bare = (np.median(column, axis=0) for column in zip(*turns[1:], strict=True))
    print(f'restore, median of {times} turns: {size / GB:.2f} GB in {ours[0]:.2f} s ({size / ours[0] / GB:.2f} GB/s)')
    print(f'  user {ours[1]:.2f} s, system (mostly to get the memory) {ours[2]:.2f} s')
    print(f'bare zstd in turn with it: {bare[0]:.2f} s; user {bare[1]:.2f} s, system {bare[2]:.2f} s')
    for what, column in (('rate', 0), ('rate by user time', 1)):
        shares = ' '.join(f'{b[column] / o[column]:.0%}' for o, b in turns[1:])
        print(f"{what} as a share of bare zstd's: {bare[column] / ours[column]:.0%}; turn by turn {shares}")


def compare_with_sb3(env, rows, folder):
    from stable_baselines3.common.buffers import ReplayBuffer
    from stable_baselines3.common.save_util import save_to_pkl

    session = Session(random_play_spec(env, rows), store=False)
    space, action_space = session.env.observation_space, session.env.action_space
    for optimize in (False, True):
        buffer = ReplayBuffer(
            rows, space, action_space, device='cpu', n_envs=session.env.num_envs,
            optimize_memory_usage=optimize, handle_timeout_termination=not optimize,
        )  # fmt: skip
        session.env.reset()
        while not buffer.full:
            state = session.env.state
            action = session.agent.act(state)
            step = session.env.step(action)
            done = step.terminated | step.truncated
            buffer.add(state, step.next_state, action, step.reward, done, [{}] * len(done))
        path = folder / 'sb3.pkl'
        with PeakMemory() as peak:
            began = time.perf_counter()
            save_to_pkl(path, buffer)
            took = time.perf_counter() - began
        arrays = sum(v.nbytes for v in vars(buffer).values() if isinstance(v, np.ndarray))
        kind = 'optimize_memory_usage' if optimize else 'as it comes'
        print(
            f'SB3 ({kind}), {rows:,} transitions: RAM {arrays / GB:.2f} GB, every save writes '
            f'{path.stat().st_size / MB:,.0f} MB in {took:.2f} s, extra RAM {peak.extra / MB:.0f} MB'
        )
        path.unlink()
        del buffer
    session.close()
    fill_and_save(env, rows, 2, folder / 'ours')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rows', type=int, default=1_000_000)
    parser.add_argument('--env', default='ALE/Pong-v5')
    parser.add_argument('--checkpoints', type=int, default=3)
    parser.add_argument('--sb3', type=int, metavar='ROWS', help='compare with Stable-Baselines3 at this size, only')
    parser.add_argument('--restore-from', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.restore_from:
        restore(args.env, args.rows, Path(args.restore_from))
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.sb3:
            compare_with_sb3(args.env, args.sb3, Path(folder))
            return
        where = Path(folder) / 'checkpoint'
        fill_and_save(args.env, args.rows, args.checkpoints, where)
        command = [sys.executable, __file__, '--env', args.env, '--rows', str(args.rows), '--restore-from', str(where)]
        subprocess.run(command, check=True)


if __name__ == '__main__':
    main()
