"""Action distributions against their formulas."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from scipy import stats

from slm_lab.agent import distribution
from slm_lab.agent.distribution import Argmax, Beta, Categorical, MultiCategorical, Normal, greedy
from slm_lab.lib.errors import SpecError


def box(*shape):
    return spaces.Box(-1, 1, shape, np.float32)


def test_categorical_by_its_formulas():
    logits = torch.tensor([[0.0, math.log(2), math.log(5)], [1.0, 1.0, 1.0]])
    pd = Categorical(logits)
    assert pd.probs[0].tolist() == pytest.approx([1 / 8, 2 / 8, 5 / 8])
    assert pd.log_prob(torch.tensor([2, 0])).tolist() == pytest.approx([math.log(5 / 8), -math.log(3)])
    entropy = -sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8))
    assert pd.entropy().tolist() == pytest.approx([entropy, math.log(3)])


def test_categorical_draws_by_probability():
    torch.manual_seed(0)
    drawn = Categorical(torch.tensor([1.0, 2.0, 5.0]).log().expand(8000, 3)).sample()
    counts = torch.bincount(drawn, minlength=3)
    expected = torch.tensor([1000.0, 2000.0, 5000.0])
    assert ((counts - expected).abs() < 4 * (expected * (1 - expected / 8000)).sqrt()).all()  # four standard deviations


def test_argmax_takes_the_largest():
    pd = Argmax(torch.tensor([[1.1, 10.0, 2.1], [3.0, 1.0, 2.0]]))
    assert pd.probs.tolist() == [[0, 1, 0], [1, 0, 0]]
    assert all(pd.sample().tolist() == [1, 0] for _ in range(50))


def test_argmax_shares_ties_equally():
    torch.manual_seed(0)
    pd = Argmax(torch.tensor([2.0, 5.0, 5.0, -1.0]).expand(4000, 4))
    assert pd.probs[0].tolist() == [0, 0.5, 0.5, 0]
    counts = torch.bincount(pd.sample(), minlength=4).tolist()
    assert counts[0] == counts[3] == 0 and abs(counts[1] - 2000) < 4 * math.sqrt(1000)


@pytest.mark.parametrize('logits', [[[1.0, 3.0, 2.0]], [[1.0, 3.0, 2.0], [-1.0, -2.0, -3.0]]])
def test_greedy_is_argmax_and_draws_nothing_without_a_tie(logits):
    before = torch.get_rng_state()
    assert greedy(torch.tensor(logits)).tolist() == torch.tensor(logits).argmax(dim=1).tolist()
    assert torch.equal(torch.get_rng_state(), before)


def test_greedy_draws_among_ties_in_any_row():
    torch.manual_seed(0)
    drawn = np.stack([greedy(torch.tensor([[1.0, 3.0, 2.0], [4.0, 0.0, 4.0]])) for _ in range(400)])
    assert (drawn[:, 0] == 1).all()
    counts = np.bincount(drawn[:, 1], minlength=3).tolist()
    assert counts[1] == 0 and abs(counts[0] - 200) < 4 * 10


@pytest.mark.parametrize(
    ('space', 'kind'),
    [
        (box(1), 'continuous'),
        (box(3), 'multi_continuous'),
        (spaces.Discrete(4), 'discrete'),
        (spaces.MultiDiscrete([2, 3]), 'multi_discrete'),
        (spaces.MultiBinary(3), 'multi_binary'),
    ],
)
def test_the_type_of_an_action_space(space, kind):
    assert distribution.action_type(space) == kind


@pytest.mark.parametrize('space', [box(2, 2), spaces.Text(3)])
def test_an_action_space_that_is_not_supported_is_named(space):
    with pytest.raises(SpecError, match='action space .* support'):
        distribution.action_type(space)


@pytest.mark.parametrize('name', [None, 'default', 'Categorical'])
def test_the_first_that_fits_is_the_default(name):
    assert distribution.pick(name, spaces.Discrete(2), 'here') is Categorical
    assert distribution.pick('Argmax', spaces.Discrete(2), 'here') is Argmax


def test_a_distribution_that_does_not_fit_is_refused():
    with pytest.raises(SpecError) as e:
        distribution.pick('argmax', spaces.Discrete(2), 'here')
    assert str(e.value) == (
        "here: 'argmax' does not fit discrete actions; did you mean 'Argmax'? Known: Argmax, Categorical, GumbelSoftmax"
    )
    with pytest.raises(SpecError, match="'Categorical' does not fit continuous actions"):
        distribution.pick('Categorical', box(1), 'here')


def normal_log_density(x, mean, std):
    return -0.5 * ((x - mean) / std) ** 2 - math.log(std) - 0.5 * math.log(2 * math.pi)


def test_normal_sums_over_components():
    pd = Normal([torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, math.log(2)]])])
    expected = normal_log_density(0.5, 0, 1) + normal_log_density(2.0, 1, 2)
    assert pd.log_prob(torch.tensor([[0.5, 2.0]])).tolist() == pytest.approx([expected])
    entropy = sum(0.5 * math.log(2 * math.pi * math.e * std**2) for std in (1, 2))
    assert pd.entropy().tolist() == pytest.approx([entropy])


def test_one_component_comes_from_one_head_of_two():
    one, two = Normal(torch.tensor([[0.3, -1.0]])), Normal([torch.tensor([[0.3]]), torch.tensor([[-1.0]])])
    action = torch.tensor([[0.7]])
    assert one.log_prob(action).tolist() == two.log_prob(action).tolist()
    assert one.log_prob(action).tolist() == pytest.approx([normal_log_density(0.7, 0.3, math.exp(-1))])


@pytest.mark.parametrize(
    ('name', 'reference'),
    [
        ('LogNormal', lambda loc, scale: stats.lognorm(s=scale, scale=math.exp(loc))),
        ('Gumbel', lambda loc, scale: stats.gumbel_r(loc, scale)),
    ],
)
def test_log_probs_and_entropies_are_scipys(name, reference):
    pd = distribution.pick(name, box(2), 'here')([torch.tensor([[0.2, -0.4]]), torch.tensor([[0.1, -0.5]])])
    frozen = [reference(loc, math.exp(log)) for loc, log in ((0.2, 0.1), (-0.4, -0.5))]
    action = [0.6, 0.9]
    expected = sum(f.logpdf(a) for f, a in zip(frozen, action, strict=True))
    assert pd.log_prob(torch.tensor([action])).tolist() == pytest.approx([expected], rel=1e-5)
    assert pd.entropy().tolist() == pytest.approx([sum(f.entropy() for f in frozen)], rel=1e-5)


def test_beta_has_one_mode_and_is_stretched_to_the_bounds():
    pd = distribution.pick('Beta', box(1), 'here')(torch.tensor([[0.0, 1.0]]))
    alpha, beta = 1 + math.log(2), 1 + math.log(1 + math.e)
    assert pd.log_prob(torch.tensor([[0.3]])).tolist() == pytest.approx([stats.beta(alpha, beta).logpdf(0.3)], rel=1e-5)
    assert torch.isfinite(pd.log_prob(torch.tensor([[0.0]]))).all()  # float32 rounds draws to the ends
    space = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))
    assert Beta.to_env(np.array([[0.0, 0.25], [1.0, 1.0]]), space).tolist() == [[-2, 0.25], [2, 1]]
    with pytest.raises(SpecError, match='Beta needs actions with bounds'):
        Beta.to_env(np.zeros((1, 1)), spaces.Box(-np.inf, np.inf, (1,)))


def test_normal_actions_are_cut_at_the_bounds():
    assert Normal.to_env(np.array([[-3.0], [0.5]]), box(1)).tolist() == [[-1], [0.5]]


def test_multi_categorical_sums_and_stacks_last():
    sure = [torch.tensor([[9e9, 0.0]]), torch.tensor([[0.0, 9e9, 0.0]]), torch.tensor([[0.0, 0.0, 9e9]])]
    assert MultiCategorical(sure).sample().tolist() == [[0, 1, 2]]
    pd = MultiCategorical([torch.tensor([[0.0, math.log(3)]]), torch.tensor([[0.0, 0.0]])])
    assert pd.log_prob(torch.tensor([[1, 0]])).tolist() == pytest.approx([math.log(3 / 4) + math.log(1 / 2)])
    assert pd.entropy().tolist() == pytest.approx([-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) + math.log(2)])
    assert isinstance(pd.probs, list) and MultiCategorical.out_dim(spaces.MultiDiscrete([2, 3])) == [2, 3]


def test_bernoulli_sums_over_components():
    pd = distribution.pick(None, spaces.MultiBinary(2), 'here')(torch.tensor([[0.0, math.log(3)]]))
    assert pd.log_prob(torch.tensor([[1.0, 0.0]])).tolist() == pytest.approx([math.log(1 / 2) + math.log(1 / 4)])


@pytest.mark.parametrize(
    ('space', 'out_dim'),
    [
        (spaces.Discrete(4), 4),
        (spaces.MultiBinary(3), 3),
        (spaces.MultiDiscrete([2, 5]), [2, 5]),
        (box(1), 2),
        (box(3), [3, 3]),
    ],
)
def test_heads_are_as_wide_as_the_default_distribution_needs(space, out_dim):
    assert distribution.pick('default', space, 'here').out_dim(space) == out_dim


def test_values_that_are_no_numbers_are_named():
    with pytest.raises(FloatingPointError, match='the net gives no numbers'):
        greedy(torch.tensor([[float('nan'), 1.0]]))


@pytest.mark.parametrize('name', ['SquashedNormal', 'Beta'])
def test_whole_numbers_between_bounds_have_equal_shares(name):
    """Of 0 to 3: a quarter of the way each, the very end included."""
    space = spaces.Box(0, 3, (1,), np.int32)
    fractions = np.array([[0.0], [0.24], [0.26], [0.49], [0.51], [0.76], [1.0]], np.float32)
    actions = fractions * 2 - 1 if name == 'SquashedNormal' else fractions
    given = getattr(distribution, name).to_env(actions, space)
    assert given.dtype == np.int32 and given[:, 0].tolist() == [0, 0, 1, 1, 2, 3, 3]


def test_whole_numbers_are_the_nearest():
    space = spaces.Box(-2, 3, (2,), np.int64)
    assert Normal.to_env(np.array([[-0.6, 2.9], [0.4, 9.0]]), space).tolist() == [[-1, 3], [0, 3]]


@pytest.mark.parametrize(
    'space',
    [
        spaces.MultiDiscrete([[2, 3], [2, 3]]),
        spaces.MultiBinary([2, 3]),
        spaces.Box(-1, 1, (2, 2)),
        spaces.Box(-1, 1, ()),
    ],
    ids=lambda space: f'{type(space).__name__}{len(space.shape)}',
)
def test_actions_of_more_or_fewer_axes_than_one_are_refused(space):
    with pytest.raises(SpecError, match='only those of one axis are supported'):
        distribution.action_type(space)
