"""State trees: what they may hold, copies of them, and bit for bit comparison."""

import copy

import numpy as np
import pytest
import torch

from slm_lab.lib.state import Ring, Stateful, check_tree, first_difference, snapshot, walk


def tree():
    return {
        'clock': {'frame': 3, 'wall_t': 1.5, 'on': True, 'none': None},
        'net': {'weight': torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 'empty': torch.zeros(0)},
        'list': [1, (2.0, 'x'), {}],
        'array': np.arange(6, dtype=np.int16).reshape(2, 3),
        'ring': Ring({'a': np.arange(4.0), 'b': np.arange(8, dtype=np.uint8).reshape(4, 2)}, 6),
    }


def test_walk_names_every_leaf():
    assert [path for path, _ in walk(tree())] == [
        'clock.frame',
        'clock.wall_t',
        'clock.on',
        'clock.none',
        'net.weight',
        'net.empty',
        'list.0',
        'list.1.0',
        'list.1.1',
        'list.2',
        'array',
        'ring',
    ]


def test_equal_trees_have_no_difference():
    assert first_difference(tree(), copy.deepcopy(tree())) is None
    assert first_difference(tree(), snapshot(tree())) is None


NAN = float('nan')


@pytest.mark.parametrize(
    ('a', 'b'),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (1.0, np.nextafter(1.0, 2).item()),
        (1.0, NAN),
        (None, 0),
        ('1', 1),
        ('a', 'b'),
        (1.0, np.float64(1.0)),
        (torch.zeros(1), np.zeros(1, np.float32)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.tensor([0.0, -0.0])),
        (torch.zeros(0, 2), torch.zeros(2, 0)),
        (np.zeros(2, np.float32), np.zeros(2, np.int32)),
        (np.zeros(2), np.zeros((1, 2))),
        (np.zeros(2), np.array([0.0, -0.0])),
        (np.array([1.0, NAN]), np.array([1.0, 2.0])),
        (np.array([True]), np.array([False])),
        ({}, []),
        ({}, None),
        ([], [1]),
    ],
)
def test_leaves_that_differ_in_one_bit_or_in_type_differ(a, b):
    for left, right in ((a, b), (b, a)):
        path, _, _ = first_difference({'x': left, 'z': 1}, {'x': right, 'z': 1})
        assert path.startswith('x')


@pytest.mark.parametrize(
    ('a', 'b'),
    [
        (NAN, -NAN),
        (np.array([NAN]), np.array([NAN])),
        (torch.tensor([NAN]), torch.tensor([NAN])),
        (np.arange(8)[::2], np.array([0, 2, 4, 6])),
        (torch.arange(6).reshape(2, 3).T, torch.tensor([[0, 3], [1, 4], [2, 5]])),
        (np.array(3.0), np.array(3.0)),
    ],
)
def test_equal_values_do_not_differ(a, b):
    assert first_difference({'x': a}, {'x': b}) is None


def test_the_first_leaf_that_differs_is_named_with_both_values():
    a, b = tree(), tree()
    b['clock']['frame'] = 4
    b['array'][0, 0] = 7
    assert first_difference(a, b) == ('clock.frame', 3, 4)
    b['clock']['frame'] = 3
    b['array'][1, 2] = 9
    assert first_difference(a, b) == ('array', '0 at [0] of 6, 2 differ', '7 at [0] of 6, 2 differ')


def test_a_tensor_and_a_view_are_described_by_the_element_that_differs():
    a = torch.arange(6.0).reshape(2, 3).T
    b = a.clone()
    b[2, 1] = -1.0
    assert first_difference([a], [b]) == ('0', '5.0 at [5] of 6, 1 differ', '-1.0 at [5] of 6, 1 differ')
    x, y = np.arange(8.0)[::2], np.arange(8.0)[::-2]
    assert first_difference([x], [y]) == ('0', '0.0 at [0] of 4, 4 differ', '7.0 at [0] of 4, 4 differ')
    assert first_difference([x], [y[1:]])[1:] == ('float64 of shape (4,)', 'float64 of shape (3,)')


@pytest.mark.parametrize('value', [1, None, {}, [], torch.zeros(1)])
def test_a_leaf_that_only_one_has_is_named(value):
    assert first_difference({'a': 1, 'b': value}, {'a': 1}) == ('b', value, 'nothing')
    assert first_difference({'a': 1}, {'a': 1, 'b': value}) == ('b', 'nothing', value)


def test_the_wall_clock_may_differ():
    a, b = tree(), tree()
    b['clock']['wall_t'] = 99.0
    assert first_difference(a, b) is None
    assert first_difference(a, b, ignore=()) == ('clock.wall_t', 1.5, 99.0)


def ring(values, written):
    return {'ring': Ring({'a': np.array(values, dtype=np.float32)}, written)}


def test_rings_are_compared_by_the_rows_that_were_written():
    assert first_difference(ring([1, 2, 0, 0], 2), ring([1, 2, 8, 9], 2)) is None  # slots 2 and 3 hold no rows yet
    assert first_difference(ring([1, 2, 0, 0], 2), ring([1, 3, 0, 0], 2))[0] == 'ring.a'
    assert first_difference(ring([1, 2, 0, 0], 2), ring([1, 2, 0, 0], 3))[0] == 'ring.written'
    assert first_difference(ring([5, 2, 3, 4], 5), ring([6, 2, 3, 4], 5))[0] == 'ring.a'


def test_rows_of_a_ring_in_slots():
    six = tree()['ring']
    assert (six.capacity, six.first_row) == (4, 2)
    assert six.slots(2, 6) == [slice(2, 4), slice(0, 2)]
    assert six.slots(3, 3) == []
    assert six.slots(4, 6) == [slice(0, 2)]
    assert six.layout() == {'a': ['float64', []], 'b': ['uint8', [2]]}
    assert Ring({'a': np.zeros(4)}, 3).first_row == 0


def test_a_snapshot_is_not_touched_by_what_happens_later():
    live = tree()
    kept = snapshot(live)
    live['clock']['frame'] = 9
    live['net']['weight'].zero_()
    live['array'][:] = 0
    live['ring'].arrays['a'][:] = 0
    live['ring'].written = 0
    live['list'].append(1)
    assert first_difference(kept, tree()) is None
    assert type(kept['list'][1]) is tuple


def test_a_tree_of_allowed_leaves_passes():
    check_tree(tree())


@pytest.mark.parametrize(
    ('leaf', 'name'),
    [
        (np.float64(1), 'float64'),
        (np.float32(1), 'float32'),
        (np.int64(1), 'int64'),
        (np.bool_(True), 'bool'),
        ({1, 2}, 'set'),
        (b'x', 'bytes'),
        (object(), 'object'),
        (np.array([None]), 'numpy object array'),
    ],
)
def test_a_leaf_that_is_not_allowed_is_named(leaf, name):
    with pytest.raises(TypeError, match=rf'state tree: agent\.0\.x holds a .*{name}'):
        check_tree({'agent': [{'x': leaf}]})


def test_the_protocol_is_structural():
    class Both:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    class Half:
        def state_dict(self):
            return {}

    assert isinstance(Both(), Stateful) and not isinstance(Half(), Stateful)
