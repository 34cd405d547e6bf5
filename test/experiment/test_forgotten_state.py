"""No part of a session forgets state: whatever training changes comes back, and whatever is saved matters.

A built Session is walked, all attributes of all its parts, before and after some training. What changed must be equal
again in a session that is built anew and loaded, or stand in a short list with a reason.
"""

import dataclasses
import re
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from resume import MEMORIES, StopAt, build, raw_spec, run_to, session_spec
from test_resume_policy import MEMORIES as POLICY_MEMORIES
from test_resume_policy import policy_spec
from test_resume_soft import MEMORIES as SOFT_MEMORIES
from test_resume_soft import soft_spec

from slm_lab.experiment import resume
from slm_lab.lib.state import Ring, first_difference, snapshot

# --- the walk

SCALARS = (type(None), bool, int, float, str, bytes)
OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, Path)


def fingerprint(root):
    """{path: value} of every leaf below an object: scalars as they are, arrays and generators as bytes."""
    leaves, seen = {}, {}
    todo = [('', root)]
    while todo:
        path, part = todo.pop()
        if isinstance(part, SCALARS) or np.isscalar(part):
            leaves[path] = repr(part)
        elif isinstance(part, np.ndarray):
            leaves[path] = (str(part.dtype), part.shape, part.tobytes() if part.dtype != object else repr(part))
        elif isinstance(part, torch.Tensor):
            leaves[path] = (str(part.dtype), tuple(part.shape), part.detach().numpy().tobytes())
        elif isinstance(part, np.random.Generator):
            leaves[path] = repr(part.bit_generator.state)
        elif id(part) in seen or isinstance(part, OPAQUE):
            continue
        else:
            seen[id(part)] = part  # kept, so that no other object gets its id
            todo += [(f'{path}.{name}', child) for name, child in children(part)]
    return leaves


def children(part):
    if isinstance(part, dict):
        # tensors are keys of optimizers' state: by their place, since ids differ from process to process
        names = [key if isinstance(key, SCALARS) else f'<{type(key).__name__} {i}>' for i, key in enumerate(part)]
        return list(zip(names, part.values(), strict=True))
    if isinstance(part, (list, tuple, set, frozenset)):
        return list(enumerate(part))
    if dataclasses.is_dataclass(part) or hasattr(part, '__dict__'):
        return list(vars(part).items())
    slots = [name for cls in type(part).__mro__ for name in getattr(cls, '__slots__', ())]
    return [(name, getattr(part, name)) for name in slots if hasattr(part, name)]


MEMORY = r'\.agent\.(memory|algorithm\.replay)'

# What training changes and a loaded session holds otherwise, and why that is right.
ALLOWED = {
    r'\.progress(\..*)?': 'the progress bar',
    r'\.events(\..*)?': "TensorBoard's files, for looking at: a stop ends one, with the actions since its last row",
    r'\.store(\..*)?': "what the store has read or written: its next save's base",
    r'\.eval_env\.(.*\.)?slots\.\d+\.env\..*': 'an evaluation begins by a reset',
    r'\.(eval_)?env\.(.*\.)?slots\.\d+\._actions': 'beyond the actions of this episode it holds those of earlier ones'
    ' (the first are compared below)',
    r'\.eval_env\.(.*\.)?slots\.\d+\._is_used': 'whether `fresh` must build the env anew: a loaded one just was built',
    r'\.(eval_)?env\.(.*\.)?(_array|_end)': 'where the stacks of frames lie: what they hold is `state`',
    r'\.(eval_)?env\.(.*\.)?_backend\.(_first|_lives_on)': 'written at the end of an episode before it is read',
    rf'{MEMORY}\._buffers\..*': 'filled anew by each sample before it is read',
    rf'{MEMORY}\._batch\..*': 'the tensors of these buffers',
    rf'{MEMORY}\.(tree\.nodes|_summed_size)': 'sums, a function of the leaves (which are compared'
    ' below), not yet brought up to date with the newest',
    rf'{MEMORY}\.batch_slots': 'the slots of the last sample, used before the training of that step ends',
    rf'{MEMORY}\.storage\.arrays\..*': 'rows beyond the stored ones are written before they are read'
    ' (the stored ones are compared below)',
    r'\..*\.rate\.scheduler\..*': "torch's scheduler, stepped to the frame before the rate is read off it",
}


def is_allowed(path):
    return any(re.fullmatch(pattern, path) for pattern in ALLOWED)


def record(session):
    """The parts of what is allowed to differ that may not differ, and the process's generators."""
    storage = getattr(session.agent.memory, 'storage', None)
    rows = {} if storage is None else {k: a[: session.agent.memory.length] for k, a in storage.arrays.items()}
    envs = [env for env in (session.env, session.eval_env) if env is not None]
    replays = session.agent.memory, getattr(session.agent.algorithm, 'replay', None)
    return {
        'rows': rows,
        'priorities': [getattr(getattr(memory, 'tree', None), 'leaves', None) for memory in replays],
        'rng': session.rng.state_dict(),
        'slots': [slot.state_dict() for env in envs for slot in env.unwrapped.slots],
    }


CATEGORICAL = {'action_pdtype': 'Categorical', 'action_policy': 'default'}  # draws from the process's generators
CASES = (
    {
        f'{algorithm} {memory} {num_envs}': raw_spec(
            algorithm,
            memory,
            'DuelingMLPNet' if algorithm == 'DQN' else 'MLPNet',
            num_envs,
            normalize_state=True,
            algo=CATEGORICAL if algorithm == 'DQN' else {},
            env={'frame_op': 'concat', 'frame_op_len': 2, 'reward_scale': 0.5},
            meta={'rigorous_eval': 2},
        )
        for algorithm, memories in MEMORIES.items()
        for memory in memories
        for num_envs in (1, 3)
    }
    | {
        f'{algorithm} {memory} {net} {num_envs}': policy_spec(
            algorithm, memory, 0, net, None if algorithm == 'Reinforce' else num_envs == 1, num_envs, env
        )
        for algorithm, memories in POLICY_MEMORIES.items()
        for memory in memories
        for net, num_envs, env in (('MLPNet', 1, 'continuous'), ('RecurrentNet', 3, 'discrete'))
    }
    | {
        f'{algorithm} {memory} {num_envs}': soft_spec(algorithm, memory, 'MLPNet', num_envs, env)
        for algorithm, memories in SOFT_MEMORIES.items()
        for memory, num_envs, env in zip(memories, (1, 3), ('continuous', 'discrete'), strict=True)
    }
)


def train_and_load(spec, mode='train'):
    """Trains a session, and loads what it saved into another. Returns: (paths that training changed, paths that the
    loaded one holds otherwise, the first difference of what may not differ at all)"""
    trained = build(spec, StopAt(155), mode=mode)  # between two evaluations and two trainings
    for env in filter(None, (trained.env, trained.eval_env)):
        assert env.unwrapped.slots  # which are made when they are first needed
    before = fingerprint(trained)
    trained.run()
    after, kept = fingerprint(trained), snapshot(record(trained))
    loaded = build(spec, StopAt(155), mode=mode)
    resume.restore_session(loaded)
    again = fingerprint(loaded)
    changed = {path for path in {*before, *after} if before.get(path) != after.get(path)}
    return changed, {p for p in changed if after.get(p) != again.get(p)}, first_difference(kept, record(loaded))


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize('mode', ['train', 'dev'])
def test_what_training_changes_comes_back(name, mode, tmp_path, monkeypatch):
    monkeypatch.setenv('RENDER', 'false')
    changed, differing, difference = train_and_load(session_spec(tmp_path, CASES[name]), mode)
    assert '.clock.frame' in changed and any(path.startswith('.env') for path in changed)
    assert sorted(path for path in differing if not is_allowed(path)) == []
    assert difference is None


def test_every_permission_to_differ_is_needed(tmp_path, monkeypatch):
    """The list above does not outlive its reasons."""
    monkeypatch.setenv('RENDER', 'false')
    paths = set()
    for name, mode in (('DQN PrioritizedReplay 3', 'train'), ('SARSA OnPolicyReplay 1', 'dev')):
        paths |= train_and_load(session_spec(tmp_path / name, CASES[name]), mode)[1]
    assert [pattern for pattern in ALLOWED if not any(re.fullmatch(pattern, path) for path in paths)] == []


LOADERS = [
    'agent.algorithm.load_state_dict',
    'agent.memory.load_state_dict',
    'agent.body.load_state_dict',
    'clock.load_state_dict',
    'env.load_state_dict',
    'eval_env.load_state_dict',
    'eval_rng.load_state_dict',
    'rng.load_state_dict',
]


@pytest.mark.parametrize('loader', LOADERS)
def test_a_part_that_does_not_load_is_found(loader, tmp_path, monkeypatch):
    """So the walk sees every part."""
    plainly = build

    def build_forgetful(*args, **kwargs):
        session = part = plainly(*args, **kwargs)
        *parents, method = loader.split('.')
        for name in parents:
            part = getattr(part, name)
        monkeypatch.setattr(part, method, lambda state: None)
        return session

    monkeypatch.setitem(train_and_load.__globals__, 'build', build_forgetful)
    raw = raw_spec('DQN', 'PrioritizedReplay', algo=CATEGORICAL, meta={'rigorous_eval': 2})
    _, differing, difference = train_and_load(session_spec(tmp_path, raw))
    assert difference or [path for path in differing if not is_allowed(path)]


# --- every leaf of the tree matters


def mutated(leaf):
    """The same kind of leaf with another value."""
    if isinstance(leaf, bool):
        return not leaf
    if isinstance(leaf, int):
        return leaf + 1
    if isinstance(leaf, float):
        return 0.5 if leaf != leaf else leaf + 0.5
    if isinstance(leaf, str):
        return leaf + '?'
    if leaf is None:
        return 0
    leaf = leaf.clone() if isinstance(leaf, torch.Tensor) else leaf.copy()
    flat = leaf.reshape(-1)
    if not len(flat):
        return None
    index = len(flat) // 2
    if leaf.dtype in (torch.bool, np.dtype(bool)):
        flat[index] = not flat[index]
    elif 'float' in str(leaf.dtype):
        flat[index] = 0.5 if flat[index] != flat[index] else flat[index] + 0.5
    else:
        flat[index] = flat[index] ^ 1
    return leaf.reshape(tuple(leaf.shape)) if isinstance(leaf, np.ndarray) else leaf


def with_leaf(tree, path, value):
    """A tree in which one leaf is another; what lies beside the path is shared."""
    if not path:
        return value
    if isinstance(tree, dict):
        return {**tree, path[0]: with_leaf(tree[path[0]], path[1:], value)}
    items = list(tree)
    items[path[0]] = with_leaf(items[path[0]], path[1:], value)
    return type(tree)(items)


def keyed_leaves(tree, path=()):
    """[(keys that lead to it, leaf)]; a ring's arrays are given one by one."""
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in keyed_leaves(value, (*path, key))]
    if isinstance(tree, (list, tuple)):
        return [leaf for i, value in enumerate(tree) for leaf in keyed_leaves(value, (*path, i))]
    return [(path, tree)]


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """A DQN with every kind of part, in the middle of an episode: (spec, its tree)"""
    folder = tmp_path_factory.mktemp('saved')
    spec = session_spec(folder, CASES['DQN PrioritizedReplay 1'])
    return spec, run_to(spec, StopAt(150, 'inside'))['tree']


def loaded_from(spec, tree):
    session = build(spec, StopAt(190), store=False)
    session.load_state_dict(snapshot(tree))
    return session


# Leaves that a loaded session need not hold as they were saved, each with its reason.
UNREAD = {
    r'eval_env\.slots\.\d+\.observation': 'no episode is under way there',
    r'clock\.wall_t': 'wall time',
    r'.*\.body\.rows\.\w+\.(wall_t|fps)': 'wall time',
    r'.*\.optims\.net\.param_groups\.0\.(foreach|fused)': 'how an optimizer computes stays as it was built',
    r'.*\.optims\.net\.param_groups\.0\.params\.\d+': 'numbers of the parameters: torch goes by their order',
}
# Leaves whose change a loader refuses or answers with a new episode, which is a difference too.
REFUSED = (ValueError, TypeError, KeyError, IndexError, RuntimeError, AssertionError, OverflowError)


def test_every_leaf_of_the_tree_makes_a_difference(saved):
    """One leaf after the other is changed: comparing finds it, and a session that loads it is another session."""
    spec, tree = saved
    honest = snapshot(loaded_from(spec, tree).state_dict())
    assert first_difference(tree, honest) is None
    without_effect, unseen, count = [], [], 0
    for keys, leaf in keyed_leaves(tree):
        path = '.'.join(map(str, keys))
        if isinstance(leaf, Ring):
            continue
        value = mutated(leaf)
        if any(re.fullmatch(pattern, path) for pattern in UNREAD) or value is None:
            continue
        count += 1
        changed = with_leaf(tree, keys, value)
        if first_difference(tree, changed) is None:
            unseen.append(path)
        try:
            loaded = loaded_from(spec, changed).state_dict()
        except REFUSED:
            continue
        if first_difference(honest, loaded) is None:
            without_effect.append(path)
    assert unseen == []
    assert without_effect == []
    assert count > 80


def test_every_array_of_the_ring_makes_a_difference(saved):
    spec, tree = saved
    ring = tree['agent']['memory']['ring']
    honest = snapshot(loaded_from(spec, tree).state_dict())
    changes = [(name, ring.written) for name in ring.arrays] + [(None, ring.written + 1)]
    for name, written in changes:
        arrays = {key: mutated(a) if key == name else a for key, a in ring.arrays.items()}
        changed = snapshot(tree)
        changed['agent']['memory']['ring'] = Ring(arrays, written)
        assert first_difference(tree, changed) is not None, name
        assert first_difference(honest, loaded_from(spec, changed).state_dict()) is not None, name
