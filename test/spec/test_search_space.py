"""What a spec's `search` means, and the values that each trial gets."""

import math

import pytest

from slm_lab.lib.errors import SpecError
from slm_lab.spec import search_space, spec_util
from slm_lab.spec.search_space import Space


def make_spec(max_trial=1, agent=None, env=None, meta=None):
    spec = spec_util.get('demo.json', 'dqn_cartpole')
    spec['meta']['max_trial'] = max_trial
    parts = {'agent': agent and [agent], 'env': env and [env], 'meta': meta}
    spec['search'] = {room: part for room, part in parts.items() if part}
    return spec


def drawn(kind, args, count=2000):
    spec = make_spec(count, agent={'algorithm': {f'gamma__{kind}': args}})
    spaces = search_space.parse(spec)
    return [search_space.draw(spaces, 3, trial)['agent.0.algorithm.gamma'] for trial in range(count)]


def test_places_are_dotted_and_lists_count():
    agent = {'algorithm': {'gamma__uniform': [0.9, 1], 'explore_var_spec': {'end_step__choice': [1, 2]}}}
    spaces = search_space.parse(
        make_spec(agent=agent, env={'num_envs__randint': [1, 3]}, meta={'max_session__choice': [1]})
    )
    assert spaces == {
        'agent.0.algorithm.gamma': Space('uniform', (0.9, 1)),
        'agent.0.algorithm.explore_var_spec.end_step': Space('choice', (1, 2)),
        'env.0.num_envs': Space('randint', (1, 3)),
        'meta.max_session': Space('choice', (1,)),
    }


def test_a_dict_may_stand_for_the_one_agent():
    spec = make_spec(agent={'algorithm': {'gamma__choice': [0.5]}})
    spec['search']['agent'] = spec['search']['agent'][0]
    assert list(search_space.parse(spec)) == ['agent.0.algorithm.gamma']


@pytest.mark.parametrize(
    ('agent', 'wanted'),
    [
        ({'algorithm': {'gamma__unifrom': [0, 1]}}, "gamma__unifrom: kind 'unifrom' is .*did you mean 'uniform'"),
        ({'algorithm': {'gamma_choice': [0, 1]}}, "search.agent.0.algorithm.gamma_choice: .*mean 'gamma__choice'"),
        ({'algorithm': {'gamma': 0.5}}, "write 'gamma__kind'"),
        ({'algorithm': {'gamma__uniform': [0.5]}}, r'form wanted here: \[low, high\]'),
        ({'algorithm': {'gamma__uniform': [0.9, 0.5]}}, 'the low end 0.9 is not below the high end 0.5'),
        ({'algorithm': {'gamma__uniform': [0.1, 'x']}}, 'all numbers'),
        ({'algorithm': {'gamma__loguniform': [0, 1]}}, 'has no logarithm'),
        ({'algorithm': {'gamma__randint': [0.5, 2]}}, 'whole numbers'),
        ({'algorithm': {'gamma__quniform': [0, 1]}}, r'\[low, high, q\]'),
        ({'algorithm': {'gamma__quniform': [0, 1, 0]}}, 'quantum 0 must be above 0'),
        ({'algorithm': {'gamma__quniform': [0.1, 0.2, 0.5]}}, 'no multiple of 0.5'),
        ({'algorithm': {'gamma__normal': [0, -1]}}, 'standard deviation -1'),
        ({'algorithm': {'gamma__choice': []}}, 'a list that is not empty'),
        ({'algorithm': {'gamma__grid_search': 0.5}}, 'a list that is not empty'),
        ({'algorithm': {'gamma__choice': [1], 'gamma__uniform': [0, 1]}}, 'twice'),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_with_its_place(agent, wanted):
    with pytest.raises(SpecError, match=wanted) as error:
        search_space.parse(make_spec(agent=agent))
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('search', [None, {}, [], {'agent': [{}]}])
def test_a_spec_without_a_search_is_refused(search):
    with pytest.raises(SpecError, match='search'):
        search_space.parse({**make_spec(), 'search': search})


def test_an_unknown_room_is_refused_with_the_nearest():
    with pytest.raises(SpecError, match="search.agents: key 'agents' is unknown; did you mean 'agent'"):
        search_space.parse({**make_spec(), 'search': {'agents': [{}]}})


def test_trials_are_the_product_of_the_grids_max_trial_times():
    agent = {
        'algorithm': {'gamma__grid_search': [0.5, 0.9], 'training_iter__choice': [1, 2, 3]},
        'net': {'hid_layers__grid_search': [[8], [16], [8, 8]]},
    }
    spec = make_spec(2, agent=agent)
    assert search_space.count_trials(spec) == 2 * 3 * 2
    spaces = search_space.parse(spec)
    points = [search_space.draw(spaces, 3, trial) for trial in range(12)]
    pairs = [(p['agent.0.algorithm.gamma'], p['agent.0.net.hid_layers']) for p in points]
    once = [(0.5, [8]), (0.5, [16]), (0.5, [8, 8]), (0.9, [8]), (0.9, [16]), (0.9, [8, 8])]  # the first key is slowest
    assert pairs == once + once


def test_without_grids_max_trial_counts_and_null_is_one():
    agent = {'algorithm': {'gamma__uniform': [0.5, 0.9]}}
    assert search_space.count_trials(make_spec(7, agent=agent)) == 7
    assert search_space.count_trials(make_spec(None, agent=agent)) == 1


@pytest.mark.parametrize(
    ('kind', 'args', 'low', 'high', 'middle'),
    [
        ('uniform', [2, 4], 2, 4, 3),
        ('loguniform', [0.01, 1], 0.01, 1, 0.1),  # as many below the geometric mean as above
        ('randint', [0, 4], 0, 3, 1.5),
        ('lograndint', [1, 1000], 1, 999, 31.6),
        ('quniform', [0, 1, 0.1], 0, 1, 0.5),
        ('qrandint', [10, 50, 10], 10, 50, 30),
        ('qloguniform', [0.001, 1, 0.001], 0.001, 1, 0.0316),
        ('qlograndint', [2, 200, 2], 2, 200, 20),
    ],
)
def test_a_range_is_drawn_from_evenly(kind, args, low, high, middle):
    values = drawn(kind, args)
    assert min(values) >= low and max(values) <= high
    # of 2000 draws half lie below the middle: five standard deviations are 112
    below = sum(value < middle for value in values) + sum(value == middle for value in values) / 2
    assert abs(below - 1000) < 112
    assert all(isinstance(value, int) for value in values) == ('int' in kind)
    if kind.startswith('q'):
        assert all(abs(value / args[2] - round(value / args[2])) < 1e-6 for value in values)


@pytest.mark.parametrize('kind', ['normal', 'randn'])
def test_a_normal_has_its_mean_and_deviation(kind):
    values = drawn(kind, [5, 2])
    mean = sum(values) / len(values)
    assert abs(mean - 5) < 5 * 2 / math.sqrt(2000)
    assert abs(math.sqrt(sum((v - mean) ** 2 for v in values) / 2000) - 2) < 5 * 2 / math.sqrt(4000)


def test_a_quantised_normal_may_leave_no_range():
    values = drawn('qnormal', [0, 1, 0.5], 200)
    assert min(values) < -0.9 < 0.9 < max(values) and all((2 * v).is_integer() for v in values)


def test_a_choice_takes_each_value():
    values = drawn('choice', [[8], [16], None], 60)
    assert all(value in values for value in ([8], [16], None))


def test_values_depend_on_seed_trial_and_key_alone():
    one = {'algorithm': {'gamma__uniform': [0.5, 0.9]}}
    two = {'net': {'polyak_coef__uniform': [0.5, 0.9]}, **one}
    first, second = (search_space.parse(make_spec(4, agent=agent)) for agent in (one, two))
    place = 'agent.0.algorithm.gamma'
    values = [search_space.draw(first, 3, trial)[place] for trial in range(4)]
    assert [search_space.draw(second, 3, trial)[place] for trial in (3, 2, 1, 0)] == values[::-1]
    assert len(set(values)) == 4
    assert search_space.draw(first, 4, 0)[place] != values[0]
    assert search_space.draw(second, 3, 0)['agent.0.net.polyak_coef'] != values[0]


def test_values_go_to_their_places_in_a_copy():
    spec = make_spec(agent={'algorithm': {'gamma__choice': [0.5]}})
    got = search_space.apply(spec, {'agent.0.algorithm.gamma': 0.5, 'agent.0.net.optim_spec.lr': 0.1, 'env.0.max_t': 9})
    assert got['agent'][0]['algorithm']['gamma'] == 0.5
    assert got['agent'][0]['net']['optim_spec'] == {'name': 'Adam', 'lr': 0.1}
    assert got['env'][0]['max_t'] == 9
    assert 'search' not in got and spec['agent'][0]['algorithm']['gamma'] == 0.99


@pytest.mark.parametrize(
    ('values', 'wanted'),
    [
        ({'agent.0.algorithm.gama': 0.5}, "key 'gama' is unknown; did you mean 'gamma'"),
        ({'agent.0.algoritm.gamma': 0.5}, "key 'algoritm' is unknown; did you mean 'algorithm'"),
        ({'agent.1.algorithm.gamma': 0.5}, 'search.agent.1: the spec has no such place'),
        ({'agent.0.algorithm.gamma.x': 0.5}, 'no dict at agent.0.algorithm.gamma'),
        ({'agent.0.algorithm.gamma': 'x'}, "agent.0.algorithm.gamma: 'x' is not of the type"),
        ({'meta.prepath': 'x'}, 'search.meta.prepath: a trial cannot have a value of its own'),
        ({'meta.search_alg': 'optuna'}, 'cannot have a value of its own'),
    ],
)
def test_a_trial_that_the_spec_does_not_allow_is_refused(values, wanted):
    spec = make_spec(agent={'algorithm': {'gamma__choice': [0.5]}})
    with pytest.raises(SpecError, match=wanted):
        search_space.check(spec, search_space.parse(spec), values)


@pytest.mark.parametrize(
    ('key', 'value', 'wanted'),
    [
        ('search_scheduler', {'grace_periods': 1}, "did you mean 'grace_period'"),
        ('search_scheduler', {'reduction_factor': 1}, 'must be above 1'),
        ('search_alg', 'optun', "did you mean 'optuna'"),
        ('search_resources', {'cpus': 1}, "did you mean 'cpu'"),
    ],
)
def test_wrong_settings_of_a_search_are_refused(key, value, wanted):
    spec = make_spec()
    spec['meta'][key] = value
    with pytest.raises(SpecError, match=wanted):
        spec_util.check(spec)


def test_settings_of_a_search_have_defaults():
    spec = make_spec()
    meta = spec_util.resolve(spec)['meta']
    assert (meta['search_alg'], meta['search_scheduler'], meta['search_resources']) == ('random', None, None)
    spec['meta'].update(search_scheduler={'grace_period': 100}, search_resources={})
    meta = spec_util.resolve(spec)['meta']
    assert meta['search_scheduler'] == {'grace_period': 100, 'reduction_factor': 4, 'brackets': 1, 'max_t': None}
    assert meta['search_resources'] == {'cpu': 1, 'gpu': 0}
