"""Spec keys: types, bounds, defaults, and the one line that each error is."""

import pytest

from slm_lab.lib.errors import SpecError
from slm_lab.lib.keys import Key, leftover, read_keys, read_values

TABLE = {
    'size': Key('int', low=1, high=100, note='rows'),
    'rate': Key('number', 0.5, above=0),
    'on': Key('bool', False),
    'name': Key('str|null', None, choices=(None, 'concat', 'stack')),
    'layers': Key('list', [8]),
    'old': leftover(),
}


def read(**spec):
    return read_values(TABLE, spec, 'my_spec > part')


def test_defaults_are_filled_in_and_values_kept():
    assert read(size=3) == {'size': 3, 'rate': 0.5, 'on': False, 'name': None, 'layers': [8]}
    spec = {'size': 4, 'rate': 2, 'on': True, 'name': 'stack', 'layers': []}
    assert read(**spec) == spec


def test_a_whole_float_is_an_int_where_ints_are_meant():
    assert type(read(size=1e2)['size']) is int
    assert type(read(size=1, rate=2.0)['rate']) is float


@pytest.mark.parametrize(
    ('spec', 'line'),
    [
        ({'size': '5'}, "my_spec > part.size: '5' is not of the type wanted here: int"),
        ({'size': 2.5}, 'my_spec > part.size: 2.5 is not of the type wanted here: int'),
        ({'size': True}, 'my_spec > part.size: True is not of the type wanted here: int'),
        ({'size': None}, 'my_spec > part.size: None is not of the type wanted here: int'),
        ({'size': float('inf')}, 'my_spec > part.size: inf is not of the type wanted here: int'),
        ({'size': 1, 'rate': False}, 'my_spec > part.rate: False is not of the type wanted here: number'),
        ({'size': 1, 'on': 1}, 'my_spec > part.on: 1 is not of the type wanted here: bool'),
        ({'size': 1, 'name': 5}, 'my_spec > part.name: 5 is not of the type wanted here: str or null'),
        ({'size': 1, 'layers': 5}, 'my_spec > part.layers: 5 is not of the type wanted here: list'),
        ({'size': 0}, 'my_spec > part.size: 0 is too small; the least is 1'),
        ({'size': 101}, 'my_spec > part.size: 101 is too large; the most is 100'),
        ({'size': 1, 'rate': 0}, 'my_spec > part.rate: 0 is too small; it must be above 0'),
        (
            {'size': 1, 'name': 'stak'},
            "my_spec > part.name: 'stak' is unknown; did you mean 'stack'? Known: None, concat, stack",
        ),
        ({'rate': 1}, "my_spec > part: key 'size' is missing (int: rows)"),
        (
            {'siez': 1},
            "my_spec > part.siez: key 'siez' is unknown; did you mean 'size'? Known: layers, name, old, on, rate, size",
        ),
        (
            {'size': 1, 'zzz': 1},
            "my_spec > part.zzz: key 'zzz' is unknown. Known: layers, name, old, on, rate, size",
        ),
    ],
)
def test_an_error_says_place_what_came_and_what_is_allowed(spec, line):
    with pytest.raises(SpecError) as e:
        read(**spec)
    assert str(e.value) == line


@pytest.mark.parametrize('spec', [None, [], 'x', 3])
def test_what_is_no_object_is_refused(spec):
    with pytest.raises(SpecError, match='my_spec > part: .* is not of the type wanted here: dict'):
        read_keys(TABLE, spec, 'my_spec > part')


@pytest.mark.parametrize('value', [1, 'x', None, [1], {'a': 1}])
def test_a_leftover_is_no_value_but_a_place_to_warn_of(value):
    checked = read_keys(TABLE, {'size': 1, 'old': value}, 'part')
    assert checked.ignored == ['part.old']
    assert checked.values == read(size=1)
    assert read_keys(TABLE, {'size': 1}, 'part').ignored == []


def test_keys_that_are_checked_elsewhere_are_let_through():
    assert read_keys(TABLE, {'size': 1, 'far': 2}, 'part', others=('far',)).values == read(size=1)


def test_validate_is_called_with_value_and_place_but_not_for_null():
    seen = []
    table = {'x': Key('int|null', validate=lambda value, where: seen.append((value, where)))}
    read_values(table, {'x': 3}, 'part')
    read_values(table, {'x': None}, 'part')
    assert seen == [(3, 'part.x')]


def test_fill_gives_the_value_with_its_own_defaults():
    table = {'x': Key('dict|null', None, fill=lambda value, where: {'place': where, **value})}
    assert read_values(table, {'x': {'a': 1}}, 'part') == {'x': {'place': 'part.x', 'a': 1}}
    assert read_values(table, {'x': None}, 'part') == read_values(table, {}, 'part') == {'x': None}
