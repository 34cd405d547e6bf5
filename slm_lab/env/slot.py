"""One environment whose state is a seed and the actions since: rewind and replay.

Every reset passes the environment a seed of its own, drawn from the slot's generator. An episode under way is then
brought back by building the environment, resetting it with that seed and repeating the actions, and the observation
it ends in tells whether that is the same episode. An environment that offers `native_state() -> tree` and
`load_native_state(tree) -> observation` is brought back by these instead, where they are exact.

- `Slot`: the environment, its generator and the record of the episode under way.
- `SlotGroup`: slots of one process that step together.
- `probe`: finds out by trying which way an environment can be brought back.
- `step_seconds`: how dear a step is.
"""

import time
from typing import NamedTuple

import numpy as np
from gymnasium import spaces

from slm_lab.lib.rng import GlobalStreams, derive_seed, generator, generator_state, set_generator_state
from slm_lab.lib.state import check_tree, snapshot

# gymnasium takes any; the Arcade Learning Environment keeps a seed in 32 bits, signed
SEED_LIMIT = 2**31

# what a probe plays: an environment that differs in only half of its episodes is still found out with 99 %
PROBE_EPISODES = 8
PROBE_STEPS = 100

# what is timed to tell how dear a step is: the middle one of so many rounds, which a pause of the machine moves little
TIMED_ROUNDS, TIMED_STEPS = 5, 10


def action_caster(space):
    """A function from one action to the type that the environment's space wants."""
    if isinstance(space, spaces.Discrete):
        return int
    dtype, shape = space.dtype, space.shape
    return lambda action: np.array(action, dtype=dtype).reshape(shape)


def first_action(space):
    """What the environment calls action 0 of the agent, which counts from 0; None where that is the same."""
    start = getattr(space, 'start', None)  # of Discrete and MultiDiscrete
    return None if start is None or not np.any(start) else start


def offers_native_state(env):
    return callable(getattr(env, 'native_state', None)) and callable(getattr(env, 'load_native_state', None))


def only_a_life_ended(terminated, truncated, info):
    """Whether the agent's episode ended because a life was lost while the game goes on, by the env's `next_life`."""
    return terminated and not truncated and info.get('life_lost') is True


def unbegun_state(rng, action_space):
    """The state of a slot whose first episode has not begun."""
    actions = np.empty((0, *action_space.shape), dtype=action_space.dtype)
    return {'rng': generator_state(rng), 'seed': None, 'actions': actions, 'observation': None}


class Slot:
    """One environment that resets itself at the end of an episode and can be brought back in the middle of one.

    Args:
        build: function without arguments that makes the environment.
        rng: the generator that the seeds of the resets are drawn from.
        env: what `build` has made already, if it has.

    Attributes:
        resume: how an episode comes back: `replay`, `fresh` (the same, with the environment built anew at each
            reset, for one that carries something over a reset), `native` (by the environment's own state) or
            `episode` (not at all: a new one begins).
        observation: where the episode stands; None before the first reset.
        restarted: whether the last `load_state_dict` had to begin a new episode.
    """

    def __init__(self, build, rng, env=None):
        self._build, self._rng = build, rng
        self.env = build() if env is None else env
        self._cast, self._first_action = action_caster(self.env.action_space), first_action(self.env.action_space)
        action_space = self.env.action_space
        self._actions = np.empty((256, *action_space.shape), dtype=action_space.dtype)
        self._num_actions = 0
        self._seed, self._is_used = None, False
        self.resume = 'replay'
        self.observation = None
        self.restarted = False

    def reset(self):
        """Begins an episode with the next seed; returns its first observation."""
        return self._begin(int(self._rng.integers(SEED_LIMIT)))

    def _begin(self, seed):
        if self.resume == 'fresh' and self._is_used:
            self._rebuild()
        # seeding may be dear (a game is loaded anew), and the environment's own state has its generators
        goes_on = self.resume == 'native' and self._seed is not None
        self._seed, self._num_actions, self._is_used = seed, 0, True
        self.observation, _ = self.env.reset(seed=None if goes_on else seed)
        return self.observation

    def step(self, action):
        """Steps the environment, and resets it where the episode ends; where only a life ended the game goes on.

        Returns: (observation, reward, terminated, truncated, first, lives_on): `observation` is the true successor,
        also at the end of an episode; `first` is the next episode's first observation there, else None; `lives_on`
        tells that it is one of the same game.
        """
        action = self._cast(action if self._first_action is None else action + self._first_action)
        return self._step(action)

    def _step(self, action):
        if self.resume != 'native':
            self._record(action)
        observation, reward, terminated, truncated, info = self.env.step(action)
        if not (terminated or truncated):
            self.observation = observation
            return observation, reward, terminated, truncated, None, False
        observation = np.array(observation)  # an environment may write the next one into the same memory
        if only_a_life_ended(terminated, truncated, info):
            self.observation = self.env.next_life()
            return observation, reward, terminated, truncated, self.observation, True
        return observation, reward, terminated, truncated, self.reset(), False

    def _record(self, action):
        n = self._num_actions
        if n == len(self._actions):
            self._actions = np.concatenate([self._actions, np.empty_like(self._actions)])
        self._actions[n] = action
        self._num_actions = n + 1

    def state_dict(self):
        state = {'rng': generator_state(self._rng), 'seed': self._seed}
        if self.resume == 'native' and self._seed is not None:
            state['native'] = self.env.native_state()
        else:
            state['actions'] = self._actions[: self._num_actions]
        return {**state, 'observation': None if self.observation is None else np.asarray(self.observation)}

    def load_state_dict(self, state):
        """Brings the episode back where `resume` allows and the environment obeys; else begins the next one."""
        set_generator_state(self._rng, state['rng'])
        self._rebuild()
        self._seed, self._num_actions, self.observation = None, 0, None
        self.restarted = False
        if state['seed'] is None:
            return
        if not self._bring_back(state):
            self._seed, self.restarted = None, True
            self.reset()

    def _bring_back(self, state):
        """Returns whether the episode stands, bit for bit, where it stood."""
        if self.resume == 'native' and 'native' in state:
            self._seed, self._is_used = int(state['seed']), True
            self.observation = self.env.load_native_state(state['native'])
        elif self.resume in ('native', 'episode') or 'actions' not in state or not self._replay(state):
            return False
        now, then = np.asarray(self.observation), np.asarray(state['observation'])
        return now.dtype == then.dtype and now.shape == then.shape and now.tobytes() == then.tobytes()

    def _replay(self, state):
        """Returns whether the episode went on to the end of its actions."""
        self._begin(int(state['seed']))
        for action in np.array(state['actions']):
            *_, first, lives_on = self._step(self._cast(action))
            if first is not None and not lives_on:
                # it ended before its time: the seed that this reset drew goes back
                set_generator_state(self._rng, state['rng'])
                return False
        return True

    def _rebuild(self):
        self.env.close()
        self.env, self._is_used = self._build(), False

    def forget_episode(self):
        """No episode is under way from here on: the state is the generator alone, until the next reset."""
        self._seed, self._num_actions, self.observation = None, 0, None

    def close(self):
        self.env.close()


class Outcome(NamedTuple):
    """Arrays that a group of N slots writes a step into.

    Attributes:
        next_state: (N, *shape), the true successors; also the first observations of a reset.
        reward: (N,) float64.
        terminated, truncated: (N,) bool.
        first: (N, *shape), and lives_on: (N,) bool, as of `Slot.step`: meant only where an episode ended.
    """

    next_state: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    first: np.ndarray
    lives_on: np.ndarray


class SlotGroup:
    """Slots in this process that step together.

    Attributes:
        at: index of the slot that is, or at an error was, at work.
    """

    def __init__(self, slots):
        self.slots = slots
        self.at = 0

    def reset(self, resume, state):
        """Begins a new episode in every slot; the first observations go into `state`."""
        for i, slot in enumerate(self.slots):
            self.at, slot.resume = i, resume
            state[i] = slot.reset()

    def step(self, actions, outcome):
        """Steps every slot with its row of `actions` into `outcome`. Returns: whether any episode ended."""
        next_state, reward, terminated, truncated, first, lives_on = outcome
        ended = False
        for i, slot in enumerate(self.slots):
            self.at = i
            next_state[i], reward[i], terminated[i], truncated[i], begun, same_game = slot.step(actions[i])
            if begun is not None:
                first[i], lives_on[i] = begun, same_game
                ended = True
        return ended

    def forget_episodes(self):
        for slot in self.slots:
            slot.forget_episode()

    def state_dict(self):
        states = []
        for i, slot in enumerate(self.slots):
            self.at = i
            states.append(slot.state_dict())
        return states

    def load_state_dict(self, states, resume, state):
        """Brings the episodes back; where they stand goes into `state`. Returns: the slots that were restarted."""
        with GlobalStreams(0, 'env', 'replay'):
            for i, slot in enumerate(self.slots):
                self.at, slot.resume = i, resume
                slot.load_state_dict(states[i])
                if slot.observation is not None:
                    state[i] = slot.observation
        return [i for i, slot in enumerate(self.slots) if slot.restarted]

    def close(self):
        for slot in self.slots:
            slot.close()


def probe(build, seed):
    """Plays short seeded episodes in a used environment and in new ones, and compares all that comes out.

    Returns: the value for `Slot.resume`: `native` when an environment offers its state and a new one that takes it
    plays on like the first; else `replay` when a used environment plays like a new one, `fresh` when only new ones
    play alike, `episode` when not even these do.
    """
    used = build()
    used.action_space.seed(derive_seed(seed, 'env', 'probe', 'action') % SEED_LIMIT)
    episode_seeds = generator(seed, 'env', 'probe').integers(SEED_LIMIT, size=PROBE_EPISODES).tolist()
    episodes = [(s, [used.action_space.sample() for _ in range(PROBE_STEPS)]) for s in episode_seeds]
    try:
        if offers_native_state(used) and _native_state_is_exact(build, used, episodes):
            return 'native'
        for episode_seed, actions in episodes:
            new = _play_anew(build, episode_seed, actions)
            if _play(used, episode_seed, actions) == new:
                continue
            return 'fresh' if _play_anew(build, episode_seed, actions) == new else 'episode'
        return 'replay'
    finally:
        used.close()


def _native_state_is_exact(build, used, episodes):
    """Whether a new environment with the state of the used one, taken in mid-episode, plays on like it, and plays
    the next episode like it: what is carried over a reset belongs to the state too.

    Both are seeded once, as in a run: to seed may be dear.
    """
    new = build()
    try:
        for number, (seed, actions) in enumerate(episodes):
            middle = len(actions) // 2
            shown = _play(used, None if number else seed, actions[:middle], stop_at_end=False)[-1][0]
            native = snapshot(used.native_state())
            check_tree(native)
            if np.asarray(new.load_native_state(native)).tobytes() != shown:
                return False
            ours, theirs = _play_on(used, actions[middle:]), _play_on(new, actions[middle:])
            ours += _play(used, None, actions[: middle // 2])
            theirs += _play(new, None, actions[: middle // 2])
            if ours != theirs:
                return False
        return True
    finally:
        new.close()


def _play_anew(build, seed, actions):
    env = build()
    try:
        return _play(env, seed, actions)
    finally:
        env.close()


def _play(env, seed, actions, stop_at_end=True):
    """The bytes and figures of an episode, for comparison."""
    first = np.asarray(env.reset(seed=seed)[0]).tobytes()
    return [(first,), *_play_on(env, actions, stop_at_end)]


def _play_on(env, actions, stop_at_end=True):
    """The same of what is left of it; where it does not stop at the end of an episode, others follow."""
    cast = action_caster(env.action_space)
    record = []
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(cast(action))
        record.append((np.asarray(observation).tobytes(), np.float64(reward).tobytes(), terminated, truncated))
        if only_a_life_ended(terminated, truncated, info):
            record.append((np.asarray(env.next_life()).tobytes(),))
        elif terminated or truncated:
            if stop_at_end:
                break
            record.append((np.asarray(env.reset()[0]).tobytes(),))
    return record


def step_seconds(build, seed):
    """Plays a little in an environment of its own. Returns: the seconds that a step takes, resets included."""
    env = build()
    try:
        env.action_space.seed(derive_seed(seed, 'env', 'time', 'action') % SEED_LIMIT)
        rounds = [[env.action_space.sample() for _ in range(TIMED_STEPS)] for _ in range(TIMED_ROUNDS)]
        env.reset(seed=0)
        times = []
        for actions in rounds:
            start = time.perf_counter()
            _play_on(env, actions, stop_at_end=False)
            times.append(time.perf_counter() - start)
        return float(np.median(times)) / TIMED_STEPS
    finally:
        env.close()
