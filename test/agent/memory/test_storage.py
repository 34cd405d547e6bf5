"""Frames that are kept once: beside a memory that keeps whole states, every sample is the same, bit for bit."""

import numpy as np
import pytest
from agent_cases import memory_spec

from slm_lab.agent.memory.batch import FIELDS, Layout
from slm_lab.agent.memory.storage import SharedFrames
from slm_lab.experiment.checkpoint import CheckpointStore
from slm_lab.lib import rng as rng_lib
from slm_lab.lib.registry import MEMORIES
from slm_lab.lib.state import check_tree, first_difference, snapshot

K = 4
PER = {'alpha': 0.6, 'epsilon': 0.01}


def build(name='Replay', num_envs=1, k=K, shared=True, frame=(1, 3), dtype=np.uint8, seed=0, **keys):
    """A memory of states of k frames, joined along their first axis."""
    layout = Layout((k * frame[0], *frame[1:]), np.dtype(dtype), (), np.dtype(np.int64), k if shared else 1)
    spec = memory_spec(name, **{**(PER if name == 'PrioritizedReplay' else {}), **keys})
    return MEMORIES.get(name)(spec, layout, num_envs, rng_lib.generator(seed, 'memory'))


class Play:
    """Steps of N envs whose frames are drawn, as a frame stack shows them. Episodes end by chance, and some are cut.

    Args:
        chance: of an end; a third of them are truncations
        cuts: chance that an episode is cut, as by a resume that cannot bring it back
    """

    def __init__(self, num_envs, k=K, frame=(1, 3), dtype=np.uint8, chance=0.2, cuts=0.0, seed=0):
        self.n, self.k, self.frame, self.dtype = num_envs, k, frame, dtype
        self.chance, self.cuts, self.rng = chance, cuts, np.random.default_rng(seed)
        self.stacks = np.stack([self.first() for _ in range(num_envs)])

    def draw(self):
        if np.dtype(self.dtype).kind == 'f':
            return self.rng.standard_normal(self.frame).astype(self.dtype)
        return self.rng.integers(0, 256, self.frame, dtype=self.dtype)

    def first(self):
        return np.concatenate([self.draw()] * self.k)

    def step(self):
        """Returns: (the envs that were cut before the step, what `add` takes)."""
        cut = np.flatnonzero(self.rng.random(self.n) < self.cuts)
        for i in cut:
            self.stacks[i] = self.first()
        states = self.stacks.copy()
        next_states = np.concatenate([states[:, self.frame[0] :], np.stack([self.draw() for _ in range(self.n)])], 1)
        ended = self.rng.random(self.n) < self.chance
        truncated = ended & (self.rng.random(self.n) < 1 / 3)
        self.stacks = next_states.copy()
        for i in np.flatnonzero(ended):
            self.stacks[i] = self.first()
        actions, rewards = self.rng.integers(0, 9, self.n), self.rng.standard_normal(self.n)
        return cut, (states, actions, rewards, next_states, ended & ~truncated, truncated)


def play_on(memories, play, steps):
    """Plays into each of the memories and draws a batch from each after every step. Returns: the batches of each."""
    batches = [[] for _ in memories]
    for _ in range(steps):
        cut, rows = play.step()
        errors = play.rng.random(memories[0].batch_size).astype(np.float32)
        for memory, drawn in zip(memories, batches, strict=True):
            memory.cut(cut)
            memory.add(*rows)
            batch = memory.sample(0)
            drawn.append({field: getattr(batch, field).numpy().copy() for field in FIELDS})
            if hasattr(memory, 'update_priorities'):
                memory.update_priorities(errors)
    return batches


@pytest.mark.parametrize('name', ['Replay', 'PrioritizedReplay'])
@pytest.mark.parametrize('num_envs', [1, 4])
@pytest.mark.parametrize('max_size', [3, 10, 37])
@pytest.mark.parametrize(('chance', 'use_cer'), [(0.08, True), (0.5, False), (1.0, True)])
def test_samples_are_those_of_a_memory_of_whole_states(name, num_envs, max_size, chance, use_cer):
    keys = {'max_size': max_size, 'batch_size': 16, 'use_cer': use_cer}
    whole, shared = (build(name, num_envs, shared=s, **keys) for s in (False, True))
    assert isinstance(shared.transitions, SharedFrames) and not isinstance(whole.transitions, SharedFrames)
    play = Play(num_envs, chance=chance, cuts=0.1 if chance == 0.08 else 0.0)
    expected, got = play_on([whole, shared], play, 3 * max_size)  # with 4 envs the ring goes round 12 times
    assert first_difference(expected, got) is None
    assert (shared.size, shared.seen_size, shared.head) == (whole.size, whole.seen_size, whole.head)
    assert shared.check_valid() == (True, '')


@pytest.mark.parametrize('num_envs', [1, 4])
@pytest.mark.parametrize('chance', [0.0, 0.3, 1.0])
def test_every_transition_is_there_after_every_step(num_envs, chance):
    whole, shared = (build(num_envs=num_envs, shared=s, max_size=22) for s in (False, True))
    play, buffers = Play(num_envs, chance=chance, cuts=0.05), shared.transitions.buffers(22)
    for _ in range(70):
        cut, rows = play.step()
        for memory in (whole, shared):
            memory.cut(cut)
            memory.add(*rows)
        slots = np.arange(22) % shared.size
        shared.transitions.take(slots, shared.seen_size, buffers)
        for field in FIELDS:
            assert np.array_equal(buffers[field], whole.arrays[field][slots]), field


@pytest.mark.parametrize(
    ('k', 'frame', 'dtype'), [(2, (2, 2, 2), np.uint8), (3, (5,), np.float32), (300, (1,), np.float32)]
)
def test_frames_of_any_kind(k, frame, dtype):
    kind = {'k': k, 'frame': frame, 'dtype': dtype}
    whole, shared = (build(num_envs=2, shared=s, max_size=9, **kind) for s in (False, True))
    expected, got = play_on([whole, shared], Play(2, chance=0.01 if k == 300 else 0.2, **kind), 400)
    assert first_difference(expected, got) is None
    assert got[-1]['states'].dtype == dtype


def test_by_hand():
    """Frames 1, 2, 3 of an episode that ends in 4, then 7 and 8 of the next."""
    shared = build(k=3, frame=(1,), max_size=4, batch_size=4)
    steps = [([1, 1, 1], 2, False), ([1, 1, 2], 3, False), ([1, 2, 3], 4, True), ([7, 7, 7], 8, False)]
    for states, frame, terminated in steps:
        shared.add(*map(np.array, ([states], [0], [0.0], [[*states[1:], frame]], [terminated], [False])))
    shared.transitions.take(np.arange(4), 4, shared._buffers)
    assert shared._buffers['states'].tolist() == [[1, 1, 1], [1, 1, 2], [1, 2, 3], [7, 7, 7]]
    assert shared._buffers['next_states'].tolist() == [[1, 1, 2], [1, 2, 3], [2, 3, 4], [7, 7, 8]]
    assert shared.arrays['frames'][:4, 0].tolist() == [1, 2, 3, 7]  # each once, the last frame of the episode apart
    assert shared.transitions.finals['frames'][0].tolist() == [4] and shared.transitions.num_finals == 1


def test_states_that_lie_in_strides_are_taken_as_they_are():
    shared, zeros = build(num_envs=2, batch_size=2, use_cer=True), np.zeros(2)
    array = np.arange(2 * 9 * 3, dtype=np.uint8).reshape(2, 9, 3)
    array[:, :4] = array[:, :1]  # as a stack begins
    shared.add(array[:, :4], zeros, zeros, array[:, 1:5], zeros, zeros)
    shared.add(array[:, 1:5], zeros, zeros, array[:, 2:6], zeros, zeros)
    batch = shared.sample(0)
    assert np.array_equal(batch.next_states[-1], array[1, 2:6])


def test_a_frame_is_kept_once_and_last_frames_only_while_they_are_needed():
    """Of 1000 transitions in 250 episodes: 1000 frames, and 250 last ones with an eighth to spare."""
    shared = build(max_size=1000, frame=(1, 50))
    for i in range(5000):
        states = np.full((1, K, 50), i % 256, np.uint8)
        shared.add(states, np.zeros(1), np.zeros(1), states, np.array([i % 4 == 3]), np.array([False]))
    frames, finals = shared.arrays['frames'], shared.transitions.finals
    assert len(frames) == 1000 + K - 1
    assert 250 <= len(finals['frames']) < 250 * 9 / 8 + 1


@pytest.mark.parametrize('num_envs', [1, 3])
def test_last_frames_get_more_room_after_they_went_round(num_envs):
    whole, shared = (build(num_envs=num_envs, shared=s, max_size=300, batch_size=64) for s in (False, True))
    play, capacities = Play(num_envs, chance=0.1), []
    for chance in (0.1, 0.6, 0.1, 0.9):
        play.chance = chance
        expected, got = play_on([whole, shared], play, 1200 // num_envs)
        assert first_difference(expected, got) is None
        capacities.append(len(shared.transitions.finals['rows']))
        assert shared.transitions.num_finals > capacities[-1]
    assert capacities[0] == 64 < capacities[1] == capacities[2] < capacities[3]


def through_a_checkpoint(folder, memory, other):
    """`other`, with the state of `memory` saved to disk and read back; `folder` tells the store to go on with."""
    CheckpointStore(folder).save(memory.state_dict(), frame=1, spec='')
    store = CheckpointStore(folder)
    other.load_state_dict(store.restore(store.find().generation, other.state_dict()))
    return store


@pytest.mark.parametrize('name', ['Replay', 'PrioritizedReplay'])
@pytest.mark.parametrize('num_envs', [1, 3])
@pytest.mark.parametrize('n', [0, 1, 5, 30, 200])
def test_a_memory_goes_on_from_its_state(name, num_envs, n, tmp_path):
    """Half of its episodes end at once, so that there are more last frames than a new memory has room for."""

    def new(seed=0):
        return build(name, num_envs, max_size=170, seed=seed)

    whole, first_half, second_half = new(), new(), new(seed=9)
    play, again = (Play(num_envs, chance=0.5) for _ in range(2))
    expected = play_on([whole], play, 2 * n + 20)[0]
    got = play_on([first_half], again, n)[0]
    state = snapshot(first_half.state_dict())
    check_tree(state)
    through_a_checkpoint(tmp_path, first_half, second_half)
    assert first_difference(second_half.state_dict(), state) is None
    got += play_on([first_half, second_half], again, n + 20)[1]  # what the old one does must not reach the new one
    assert first_difference(expected, got) is None
    assert first_difference(whole.state_dict(), second_half.state_dict()) is None


def test_checkpoint_after_checkpoint_while_last_frames_need_more_and_more_room(tmp_path):
    """What was written before their ring grew is not written again, and is read into the larger one."""
    shared, store, capacities = build(max_size=900), CheckpointStore(tmp_path), set()
    play = Play(1, chance=0.7)
    for frame in range(1, 17):
        play_on([shared], play, 110)
        store.save(shared.state_dict(), frame=frame, spec='')
        capacities.add(len(shared.transitions.finals['rows']))
        other, reader = build(max_size=900, seed=9), CheckpointStore(tmp_path)
        generation = reader.find().generation
        other.load_state_dict(reader.restore(generation, other.state_dict()))
        assert first_difference(other.state_dict(), shared.state_dict()) is None
        segments = generation.manifest['rings']['finals']['segments']
        assert len(segments) == frame or frame > 8  # the first transitions are gone after 900
        if frame % 4 == 0:  # and goes on from what was read
            shared, store = other, reader
    assert len(capacities) > 6


def test_an_episode_that_was_cut_keeps_its_next_state_over_a_checkpoint(tmp_path):
    shared, other = build(use_cer=True, batch_size=1), build(use_cer=True, batch_size=1)
    play = Play(1, chance=0.0)
    last = play_on([shared], play, 6)[0][-1]
    store = through_a_checkpoint(tmp_path, shared, other)
    other.cut([0])
    play.stacks[0] = play.first()
    play_on([other], play, 2)
    store.save(other.state_dict(), frame=2, spec='')
    back = build()
    reader = CheckpointStore(tmp_path)
    back.load_state_dict(reader.restore(reader.find().generation, back.state_dict()))
    buffers = back.transitions.buffers(3)
    back.transitions.take(np.arange(5, 8), 8, buffers)
    assert np.array_equal(buffers['next_states'][0], last['next_states'][0])
    assert len(np.unique(buffers['states'][1], axis=0)) == 1  # the first frame of the new episode, four times
    assert not np.array_equal(buffers['states'][1][-1], last['next_states'][0][-1])


@pytest.mark.parametrize('ring', [0, 1])
def test_a_memory_of_which_a_ring_is_lost_is_empty(ring, tmp_path):
    keys = {'num_envs': 2, 'max_size': 20}
    shared, other, new = (build('PrioritizedReplay', **keys) for _ in range(3))
    play_on([shared], Play(2, chance=0.5), 15)
    CheckpointStore(tmp_path).save(shared.state_dict(), frame=1, spec='')
    segment = tmp_path / f'000001_1_ring{ring}.seg'
    segment.write_bytes(segment.read_bytes()[:-1])
    store = CheckpointStore(tmp_path)
    found = store.find()
    assert 'without finals (it starts empty), ring (it starts empty)' in found.skipped[0] or (
        'without ring (it starts empty), finals (it starts empty)' in found.skipped[0]
    )
    other.load_state_dict(store.restore(found.generation, other.state_dict()))
    assert (other.size, other.seen_size, other.check_valid()) == (0, 0, (True, ''))
    new.load_state_dict({**new.state_dict(), **{key: other.state_dict()[key] for key in ('rng', 'max_priority')}})
    assert first_difference(new.state_dict(), other.state_dict()) is None
    # it fills anew, and what is saved then holds nothing of what was there
    play = Play(2, chance=0.5, seed=1)
    expected, got = play_on([new, other], play, 40)
    assert first_difference(expected, got) is None
    store.save(other.state_dict(), frame=2, spec='')
    reader, back = CheckpointStore(tmp_path), build('PrioritizedReplay', **keys)
    back.load_state_dict(reader.restore(reader.find().generation, back.state_dict()))
    assert first_difference(back.state_dict(), other.state_dict()) is None
