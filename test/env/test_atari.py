"""Atari games: preprocessing, lives, and games that are brought back."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

from slm_lab.env import atari
from slm_lab.env.registration import make_single
from slm_lab.env.slot import Slot
from slm_lab.lib.errors import SpecError
from slm_lab.lib.rng import generator, generator_state
from slm_lab.lib.state import check_tree, first_difference, snapshot

ale_py = pytest.importorskip('ale_py')
cv2 = pytest.importorskip('cv2')
gymnasium = pytest.importorskip('gymnasium')
atari.register()

PONG, BREAKOUT = 'ALE/Pong-v5', 'ALE/Breakout-v5'
STICKY, STEADY = {'repeat_action_probability': 0.25}, {'repeat_action_probability': 0.0}


@pytest.fixture
def make():
    """Makes games and closes them in the end."""
    made = []

    def make_one(name, **kwargs):
        made.append(atari.make_atari(name, **kwargs))
        return made[-1]

    yield make_one
    for env in made:
        env.close()


def random_actions(env, n, seed=0):
    return np.random.default_rng(seed).integers(env.action_space.n, size=n).tolist()


def play(env, actions):
    """Steps through lives, and through games. Returns: what came out of each step, with the observation's bytes."""
    record = []
    for action in actions:
        observation, *rest, info = env.step(action)
        record.append((observation.tobytes(), *rest, info['life_lost']))
        if info['life_lost']:
            record.append(env.next_life().tobytes())
        elif rest[1] or rest[2]:
            record.append(env.reset()[0].tobytes())
    return record


# --- preprocessing


def shrink(screen):
    return cv2.resize(screen, (84, 84), interpolation=cv2.INTER_AREA)


def num_no_ops(seed):
    """What ale-py's environment, seeded, draws from its generator."""
    words = np.random.SeedSequence(seed).generate_state(2)
    return int(gymnasium.utils.seeding.np_random(int(words[0]))[0].integers(1, 31))


@pytest.mark.parametrize('name', [PONG, 'ALE/Qbert-v5', 'SpaceInvadersNoFrameskip-v4'])
def test_preprocessing_equals_the_same_done_step_by_step(name, make):
    """By a plain environment that gives every screen: the maximum of the last two of four, made smaller."""
    env = make(name, kwargs=STEADY)
    plain = gymnasium.make(name, frameskip=1, obs_type='grayscale', **STEADY)
    observation, _ = env.reset(seed=5)
    plain.reset(seed=5)
    for _ in range(num_no_ops(5)):
        plain.step(0)
    assert env.observation_space == gymnasium.spaces.Box(0, 255, (1, 84, 84), np.uint8)
    assert plain.unwrapped.get_action_meanings()[1] == 'FIRE'
    before, screen = [plain.step(1)[0] for _ in range(4)][2:]
    assert np.array_equal(observation[0], shrink(np.maximum(before, screen)))
    for action in random_actions(env, 60):
        observation, reward, *_ = env.step(action)
        screens, rewards = zip(*[plain.step(action)[:2] for _ in range(4)], strict=True)
        expected = shrink(np.maximum(screens[2], screens[3]))
        assert observation.shape == (1, 84, 84) and observation.dtype == np.uint8
        assert np.array_equal(observation[0], expected)
        assert reward == sum(rewards)
    plain.close()


def test_the_number_of_no_ops_is_drawn_by_the_seed_between_1_and_30(make):
    env = make(PONG, kwargs=STEADY)
    screens = []
    for seed in range(12):
        env.reset(seed=seed)
        screens.append(env._ale.getEpisodeFrameNumber())
    expected = [num_no_ops(seed) for seed in range(12)]
    assert screens == [n + 4 for n in expected]  # FIRE is one more action
    assert len(set(expected)) > 5 and min(expected) >= 1 and max(expected) <= 30


def test_the_same_seed_gives_the_same_game_and_another_one_another(make):
    env = make(PONG, kwargs=STICKY)
    actions = random_actions(env, 80)
    games = []
    for seed in (3, 3, 4):
        env.reset(seed=seed)
        games.append(play(env, actions))
    assert games[0] == games[1] != games[2]


@pytest.mark.parametrize('skip', [1, 2, 6])
def test_frameskip_is_how_often_an_action_is_repeated(skip, make):
    env = make(PONG, kwargs={'frameskip': skip})
    env.reset(seed=1)
    before = env._ale.getEpisodeFrameNumber()
    env.step(0)
    assert env._ale.getEpisodeFrameNumber() - before == skip


def test_an_observation_is_the_callers_own(make):
    env = make(PONG)
    first, _ = env.reset(seed=1)
    kept = first.copy()
    for _ in range(5):
        env.step(2)
    assert np.array_equal(first, kept)


class ScriptedEmulator:
    """Plays screens of one value each, 1, 2, 3, …; the game is over when there are no more."""

    def __init__(self, num_screens):
        self.shown, self.num_screens = 0, num_screens

    def act(self, action):
        self.shown += 1
        return 1

    def getScreenGrayscale(self, target):
        target.fill(self.shown)

    def game_over(self, with_truncation=True):
        return self.shown >= self.num_screens

    def game_truncated(self):
        return False

    def lives(self):
        return 3


@pytest.mark.parametrize('num_screens', [1, 2, 3])
def test_a_game_that_ends_within_the_repeats_shows_its_last_screen_and_no_older_one(num_screens, make):
    env = make(PONG)
    env.reset(seed=1)
    env._screens.fill(200)
    env._ale = ScriptedEmulator(num_screens)
    observation, reward, terminated, truncated, info = env.step(0)
    assert (observation == num_screens).all()
    assert (reward, terminated, truncated, info['life_lost']) == (num_screens, True, False, False)


# --- fire and lives


def ball_is_in_play(env):
    """In Breakout nothing moves without an action until FIRE was pressed: the ball's byte of RAM stays 0."""
    return env._ale.getRAM()[101] != 0


def until_a_life_is_lost(env):
    """Steps by no-ops. Returns: the reward"""
    total = 0.0
    for _ in range(400):
        _, reward, terminated, _, info = env.step(0)
        total += reward
        if terminated:
            return total, info
    raise AssertionError('no life was lost')


def test_fire_is_pressed_at_the_start_and_after_each_lost_life(make):
    env = make(BREAKOUT, life_loss=True, kwargs=STEADY)
    env.reset(seed=1)
    assert ball_is_in_play(env)
    for lives in (4, 3):
        _, info = until_a_life_is_lost(env)
        assert info == {'lives': lives, 'life_lost': True}
        env.next_life()
        assert ball_is_in_play(env)


def test_the_last_life_ends_the_game(make):
    env = make(BREAKOUT, life_loss=True, kwargs=STEADY)
    env.reset(seed=1)
    for _ in range(4):
        assert until_a_life_is_lost(env)[1]['life_lost']
        env.next_life()
    assert until_a_life_is_lost(env)[1] == {'lives': 0, 'life_lost': False}


def test_without_life_loss_an_episode_is_a_game(make):
    env = make(BREAKOUT, kwargs=STEADY)
    env.reset(seed=1)
    for _ in range(200):  # the ball falls, and no-ops leave the game waiting for FIRE
        assert not env.step(0)[2]
    assert env._ale.lives() == 4


def test_what_is_scored_between_two_lives_counts_with_the_next_step(make):
    env = make(BREAKOUT, life_loss=True)
    env.reset(seed=1)
    env._ale = ScriptedEmulator(100)  # scores 1 for every screen
    env.next_life()  # no-ops, then FIRE
    assert env.step(0)[1] == 8 + 4
    assert env.step(0)[1] == 4


def test_what_is_still_to_be_counted_comes_back(make):
    env, again = make(BREAKOUT, life_loss=True), make(BREAKOUT, life_loss=True)
    env.reset(seed=1)
    env._unpaid = 3.0
    again.load_native_state(snapshot(env.native_state()))
    assert again.step(0)[1] == 3.0  # a no-op right after FIRE scores nothing


def test_a_game_that_ends_between_two_lives_says_so_at_the_next_step(make):
    env = make(BREAKOUT, life_loss=True)
    env.reset(seed=1)
    env._ale = ScriptedEmulator(2)
    env.next_life()
    _, _, terminated, _, info = env.step(0)
    assert terminated and not info['life_lost']


def test_max_t_truncates_a_game(make):
    env = make(PONG, max_t=7)
    assert env.spec.max_episode_steps == 7
    for _ in range(2):
        env.reset(seed=1)
        ends = [env.step(0)[2:4] for _ in range(7)]
        assert ends == [(False, False)] * 6 + [(False, True)]


def test_the_emulator_truncates_a_game(make):
    env = make(PONG, kwargs={'max_num_frames_per_episode': 60})
    env.reset(seed=1)
    ends = list(itertools.takewhile(lambda end: end == (False, False), (env.step(0)[2:4] for _ in range(30))))
    assert 60 - 30 <= 4 * len(ends) <= 60
    assert env._ale.game_truncated()


# --- ids and keywords


def test_old_ids_have_no_sticky_actions(make):
    for name, probability in (('PongNoFrameskip-v4', 0.0), (PONG, 0.25)):
        env = make(name)
        assert env.sticky == probability
        assert env.unwrapped._frameskip == 1


@pytest.mark.parametrize(
    ('kwargs', 'key'),
    [({'frameskip': (2, 5)}, 'frameskip'), ({'frameskip': 0}, 'frameskip'), ({'continuous': True}, 'continuous')],
)
def test_keywords_that_do_not_fit_are_refused(kwargs, key):
    with pytest.raises(SpecError, match=key):
        atari.make_atari(PONG, kwargs=kwargs)


def test_other_keywords_go_to_the_game(make):
    env = make(PONG, kwargs={'full_action_space': True, 'difficulty': 1})
    assert env.action_space.n == 18


def test_what_is_a_game_of_images():
    assert atari.is_atari(PONG) and atari.is_atari('ale_py:ALE/Breakout-v5') and atari.is_atari('QbertNoFrameskip-v4')
    assert not atari.is_atari('CartPole-v1') and not atari.is_atari(PONG, {'obs_type': 'ram'})


def test_a_game_as_memory_is_left_as_it_is():
    env = make_single(PONG, kwargs={'obs_type': 'ram'})
    assert env.observation_space.shape == (128,)
    env.close()


def test_without_ale_py_a_game_says_what_to_install(tmp_path):
    (tmp_path / 'ale_py.py').write_text('raise ImportError("not here")')
    code = (
        'from slm_lab.env.registration import make_single\n'
        'from slm_lab.lib.errors import SpecError\n'
        'try:\n    make_single("ALE/Pong-v5")\nexcept SpecError as e:\n    print(e)'
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, '-c', code], env={**os.environ, 'PYTHONPATH': path}, capture_output=True, text=True
    )
    assert "pip install '.[atari]'" in done.stdout, done.stderr


def test_importing_the_env_room_imports_no_game():
    code = (
        'import sys, slm_lab.env; print([m for m in ("ale_py", "cv2", "gym", "mujoco", "Box2D") if m in sys.modules])'
    )
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, '-c', code], env={**os.environ, 'PYTHONPATH': path}, capture_output=True, text=True
    )
    assert done.stdout.strip() == '[]', done.stderr


# --- bringing a game back


@pytest.mark.parametrize('kwargs', [STICKY, STEADY], ids=['sticky', 'steady'])
@pytest.mark.parametrize('name', [PONG, BREAKOUT])
def test_a_new_game_with_the_state_of_another_plays_on_like_it(name, kwargs, make):
    """Through lost lives, and over the end of games: Breakout's end here after some 150 random steps."""
    env = make(name, life_loss=True, kwargs=kwargs)
    env.reset(seed=8)
    play(env, random_actions(env, 90))
    state = snapshot(env.native_state())
    check_tree(state)
    shown = env._observe()
    actions = random_actions(env, 400, seed=1)
    expected = play(env, actions)
    again = make(name, life_loss=True, kwargs=kwargs)
    again.reset(seed=99)
    play(again, actions[:30])
    assert np.array_equal(again.load_native_state(state), shown)
    assert first_difference(state, again.native_state()) is None
    assert play(again, actions) == expected


@pytest.mark.parametrize('part', ['rng', 'held'])
def test_without_any_part_of_what_makes_actions_stick_the_future_would_be_another(part, make):
    """The tests above can fail: a state without the generator or without the action held plays on differently."""
    kwargs = {'repeat_action_probability': 0.9}
    env, again = make(PONG, kwargs=kwargs), make(PONG, kwargs=kwargs)
    env.reset(seed=8)
    env.step(2)
    while env._held != 2:
        env.step(2)
    state = snapshot(env.native_state())
    state[part] = generator_state(np.random.default_rng(5)) if part == 'rng' else 3
    actions = random_actions(env, 60, seed=1)
    expected = play(env, actions)
    again.load_native_state(state)
    assert play(again, actions) != expected


def test_the_action_that_sticks_comes_back_at_every_moment(make):
    """Which action a screen repeats decides little: many short futures are compared, with much stickiness."""
    kwargs = {'repeat_action_probability': 0.8}
    env, again = make(PONG, kwargs=kwargs), make(PONG, kwargs=kwargs)
    env.reset(seed=3)
    again.reset(seed=4)
    for moment in range(40):
        play(env, random_actions(env, 7, seed=moment))
        again.load_native_state(snapshot(env.native_state()))
        actions = random_actions(env, 6, seed=100 + moment)
        assert play(env, actions) == play(again, actions), moment


def test_a_screen_takes_the_action_before_it_with_the_probability_of_sticking(make):
    """Over 4,000 screens of alternating actions; three standard deviations are 0.02."""
    env = make(PONG, kwargs={'repeat_action_probability': 0.25})
    env.reset(seed=1)
    env._ale = acted = RecordingEmulator()
    for i in range(1000):
        env._repeat(2 + i % 2, 4)
    values = [env._actions.index(action) for action in acted.actions]
    # of the first screen of each step: it sticks to the other action
    stuck = np.mean([values[4 * i] != 2 + i % 2 for i in range(1000)])
    assert abs(stuck - 0.25) < 0.05
    # of all screens: the k-th of a step still has the other action where all up to it stuck
    wrong = np.mean([values[4 * i + k] != 2 + i % 2 for i in range(1000) for k in range(4)])
    assert abs(wrong - np.mean([0.25**k for k in (1, 2, 3, 4)])) < 0.02


class RecordingEmulator:
    """Notes the actions of all screens."""

    def __init__(self):
        self.actions = []

    def act(self, action):
        self.actions.append(action)
        return 0

    def game_over(self):
        return False

    def getScreenGrayscale(self, target):
        pass


def test_a_slot_brings_a_game_back_right_after_a_life_was_lost(make):
    def slot():
        made = Slot(lambda: make(BREAKOUT, life_loss=True, kwargs=STICKY), generator(1, 'env', 0))
        made.resume = 'native'
        return made

    whole = slot()
    whole.reset()
    while not whole.step(0)[5]:  # lives_on
        pass
    state = snapshot(whole.state_dict())
    actions = random_actions(whole.env, 250)
    other = slot()
    other.load_state_dict(state)
    assert not other.restarted
    for action in actions:
        ours, theirs = whole.step(action), other.step(action)
        assert ours[0].tobytes() == theirs[0].tobytes()
        assert ours[1:4] == theirs[1:4] and ours[5] == theirs[5]
    assert first_difference(whole.state_dict(), other.state_dict()) is None
