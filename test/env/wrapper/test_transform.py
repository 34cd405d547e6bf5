import numpy as np
import pytest
from env_cases import spec_of

from slm_lab.env import make_env
from slm_lab.env.wrapper.stateful import NormalizeState, TrackReturn
from slm_lab.lib.errors import LabError


@pytest.mark.parametrize(
    'scale, rewards', [(0.5, [0.5, 1.0, 1.5]), (-2, [-2.0, -4.0, -6.0]), ('sign', [1.0, 1.0, 1.0])]
)
def test_reward_scale(scale, rewards):
    env = make_env(spec_of('Count-v0', reward_scale=scale), seed=0)
    env.reset()
    assert [env.step([0]).reward[0] for _ in range(3)] == rewards


def test_sign_of_negative_rewards():
    env = make_env(spec_of('Pendulum-v1', reward_scale='sign'), seed=0)
    env.reset()
    assert env.step([[1.0]]).reward.tolist() == [-1.0]


def test_the_return_stays_raw():
    env = make_env(spec_of('Count-v0', reward_scale=100), seed=0)
    env.reset()
    env.step([0])
    env.step([1])
    assert env.total_reward == 1 + 2


def test_evaluation_reads_the_statistics_of_training_and_adds_nothing():
    spec = spec_of('Count-v0', normalize_state=True)
    train = make_env(spec, seed=0)
    train.reset()
    train.step([0])  # seen: 0, 1; mean 0.5, variance 0.25
    evaluating = make_env(spec, seed=1, evaluating=True, train_env=train, num_envs=2)
    first = evaluating.reset()
    np.testing.assert_allclose(first, [[-1], [-1]], rtol=1e-6)
    step = evaluating.step([0, 1])
    np.testing.assert_allclose(step.next_state, [[1], [1]], rtol=1e-6)
    np.testing.assert_allclose(step.state, [[1], [-1]], rtol=1e-6)
    assert train.state_dict()['NormalizeState']['count'] == 2
    assert 'NormalizeState' not in evaluating.state_dict()
    train.step([0])  # evaluation sees the statistics grow: 0, 1, 2 have mean 1
    np.testing.assert_allclose(evaluating.reset(), [[-np.sqrt(1.5)]] * 2, rtol=1e-6)


def test_evaluation_alone_takes_saved_statistics_or_says_that_it_has_none():
    spec = spec_of('Count-v0', normalize_state=True, frame_op='stack', frame_op_len=2, reward_scale=2)
    train = make_env(spec, seed=0)
    train.reset()
    train.step([0])
    alone = make_env(spec, seed=1, evaluating=True)
    with pytest.raises(LabError, match='no observation statistics'):
        alone.reset()
    alone.load_statistics(train.state_dict())
    np.testing.assert_allclose(alone.reset(), [[[-1], [-1]]], rtol=1e-6)
    assert repr(alone) == '<FrameStack<ApplyStatistics<TrackReturn<1 x Count-v0>>>>'


def test_the_stack_of_statistics_lies_inside_the_frames():
    env = make_env(spec_of('Count-v0', normalize_state=True), seed=0)
    assert isinstance(env, NormalizeState) and isinstance(env.env, TrackReturn)
