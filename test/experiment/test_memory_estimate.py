"""What a run is told to take, by figures worked out by hand; and that what cannot fit never starts."""

import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from lab_process import SPEC_NAME, hashes, make_spec

from run_lab import main
from slm_lab.agent.memory.batch import Layout
from slm_lab.agent.memory.on_policy import OnPolicyBatchReplay
from slm_lab.agent.memory.prioritized import SumTree
from slm_lab.agent.memory.replay import Replay
from slm_lab.experiment import memory_estimate
from slm_lab.experiment.memory_estimate import (
    PROCESS,
    SHARED,
    WORKER,
    Estimate,
    NotEnoughMemory,
    check,
    estimate,
    on_policy_bytes,
    refusal,
    transition_bytes,
    tree_bytes,
)
from slm_lab.lib.machine import GB, MB, Available
from slm_lab.spec import spec_util

# CartPole: two states of 4 floats, an action of 8 bytes, reward, terminated and truncated of 4
CARTPOLE_ROW = 2 * 4 * 4 + 8 + 3 * 4
COLUMNS = 8 + 3 * 4


class _Screen(gymnasium.Env):
    """Frames of 84 x 84, as those of Atari games are once they are preprocessed."""

    observation_space = spaces.Box(0, 255, (1, 84, 84), np.uint8)
    action_space = spaces.Discrete(6)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros((1, 84, 84), np.uint8), {}


@pytest.fixture
def screen():
    gymnasium.register('Screen-v0', _Screen)
    yield 'Screen-v0'
    del gymnasium.registry['Screen-v0']


def prepared(spec):
    return spec_util.prepare({'name': SPEC_NAME, **spec})


def of_atari_size(env_name, max_frame=10_000_000, **memory):
    spec = make_spec(max_frame=max_frame)
    spec['env'][0] |= {'name': env_name, 'frame_op': 'concat', 'frame_op_len': 4}
    spec['agent'][0]['memory'] = {'name': 'Replay', 'batch_size': 32, 'max_size': 1_000_000, 'use_cer': False, **memory}
    spec['agent'][0]['net'] |= {
        'type': 'ConvNet',
        'conv_hid_layers': [[4, 8, 8, 0, 1]],
        'fc_hid_layers': [8],
        'hid_layers_activation': 'relu',
    }
    spec['agent'][0]['net'].pop('hid_layers')
    return prepared(spec)


# --- what is needed


def test_a_replay_of_cartpole():
    needed = estimate(spec_util.get('demo.json', 'dqn_cartpole'))
    assert needed.parts['replay of 10,000 transitions'] == 10_000 * CARTPOLE_ROW == 520_000
    assert needed.parts['processes'] == SHARED + PROCESS
    # 4 -> 64 -> 2, and a target net
    weights = 4 * ((4 + 1) * 64 + (64 + 1) * 2)
    assert needed.parts['nets and optimizers'] == 7 * weights + 2 * weights
    assert needed.total == sum(needed.parts.values())
    assert needed.mapped == 520_000 + 9 * weights


def test_slots_that_the_run_never_reaches_are_reserved_but_not_counted():
    spec = spec_util.get('demo.json', 'dqn_cartpole')
    spec['env'][0]['max_frame'] = 600
    needed = estimate(spec)
    assert needed.parts['replay of 600 transitions'] == 600 * CARTPOLE_ROW
    assert needed.mapped > 10_000 * CARTPOLE_ROW


def test_workers_that_divide_max_frame_keep_their_own_share():
    spec = spec_util.get('demo.json', 'dqn_cartpole')
    spec['env'][0]['max_frame'] = 600
    spec['meta'] |= {'distributed': 'synced', 'max_session': 3}
    assert estimate(spec, 3).parts['replay of 200 transitions'] == 3 * 200 * CARTPOLE_ROW


def test_sessions_that_run_together_and_their_parent():
    spec = spec_util.get('demo.json', 'dqn_cartpole')
    one, three = estimate(spec), estimate(spec, 3)
    assert three.parts['processes'] == SHARED + 4 * PROCESS
    assert three.total - three.parts['processes'] == 3 * (one.total - one.parts['processes'])
    assert three.mapped == one.mapped  # a limit of address space holds for each process by itself
    assert 'for 3 sessions at a time' in str(three)
    assert any('max_session' in change for change in three.changes)
    assert not any('max_session' in change for change in one.changes)


def test_a_million_stacks_of_4_frames_take_little_more_than_a_million_frames(screen):
    needed = estimate(of_atari_size(screen))
    replay = needed.parts['replay of 1,000,000 transitions']
    assert 1_000_000 * (84 * 84 + COLUMNS) <= replay <= 1.05 * 1_000_000 * 84 * 84
    # as the memory does
    layout = Layout.of(spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(6), frames_per_state=4)
    memory = Replay({'batch_size': 1, 'max_size': 997, 'use_cer': False}, layout, 1, None)
    stored = memory.transitions.arrays.values()
    assert replay * 1000 == 1_000_000 * sum(a.nbytes for a in stored)  # 997, and 3 for the first stack's older frames


def test_states_that_are_no_stacks_are_counted_twice(screen):
    spec = of_atari_size(screen)
    spec['env'][0] |= {'frame_op': None, 'frame_op_len': None}
    assert estimate(spec).parts['replay of 1,000,000 transitions'] == 1_000_000 * (2 * 84 * 84 + COLUMNS)


def test_priorities_take_the_size_of_the_tree():
    for capacity in (1, 2, 3, 1000, 1024, 1025):
        assert tree_bytes(capacity) == SumTree(capacity).nodes.nbytes
    spec = make_spec(max_frame=10_000)
    spec['agent'][0]['memory'] |= {'name': 'PrioritizedReplay', 'alpha': 0.6, 'epsilon': 1e-4, 'max_size': 1025}
    assert estimate(prepared(spec)).parts['priorities'] == 2 * 2048 * 8


def test_an_on_policy_memory_grows_by_doubling_and_its_batch_is_a_copy():
    spec = spec_util.get('benchmark/ppo/ppo_classic.json', 'ppo_cartpole_v1')
    num_envs = spec['env'][0]['num_envs']
    spec['agent'][0]['algorithm']['time_horizon'] = 33
    assert estimate(spec).parts['on-policy batch'] == num_envs * (64 + 33) * CARTPOLE_ROW
    # as the memory does
    layout = Layout.of(spaces.Box(0, 255, (4,), np.uint8), spaces.Discrete(2))
    memory = OnPolicyBatchReplay({}, layout, 2, None)
    zeros = np.zeros((2, 4), np.uint8), np.zeros(2, int), np.zeros(2), np.zeros((2, 4), np.uint8), *np.zeros((2, 2))
    for _ in range(33):
        memory.add(*zeros)
    stored = sum(a.nbytes for a in memory.storage.arrays.values())
    taken = sum(tensor.nbytes for tensor in memory.sample(0) if tensor is not None)
    floats = 2 * 33 * 2 * 4 * 4
    assert on_policy_bytes(layout, 33, 2) == stored + taken + floats


def test_whole_episodes_are_counted_up_to_the_time_limit():
    """CartPole-v0 ends at 200 steps; the memory hands over 1 episode."""
    spec = spec_util.get('benchmark/reinforce/reinforce_cartpole.json', 'reinforce_cartpole')
    spec['env'][0]['name'], spec['env'][0]['max_frame'] = 'CartPole-v0', 100_000
    assert spec['agent'][0]['algorithm']['training_frequency'] == 1
    assert estimate(spec).parts['on-policy batch'] == (256 + 200) * CARTPOLE_ROW


def test_the_replay_of_self_imitation_is_counted_beside_the_batch():
    spec = spec_util.get('experimental/sil/sil_cartpole.json', 'sil_shared_cartpole')
    spec['agent'][0]['memory']['max_size'], spec['env'][0]['max_frame'] = 10**13, 10**13  # far more than exists
    needed = estimate(spec)
    assert needed.parts['replay of 10,000,000,000,000 transitions'] == 10**13 * CARTPOLE_ROW
    assert needed.parts['on-policy batch'] > 0


def test_a_transition_is_as_large_as_the_memory_makes_it():
    layout = Layout.of(spaces.Box(-1, 1, (3,), np.float64), spaces.Box(-1, 1, (2,), np.float32))
    arrays = layout.allocate((7,))
    assert transition_bytes(layout) * 7 == sum(a.nbytes for a in arrays.values())
    assert transition_bytes(layout) == 2 * 3 * 4 + 2 * 4 + 3 * 4


def test_async_workers_of_training_and_evaluation(monkeypatch):
    monkeypatch.setattr(memory_estimate, 'count_cpus', lambda: 8)
    spec = spec_util.get('benchmark/ppo/ppo_classic.json', 'ppo_cartpole_v1')
    spec['env'][0] |= {'num_envs': 4, 'vector': 'async'}
    spec['meta']['rigorous_eval'] = 16
    assert estimate(spec).parts['env workers'] == (4 + 8) * WORKER
    (two,) = (n for name, n in estimate(spec, 2).parts.items() if name.startswith('env workers'))
    assert two == 2 * (4 + 4) * WORKER
    spec['env'][0]['vector'] = 'sync'
    assert 'env workers' not in estimate(spec).parts


# --- the two together

NEEDED = Estimate(
    28 * GB, {'processes': GB, 'replay of 1,000,000 transitions': 27 * GB}, 2, 14 * GB, ('memory.max_size',)
)


def test_what_fits_is_one_line_and_what_does_not_an_error_with_the_figures():
    line = check(NEEDED, there=Available(28 * GB))
    assert line.startswith('Memory: about 28 GB for 2 sessions at a time (processes 1 GB, replay of 1,000,000 ')
    assert line.endswith('; 28 GB are there on this machine')
    with pytest.raises(NotEnoughMemory) as error:
        check(NEEDED, there=Available(28 * GB - 1))
    assert error.value.exit_status == 2
    text = str(error.value)
    assert '\n' not in text
    for wanted in ('about 28 GB', 'processes 1 GB', '27 GB', '28 GB are there', 'memory.max_size', '--force'):
        assert wanted in text


def test_force_lets_it_through_and_says_so():
    assert 'cannot fit, and is tried because of --force' in check(NEEDED, True, Available(GB))
    assert '--force' not in check(NEEDED, True, Available(100 * GB))
    assert '--force' not in str(refusal(NEEDED, Available(GB), forced=True))


def test_the_limit_of_a_process_holds_for_one_session():
    check(NEEDED, there=Available(100 * GB, address_space=14 * GB))
    with pytest.raises(NotEnoughMemory, match='a session reserves 14 GB of address space .*may map 13 GB more'):
        check(NEEDED, there=Available(100 * GB, address_space=13 * GB))


# --- by the command


@pytest.fixture
def run(tmp_path, command, monkeypatch, capsys):
    """Runs the lab's command in a folder of its own. Returns: (exit status, stdout, stderr)"""
    monkeypatch.chdir(tmp_path)

    def run(*args, **changes):
        Path('spec.json').write_text(json.dumps({SPEC_NAME: make_spec(**{'max_frame': 60, **changes})}))
        status = main(['spec.json', SPEC_NAME, *args])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_a_new_run_that_cannot_fit_writes_nothing(run, monkeypatch, tmp_path):
    monkeypatch.setattr(memory_estimate, 'available', lambda: Available(100 * MB))
    for mode in ('train', 'dev'):
        status, out, err = run(mode)
        assert status == 2
        assert err.startswith('error: not enough memory: it takes about ')
        assert err.count('\n') == 1
        assert '100 MB are there' in err
        assert out == ''
        assert not (tmp_path / 'data').exists()


def test_a_run_says_what_it_takes_before_it_starts(run):
    status, out, _ = run('train')
    assert status == 0
    assert out.count('Memory: about ') == 1
    assert out.index('Memory: about ') < out.index('Running RL loop')


def test_force_starts_all_the_same_and_the_resume_command_has_it(run, monkeypatch, tmp_path):
    monkeypatch.setattr(memory_estimate, 'available', lambda: Available(100 * MB))
    status, out, _ = run('train', '--force')
    assert status == 0
    assert 'it cannot fit, and is tried because of --force' in out
    assert f'--force spec.json {SPEC_NAME} train@' in out


def test_a_resume_that_cannot_fit_changes_nothing(run, monkeypatch, tmp_path):
    assert run('train')[0] == 0
    before = hashes(tmp_path / 'data')
    monkeypatch.setattr(memory_estimate, 'available', lambda: Available(100 * MB))
    status, _, err = run('train@latest', max_frame=120)
    assert (status, err[:25]) == (2, 'error: not enough memory:')
    assert hashes(tmp_path / 'data') == before
    # with nothing left to train it needs nothing
    assert run('train@latest')[0] == 0


def test_memory_that_the_system_refuses_at_once_is_the_same_line(run, monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise MemoryError('Unable to allocate')

    monkeypatch.setattr(Layout, 'allocate', allocate_only((1,), refuse))
    status, _, err = run('train')
    assert status == 2
    assert err.startswith('error: not enough memory: it takes about ')
    assert 'a session reserves ' in err
    assert not (tmp_path / 'data').exists()


def allocate_only(leading, otherwise):
    allocate = Layout.allocate
    return lambda self, shape: allocate(self, shape) if shape == leading else otherwise()
