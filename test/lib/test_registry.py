"""Names in a spec, and the classes behind them."""

import pytest

from slm_lab.lib import registry
from slm_lab.lib.errors import SpecError
from slm_lab.lib.registry import Registry


@pytest.fixture
def fruits():
    fruits = Registry('fruit', 'slm_lab.lib.registry')

    @fruits.register
    class Apple:
        pass

    @fruits.register
    def pear():
        pass

    fruits.expected = {'Apple': Apple, 'pear': pear}
    return fruits


def test_what_is_registered_is_found_by_its_own_name(fruits):
    assert fruits.names() == ['Apple', 'pear']
    assert {name: fruits.get(name) for name in fruits.names()} == fruits.expected


def test_an_unknown_name_says_place_name_nearest_and_known(fruits):
    with pytest.raises(SpecError) as e:
        fruits.get('aple', 'my_spec > agent.0.fruit')
    assert str(e.value) == "my_spec > agent.0.fruit: fruit 'aple' is unknown; did you mean 'Apple'? Known: Apple, pear"


@pytest.mark.parametrize('name', [None, 3, ['Apple'], {'Apple': 1}])
def test_what_is_no_name_is_unknown(fruits, name):
    with pytest.raises(SpecError, match='is unknown'):
        fruits.get(name)


@pytest.mark.parametrize(
    ('names', 'name'),
    [
        (registry.ALGORITHMS, 'DoubleDQN'),
        (registry.MEMORIES, 'PrioritizedReplay'),
        (registry.NETS, 'DuelingMLPNet'),
        (registry.POLICIES, 'epsilon_greedy'),
        (registry.DISTRIBUTIONS, 'Argmax'),
        (registry.ENV_TABLES, 'env'),
    ],
    ids=lambda v: v if isinstance(v, str) else v.kind,
)
def test_a_registry_imports_its_home_at_the_first_lookup(names, name):
    assert Registry(names.kind, names.home).names() == []  # it holds only what was registered with itself
    assert name in names.names()
    assert names.get(name).__name__ == name
