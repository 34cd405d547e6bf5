"""The DQN family: targets by hand, what is counted, priorities, and weights."""

import numpy as np
import pytest
import torch
from agent_cases import algorithm, fill, memory, net_spec, world

from slm_lab.agent.algorithm.dqn import q_loss, q_targets
from slm_lab.agent.memory.batch import Batch
from slm_lab.lib.state import first_difference, snapshot

GAMMA = 0.5


def table_net(algorithm, name, table):
    """Makes a linear net on one-hot states the table Q[s][a]."""
    net = algorithm.nets[name]
    with torch.no_grad():
        net.model_tail[0].weight.copy_(torch.tensor(table).T)
        net.model_tail[0].bias.zero_()


NET = [[1.0, 3.0, 2.0], [4.0, 0.0, 5.0]]
TARGET = [[10.0, 20.0, 30.0], [60.0, 50.0, 40.0]]


def tabular(name, **keys):
    one = algorithm(name, world(2, 3), net_spec(hid_layers=[], **keys.pop('net', {})), gamma=GAMMA, **keys)
    table_net(one, 'net', NET)
    if 'target_net' in one.nets:
        table_net(one, 'target_net', TARGET)
    return one


def batch():
    """Four transitions to state 1, 0, 1, 1: going on, truncated, terminated, both."""
    eye = torch.eye(2)
    return Batch(
        states=eye[[0, 1, 0, 1]],
        actions=torch.tensor([0, 1, 2, 0]),
        rewards=torch.tensor([1.0, 2.0, 3.0, 4.0]),
        next_states=eye[[1, 0, 1, 1]],
        terminated=torch.tensor([0.0, 0.0, 1.0, 1.0]),
        truncated=torch.tensor([0.0, 1.0, 0.0, 1.0]),
    )


def test_targets_bootstrap_unless_terminated():
    targets = q_targets(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 1.0]), torch.tensor([8.0, 8.0]), 0.25)
    assert targets.tolist() == [3.0, 1.0]


@pytest.mark.parametrize(
    ('name', 'next_q'),
    [
        ('VanillaDQN', (5.0, 3.0)),  # the net's largest in states 1 and 0
        ('DQN', (60.0, 30.0)),  # the target net's largest
        (
            'DoubleDQN',
            (40.0, 20.0),
        ),  # the target net's value of the net's best: action 2 in state 1, action 1 in state 0
    ],
)
def test_targets_by_hand(name, next_q):
    """A truncated episode goes on beyond its last state; a terminated one does not."""
    one = tabular(name)
    assert one.calc_targets(batch()).tolist() == [1 + GAMMA * next_q[0], 2 + GAMMA * next_q[1], 3.0, 4.0]
    assert not one.calc_targets(batch()).requires_grad


def test_the_loss_by_hand():
    """Q(s, a) = 1, 0, 2, 4 against targets 2, 0, 5, 0: squares 1, 0, 9, 16."""
    one, b = tabular('DQN'), batch()
    targets = torch.tensor([2.0, 0.0, 5.0, 0.0])
    loss, q = q_loss(one.net, one.loss_fn, b.states, b.actions, targets)
    assert loss.item() == (1 + 0 + 9 + 16) / 4 and q.tolist() == [1, 0, 2, 4]
    assert loss.requires_grad
    weights = torch.tensor([1.0, 1.0, 0.5, 0.25])
    loss, q = q_loss(one.net, one.loss_fn, b.states, b.actions, targets, weights)
    assert loss.item() == (1 + 0 + 4.5 + 4) / 4 and q.tolist() == [1, 0, 2, 4]


def test_the_loss_is_the_spec_s():
    one, b = tabular('DQN', net={'loss_spec': {'name': 'SmoothL1Loss'}}), batch()
    loss, _ = q_loss(one.net, one.loss_fn, b.states, b.actions, torch.tensor([1.5, 0.0, 5.0, 0.0]))
    assert loss.item() == (0.125 + 0 + 2.5 + 3.5) / 4


def test_a_step_moves_the_taken_actions_alone():
    one, b = tabular('VanillaDQN', net={'optim_spec': {'name': 'SGD', 'lr': 1.0}}), batch()
    loss, _ = q_loss(one.net, one.loss_fn, b.states, b.actions, torch.tensor([2.0, 0.0, 2.0, 4.0]))
    one.learners['net'].step(loss)  # only Q(0, 0) is off, by 1: gradient 2 · −1 / 4
    assert one.net.model_tail[0].weight.T.tolist() == [[1.5, 3.0, 2.0], [4.0, 0.0, 5.0]]


# --- training


def trained(name, steps=1, memory_name='Replay', memory_keys=None, torch_seed=0, **keys):
    torch.manual_seed(torch_seed)
    one = algorithm(name, world(1), net_spec(optim_spec={'name': 'Adam', 'lr': 0.01}), training_start_step=0, **keys)
    replay = memory(memory_name, **(memory_keys or {}))
    fill(replay, 10, terminated=[3, 6], truncated=[8])
    return one, replay, [one.train(replay, 10) for _ in range(steps)]


@pytest.mark.parametrize('name', ['VanillaDQN', 'DQN', 'DoubleDQN'])
@pytest.mark.parametrize(('training_iter', 'training_batch_iter'), [(1, 1), (3, 1), (1, 4), (3, 2)])
def test_every_optimizer_step_is_counted(name, training_iter, training_batch_iter):
    one, _, (done,) = trained(name, training_iter=training_iter, training_batch_iter=training_batch_iter)
    assert done.opt_steps == training_iter * training_batch_iter
    assert one.learners['net'].optim.state[next(one.net.parameters())]['step'] == done.opt_steps
    assert np.isfinite(done.loss)


def test_the_reported_loss_is_the_mean_of_all_steps(monkeypatch):
    one, replay, _ = trained('DQN', steps=0, training_iter=2, training_batch_iter=3)
    losses, step = [], one.learners['net'].step
    monkeypatch.setattr(one.learners['net'], 'step', lambda loss: losses.append(step(loss)) or losses[-1])
    assert one.train(replay, 10).loss == pytest.approx(np.mean(losses)) and len(set(losses)) == 6


@pytest.mark.parametrize('name', ['VanillaDQN', 'DQN', 'DoubleDQN'])
def test_targets_are_computed_again_only_where_steps_change_them(name, monkeypatch):
    one, replay, _ = trained(name, steps=0, training_iter=2, training_batch_iter=4)
    calls, calc = [], one.calc_targets
    monkeypatch.setattr(one, 'calc_targets', lambda batch: calls.append(1) or calc(batch))
    one.train(replay, 10)
    assert len(calls) == (2 if name == 'DQN' else 8)


def test_kept_targets_are_those_that_would_be_computed_again(monkeypatch):
    kept, _, a = trained('DQN', steps=3, training_iter=2, training_batch_iter=4)
    monkeypatch.setattr(type(kept), 'TARGETS_FOLLOW_NET', True)
    again, _, b = trained('DQN', steps=3, training_iter=2, training_batch_iter=4)
    assert a == b
    assert first_difference(kept.state_dict(), again.state_dict()) is None


def test_training_waits_for_its_start_and_its_frequency():
    dqn = algorithm('DQN', world(1), training_frequency=4, training_start_step=8)
    by_batch = algorithm('DQN', world(1), training_frequency=4)
    replay, trained_at, waits_for_a_batch = memory('Replay', max_size=100), [], []
    for i in range(1, 21):
        fill(replay, 1, first=i)
        trained_at += [i] * dqn.train(replay, i).opt_steps
        waits_for_a_batch += [i] * by_batch.train(replay, i).opt_steps
    assert trained_at == [9, 13, 17]
    assert waits_for_a_batch == [5, 9, 13, 17]  # more than batch_size = 4 transitions


def test_the_target_net_follows_by_frame_whether_or_not_training_has_begun():
    dqn = algorithm('DQN', world(1, num_envs=4), net_spec(update_frequency=10))
    followed = []
    for frame in range(4, 41, 4):
        with torch.no_grad():
            dqn.net.model_tail[0].bias.fill_(frame)
        dqn.update(frame)
        followed.append(dqn.target_net.model_tail[0].bias[0].item())
    assert followed == [pytest.approx(followed[0]), followed[0], 12, 12, 20, 20, 20, 32, 32, 40]
    assert abs(followed[0]) < 1  # as it was made


# --- prioritized replay


def test_priorities_are_the_errors_of_the_last_step_on_the_batch(monkeypatch):
    keys = {'alpha': 1.0, 'epsilon': 0.5}
    one, replay, _ = trained('DQN', 0, 'PrioritizedReplay', keys, training_batch_iter=2)
    errors = []
    update = replay.update_priorities
    monkeypatch.setattr(replay, 'update_priorities', lambda e: errors.append(e.copy()) or update(e))
    one.train(replay, 10)
    assert len(errors) == 2 and not np.array_equal(errors[0], errors[1])
    slots = replay.batch_slots
    b = replay._take(slots)
    with torch.no_grad():  # what the first of the two steps began with, computed apart
        one_again, _, _ = trained('DQN', 0, 'PrioritizedReplay', keys, training_batch_iter=2)
        y = one_again.calc_targets(b)
        q = one_again.net(b.states).gather(1, b.actions.unsqueeze(1)).squeeze(1)
    assert errors[0] == pytest.approx((y - q).abs().numpy())
    last = dict(zip(slots, errors[1] + 0.5, strict=True))
    assert [replay.tree.leaves[s] for s in last] == pytest.approx(list(last.values()))


def test_importance_weights_enter_the_loss(monkeypatch):
    """With one optimizer step the reported loss is the mean of weight · squared error."""
    beta = {'name': 'no_decay', 'start_val': 1.0}
    one, replay, _ = trained('DQN', 0, 'PrioritizedReplay', {'beta_spec': beta})
    replay.tree.set_all(np.arange(1.0, 11.0))
    seen = []
    monkeypatch.setattr(replay, 'update_priorities', seen.append)
    done = one.train(replay, 10)
    priorities = replay.tree.leaves[replay.batch_slots]
    weights = priorities.min() / priorities
    assert weights.min() < 1 and done.loss == pytest.approx((weights * seen[0] ** 2).mean())


def test_a_step_that_is_left_out_sets_no_priorities():
    one, replay, _ = trained('DQN', 0, 'PrioritizedReplay', training_iter=3, training_batch_iter=4)
    replay.arrays['rewards'][:] = np.nan
    before = snapshot([replay.tree.leaves, one.net.state_dict()])
    done = one.train(replay, 10)
    assert done.opt_steps == 0 and np.isnan(done.loss)
    assert first_difference([replay.tree.leaves, one.net.state_dict()], before) is None
    assert one.learners['net'].skipped_steps == 3  # one of each batch: it would stay as it is


def test_only_steps_that_were_taken_are_counted():
    one, replay, _ = trained('DQN', 0, training_iter=40)
    replay.arrays['rewards'][0] = np.inf  # in about a third of the batches of 4 out of 10
    done = one.train(replay, 10)
    skipped = one.learners['net'].skipped_steps
    assert 0 < skipped < 40 and done.opt_steps == 40 - skipped and np.isfinite(done.loss)
    assert all(torch.isfinite(p).all() for p in one.net.parameters())
