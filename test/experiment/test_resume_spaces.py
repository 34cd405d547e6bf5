"""n frames, save, load into a fresh process, n more == 2n frames, for images and for actions of several parts."""

import itertools

import pytest
import tiny_envs
from resume import StopAt, build, raw_spec, session_spec
from test_resume_equality import HALF, check_resume
from test_resume_policy import MEMORIES, WAYS, policy_spec

IMAGE_ALGORITHMS = {
    'DQN': 'Replay',
    'DoubleDQN': 'PrioritizedReplay',
    'SARSA': 'OnPolicyReplay',
    'Reinforce': 'OnPolicyReplay',
    'ActorCritic': 'OnPolicyBatchReplay',
    'PPO': 'OnPolicyBatchReplay',
}
IMAGE_NETS = ['ConvNet', 'DuelingConvNet']
MULTI = ['TinyMultiDiscrete-v0', 'TinyMultiBinary-v0']
# the second convolution is the one that batch normalisation follows
CONVOLUTIONS = {'conv_hid_layers': [[3, 4, 2, 0, 1], [4, 3, 1]], 'fc_hid_layers': [8], 'normalize': True}


def sharing(algorithm):
    return [None] if algorithm == 'Reinforce' else [True, False]


def image_cases():
    """(algorithm, net, batch_norm, num_envs, shared)"""
    for algorithm in IMAGE_ALGORITHMS:
        shared = sharing(algorithm) if algorithm in MEMORIES else [None]
        nets = IMAGE_NETS if algorithm not in MEMORIES else ['ConvNet']
        yield list(itertools.product([algorithm], nets, [False, True], [1, 4], shared))


def multi_cases():
    """(algorithm, memory, shared, num_envs, env)"""
    for algorithm, memories in MEMORIES.items():
        yield list(itertools.product([algorithm], memories, sharing(algorithm), [1, 4], MULTI))


def marked(groups, n):
    """Every n-th of each algorithm's cases is in the normal run; n has no factor in common with the numbers of
    choices, so that each choice is in some of them."""
    for cases in groups:
        yield from (pytest.param(*case, marks=() if i % n == 0 else pytest.mark.slow) for i, case in enumerate(cases))


def image_spec(algorithm, net, batch_norm, num_envs, shared=None, env=None):
    memory, nets = IMAGE_ALGORITHMS[algorithm], {**CONVOLUTIONS, 'batch_norm': batch_norm}
    if algorithm in MEMORIES:
        raw = policy_spec(algorithm, memory, 0, 'MLPNet', shared, num_envs, 'discrete')
        raw['agent'][0]['net'].update(nets, type=net)
    else:
        raw = raw_spec(algorithm, memory, net, num_envs, nets=nets)
    del raw['agent'][0]['net']['hid_layers']
    raw['env'][0].update({'name': 'TinyImage-v0', 'max_t': 20, **(env or {})})
    return raw


def multi_spec(algorithm, memory, shared, num_envs, env, way=0):
    raw = policy_spec(algorithm, memory, way, 'MLPNet', shared, num_envs, 'discrete')
    raw['env'][0].update(name=env, max_t=20)
    return raw


@pytest.mark.parametrize(
    ('algorithm', 'net', 'batch_norm', 'num_envs', 'shared'), list(marked(image_cases(), 5)), ids=str
)
def test_equal_on_images(algorithm, net, batch_norm, num_envs, shared, tmp_path, fresh):
    check_resume(tmp_path, image_spec(algorithm, net, batch_norm, num_envs, shared), fresh, StopAt(HALF))


@pytest.mark.parametrize('num_envs', [1, 4])
def test_equal_on_stacked_images_of_two_channels_with_evaluation(num_envs, tmp_path, fresh):
    env = {'channels': 2, 'frame_op': 'concat', 'frame_op_len': 2}
    raw = image_spec('DoubleDQN', 'ConvNet', True, num_envs, env=env)
    raw['meta']['rigorous_eval'] = 1
    check_resume(tmp_path, raw, fresh, StopAt(HALF, 'inside'))


@pytest.mark.parametrize(('algorithm', 'memory', 'shared', 'num_envs', 'env'), list(marked(multi_cases(), 7)), ids=str)
def test_equal_with_actions_of_several_parts(algorithm, memory, shared, num_envs, env, tmp_path, fresh):
    check_resume(tmp_path, multi_spec(algorithm, memory, shared, num_envs, env), fresh, StopAt(HALF))


@pytest.mark.slow
@pytest.mark.parametrize('env', MULTI)
@pytest.mark.parametrize(('algorithm', 'way'), [(name, way) for name in WAYS for way in range(1, len(WAYS[name]))])
def test_equal_with_actions_of_several_parts_each_way(algorithm, way, env, tmp_path, fresh):
    """The first way of each algorithm is in the product above."""
    shared = None if algorithm == 'Reinforce' else False
    raw = multi_spec(algorithm, MEMORIES[algorithm][-1], shared, 4, env, way)
    check_resume(tmp_path, raw, fresh, StopAt(HALF))


@pytest.mark.parametrize(('cases', 'n'), [(image_cases, 5), (multi_cases, 7)])
def test_the_normal_run_has_every_choice(cases, n):
    every = [case for group in cases() for case in group]
    normal = [param.values for param in marked(cases(), n) if not param.marks]
    for i in range(len(every[0])):
        assert {case[i] for case in normal} == {case[i] for case in every}


def test_these_runs_hold_what_they_are_for(tmp_path):
    """Images as bytes in the memory, statistics of batches that move, episodes of both ends, a probe that replays."""
    session = build(session_spec(tmp_path, image_spec('DQN', 'ConvNet', True, 1)), store=False)
    ends = []
    step = session.env.step
    session.env.step = lambda actions: ends.append(step(actions)) or ends[-1]
    session.run()
    assert session.env.unwrapped.resume == 'replay'
    assert any(s.terminated[0] for s in ends) and any(s.truncated[0] for s in ends)
    assert session.agent.memory.state_dict()['ring'].arrays['states'].dtype == 'uint8'
    assert session.env.observation_space.shape == (1, tiny_envs.SIZE, tiny_envs.SIZE)
    statistics = {k: v for k, v in session.agent.algorithm.net.state_dict().items() if 'running_mean' in k}
    assert len(statistics) == 1 and all((v != 0).any() for v in statistics.values())
