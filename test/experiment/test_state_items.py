"""Every single item of a session's state tree is loaded as it was saved: none is dropped, made up or set by default.

Each item in turn is changed by the smallest step and the tree is loaded into a session built anew: that session must
hold the changed item and nothing else that differs.
"""

import math
import re

import numpy as np
import pytest
import torch
from resume import StopAt, build, raw_spec, run_to, session_spec
from test_resume_policy import policy_spec

from slm_lab.lib.state import Ring, first_difference, snapshot

SPECS = {
    'DoubleDQN': raw_spec('DoubleDQN', 'PrioritizedReplay', normalize_state=True, meta={'rigorous_eval': 1}),
    'ActorCritic': policy_spec('ActorCritic', 'OnPolicyReplay', 0, 'MLPNet', False, 1, 'discrete'),
    'PPO': policy_spec('PPO', 'OnPolicyBatchReplay', 0, 'MLPNet', True, 4, 'continuous'),
}

# --- one item changed


def places(tree, path=()):
    """The keys that lead to each item; a ring has its arrays and `written` as items."""
    if isinstance(tree, (dict, list, tuple)) and tree:
        for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from places(child, (*path, key))
    elif isinstance(tree, Ring):
        yield from ((*path, name) for name in ('written', *tree.arrays))
    else:
        yield path


def at(tree, place):
    for key in place:
        tree = {'written': tree.written, **tree.arrays}[key] if isinstance(tree, Ring) else tree[key]
    return tree


def with_change(tree, place):
    """The tree with the item at a place changed; the rest is shared."""
    if not place:
        return changed(tree)
    key, rest = place[0], place[1:]
    if isinstance(tree, Ring):
        if key == 'written':
            return Ring(tree.arrays, tree.written + 1)
        return Ring({**tree.arrays, key: changed(tree.arrays[key])}, tree.written)
    if isinstance(tree, dict):
        return {**tree, key: with_change(tree[key], rest)}
    return type(tree)(with_change(child, rest) if i == key else child for i, child in enumerate(tree))


def changed(item):
    """Another item of the same type: the next float, the next int, the other bool; an array has its first element
    changed so, there with the lowest bit of an int flipped, which leaves an action an action."""
    if isinstance(item, bool):
        return not item
    if isinstance(item, int):
        return item + 1
    if isinstance(item, float):
        return 0.5 if math.isnan(item) else math.nextafter(item, math.inf)
    array = item.numpy().copy() if isinstance(item, torch.Tensor) else item.copy()
    first = array.reshape(-1)[:1]  # a view, since the copy is contiguous
    if array.dtype.kind == 'f':
        first[...] = 0.5 if np.isnan(first[0]) else np.nextafter(first, np.inf, dtype=array.dtype)
    else:
        first ^= 1
    return torch.from_numpy(array) if isinstance(item, torch.Tensor) else array


# --- what does not come back as it was put in, and why that is right

EMPTY = (str, type(None), dict, list, tuple)  # names, and what holds nothing: there is no smallest step from these
REFUSED = {r'rng\.python\.version': "Python's generator knows no other"}
BUILT = {
    r'.*\.param_groups\.\d+\.fused': 'how a step is computed here, chosen anew by the device and the optimizer',
    r'.*\.param_groups\.\d+\.params\.\d+': "torch's numbering, by place; what it numbers is in `state`",
}
EPISODE = {
    r'env\.slots\.\d+\.(seed|actions|observation)': 'replayed: the env stands elsewhere than it was saved, so'
    ' that it is not believed and a new episode begins',
}


def matches(patterns, place):
    return any(re.fullmatch(pattern, '.'.join(map(str, place))) for pattern in patterns)


def has_a_step(item):
    return not isinstance(item, EMPTY) and not (isinstance(item, np.ndarray) and not item.size)


def load(spec, tree):
    session = build(spec, store=False)
    session.load_state_dict(snapshot(tree))
    held = session.state_dict()
    # the clock on the wall goes on from what was loaded
    assert 0 <= held['clock']['wall_t'] - tree['clock']['wall_t'] < 10
    held['clock']['wall_t'] = tree['clock']['wall_t']
    return session, held


@pytest.fixture(scope='module', params=SPECS)
def saved(request, tmp_path_factory):
    """(spec, tree) of a session in the middle of an episode."""
    spec = session_spec(tmp_path_factory.mktemp(request.param), SPECS[request.param])
    return spec, run_to(spec, StopAt(150, 'inside'), store=False)['tree']


def test_every_item_is_loaded_as_it_was_saved(saved):
    spec, tree = saved
    steps = [place for place in places(tree) if has_a_step(at(tree, place))]
    assert len(steps) > 100
    for place in steps:
        other = with_change(tree, place)
        difference = first_difference(tree, other, ignore=())
        assert difference is not None and difference[0] == '.'.join(map(str, place))
        if matches(REFUSED, place):
            with pytest.raises(ValueError):
                load(spec, other)
            continue
        session, held = load(spec, other)
        if session.env.restarted:
            assert matches(EPISODE, place), place
            assert session.env.restarted == [place[2]]
            continue
        if matches(BUILT, place):
            assert at(held, place) == at(tree, place), place
        else:
            assert first_difference(other, held, ignore=()) is None, place


def test_no_change_of_an_episode_is_believed(saved):
    """Another seed, or another observation than the env comes to."""
    spec, tree = saved
    for place in places(tree):
        if matches([r'env\.slots\.\d+\.(seed|observation)'], place):
            assert load(spec, with_change(tree, place))[0].env.restarted == [place[2]]


def test_each_exception_is_needed(saved):
    _, tree = saved
    for pattern in (*REFUSED, *BUILT, *EPISODE):
        assert any(matches([pattern], place) for place in places(tree)), pattern
