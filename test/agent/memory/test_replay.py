"""Uniform replay: slots, the seam of the ring, true next states, dtypes, and when training is due."""

from collections import deque

import numpy as np
import pytest
import torch
from agent_cases import add, fill, memory

from slm_lab.agent.memory.batch import FIELDS
from slm_lab.lib.state import Ring, first_difference


def test_an_empty_memory():
    empty = memory('Replay')
    assert (empty.size, empty.head, empty.seen_size) == (0, -1, 0)
    assert empty.check_valid() == (True, '')


@pytest.mark.parametrize('k', [1, 4, 9, 10, 11, 25])
def test_size_head_and_seen_size(k):
    replay = memory('Replay', max_size=10)
    fill(replay, k)
    assert (replay.size, replay.head, replay.seen_size) == (min(k, 10), (k - 1) % 10, k)


@pytest.mark.parametrize('num_envs', [1, 4])
@pytest.mark.parametrize('max_size', [4, 7, 8])
def test_it_holds_the_last_transitions_at_every_offset(num_envs, max_size):
    replay = memory('Replay', num_envs, max_size=max_size)
    expected, first = deque(maxlen=max_size), 0
    for _ in range(3 * max_size):
        expected.extend(range(first, first + num_envs))
        first = add(replay, first, terminated=range(0, 99, 5), truncated=range(1, 99, 7))
        ids = replay.arrays['states'][: replay.size, 0].astype(int)
        assert sorted(ids) == list(expected)
        assert ids[replay.head] == expected[-1]
        assert np.array_equal(replay.arrays['next_states'][: replay.size, 0], ids + 0.5)
        assert np.array_equal(replay.arrays['actions'][: replay.size], ids % 3)
        assert np.array_equal(replay.arrays['rewards'][: replay.size], 10 * ids)
        assert np.array_equal(replay.arrays['terminated'][: replay.size], (ids % 5 == 0).astype(float))
        assert np.array_equal(replay.arrays['truncated'][: replay.size], ((ids - 1) % 7 == 0).astype(float))


def test_a_batch_holds_whole_transitions():
    replay = memory('Replay', batch_size=64, max_size=10)
    fill(replay, 25)
    batch = replay.sample(frame=25)
    ids = batch.states[:, 0]
    assert set(ids.tolist()) == set(range(15, 25))
    assert torch.equal(batch.next_states[:, 0], ids + 0.5) and torch.equal(batch.rewards, 10 * ids)
    assert torch.equal(batch.actions, ids.long() % 3) and batch.weights is None
    assert [tuple(getattr(batch, f).shape) for f in FIELDS] == [(64, 1), (64,), (64,), (64, 1), (64,), (64,)]


def test_only_what_was_written_is_drawn():
    replay = memory('Replay', batch_size=200, max_size=10)
    fill(replay, 3, first=1)
    assert set(replay.sample(3).states[:, 0].tolist()) == {1.0, 2.0, 3.0}


def test_draws_are_uniform():
    replay = memory('Replay', batch_size=1000, max_size=10)
    fill(replay, 10)
    drawn = np.concatenate([replay.sample(0).states[:, 0].numpy().copy() for _ in range(20)]).astype(int)
    counts = np.bincount(drawn, minlength=10)
    assert np.abs(counts - 2000).max() < 4 * np.sqrt(20000 * 0.1 * 0.9)  # four standard deviations


def test_the_newest_is_in_every_batch_with_cer():
    replay = memory('Replay', batch_size=4, max_size=10, use_cer=True)
    first = 0
    for _ in range(25):
        first = add(replay, first)
        assert replay.sample(0).states[-1, 0] == first - 1


def test_two_memories_with_one_seed_draw_alike_and_nothing_else_is_drawn_from():
    one, other, third = memory('Replay', seed=1), memory('Replay', seed=1), memory('Replay', seed=2)
    for replay in (one, other, third):
        fill(replay, 10)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    draws = [[replay.sample(0).states[:, 0].tolist() for _ in range(5)] for replay in (one, other, third)]
    assert draws[0] == draws[1] != draws[2]
    assert np.array_equal(np.random.get_state()[1], before[0]) and torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize(
    ('dtype', 'values'),
    [(np.uint8, [0, 1, 128, 255]), (np.float32, [0.1, -3e38, 1e-40, np.float32(1) / 3])],
)
def test_observations_keep_their_dtype_and_every_bit(dtype, values):
    replay = memory('Replay', state=(4, dtype), max_size=3)
    states = np.array([values], dtype=dtype)
    replay.add(states, np.array([1]), np.array([0.1]), states[:, ::-1], np.array([False]), np.array([True]))
    batch = replay.sample(0)
    assert replay.arrays['states'].dtype == dtype
    assert batch.states.numpy().tobytes() == np.repeat(states, 4, axis=0).tobytes()
    assert batch.next_states.numpy().tobytes() == np.repeat(states[:, ::-1], 4, axis=0).tobytes()
    assert (batch.terminated[0], batch.truncated[0]) == (0.0, 1.0)


def test_continuous_actions_are_stored_as_they_are():
    replay = memory('Replay', num_envs=2, action=((3,), np.float32), max_size=4)
    actions = np.arange(6, dtype=np.float32).reshape(2, 3) / 7
    replay.add(np.zeros((2, 1)), actions, np.zeros(2), np.zeros((2, 1)), np.zeros(2, bool), np.zeros(2, bool))
    assert np.array_equal(replay.arrays['actions'][:2], actions)
    assert replay.sample(0).actions.shape == (4, 3)


def due_by_insertions(steps, num_envs, frequency, start):
    """Steps at which training is due when each insertion is looked at by itself: past the start, and a multiple of the
    frequency after the first one."""
    due, seen = [], 0
    for _ in range(steps):
        to_train = False
        for _env in range(num_envs):
            seen += 1
            to_train = to_train or (seen > start and (seen - 1) % frequency == 0)
        due.append(to_train)
    return due


@pytest.mark.parametrize('num_envs', [1, 3, 4])
@pytest.mark.parametrize('max_size', [10, 12, 1000])
@pytest.mark.parametrize('frequency', [1, 4, 5, 16])
@pytest.mark.parametrize('start', [0, 7, 32])
def test_training_is_due_when_an_insertion_makes_it_due(num_envs, max_size, frequency, start):
    replay = memory('Replay', num_envs, max_size=max_size)
    due, first = [], 0
    for _ in range(60):
        first = add(replay, first)
        due.append(replay.is_due(frequency, start))
    assert due == due_by_insertions(60, num_envs, frequency, start)


def test_training_of_one_env_is_due_every_fourth_step_after_the_warm_up():
    replay = memory('Replay', max_size=100)
    due = [replay.is_due(4, 8) for step in range(20) if add(replay, step) is not None]
    assert [i + 1 for i, is_due in enumerate(due) if is_due] == [9, 13, 17]  # transitions seen: 1 + a multiple of 4


def test_nothing_is_due_while_the_memory_is_empty():
    assert not memory('Replay').is_due(1, 0)


def test_the_state_is_a_ring_of_what_was_seen():
    replay = memory('Replay', max_size=10)
    fill(replay, 25)
    ring = replay.state_dict()['ring']
    assert isinstance(ring, Ring) and (ring.written, ring.capacity, ring.first_row) == (25, 10, 15)
    assert all(ring.arrays[name] is replay.arrays[name] for name in FIELDS)


def test_a_checkpoint_may_be_read_straight_into_the_arrays():
    replay, other = memory('Replay'), memory('Replay', seed=5)
    fill(replay, 25)
    for name in FIELDS:
        other.arrays[name][...] = replay.arrays[name]
    other.load_state_dict({**replay.state_dict(), 'ring': Ring(other.arrays, 25)})
    assert first_difference(replay.state_dict(), other.state_dict()) is None


def test_a_stored_reward_that_is_not_finite_is_found():
    replay = memory('Replay')
    fill(replay, 3)
    replay.arrays['rewards'][1] = np.inf
    assert replay.check_valid() == (False, 'a stored reward is not finite')
