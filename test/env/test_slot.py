import logging

import gymnasium
import numpy as np
import pytest
from env_cases import Forgetful, OneLife, one_life, play, spec_of, through_text

import slm_lab.env
from slm_lab.env import make_env
from slm_lab.env.registration import make_single
from slm_lab.env.slot import Slot, probe
from slm_lab.env.vector import VectorEnv
from slm_lab.lib.errors import SpecError
from slm_lab.lib.rng import GlobalStreams, generator
from slm_lab.lib.state import check_tree, first_difference


def build(name, **kwargs):
    return lambda: make_single(name, **kwargs)


@pytest.mark.parametrize(
    'name, mode',
    [
        ('CartPole-v1', 'replay'),
        ('Pendulum-v1', 'replay'),
        ('Acrobot-v1', 'replay'),
        ('MountainCar-v0', 'replay'),
        ('Count-v0', 'replay'),
        ('Carried-v0', 'fresh'),
        ('Noisy-v0', 'episode'),
        ('GloballyNoisy-v0', 'episode'),
    ],
)
def test_probe_finds_the_way_back(name, mode):
    assert probe(build(name), seed=0) == mode


def test_the_probe_disturbs_no_generator_of_the_run():
    streams = GlobalStreams(0)
    streams.install()
    before = streams.state_dict()
    firsts = []
    for resume in ('auto', 'episode'):
        env = make_env(spec_of('GloballyNoisy-v0', resume=resume), seed=5)
        env.unwrapped.resume_mode()
        assert first_difference(before, streams.state_dict()) is None
        firsts.append(make_env(spec_of('CartPole-v1', resume='auto' if resume == 'auto' else 'replay'), 5).reset())
    np.testing.assert_array_equal(*firsts)


def test_a_resumed_run_does_not_probe_again(monkeypatch):
    env = make_env(spec_of('Carried-v0'), seed=0)
    env.reset()
    state = through_text(env.state_dict())
    assert state['resume'] == 'fresh'
    later = make_env(spec_of('Carried-v0'), seed=0)
    monkeypatch.setattr(later.unwrapped, '_probe', lambda: pytest.fail('probed again'))
    later.load_state_dict(state)
    later.reset()


def test_a_probe_happens_once_and_evaluation_shares_it(monkeypatch):
    probed = []
    monkeypatch.setattr(slm_lab.env, 'probe', lambda build, seed: probed.append(seed) or probe(build, seed))
    train = make_env(spec_of('Carried-v0'), seed=0)
    evaluating = make_env(spec_of('Carried-v0'), seed=1, evaluating=True, train_env=train)
    train.reset()
    train.reset()
    evaluating.reset()
    assert probed == [0] and evaluating.unwrapped.resume == 'fresh'


def test_fresh_builds_anew_at_each_reset():
    env = make_env(spec_of('Carried-v0', resume='fresh'), seed=0)
    env.reset()
    counts = [int(env.step([0]).state[0, 0]) for _ in range(21)]
    assert counts == [1] * 21
    used = make_env(spec_of('Carried-v0', resume='replay'), seed=0)
    used.reset()
    assert [int(used.step([0]).state[0, 0]) for _ in range(21)] == [1] * 6 + [2] * 7 + [3] * 7 + [4]


def test_every_reset_passes_a_seed_of_its_own():
    slot = Slot(build('CartPole-v1'), generator(0, 'env', 0))
    seeds = []
    for _ in range(3):
        slot.reset()
        seeds.append(slot.state_dict()['seed'])
    expected = generator(0, 'env', 0).integers(2**31, size=3).tolist()
    assert seeds == expected and len(set(seeds)) == 3


def test_the_state_is_seed_actions_and_generator():
    slot = Slot(build('Pendulum-v1'), generator(0, 'env', 0))
    slot.reset()
    slot.step(np.array([0.5]))
    slot.step(np.array([-1.5]))
    state = slot.state_dict()
    check_tree(state)
    assert set(state) == {'rng', 'seed', 'actions', 'observation'}
    assert state['actions'].tolist() == [[0.5], [-1.5]] and state['actions'].dtype == np.float32


def test_a_slot_that_never_began_comes_back_as_that():
    env = make_env(spec_of('CartPole-v1'), seed=3)
    later = make_env(spec_of('CartPole-v1'), seed=0)
    later.load_state_dict(through_text(env.state_dict()))
    assert later.state is None and later.restarted == []
    np.testing.assert_array_equal(later.reset(), env.reset())


@pytest.mark.parametrize('resume', ['auto', 'replay', 'episode'])
@pytest.mark.parametrize('num_envs', [1, 3])
def test_an_environment_without_a_way_back_begins_a_new_episode(resume, num_envs, caplog):
    spec = spec_of('Noisy-v0', resume=resume, num_envs=num_envs, normalize_state=True, frame_op='stack', frame_op_len=2)
    env = make_env(spec, seed=0)
    env.reset()
    play(env, 0, 13)
    state = through_text(env.state_dict())
    later = make_env(spec, seed=0)
    with caplog.at_level(logging.WARNING, logger='slm_lab.env'):
        later.load_state_dict(state)
    assert later.restarted == list(range(num_envs))
    assert len(caplog.records) == 1 and "env 'Noisy-v0'" in caplog.text
    # the episode's own state begins anew
    frames = later.state
    np.testing.assert_array_equal(frames[:, 0], frames[:, 1])
    after = later.state_dict()
    assert after['TrackReturn']['running'].tolist() == [0.0] * num_envs
    assert [slot['actions'].tolist() for slot in after['slots']] == [[]] * num_envs
    # all else is what was saved, and the generators are where the next reset of the run had left them
    assert after['TrackReturn']['finished'].tolist() == [9.0] * num_envs
    assert first_difference(state['NormalizeState'], after['NormalizeState']) is None
    env.reset()
    for ours, theirs in zip(after['slots'], env.state_dict()['slots'], strict=True):
        assert first_difference(ours['rng'], theirs['rng']) is None and ours['seed'] == theirs['seed']
    # nine steps make a whole episode from there
    ends = [bool(s['terminated'][0]) for s in play(later, 13, 23)]
    assert ends == [False] * 8 + [True, False]


def test_resume_by_episode_does_not_try():
    env = make_env(spec_of('CartPole-v1', resume='episode'), seed=0)
    env.reset()
    env.step([0])
    later = make_env(spec_of('CartPole-v1', resume='episode'), seed=0)
    later.load_state_dict(through_text(env.state_dict()))
    assert later.restarted == [0]
    np.testing.assert_array_equal(later.state, env.reset())


def test_a_replay_that_ends_too_early_draws_no_seed(caplog):
    env = make_env(spec_of('Count-v0', resume='replay'), seed=0)
    env.reset()
    env.step([0])
    state = through_text(env.state_dict())
    state['slots'][0]['actions'] = np.array([0, 1, 0])
    later = make_env(spec_of('Count-v0', resume='replay'), seed=0)
    later.load_state_dict(state)
    env.reset()
    assert later.restarted == [0] and len(caplog.records) == 1
    assert later.state_dict()['slots'][0]['seed'] == env.state_dict()['slots'][0]['seed']


def test_an_observation_that_differs_in_one_bit_is_another():
    env = make_env(spec_of('CartPole-v1', resume='replay'), seed=0)
    env.reset()
    env.step([0])
    state = through_text(env.state_dict())
    observation = state['slots'][0]['observation'].copy()
    observation[2] = np.nextafter(observation[2], np.float32(1))
    state['slots'][0]['observation'] = observation
    env.load_state_dict(state)
    assert env.restarted == [0]


def test_restoring_draws_nothing_from_the_streams_of_the_process():
    env = make_env(spec_of('GloballyNoisy-v0', resume='replay'), seed=0)
    env.reset()
    env.step([0])
    state = through_text(env.state_dict())
    streams = GlobalStreams(0)
    streams.install()
    before = streams.state_dict()
    make_env(spec_of('GloballyNoisy-v0', resume='replay'), seed=0).load_state_dict(state)
    assert first_difference(before, streams.state_dict()) is None


class Recording(gymnasium.Env):
    """Notes the actions that it is given."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,))

    def __init__(self, space):
        self.action_space, self.actions = space, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.actions.append(action)
        return np.array([len(self.actions)], np.float32), 0.0, False, False, {}


@pytest.mark.parametrize(
    'space, action, given',
    [
        (gymnasium.spaces.Discrete(3), 2, 2),
        (gymnasium.spaces.Discrete(3, start=-1), 0, -1),
        (gymnasium.spaces.Discrete(3, start=5), 2, 7),
        (gymnasium.spaces.MultiDiscrete([3, 3], start=[1, 4]), np.array([0, 2]), [1, 6]),
    ],
)
def test_the_agents_action_0_is_the_spaces_first(space, action, given):
    slot = Slot(lambda: Recording(space), generator(0))
    slot.reset()
    slot.step(action)
    assert space.contains(slot.env.actions[0])
    np.testing.assert_array_equal(slot.env.actions[0], given)
    state = slot.state_dict()
    again = Slot(lambda: Recording(space), generator(1))
    again.load_state_dict(state)
    assert not again.restarted
    np.testing.assert_array_equal(again.env.actions[0], given)  # the start is added once, not again on replay


@pytest.mark.parametrize('name, mode', [('CartPole-v1', 'replay'), ('Carried-v0', 'fresh'), ('Noisy-v0', 'episode')])
def test_after_forgetting_its_episodes_an_env_is_its_generators_alone(name, mode):
    """An evaluation env between two evaluations: nothing to replay, and the next seeds are as if never stopped."""
    spec = spec_of(name, resume=mode, frame_op='concat', frame_op_len=2)
    env = make_env(spec, seed=3)
    env.reset()
    env.step(np.zeros(env.num_envs, dtype=int))
    env.forget_episodes()
    tree = env.state_dict()
    check_tree(tree)
    seeds = [slot['rng'] for slot in tree['slots']]
    resumed = make_env(spec, seed=99)
    resumed.load_state_dict(tree)
    assert resumed.restarted == []
    assert [slot['rng'] for slot in resumed.state_dict()['slots']] == seeds
    first, again = env.reset(), resumed.reset()
    if mode != 'episode':
        np.testing.assert_array_equal(first, again)
    assert env.unwrapped.slots[0]._seed == resumed.unwrapped.slots[0]._seed


def test_a_lost_life_ends_the_agents_episode_and_not_the_game():
    slot = Slot(one_life, generator(0, 'env', 0))
    slot.reset()
    seed, lives, steps = slot.state_dict()['seed'], [], 0
    while True:
        observation, _, terminated, _, first, lives_on = slot.step(1)
        steps += 1
        if not terminated:
            assert (first, lives_on) == (None, False)
            continue
        lives.append((int(observation[0]), int(first[0]), lives_on))
        if not lives_on:
            break
        # the step that begins the next life is one of the game's, too
        assert first[1] == observation[1] + 1 and slot.observation is first
        assert slot.state_dict()['seed'] == seed and len(slot.state_dict()['actions']) == steps
    assert lives == [(2, 2, True), (1, 1, True), (0, 3, False)]  # the last one's successor is of a new game
    assert slot.state_dict()['seed'] != seed and len(slot.state_dict()['actions']) == 0


@pytest.mark.parametrize('resume', ['replay', 'fresh', 'native'])
def test_a_slot_comes_back_at_any_step_of_a_game(resume):
    """Also in a later life: a replay goes over the lives that were lost before."""
    slot = Slot(one_life, generator(0, 'env', 0))
    slot.resume = resume
    slot.reset()
    saved, steps = [], []
    for _ in range(40):
        saved.append(through_text(slot.state_dict()))
        steps.append([np.array(x) if isinstance(x, np.ndarray) else x for x in slot.step(1)])
    assert any(lives_on for *_, lives_on in steps)
    for at, state in enumerate(saved):
        later = Slot(one_life, generator(99))
        later.resume = resume
        later.load_state_dict(state)
        assert not later.restarted
        assert first_difference([list(later.step(1)) for _ in steps[at:]], steps[at:]) is None
        assert first_difference(later.state_dict(), through_text(slot.state_dict())) is None


def test_the_native_state_lies_in_place_of_the_actions():
    slot = Slot(one_life, generator(0, 'env', 0))
    slot.resume = 'native'
    assert set(slot.state_dict()) == {'rng', 'seed', 'actions', 'observation'}  # no episode, nothing to bring back
    slot.reset()
    slot.step(1)
    state = slot.state_dict()
    check_tree(state)
    assert set(state) == {'rng', 'seed', 'native', 'observation'} and state['native']['t'] == 1


@pytest.mark.parametrize('wrapper, mode', [(OneLife, 'native'), (Forgetful, 'replay')])
def test_the_probe_takes_the_native_state_only_where_it_is_exact(wrapper, mode):
    assert probe(lambda: one_life(wrapper), seed=0) == mode


class CarriedNative(gymnasium.Wrapper):
    """Its state is exact until the next reset, which counts what the state lacks."""

    def native_state(self):
        env = self.unwrapped
        return {'t': env.t, 'resets': env.resets, 'rng': env.np_random.bit_generator.state}

    def load_native_state(self, state):
        env = self.unwrapped
        self.env.reset(seed=0)
        env.t, env.np_random.bit_generator.state = state['t'], state['rng']
        env.np_random.bit_generator.advance(-1)
        observation = env._observe()
        observation[0] = state['resets']
        return observation


def test_a_native_state_that_lacks_what_a_reset_carries_over_is_not_exact():
    assert probe(lambda: CarriedNative(gymnasium.make('Carried-v0', disable_env_checker=True)), seed=0) == 'fresh'


def test_a_native_state_that_comes_back_as_another_observation_is_an_episode_boundary():
    slot = Slot(one_life, generator(0, 'env', 0))
    slot.resume = 'native'
    slot.reset()
    slot.step(1)
    state = through_text(slot.state_dict())
    state['observation'] = np.nextafter(state['observation'], 100)
    later = Slot(one_life, generator(0, 'env', 0))
    later.resume = 'native'
    later.load_state_dict(state)
    slot.reset()
    assert later.restarted
    expected = Slot(one_life, generator(0, 'env', 0))
    expected.resume = 'native'
    expected._begin(slot.state_dict()['seed'])  # the next seed, as if never stopped, and from it all else
    assert first_difference(later.state_dict()['native'], expected.state_dict()['native']) is None
    assert first_difference(later.state_dict()['rng'], slot.state_dict()['rng']) is None


def test_native_is_refused_where_no_state_is_offered():
    with pytest.raises(SpecError, match="env 'CartPole-v1': resume 'native' needs an environment that offers"):
        VectorEnv('CartPole-v1', build('CartPole-v1'), 1, 0, 'native', None)
