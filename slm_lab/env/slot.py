"""One environment whose state is a seed and the actions since: rewind and replay.

Every reset passes the environment a seed of its own, drawn from the slot's generator. An episode under way is then
brought back by building the environment, resetting it with that seed and repeating the actions, and the observation
it ends in tells whether that is the same episode.

- `Slot`: the environment, its generator and the record of the episode under way.
- `probe`: finds out by trying which way an environment can be brought back.
"""

import numpy as np
from gymnasium import spaces

from slm_lab.lib.rng import derive_seed, generator, generator_state, set_generator_state

# gymnasium takes any; the Arcade Learning Environment keeps a seed in 32 bits, signed
SEED_LIMIT = 2**31

# what a probe plays: an environment that differs in only half of its episodes is still found out with 99 %
PROBE_EPISODES = 8
PROBE_STEPS = 100


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


class Slot:
    """One environment that resets itself at the end of an episode and can be brought back in the middle of one.

    Args:
        build: function without arguments that makes the environment.
        rng: the generator that the seeds of the resets are drawn from.

    Attributes:
        resume: how an episode comes back: `replay`, `fresh` (the same, with the environment built anew at each
            reset, for one that carries something over a reset) or `episode` (not at all: a new one begins).
        observation: where the episode stands; None before the first reset.
        restarted: whether the last `load_state_dict` had to begin a new episode.
    """

    def __init__(self, build, rng):
        self._build, self._rng = build, rng
        self.env = build()
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
        self._seed, self._num_actions, self._is_used = seed, 0, True
        self.observation, _ = self.env.reset(seed=seed)
        return self.observation

    def step(self, action):
        """Steps the environment, and resets it where the episode ends.

        Returns: (observation, reward, terminated, truncated, first): `observation` is the true successor, also at
        the end of an episode; `first` is the next episode's first observation there, else None.
        """
        action = self._cast(action if self._first_action is None else action + self._first_action)
        return self._step(action)

    def _step(self, action):
        n = self._num_actions
        if n == len(self._actions):
            self._actions = np.concatenate([self._actions, np.empty_like(self._actions)])
        self._actions[n] = action
        self._num_actions = n + 1
        observation, reward, terminated, truncated, _ = self.env.step(action)
        if terminated or truncated:
            # an environment may write the next observation into the same memory
            return np.array(observation), reward, terminated, truncated, self.reset()
        self.observation = observation
        return observation, reward, terminated, truncated, None

    def state_dict(self):
        return {
            'rng': generator_state(self._rng),
            'seed': self._seed,
            'actions': self._actions[: self._num_actions],
            'observation': None if self.observation is None else np.asarray(self.observation),
        }

    def load_state_dict(self, state):
        """Brings the episode back where `resume` allows and the environment obeys; else begins the next one."""
        set_generator_state(self._rng, state['rng'])
        self._rebuild()
        self._seed, self._num_actions, self.observation = None, 0, None
        self.restarted = False
        if state['seed'] is None:
            return
        if self.resume == 'episode' or not self._replay(state):
            self.restarted = True
            self.reset()

    def _replay(self, state):
        """Returns whether the episode stands, bit for bit, where it stood."""
        self._begin(int(state['seed']))
        for action in np.array(state['actions']):
            first = self._step(self._cast(action))[-1]
            if first is not None:
                # it ended before its time: the seed that this reset drew goes back
                set_generator_state(self._rng, state['rng'])
                return False
        now, then = np.asarray(self.observation), np.asarray(state['observation'])
        return now.dtype == then.dtype and now.shape == then.shape and now.tobytes() == then.tobytes()

    def _rebuild(self):
        self.env.close()
        self.env, self._is_used = self._build(), False

    def forget_episode(self):
        """No episode is under way from here on: the state is the generator alone, until the next reset."""
        self._seed, self._num_actions, self.observation = None, 0, None

    def close(self):
        self.env.close()


def probe(build, seed):
    """Plays short seeded episodes in a used environment and in new ones, and compares all that comes out.

    Returns: the value for `Slot.resume`: `replay` when a used environment plays like a new one, `fresh` when only
    new ones play alike, `episode` when not even these do.
    """
    used = build()
    used.action_space.seed(derive_seed(seed, 'env', 'probe', 'action') % SEED_LIMIT)
    episode_seeds = generator(seed, 'env', 'probe').integers(SEED_LIMIT, size=PROBE_EPISODES)
    try:
        for episode_seed in episode_seeds.tolist():
            actions = [used.action_space.sample() for _ in range(PROBE_STEPS)]
            new = _play_anew(build, episode_seed, actions)
            if _play(used, episode_seed, actions) == new:
                continue
            return 'fresh' if _play_anew(build, episode_seed, actions) == new else 'episode'
        return 'replay'
    finally:
        used.close()


def _play_anew(build, seed, actions):
    env = build()
    try:
        return _play(env, seed, actions)
    finally:
        env.close()


def _play(env, seed, actions):
    """The bytes and figures of an episode, for comparison."""
    cast = action_caster(env.action_space)
    record = [np.asarray(env.reset(seed=seed)[0]).tobytes()]
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(cast(action))
        record.append((np.asarray(observation).tobytes(), np.float64(reward).tobytes(), terminated, truncated))
        if terminated or truncated:
            break
    return record
