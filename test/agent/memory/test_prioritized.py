"""Prioritized replay and its sum tree, against brute force."""

import numpy as np
import pytest
from agent_cases import add, fill, memory

from slm_lab.agent.memory.prioritized import SumTree
from slm_lab.lib.state import Ring, snapshot

CAPACITIES = [1, 2, 4, 5, 100]


def filled(priorities, **keys):
    """A memory whose slots have the given priorities."""
    replay = memory('PrioritizedReplay', max_size=len(priorities), **keys)
    fill(replay, len(priorities))
    replay.tree.set_all(np.asarray(priorities, dtype=float))
    return replay


# --- the tree


@pytest.mark.parametrize('capacity', CAPACITIES)
def test_sums_are_those_of_the_leaves_whatever_is_set(capacity):
    """Whole priorities: their sums are exact, whatever the order of adding."""
    rng, tree, leaves = np.random.default_rng(0), SumTree(capacity), np.zeros(capacity)
    for _ in range(200):
        slots = rng.choice(capacity, size=rng.integers(1, capacity + 1), replace=False)
        leaves[slots] = rng.integers(0, 9, len(slots))
        tree.set(slots, leaves[slots])
        assert tree.total == leaves.sum()
        assert np.array_equal(tree.leaves, leaves)
    inner = np.arange(1, tree.width)
    assert np.array_equal(tree.nodes[inner], tree.nodes[2 * inner] + tree.nodes[2 * inner + 1])


@pytest.mark.parametrize('capacity', CAPACITIES)
def test_a_mass_is_found_where_the_running_sum_passes_it(capacity):
    rng, tree = np.random.default_rng(1), SumTree(capacity)
    for _ in range(20):
        leaves = rng.integers(0, 4, capacity).astype(float)
        leaves[rng.integers(capacity)] = 3.0
        tree.set_all(leaves)
        masses = np.sort(np.concatenate([np.arange(leaves.sum()), rng.random(50) * leaves.sum()]))
        assert np.array_equal(tree.find(masses), np.searchsorted(np.cumsum(leaves), masses, side='right'))
        assert masses[0] == 0.0  # the caller's array is left as it was


@pytest.mark.parametrize('capacity', CAPACITIES)
def test_a_slot_without_priority_is_never_found(capacity):
    """Not even by a mass that rounding lifts to the total or past it."""
    rng, tree = np.random.default_rng(2), SumTree(capacity)
    for _ in range(50):
        leaves = np.where(rng.random(capacity) < 0.6, 0.0, rng.random(capacity) * 10.0 ** rng.integers(-12, 12))
        leaves[rng.integers(capacity)] = rng.random() + 1e-9
        tree.set_all(leaves)
        edges = np.concatenate([[0.0, tree.total, tree.total * (1 + 1e-9)], np.cumsum(leaves)])
        assert (leaves[tree.find(edges)] > 0).all()


def test_of_a_slot_that_is_set_twice_the_last_one_holds():
    tree = SumTree(5)
    tree.set(np.array([3, 1, 3, 3]), np.array([1.0, 2.0, 4.0, 8.0]))
    assert tree.leaves.tolist() == [0, 2, 0, 8, 0] and tree.total == 10


@pytest.mark.parametrize('capacity', CAPACITIES)
def test_sums_are_a_pure_function_of_the_leaves(capacity):
    rng, tree, rebuilt = np.random.default_rng(3), SumTree(capacity), SumTree(capacity)
    for _ in range(100):
        slots = rng.integers(0, capacity, 8)
        tree.set(slots, rng.random(8))
    rebuilt.set_all(tree.leaves)
    assert rebuilt.nodes.tobytes() == tree.nodes.tobytes()


# --- priorities


def test_an_empty_memory_has_no_priority():
    empty = memory('PrioritizedReplay', max_size=4)
    assert empty.tree.total == 0 and empty.check_valid() == (True, '')


def test_errors_become_priorities():
    replay = memory('PrioritizedReplay', batch_size=4, max_size=4, alpha=0.5, epsilon=1.0)
    fill(replay, 4)
    replay.batch_slots = np.array([0, 1, 2, 3])
    replay.update_priorities(np.array([0.0, 3.0, 8.0, 15.0]))
    assert replay.tree.leaves.tolist() == [1.0, 2.0, 3.0, 4.0]  # sqrt(error + 1)
    replay.update_priorities(np.array([24.0, 0.0, 3.0, 0.0]))
    assert replay.tree.leaves.tolist() == [5.0, 1.0, 2.0, 1.0]
    assert replay.tree.total == 9


@pytest.mark.parametrize('bad', [np.nan, np.inf])
@pytest.mark.parametrize('all_bad', [False, True])
def test_an_error_that_is_not_finite_leaves_the_priority_as_it_was(bad, all_bad):
    replay = memory('PrioritizedReplay', batch_size=4, max_size=4, alpha=1.0, epsilon=0.0)
    fill(replay, 4)
    replay.batch_slots = np.array([3, 0, 1, 2])
    replay.update_priorities(np.array([bad] * 4 if all_bad else [2.0, bad, 3.0, 4.0]))
    assert replay.tree.leaves.tolist() == ([1.0] * 4 if all_bad else [1.0, 3.0, 4.0, 2.0])
    assert replay.check_valid() == (True, '')
    drawn = {state for _ in range(50) for state in replay.sample(0).states[:, 0].tolist()}
    assert len(drawn) == 4


def test_a_priority_that_is_not_finite_is_found():
    replay = filled([1, 2, 3])
    replay.tree.leaves[1] = np.nan
    assert replay.check_valid() == (False, 'a priority is not finite')


def test_alpha_0_is_uniform():
    replay = memory('PrioritizedReplay', batch_size=4, max_size=4, alpha=0.0, epsilon=0.0)
    fill(replay, 4)
    replay.sample(0)
    replay.update_priorities(np.array([0.0, 1.0, 5.0, 100.0]))
    assert replay.tree.leaves.tolist() == [1.0] * 4


@pytest.mark.parametrize('num_envs', [1, 4])
def test_a_new_transition_gets_the_largest_priority_so_far(num_envs):
    replay = memory('PrioritizedReplay', num_envs, batch_size=2, max_size=10)
    first = add(replay, 0)
    assert replay.tree.leaves[:num_envs].tolist() == [1.0] * num_envs
    replay.sample(0)
    replay.update_priorities(np.array([7.0, 7.0]))
    first = add(replay, first)
    replay.sample(0)
    replay.update_priorities(np.array([0.25, 0.25]))
    fill(replay, 10, first)  # all over again
    assert replay.tree.leaves.tolist() == [7.0] * 10 and replay.max_priority == 7.0
    assert replay.check_valid() == (True, '')


def test_the_newest_of_every_batch_with_cer_is_the_one_whose_priority_is_set():
    replay = filled([1, 1, 1, 1, 1], batch_size=2, use_cer=True)
    add(replay, 5)  # goes into slot 0
    batch = replay.sample(0)
    assert batch.states[-1, 0] == 5 and replay.batch_slots[-1] == replay.head == 0
    replay.update_priorities(np.array([2.0, 9.0]))
    assert replay.tree.leaves[0] == 9.0


def test_a_batch_holds_the_transitions_of_its_slots():
    replay = filled(np.arange(1, 11), batch_size=64)
    batch = replay.sample(0)
    assert batch.states[:, 0].tolist() == replay.batch_slots.tolist()
    assert batch.next_states[:, 0].tolist() == (replay.batch_slots + 0.5).tolist()


# --- draws


def test_draws_follow_the_priorities():
    priorities = np.array([0, 1, 2, 3, 0, 4, 10, 0.5])
    replay = filled(priorities, batch_size=32)
    counts = np.zeros(len(priorities))
    for _ in range(1000):
        replay.sample(0)
        counts += np.bincount(replay.batch_slots, minlength=len(priorities))
    p = priorities / priorities.sum()
    assert counts[[0, 4]].tolist() == [0, 0]
    assert (np.abs(counts - 32000 * p) <= 4 * np.sqrt(32000 * p * (1 - p))).all()  # four standard deviations


def test_one_draw_falls_into_each_equal_part_of_the_total():
    replay = filled([1, 1, 1, 1], batch_size=4)
    for _ in range(20):
        replay.sample(0)
        assert replay.batch_slots.tolist() == [0, 1, 2, 3]


def test_without_any_priority_the_draws_are_uniform():
    replay = filled([0, 0, 0, 0], batch_size=400, beta_spec={'name': 'no_decay', 'start_val': 0.5})
    batch = replay.sample(0)
    assert np.bincount(replay.batch_slots, minlength=4).min() > 60  # of 100 expected
    assert batch.weights.tolist() == [1.0] * 400


# --- importance weights


def test_weights_by_hand():
    """P = 1/8, 2/8, 5/8 of 3 transitions: (3 P) ** −0.5 over its largest is (1 / p) ** 0.5."""
    replay = filled([1, 2, 5], batch_size=8, beta_spec={'name': 'no_decay', 'start_val': 0.5})
    weights = replay.sample(0).weights
    expected = {0: 1.0, 1: 0.5**0.5, 2: 0.2**0.5}
    assert weights.tolist() == pytest.approx([expected[s] for s in replay.batch_slots])
    assert replay.batch_slots.tolist() == [0, 1, 1, 2, 2, 2, 2, 2]


def test_beta_follows_the_frame():
    beta = {'name': 'linear_decay', 'start_val': 0.4, 'end_val': 1.0, 'end_step': 100}
    replay = filled([1, 4], batch_size=5, beta_spec=beta)
    for frame, power in ((0, 0.4), (50, 0.7), (100, 1.0), (500, 1.0)):
        assert replay.sample(frame).weights[-1] == pytest.approx(0.25**power)
    assert filled([1, 4]).sample(0).weights is None


def test_a_newest_transition_without_priority_has_a_finite_weight():
    replay = filled([1, 4, 0], batch_size=3, use_cer=True, beta_spec={'name': 'no_decay', 'start_val': 1.0})
    weights = replay.sample(0).weights
    assert replay.batch_slots[-1] == 2 and np.isfinite(weights.numpy()).all() and weights[-1] == weights.max() == 1


# --- state


def test_loading_rebuilds_the_same_sums():
    replay = memory('PrioritizedReplay', batch_size=8, max_size=100, alpha=0.6, epsilon=0.01)
    errors, first = np.random.default_rng(0), 0
    for _ in range(250):
        first = add(replay, first)
        replay.sample(0)
        replay.update_priorities(errors.random(8).astype(np.float32) * 3)
    other = memory('PrioritizedReplay', seed=9, batch_size=8, max_size=100, alpha=0.6, epsilon=0.01)
    other.load_state_dict(snapshot(replay.state_dict()))
    assert other.tree.nodes.tobytes() == replay.tree.nodes.tobytes()
    assert other.max_priority == replay.max_priority and other.check_valid() == (True, '')


def test_where_the_transitions_were_lost_so_are_their_priorities():
    replay = filled([1, 4, 2])
    replay.max_priority = 6.0
    state = snapshot(replay.state_dict())
    other = memory('PrioritizedReplay', max_size=3)
    other.load_state_dict({**state, 'ring': Ring(other.arrays, 0)})
    assert other.size == 0 and other.tree.nodes.tolist() == [0.0] * len(other.tree.nodes)
    add(other, 0)
    assert other.tree.leaves.tolist() == [6.0, 0, 0] and other.check_valid() == (True, '')


def test_a_broken_tree_is_found():
    replay = filled([1, 4, 2])
    replay.sample(0)  # sums up what was added
    replay.tree.nodes[1] += 1
    assert replay.check_valid() == (False, 'a sum of the tree differs from its leaves')
    replay = memory('PrioritizedReplay', max_size=3)
    add(replay, 0)
    replay.tree.set(np.array([2]), 1.0)
    assert replay.check_valid() == (False, 'an empty slot has a priority')
