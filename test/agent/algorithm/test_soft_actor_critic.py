"""SAC and CrossQ: log-probs, targets and losses by independent formulas, and what trains what."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from scipy import stats

from slm_lab.agent.algorithm import crossq, soft_actor_critic
from slm_lab.agent.algorithm.base import World
from slm_lab.agent.distribution import SquashedNormal
from slm_lab.agent.memory.batch import Batch
from slm_lab.lib.errors import SpecError
from slm_lab.spec import spec_util

DISCRETE, CONTINUOUS = spaces.Discrete(3), spaces.Box(np.float32([-2, 0]), np.float32([2, 1]))
STATES = spaces.Box(-1, 1, (4,), np.float32)
NET = {'type': 'MLPNet', 'hid_layers': [8], 'hid_layers_activation': 'relu', 'update_type': 'polyak'}


def raw_agent(name='SoftActorCritic', algorithm=(), net=(), **parts):
    algorithm = {'name': name, 'gamma': 0.9, 'training_frequency': 1, 'training_iter': 1, **dict(algorithm)}
    net = {**NET, 'polyak_coef': 0.5, **dict(net)} if name == 'SoftActorCritic' else {**NET, **dict(net)}
    if name == 'CrossQ':
        del net['update_type']
    memory = {'name': 'Replay', 'batch_size': 6, 'max_size': 50}
    return {'name': name, 'algorithm': algorithm, 'memory': memory, 'net': net, **parts}


def build(name='SoftActorCritic', action_space=DISCRETE, num_envs=2, **parts):
    torch.manual_seed(3)
    ignored = []
    spec = spec_util._resolve_agent(raw_agent(name, **parts), 'agent.0', ignored)
    cls = {'SoftActorCritic': soft_actor_critic.SoftActorCritic, 'CrossQ': crossq.CrossQ}[name]
    return cls(spec, World(STATES, action_space, num_envs), seed=5)


def batch_for(action_space, n=6):
    rng = torch.Generator().manual_seed(0)
    actions = torch.arange(n) % 3 if action_space is DISCRETE else torch.rand(n, 2, generator=rng) * 2 - 1
    return Batch(
        states=torch.randn(n, 4, generator=rng),
        actions=actions,
        rewards=torch.arange(n, dtype=torch.float32),
        next_states=torch.randn(n, 4, generator=rng),
        terminated=torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
        truncated=torch.zeros(n),
    )


class OneBatch:
    """A memory that always is due and always gives the same batch."""

    batch_size = 6

    def __init__(self, batch, due=True):
        self.batch, self.due = batch, due

    def is_due(self, frequency, start):
        return self.due

    def sample(self, frame):
        return self.batch


# --- the squashed distribution


def test_the_log_prob_of_a_squashed_action_is_that_of_the_change_of_variables():
    """log N(u; loc, scale) − log(1 − tanh²(u)), by scipy."""
    torch.manual_seed(0)
    loc, log_scale = torch.tensor([[0.3, -0.7]]).double(), torch.tensor([[-0.5, 0.2]]).double()
    action, log_prob = SquashedNormal([loc, log_scale]).rsample_with_log_prob()
    u = np.arctanh(action.numpy())
    expected = stats.norm.logpdf(u, loc.numpy(), np.exp(log_scale.numpy())) - np.log(1 - action.numpy() ** 2)
    assert log_prob.item() == pytest.approx(expected.sum(), rel=1e-9)


def test_the_density_of_squashed_actions_sums_to_one():
    u = torch.linspace(-8, 8, 20001).double().unsqueeze(1)
    pd = SquashedNormal([torch.full_like(u, 0.4), torch.full_like(u, -0.3)])
    pd.rsample = lambda: u
    actions, log_probs = pd.rsample_with_log_prob()
    assert torch.trapezoid(log_probs.exp(), actions.squeeze(1)).item() == pytest.approx(1, abs=1e-6)


def test_far_out_log_probs_are_finite():
    pd = SquashedNormal([torch.tensor([[60.0]]), torch.tensor([[2.0]])])
    action, log_prob = pd.rsample_with_log_prob()
    assert action.item() == 1.0 and torch.isfinite(log_prob).all()


def test_the_env_gets_actions_at_its_bounds_and_the_middle():
    actions = np.float32([[-1, -1], [0, 0], [1, 1]])
    np.testing.assert_allclose(SquashedNormal.to_env(actions, CONTINUOUS), [[-2, 0], [0, 0.5], [2, 1]])


# --- formulas


def test_soft_values_by_hand():
    q, probs = torch.tensor([[1.0, 3.0]]), torch.tensor([[0.25, 0.75]])
    expected = 0.25 * (1 - 0.5 * math.log(0.25)) + 0.75 * (3 - 0.5 * math.log(0.75))
    assert soft_actor_critic.soft_values(q, probs.log(), probs, 0.5).item() == pytest.approx(expected)


def test_alpha_grows_while_the_entropy_is_below_its_target_and_shrinks_above():
    for entropy, sign in ((0.2, -1), (0.9, 1)):
        log_alpha = torch.zeros((), requires_grad=True)
        soft_actor_critic.temperature_loss(log_alpha, torch.tensor([entropy]), 0.5).backward()
        assert log_alpha.grad.item() == pytest.approx(entropy - 0.5)
        assert np.sign(log_alpha.grad.item()) == sign


def test_discrete_targets_are_exact_expectations_of_the_critics_mean():
    algorithm, batch = build(), batch_for(DISCRETE)
    with torch.no_grad():
        algorithm.log_alpha.fill_(math.log(0.3))
        probs = torch.softmax(algorithm.net(batch.next_states), -1)
        q1, q2 = (net(batch.next_states) for net in algorithm.target_critics)
        value = (probs * ((q1 + q2) / 2 - 0.3 * probs.log())).sum(-1)
        expected = batch.rewards + 0.9 * (1 - batch.terminated) * value
    torch.testing.assert_close(algorithm.calc_targets(batch), expected)
    assert algorithm.calc_targets(batch)[1] == 1.0  # terminated: the reward alone


def test_continuous_targets_use_the_policys_own_sample():
    algorithm, batch = build(action_space=CONTINUOUS), batch_for(CONTINUOUS)
    torch.manual_seed(1)
    targets = algorithm.calc_targets(batch)
    torch.manual_seed(1)
    with torch.no_grad():
        actions, log_probs = SquashedNormal(algorithm.net(batch.next_states)).rsample_with_log_prob()
        qs = [net(batch.next_states, actions).squeeze(1) for net in algorithm.target_critics]
        value = torch.minimum(*qs) - log_probs  # alpha begins at 1
    torch.testing.assert_close(targets, batch.rewards + 0.9 * (1 - batch.terminated) * value)


@pytest.mark.parametrize(('space', 'expected'), [(DISCRETE, 0.6 * math.log(3)), (CONTINUOUS, -2.0)])
def test_the_target_entropy_can_be_reached(space, expected):
    assert build(action_space=space).target_entropy == pytest.approx(expected)


# --- training


def weights(algorithm):
    return {name: [p.detach().clone() for p in net.parameters()] for name, net in algorithm.nets.items()}


def changed(before, after):
    return {name for name in before if any(not torch.equal(a, b) for a, b in zip(before[name], after[name]))}  # noqa: B905


@pytest.mark.parametrize('space', [DISCRETE, CONTINUOUS], ids=['discrete', 'continuous'])
@pytest.mark.parametrize('name', ['SoftActorCritic', 'CrossQ'])
def test_every_net_and_alpha_is_trained_and_every_step_counted(name, space):
    algorithm = build(name, space, algorithm={'training_iter': 3})
    before = weights(algorithm)
    trained = algorithm.train(OneBatch(batch_for(space)), 100)
    assert changed(before, weights(algorithm)) == set(before)
    assert trained.opt_steps == 12  # two critics, the policy and alpha, three times
    assert math.isfinite(trained.loss) and math.isfinite(trained.entropy)


def test_a_delayed_policy_moves_at_every_second_batch_and_with_it_the_targets():
    algorithm, memory = build(algorithm={'policy_delay': 2}), OneBatch(batch_for(DISCRETE))
    steps, moved = [], []
    for _ in range(4):
        before = weights(algorithm)
        steps.append(algorithm.train(memory, 100).opt_steps)
        moved.append('net' in (names := changed(before, weights(algorithm))) and 'target_q1_net' in names)
        assert {'q1_net', 'q2_net'} <= names
    assert steps == [4, 2, 4, 2] and moved == [True, False, True, False]


@pytest.mark.parametrize('num_envs', [1, 4, 8])
@pytest.mark.parametrize('period', [1, 4, 5, 16])
@pytest.mark.parametrize('update_frequency', [1, 4, 7, 16, 32])
def test_the_targets_move_at_the_training_that_follows_a_multiple_of_their_frequency(
    num_envs, period, update_frequency
):
    """Trainings are due when 1 + a multiple of the period is crossed; each stands for the frames since the last one."""
    net = {'update_type': 'replace', 'update_frequency': update_frequency}
    algorithm = build(num_envs=num_envs, algorithm={'training_frequency': period}, net=net)
    memory, moved, expected, since = OneBatch(batch_for(DISCRETE)), [], [], 0
    for frame in range(num_envs, 97, num_envs):
        due = [f for f in range(frame - num_envs + 1, frame + 1) if (f - 1) % period == 0]
        if not due:
            continue
        before = weights(algorithm)
        algorithm.train(memory, frame)
        moved.append('target_q1_net' in changed(before, weights(algorithm)))
        until = frame if period <= num_envs else due[-1]
        expected.append(until // update_frequency > since // update_frequency)
        since = until
    assert moved[1:] == expected[1:] and any(moved)


@pytest.mark.parametrize('space', [DISCRETE, CONTINUOUS], ids=['discrete', 'continuous'])
def test_the_policys_step_leaves_the_critics_gradients_alone(space):
    algorithm = build(action_space=space)
    algorithm.train_policy(batch_for(space))
    assert all(p.grad is None and p.requires_grad for critic in algorithm.critics for p in critic.parameters())


@pytest.mark.parametrize('name', ['SoftActorCritic', 'CrossQ'])
@pytest.mark.parametrize('space', [DISCRETE, CONTINUOUS], ids=['discrete', 'continuous'])
def test_the_critics_find_the_value_of_a_reward_that_ends_the_episode(name, space):
    """Every transition terminates with its reward: Q of the taken action must become that reward."""
    net = {'optim_spec': {'name': 'Adam', 'lr': 0.01}, 'hid_layers': [32]}
    algorithm = build(name, space, net=net)
    batch = batch_for(space)._replace(terminated=torch.ones(6), rewards=torch.tensor([0.0, 1, 2, 0, 1, 2]))
    for _ in range(600):
        algorithm.train(OneBatch(batch), 100)
    qs, _ = algorithm.critic_values(batch)
    for q in qs:
        torch.testing.assert_close(q.detach(), batch.rewards, atol=0.1, rtol=0)


def test_the_policy_prefers_what_the_critics_prefer():
    algorithm = build(net={'optim_spec': {'name': 'Adam', 'lr': 0.01}})
    batch = batch_for(DISCRETE)._replace(terminated=torch.ones(6), rewards=torch.tensor([0.0, 5, 0, 0, 5, 0]))
    for _ in range(600):  # action 1 pays, in every state
        algorithm.train(OneBatch(batch), 100)
    probs = torch.softmax(algorithm.net(batch.states), -1)
    assert (probs[[1, 4]].argmax(-1) == 1).all()


def test_a_discrete_policy_is_drawn_to_what_the_critics_differ_about():
    """Their mean prefers action 1 (1 to 0), their minimum would shun it (−2 to 0)."""
    algorithm, batch = build(net={'optim_spec': {'name': 'Adam', 'lr': 0.01}}), batch_for(DISCRETE)
    values = [torch.tensor([0.0, 4.0, 0.0]), torch.tensor([0.0, -2.0, 0.0])]
    algorithm.critics = [lambda states, q=q: q.expand(len(states), 3) for q in values]
    with torch.no_grad():
        algorithm.log_alpha.fill_(-10.0)
        before = torch.softmax(algorithm.net(batch.states), -1)
    for _ in range(10):
        algorithm.train_policy(batch)
    after = torch.softmax(algorithm.net(batch.states), -1)
    assert (after[:, 1] > before[:, 1]).all()


# --- acting


@pytest.mark.parametrize('space', [DISCRETE, CONTINUOUS], ids=['discrete', 'continuous'])
def test_actions_are_random_until_the_warm_up_is_over_but_never_in_evaluation(space):
    algorithm = build(action_space=space, algorithm={'training_start_step': 20})
    states = np.zeros((2, 4), np.float32)
    algorithm.policy = lambda states, actor, explore_var, rng: 'by the policy'
    algorithm.update(18)
    assert not isinstance(algorithm.act(states), str) and algorithm.act(states, evaluating=True) == 'by the policy'
    algorithm.update(20)
    assert algorithm.act(states) == 'by the policy'


def test_continuous_random_actions_fill_the_squashed_range():
    algorithm = build(action_space=CONTINUOUS)
    actions = algorithm.random_actions(4000, np.random.default_rng(0))
    assert actions.dtype == np.float32 and actions.shape == (4000, 2)
    assert actions.min() < -0.99 and actions.max() > 0.99 and abs(actions.mean()) < 0.03


# --- CrossQ


def test_crossq_has_no_target_and_normalises_both_halves_together():
    critic = {**NET, 'batch_renorm': True}
    del critic['update_type']
    algorithm = build('CrossQ', critic_net=critic)
    assert set(algorithm.nets) == {'net', 'q1_net', 'q2_net', 'alpha'}
    batch = batch_for(DISCRETE)
    algorithm.critics[0].train()
    with torch.no_grad():
        both = algorithm.critics[0](torch.cat([batch.states, batch.next_states]))
    algorithm.critics[0].eval()
    (q1, _), (next_q1, _) = algorithm.joint_qs(batch, None)
    torch.testing.assert_close(torch.cat([q1, next_q1]), both)
    assert q1.requires_grad and not next_q1.requires_grad
    assert not any(critic.training for critic in algorithm.critics)  # the policy sees running statistics


def test_crossq_targets_are_expectations_of_the_critics_mean():
    algorithm, batch = build('CrossQ'), batch_for(DISCRETE)
    with torch.no_grad():
        probs = torch.softmax(algorithm.net(batch.next_states), -1)
        q1, q2 = (net(batch.next_states) for net in algorithm.critics)
        value = (probs * ((q1 + q2) / 2 - probs.log())).sum(-1)  # alpha begins at 1
    targets = algorithm.critic_values(batch)[1]
    torch.testing.assert_close(targets, batch.rewards + 0.9 * (1 - batch.terminated) * value)


# --- errors


@pytest.mark.parametrize(
    ('space', 'parts', 'said'),
    [
        (DISCRETE, {'algorithm': {'action_pdtype': 'Argmax'}}, 'Categorical or GumbelSoftmax'),
        (CONTINUOUS, {'algorithm': {'action_pdtype': 'Beta'}}, 'Normal or MultivariateNormal'),
        (spaces.MultiBinary(2), {}, 'MultiBinary'),
        (spaces.Box(-np.inf, np.inf, (2,), np.float32), {}, 'needs actions with bounds'),
        (DISCRETE, {'algorithm': {'target_entropy': 2.0}}, 'cannot be reached by 3'),
        (
            CONTINUOUS,
            {'algorithm': {'target_entropy': 2 * math.log(2)}},
            r'cannot be reached by 2 actions in \(−1, 1\)',
        ),
        (DISCRETE, {'algorithm': {'target_entropy': 'max'}}, "neither 'auto' nor a number"),
        (DISCRETE, {'net': {'polyak_coef': 0.0}}, 'would never move'),
    ],
    ids=['argmax', 'beta', 'multi-binary', 'no bounds', 'entropy', 'continuous entropy', 'word', 'polyak 0'],
)
def test_what_cannot_work_is_refused(space, parts, said):
    with pytest.raises(SpecError, match=said):
        build(action_space=space, **parts)
