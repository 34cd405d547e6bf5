"""What all algorithms share: tensors, nets by name, state, and the count of steps that were left out."""

import math

import numpy as np
import pytest
import torch
from agent_cases import algorithm, fill, memory, net_spec, world
from gymnasium import spaces

from slm_lab.agent.algorithm.base import World
from slm_lab.lib.errors import SpecError
from slm_lab.lib.state import check_tree, first_difference, snapshot

NAMES = ['SARSA', 'VanillaDQN', 'DQN', 'DoubleDQN']
REPLAYS = {'SARSA': 'OnPolicyBatchReplay'}


def trained(name, seed=0, steps=5, **keys):
    """An algorithm of one-dimensional states after a few steps, and its memory."""
    net = net_spec('DuelingMLPNet', optim_spec={'name': 'Adam', 'lr': 0.01})
    one = algorithm(name, world(1), net, seed, **keys)
    store = memory(REPLAYS.get(name, 'Replay'))
    train(one, store, 0, steps)
    return one, store


def train(algorithm, store, start, steps):
    for i in range(start, start + steps):
        algorithm.act(np.full((1, 1), i, np.float32))
        fill(store, 1, first=i, terminated=range(0, 99, 3))
        algorithm.train(store, i + 1)
        algorithm.update(i + 1)


@pytest.mark.parametrize(
    ('name', 'nets'),
    [
        ('SARSA', ['net']),
        ('VanillaDQN', ['net']),
        ('DQN', ['net', 'target_net']),
        ('DoubleDQN', ['net', 'target_net']),
        ('Random', []),
    ],
)
def test_nets_have_the_names_of_their_files(name, nets):
    one = algorithm(name)
    assert list(one.nets) == nets and list(one.learners) == nets[:1]
    if 'target_net' in nets:
        assert first_difference(one.nets['net'].state_dict(), one.nets['target_net'].state_dict()) is None


def test_states_of_any_dtype_become_floats():
    dqn = algorithm('DQN')
    for dtype in (np.uint8, np.float32, np.float64, np.int64):
        states = np.array([[1, 250], [3, 4]], dtype=dtype)[:, ::-1]
        tensor = dqn.to_tensor(states)
        assert tensor.dtype == torch.float32 and tensor.tolist() == [[250, 1], [4, 3]]


def test_acting_gives_an_action_for_each_env_and_needs_no_gradient():
    dqn = algorithm('DQN', world(num_envs=3), explore_var_spec={'name': 'no_decay', 'start_val': 0})
    actions = dqn.act(np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32))
    assert actions.shape == (3,) and actions.dtype == np.int64
    assert all(p.grad is None for p in dqn.net.parameters())


def test_a_net_needs_states_of_one_axis():
    images = World(spaces.Box(0, 255, (4, 8, 8), np.uint8), spaces.Discrete(2), 1)
    with pytest.raises(SpecError, match=r'MLPNet takes states of one axis; the env gives \(4, 8, 8\)'):
        algorithm('DQN', images)


def test_actions_that_do_not_fit_are_refused():
    with pytest.raises(SpecError, match='DQN takes discrete actions; the env has Box'):
        algorithm('DQN', world(actions=spaces.Box(-1, 1, (1,), np.float32)))


def test_streams_are_derived_by_name_from_the_seed():
    one, same, other = (algorithm('Random', seed=seed) for seed in (1, 1, 2))
    states = np.zeros((50, 2))
    drawn = [x.act(states).tolist() for x in (one, same, other)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert one.act(states, evaluating=True).tolist() != drawn[0]


@pytest.mark.parametrize('name', NAMES)
def test_an_algorithm_goes_on_from_its_state(name):
    torch.manual_seed(0)
    one, store = trained(name)
    state = snapshot(one.state_dict())
    check_tree(state)
    other, _ = trained(name, seed=5, steps=2)
    other.load_state_dict(state)
    assert first_difference(other.state_dict(), state) is None
    other_store = memory(REPLAYS.get(name, 'Replay'), seed=3)
    other_store.load_state_dict(snapshot(store.state_dict()))
    process = torch.get_rng_state()
    train(one, store, 5, 8)
    torch.set_rng_state(process)
    train(other, other_store, 5, 8)
    assert first_difference(one.state_dict(), other.state_dict()) is None
    assert first_difference(one.state_dict(), state) is not None


def test_a_loaded_target_is_not_the_source():
    dqn, _ = trained('DQN')
    with torch.no_grad():
        dqn.net.v[0].bias.add_(1.0)
    other = algorithm('DQN', world(1), net_spec('DuelingMLPNet'))
    other.load_state_dict(snapshot(dqn.state_dict()))
    assert first_difference(other.target_net.state_dict(), dqn.target_net.state_dict()) is None
    assert first_difference(other.target_net.state_dict(), other.net.state_dict()) is not None


def test_targets_are_synced_by_name():
    dqn, _ = trained('DQN')
    with torch.no_grad():
        dqn.net.v[0].bias.add_(1.0)
    dqn.sync_targets([])
    assert first_difference(dqn.target_net.state_dict(), dqn.net.state_dict()) is not None
    dqn.sync_targets(['target_net'])
    assert first_difference(dqn.target_net.state_dict(), dqn.net.state_dict()) is None


def test_figures_of_the_learners():
    dqn, _ = trained('DQN', check=True)
    assert dqn.lr == 0.01 and dqn.grad_norm > 0
    assert math.isnan(algorithm('Random').lr) and math.isnan(algorithm('Random').grad_norm)


@pytest.mark.filterwarnings('ignore:The epoch parameter', 'ignore:Detected call of')
def test_set_frame_sets_all_that_follows_the_frame():
    net = net_spec(optim_spec={'name': 'SGD', 'lr': 1.0}, lr_scheduler_spec={'name': 'StepLR', 'step_size': 10})
    dqn = algorithm('DQN', net=net)
    dqn.set_frame(25)
    assert dqn.explore_var == 0.75 and dqn.lr == pytest.approx(0.01)


@pytest.mark.parametrize('name', NAMES)
def test_steps_that_were_left_out_are_counted_and_saved(name):
    one, store = trained(name, steps=0)
    fill(store, 5)
    arrays = store.storage.arrays if name == 'SARSA' else store.arrays
    arrays['rewards'][:5] = np.inf
    before = snapshot(one.nets['net'].state_dict())
    done = one.train(store, 5)
    assert done.opt_steps == 0 and math.isnan(done.loss)
    assert first_difference(one.nets['net'].state_dict(), before) is None
    assert one.state_dict()['skipped_steps'] == {'net': 1}
    other, _ = trained(name, steps=0)
    other.load_state_dict(snapshot(one.state_dict()))
    assert other.learners['net'].skipped_steps == 1
