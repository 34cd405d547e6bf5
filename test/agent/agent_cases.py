"""What the tests of this room share: small specs and worlds, memories that are filled with known transitions."""

import numpy as np
from gymnasium import spaces

from slm_lab.agent.algorithm.base import World
from slm_lab.agent.memory.batch import Layout
from slm_lab.lib import rng
from slm_lab.lib.keys import read_values
from slm_lab.lib.registry import ALGORITHMS, MEMORIES, NETS

EPSILON = {'name': 'linear_decay', 'start_val': 1.0, 'end_val': 0.0, 'start_step': 0, 'end_step': 100}


def net_spec(type='MLPNet', **keys):
    """A resolved net spec."""
    spec = {'type': type, 'hid_layers': [4], 'hid_layers_activation': 'relu', **keys}
    return read_values(NETS.get(type).KEYS, spec, 'net')


def memory_spec(name, **keys):
    replays = {'batch_size': 4, 'max_size': 10} if 'Policy' not in name else {}
    replays.update({'alpha': 1.0, 'epsilon': 0.0} if name == 'PrioritizedReplay' else {})
    return read_values(MEMORIES.get(name).KEYS, {'name': name, **replays, **keys}, 'memory')


def algorithm_spec(name, **keys):
    spec = {'name': name}
    if name != 'Random':
        spec.update(gamma=0.5, training_frequency=1, action_policy='epsilon_greedy', explore_var_spec=EPSILON)
    if 'DQN' in name:
        spec.update(training_iter=1, training_batch_iter=1)
    return read_values(ALGORITHMS.get(name).KEYS, {**spec, **keys}, 'algorithm')


def world(state_dim=2, actions=3, num_envs=1):
    actions = spaces.Discrete(actions) if isinstance(actions, int) else actions
    return World(spaces.Box(-np.inf, np.inf, (state_dim,), np.float32), actions, num_envs)


def algorithm(name, world=None, net=None, seed=0, check=False, **keys):
    """An algorithm with a small net."""
    world = world or globals()['world']()
    spec = {'algorithm': algorithm_spec(name, **keys), 'memory': {}, 'net': net or net_spec()}
    return ALGORITHMS.get(name)(spec, world, seed, check=check)


def memory(name, num_envs=1, seed=0, state=(1, np.float32), action=((), np.int64), **keys):
    """A memory of states of `state` = (size, dtype)."""
    layout = Layout((state[0],), np.dtype(state[1]), action[0], np.dtype(action[1]))
    return MEMORIES.get(name)(memory_spec(name, **keys), layout, num_envs, rng.generator(seed, 'memory'))


def add(memory, first, terminated=(), truncated=()):
    """Adds the transitions first, first + 1, … of each env: transition i goes from state [i] to [i + 0.5], has action
    i % 3 and reward 10 i. `terminated` and `truncated` name transitions. Returns: the next one."""
    n = memory.num_envs
    ids = first + np.arange(n)
    ends = [np.array([i in ended for i in ids]) for ended in (terminated, truncated)]
    memory.add(ids[:, None].astype(float), ids % 3, 10.0 * ids, ids[:, None] + 0.5, *ends)
    return first + n


def fill(memory, steps, first=0, **ends):
    for _ in range(steps):
        first = add(memory, first, **ends)
    return first
