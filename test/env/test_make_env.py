import logging
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from env_cases import spec_of

import slm_lab.env as env_room
from slm_lab.env import VectorEnv, check_env_spec, make_env, make_raw, registration
from slm_lab.lib.errors import SpecError
from slm_lab.lib.registry import ENV_TABLES


def test_the_chain_is_shown():
    spec = spec_of('Count-v0', num_envs=2, normalize_state=True, frame_op='stack', frame_op_len=3, reward_scale='sign')
    chain = '<ScaleReward<FrameStack<NormalizeState<TrackReturn<2 x Count-v0>>>>>'
    assert repr(make_env(spec, seed=0)) == chain
    assert repr(make_env(spec_of('Count-v0'), seed=0)) == '<TrackReturn<1 x Count-v0>>'


def test_num_envs_of_the_call_comes_before_the_spec():
    env = make_env(spec_of('CartPole-v1', num_envs=2), seed=0, num_envs=3)
    assert env.num_envs == 3 and env.reset().shape == (3, 4)


def test_max_t_is_the_specs_or_the_environments_own():
    assert make_env(spec_of('CartPole-v1', max_t=None), seed=0).max_t == 500
    assert make_env(spec_of('CartPole-v1', max_t=12), seed=0).max_t == 12
    assert make_env(spec_of('Count-v0'), seed=0).max_t is None


def test_float64_observations_become_float32():
    env = make_env(spec_of('Count-v0'), seed=0)
    assert env.observation_space.dtype == np.float32
    assert env.reset().dtype == np.float32
    assert env.step([0]).next_state.dtype == np.float32


def test_seeds_and_slots_have_streams_of_their_own():
    spec = spec_of('CartPole-v1', num_envs=2)
    first, same, other = (make_env(spec, seed=s).reset() for s in (1, 1, 2))
    np.testing.assert_array_equal(first, same)
    assert (first[0] != first[1]).all()
    assert (first != other).all()


def test_a_slots_stream_does_not_depend_on_the_number_of_slots():
    one, three = (make_env(spec_of('CartPole-v1', num_envs=n), seed=4).reset() for n in (1, 3))
    np.testing.assert_array_equal(one[0], three[0])


def test_seq_len_of_a_recurrent_net_decides_the_frames(caplog):
    env = make_env(spec_of('CartPole-v1', net={'type': 'RecurrentNet', 'seq_len': 4}), seed=0)
    assert env.observation_space.shape == (4, 4) and env.reset().shape == (1, 4, 4)
    with caplog.at_level(logging.INFO, logger='slm_lab.env'):
        spec = spec_of('CartPole-v1', net={'seq_len': 2}, frame_op='concat', frame_op_len=4)
        assert make_env(spec, seed=0).observation_space.shape == (2, 4)
    assert "'stack' of the net's seq_len 2 instead of 'concat' of 4" in caplog.text


def test_evaluation_does_not_scale_rewards():
    spec = spec_of('Count-v0', reward_scale=10)
    train, evaluating = make_env(spec, seed=0), make_env(spec, seed=0, evaluating=True)
    rewards = []
    for env in (train, evaluating):
        env.reset()
        rewards.append(env.step([0]).reward.tolist())
    assert rewards == [[10.0], [1.0]]


def test_a_make_keyword_of_the_spec_reaches_the_environment():
    env = make_env(spec_of('Count-v0', start=5), seed=0)
    assert env.reset().tolist() == [[5.0]]


def test_a_keyword_that_nobody_takes_is_an_error_with_its_place():
    with pytest.raises(SpecError, match=r"^tested > env\.0\.gravity: 'Pendulum-v1' does not take this keyword"):
        make_env(spec_of('Pendulum-v1', gravity=9.8), seed=0)


@pytest.mark.parametrize(
    'env, line',
    [
        ({'frame_op_length': 4}, r"env\.0\.frame_op_length: .* did you mean 'frame_op_len'"),
        ({'max_frames': 4}, "did you mean 'max_frame'"),
        ({'normalise_state': True}, "did you mean 'normalize_state'"),
        ({'max_episode_steps': 10}, "use 'max_t'"),
        (
            {'render_mode': 'human'},
            r"env\.0\.render_mode: the lab opens windows itself.* 'train' does with RENDER=true",
        ),
        ({'max_frame': 10.5}, r'env\.0\.max_frame: 10\.5'),
        ({'max_t': 0}, r'env\.0\.max_t: 0 is too small'),
        ({'reward_scale': 'signs'}, "reward_scale: 'signs' is unknown; it is a number, 'sign' or null"),
        ({'frame_op': 'concat'}, "'frame_op' is given without 'frame_op_len'"),
        ({'frame_op_len': 4}, "'frame_op_len' is given without 'frame_op'"),
        ({'frame_op': 'concatenate', 'frame_op_len': 4}, "'concatenate' is unknown; did you mean 'concat'"),
        ({'resume': 'replays'}, "did you mean 'replay'"),
        ({'resume': 'natives'}, "did you mean 'native'"),
        ({'vector': 'asynch'}, "did you mean 'async'"),
        ({'num_envs': True}, r'env\.0\.num_envs: True is not of the type'),
    ],
)
def test_wrong_keys_and_values_are_refused(env, line):
    with pytest.raises(SpecError, match=line):
        check_env_spec(spec_of('CartPole-v1', **env)['env'][0], 'env.0')


@pytest.mark.parametrize('cpus, max_session, each', [(8, 1, 8), (8, 2, 4), (8, 3, 2), (2, 4, 1), (1, 1, 1)])
def test_sessions_share_the_cpus_of_the_process(cpus, max_session, each, monkeypatch):
    monkeypatch.setattr(env_room, 'count_cpus', lambda: cpus)
    seen = {}
    monkeypatch.setattr(
        env_room, 'VectorEnv', lambda *args, **kwargs: seen.update(kwargs) or VectorEnv(*args, **kwargs)
    )
    spec = {**spec_of('CartPole-v1', vector='sync'), 'meta': {'max_session': max_session}}
    make_env(spec, seed=0).close()
    assert (seen['cpus'], seen['vector']) == (each, 'sync')


def test_a_lost_life_ends_an_episode_in_training_alone(monkeypatch):
    made = []

    def make_atari(name, max_t, kwargs, life_loss, render):
        made.append((name, max_t, kwargs, life_loss, render))
        return gymnasium.make('CartPole-v1')

    fake = SimpleNamespace(is_atari=lambda name, kwargs=None: name == 'Some/Game-v5', make_atari=make_atari)
    monkeypatch.setattr(registration, 'atari', fake)
    spec = spec_of('Some/Game-v5', max_t=7, mode=3, resume='replay')
    train = make_env(spec, seed=0)
    make_env(spec, seed=0, evaluating=True, train_env=train)
    make_raw(spec['env'][0], render=True)
    expected = [(True, False), (False, False), (False, True)]
    assert made == [('Some/Game-v5', 7, {'mode': 3}, *flags) for flags in expected]


def test_evaluation_is_where_training_found_it_should_be():
    spec = spec_of('CartPole-v1', num_envs=2, vector='async', resume='replay')
    train = make_env(spec, seed=0)
    evaluating = make_env(spec_of('CartPole-v1', num_envs=2), seed=1, evaluating=True, train_env=train)
    assert evaluating.unwrapped.vector_mode() == 'async'
    assert evaluating.unwrapped.resume_mode() == 'replay'
    for env in (train, evaluating):
        env.close()


def test_leftovers_are_reported_and_make_keywords_are_not():
    env_spec = {'name': 'A-v0', 'max_frame': 1e7, 'image_downsize': [84, 84], 'unity': {}, 'continuous': True}
    assert check_env_spec(env_spec, 'mine > env.0') == ['mine > env.0.image_downsize', 'mine > env.0.unity']


def test_a_missing_key_is_named():
    with pytest.raises(SpecError, match="x: key 'max_frame' is missing"):
        check_env_spec({'name': 'CartPole-v1'}, 'x')


def test_the_spec_room_finds_the_check_by_name():
    values, ignored = ENV_TABLES.get('env')({'name': 'A-v0', 'max_frame': 1e3, 'cfg_name': 'x', 'g': 9.8}, 'e')
    assert ignored == ['e.cfg_name']
    assert (values['max_frame'], values['num_envs'], values['resume'], values['g']) == (1000, 1, 'auto', 9.8)
    assert type(values['max_frame']) is int
