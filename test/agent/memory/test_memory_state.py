"""n steps, save, load into a fresh memory, n more: the same as 2n steps."""

import numpy as np
import pytest
from agent_cases import add, memory

from slm_lab.agent.memory.batch import FIELDS
from slm_lab.lib.state import check_tree, first_difference, snapshot

NAMES = ['Replay', 'PrioritizedReplay', 'OnPolicyBatchReplay', 'OnPolicyReplay', 'OnPolicyCrossEntropy']
DUE = {'Replay': (3, 5), 'PrioritizedReplay': (3, 5), 'OnPolicyBatchReplay': (7,), 'OnPolicyReplay': (2,)}
DUE['OnPolicyCrossEntropy'] = DUE['OnPolicyReplay']


def run(memory, name, steps, start=0):
    """Adds `steps` steps, sampling when it is due. Returns: the batches"""
    batches, n = [], memory.num_envs
    for step in range(start, start + steps):
        rng = np.random.default_rng(step)
        first = step * n
        ids = range(first, first + n)
        terminated, truncated = ([i for i in ids if rng.random() < 0.15] for _ in range(2))
        add(memory, first, terminated, truncated)
        if memory.is_due(*DUE[name]):
            batch = memory.sample(step)
            batches.append({field: snapshot(getattr(batch, field)) for field in (*FIELDS, 'weights')})
            if name == 'PrioritizedReplay':
                memory.update_priorities(rng.random(4).astype(np.float32))
    return batches


def new(name, num_envs, seed):
    beta = {'name': 'linear_decay', 'start_val': 0.4, 'end_val': 1.0, 'end_step': 80}
    keys = {'alpha': 0.6, 'epsilon': 0.01, 'beta_spec': beta, 'use_cer': True} if name == 'PrioritizedReplay' else {}
    keys = {'cross_entropy': 0.5} if name == 'OnPolicyCrossEntropy' else keys
    return memory(name, num_envs, seed, **keys)


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('num_envs', [1, 3])
@pytest.mark.parametrize('n', [0, 1, 4, 5, 13, 40])
def test_a_memory_goes_on_from_its_state(name, num_envs, n):
    whole, first_half, second_half = new(name, num_envs, 0), new(name, num_envs, 0), new(name, num_envs, 1)
    expected = run(whole, name, 2 * n + 20)
    batches = run(first_half, name, n)
    state = snapshot(first_half.state_dict())
    check_tree(state)
    run(first_half, name, 20, n)  # what the old one does next must not reach the new one
    second_half.load_state_dict(state)
    batches += run(second_half, name, n + 20, n)
    assert first_difference(batches, expected) is None
    assert first_difference(second_half.state_dict(), whole.state_dict()) is None
    assert second_half.check_valid() == (True, '') and len(expected) > 0
