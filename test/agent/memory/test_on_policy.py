"""On-policy memories: transitions of the current policy, handed over once."""

import numpy as np
import pytest
import torch
from agent_cases import add, fill, memory

from slm_lab.agent.memory.batch import FIELDS
from slm_lab.lib.errors import SpecError


def ids(batch):
    return batch.states[..., 0].int().tolist()


@pytest.mark.parametrize('num_envs', [1, 3])
@pytest.mark.parametrize('steps', [4, 32, 33, 100])
def test_a_batch_is_all_steps_since_the_last_one(num_envs, steps):
    batch_replay = memory('OnPolicyBatchReplay', num_envs)
    first, due = 0, []
    for _ in range(steps):
        first = add(batch_replay, first, terminated=[2], truncated=[4])
        due.append(batch_replay.is_due(steps))
    assert due == [False] * (steps - 1) + [True]
    assert (batch_replay.size, batch_replay.seen_size) == (steps * num_envs, steps * num_envs)
    batch = batch_replay.sample(0)
    expected = torch.arange(steps * num_envs).reshape(steps, num_envs)
    assert torch.equal(batch.states, expected.unsqueeze(-1).float())
    assert torch.equal(batch.next_states, expected.unsqueeze(-1) + 0.5)
    assert torch.equal(batch.actions, expected % 3) and torch.equal(batch.rewards, 10.0 * expected)
    assert torch.equal(batch.terminated, (expected == 2).float())
    assert torch.equal(batch.truncated, (expected == 4).float())
    assert (batch_replay.size, batch_replay.seen_size) == (0, steps * num_envs)
    assert not batch_replay.is_due(1)


def test_a_batch_is_not_touched_by_what_comes_after_it():
    batch_replay = memory('OnPolicyBatchReplay')
    fill(batch_replay, 3)
    batch = batch_replay.sample(0)
    fill(batch_replay, 3, first=50)
    assert ids(batch) == [[0], [1], [2]]
    assert ids(batch_replay.sample(0)) == [[50], [51], [52]]


def test_dtypes_are_kept():
    batch_replay = memory('OnPolicyBatchReplay', state=(2, np.uint8), action=((2,), np.float32))
    state = np.array([[255, 1]], np.uint8)
    batch_replay.add(state, np.array([[0.1, 0.2]]), [1.5], state, [True], [False])
    batch = batch_replay.sample(0)
    assert batch.states.dtype == torch.uint8 and batch.states.tolist() == [[[255, 1]]]
    assert torch.equal(batch.actions, torch.tensor([[[0.1, 0.2]]]))


# --- whole episodes


def test_episodes_of_one_env_follow_each_other():
    episodic = memory('OnPolicyReplay')
    due = []
    for i in range(9):
        add(episodic, i, terminated=[2, 8], truncated=[5])
        due.append(episodic.is_due(2))
    assert due == [False] * 5 + [True] * 4
    batch = episodic.sample(0)
    assert ids(batch) == list(range(9))
    assert batch.terminated.nonzero().flatten().tolist() == [2, 8]
    assert batch.truncated.nonzero().flatten().tolist() == [5]
    assert (episodic.size, episodic.episodes, episodic.seen_size) == (0, 0, 9)


def test_an_open_episode_stays_for_the_next_time():
    episodic = memory('OnPolicyReplay')
    first = fill(episodic, 5, terminated=[2])  # 3 and 4 belong to an episode that runs
    assert ids(episodic.sample(0)) == [0, 1, 2]
    assert episodic.size == 2
    fill(episodic, 2, first, terminated=[6])
    assert episodic.is_due(1)
    assert ids(episodic.sample(0)) == [3, 4, 5, 6]


def test_each_env_has_episodes_of_its_own():
    """Two envs: even transitions are env 0's, odd ones env 1's."""
    episodic = memory('OnPolicyReplay', num_envs=2)
    first = fill(episodic, 3, terminated=[2])  # 0 2| 4 and 1 3 5
    assert episodic.is_due(1) and not episodic.is_due(2)
    assert ids(episodic.sample(0)) == [0, 2]
    assert episodic.begins.tolist() == [2, 0]
    first = fill(episodic, 2, first, truncated=[7], terminated=[8])  # 4 6 8| and 1 3 5 7| 9
    assert episodic.episodes == 2
    assert ids(episodic.sample(0)) == [4, 6, 8, 1, 3, 5, 7]
    assert episodic.begins.tolist() == [1, 0]  # step 4 (8 and 9) stays for env 1 alone
    fill(episodic, 1, first, terminated=[10, 11])
    assert ids(episodic.sample(0)) == [10, 9, 11]
    assert episodic.size == 0 and episodic.begins.tolist() == [0, 0]


def test_whole_episodes_against_lists():
    """Random ends in three envs for 300 steps: each transition comes once, whole episodes only, env by env."""
    rng, episodic = np.random.default_rng(0), memory('OnPolicyReplay', num_envs=3)
    open_episodes, ended, first = [[], [], []], [[], [], []], 0
    for _ in range(300):
        ends = [first + env for env in range(3) if rng.random() < 0.1]
        cut = [i for i in ends if rng.random() < 0.5]
        for env in range(3):
            open_episodes[env].append(first + env)
            if first + env in ends:
                ended[env] += open_episodes[env]
                open_episodes[env] = []
        first = add(episodic, first, terminated=set(ends) - set(cut), truncated=cut)
        if episodic.is_due(4):
            batch = episodic.sample(0)
            assert ids(batch) == sum(ended, [])
            assert all(len(getattr(batch, name)) == len(ids(batch)) for name in FIELDS)
            ended = [[], [], []]
    assert first == 900


def test_an_episode_that_cannot_be_brought_back_ends_where_it_stood():
    """Env 1's runs on: what is stored of it is cut as by a time limit; an episode that has ended stays as it ended."""
    batch_replay = memory('OnPolicyBatchReplay', 3)
    fill(batch_replay, 2, terminated=[3])  # rows 3, 4, 5 are the last of envs 0, 1, 2
    assert batch_replay.cut([0, 1]) == 1
    batch = batch_replay.sample(0)
    assert batch.truncated.tolist() == [[0, 0, 0], [0, 1, 0]] and batch.terminated.tolist() == [[0, 0, 0], [1, 0, 0]]
    assert batch_replay.cut([0, 1, 2]) == 0  # nothing stored, nothing to cut


def test_a_cut_episode_counts_as_one_that_ended():
    replay = memory('OnPolicyReplay', 2)
    fill(replay, 3)
    assert not replay.is_due(1)
    assert replay.cut([1]) == 1
    assert replay.is_due(1)
    assert ids(replay.sample(0)) == [1, 3, 5]  # all of env 1; env 0's episode still runs
    fill(replay, 1, first=6)
    assert replay.size == 4 * 2


def test_transitions_of_a_replay_stand_alone():
    replay = memory('Replay', 2)
    fill(replay, 2)
    assert replay.cut([0, 1]) == 0 and not replay.arrays['truncated'].any()


# --- the best episodes


def elite(quantile, num_envs=1):
    return memory('OnPolicyCrossEntropy', num_envs, cross_entropy=quantile)


@pytest.mark.parametrize(
    ('quantile', 'kept'),
    [
        (0.01, [2, 3, 4, 5, 6]),  # 10 + 0.03 · 40: above the least
        (1 / 3, [2, 3, 4, 5, 6]),  # 50, which is reached
        (0.5, [4, 5, 6]),  # (50 + 60) / 2
        (0.7, [4, 5]),  # 60 + 0.1 · 30
        (0.99, [4, 5]),
        (1.0, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_episodes_of_a_high_return_stay(quantile, kept):
    """Rewards are 10 i: the episodes 0 1, 2 3, 4 5, 6 have returns 10, 50, 90, 60."""
    best = elite(quantile)
    fill(best, 7, terminated=[1, 5, 6], truncated=[3])
    batch = best.sample(0)
    assert ids(batch) == kept
    assert batch.rewards.tolist() == [10.0 * i for i in kept] and batch.actions.tolist() == [i % 3 for i in kept]
    assert all(len(getattr(batch, name)) == len(kept) for name in FIELDS)
    assert (best.size, best.episodes, best.seen_size) == (0, 0, 7)


def test_episodes_of_all_envs_compete_and_open_ones_wait():
    """Two envs: 0 2 | 4 and 1 3 | 5 7 | with returns 20, 40, 120; 4 6 of env 0 still runs."""
    best = elite(0.6, 2)
    first = fill(best, 4, terminated=[2, 3], truncated=[7])
    assert best.is_due(3)
    assert ids(best.sample(0)) == [5, 7]  # the quantile lies at 40 + 0.2 · 80
    fill(best, 1, first, terminated=[8])
    assert ids(best.sample(0)) == [4, 6, 8]


@pytest.mark.parametrize('quantile', [0.3, 0.999])
def test_equal_returns_all_stay(quantile):
    best = elite(quantile)
    for _ in range(7):
        add(best, 3, terminated=[3])
    assert ids(best.sample(0)) == [3] * 7


@pytest.mark.parametrize('quantile', [0, 1.1, None])
def test_a_quantile_lies_above_0_and_at_most_at_1(quantile):
    with pytest.raises(SpecError, match='memory.cross_entropy'):
        elite(quantile)
