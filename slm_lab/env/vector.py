"""N environments that step together; one code path also for N = 1.

- `Step`: what a step yields.
- `VectorEnv`: the slots, in this process or in workers, without any wrapper.
"""

import logging
from typing import NamedTuple

import numpy as np
from gymnasium import spaces

from slm_lab.env.slot import Outcome, Slot, SlotGroup, offers_native_state, step_seconds, unbegun_state
from slm_lab.env.workers import Workers, worker_shares
from slm_lab.lib.errors import ResumeError, SpecError
from slm_lab.lib.machine import count_cpus
from slm_lab.lib.rng import GlobalStreams, generator

logger = logging.getLogger('slm_lab.env')

# what a step costs more for each worker: a message there, an answer back, and waking up. Measured on 2 busy cores: 15
# to 35 µs for the messages; workers have to save a multiple of it.
WORKER_SECONDS = 50e-6


class Step(NamedTuple):
    """One step of N slots; arrays of their own, that no later step writes into.

    Attributes:
        next_state: (N, *shape), each slot's true successor, also where its episode ended.
        reward: (N,) float64.
        terminated, truncated: (N,) bool.
        state: (N, *shape), where each slot goes on: the next episode's first observation where one ended. It is
            the very object `next_state` when no episode ended.
        lives_on: (N,) bool, the slots whose episode ended because a life was lost while the game goes on; None when
            there is none.
    """

    next_state: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    state: np.ndarray
    lives_on: np.ndarray | None = None


def ended_slots(step):
    """The indices of the slots whose episode ended."""
    return np.flatnonzero(step.terminated | step.truncated)


class LocalSlots:
    """N slots in this process; see `Workers` for the same in others."""

    def __init__(self, slots, shape, dtype):
        self.group = SlotGroup(slots)
        self._shape, self._dtype, self._n = shape, dtype, len(slots)
        self._first, self._lives_on = np.empty(shape, dtype), np.empty(self._n, np.bool_)

    def reset(self, resume):
        """Returns: the first observations (N, *shape)."""
        state = np.empty(self._shape, self._dtype)
        self.group.reset(resume, state)
        return state

    def step(self, actions):
        """Returns: (Outcome of N slots, whether any episode ended). What is meant only at an end is overwritten by
        the next step, the rest is the caller's own."""
        n = self._n
        next_state, reward = np.empty(self._shape, self._dtype), np.empty(n)
        terminated, truncated = np.empty(n, np.bool_), np.empty(n, np.bool_)
        outcome = Outcome(next_state, reward, terminated, truncated, self._first, self._lives_on)
        return outcome, self.group.step(actions, outcome)

    def load_state_dict(self, states, resume):
        """Returns: (where the episodes stand (N, *shape), the slots that were restarted)."""
        state = np.empty(self._shape, self._dtype)
        return state, self.group.load_state_dict(states, resume, state)

    def state_dict(self):
        return self.group.state_dict()

    def forget_episodes(self):
        self.group.forget_episodes()

    def close(self):
        self.group.close()


class VectorEnv:
    """N slots, in this process or in worker processes, with the same results bit for bit.

    Args:
        name: the environment's name, for messages.
        build: function without arguments that makes one environment.
        num_envs: N.
        seed: the seed that the slots' generators are derived from.
        resume: `replay`, `fresh`, `native`, `episode`, or `auto`: found by `probe` before the first reset.
        probe: function without arguments that returns one of the first four.
        build_first: makes slot 0 instead of `build`, e.g. with a window; all slots are then in this process.
        vector: `sync` (this process), `async` (workers), or `auto`: found by `pick`.
        pick: function without arguments that returns one of the first two, e.g. another env's `vector_mode`; None:
            workers where an environment's step is dear enough for it.
        cpus: how many the workers may use; None: all that this process may.

    Attributes:
        observation_space, action_space: of one slot.
        max_t: steps after which an episode is truncated, None without a limit.
        frames_per_state: of how many frames a state is made.
        state: (N, *shape), the observation to act on next; None before the first reset.
        restarted: the slots that the last `load_state_dict` could not bring back: a new episode begins in each.
    """

    frames_per_state = 1

    def __init__(
        self,
        name,
        build,
        num_envs,
        seed,
        resume,
        probe,
        build_first=None,
        vector='auto',
        pick=None,
        cpus=None,
    ):
        self.name, self.num_envs = name, num_envs
        self.resume, self._probe = resume, probe
        self.vector, self._pick = 'sync' if build_first else vector, pick
        self._is_picked = self.vector == 'auto'
        self._build, self._seed, self._cpus = build, seed, cpus or count_cpus()
        self._first_env = env = (build_first or build)()
        if resume == 'native' and not offers_native_state(env):
            raise SpecError(f"env '{name}': resume 'native' needs an environment that offers its state; use 'auto'")
        self.observation_space, self.action_space = _lab_space(env.observation_space), env.action_space
        self.max_t = env.spec.max_episode_steps
        self.state, self.restarted = None, []
        self._shape, self._dtype = (num_envs, *self.observation_space.shape), self.observation_space.dtype
        # workers are made now, since a process that is forked later would keep a copy of all that is replaced in the
        # agent's memory; slots in this process when they are first needed
        self._backend = self._make_workers() if self.vector_mode() == 'async' else None

    @property
    def unwrapped(self):
        return self

    @property
    def slots(self):
        """The slots, where they are in this process."""
        return self._made().group.slots

    def resume_mode(self):
        """Which way an episode is brought back; tries it out, once, where the spec says `auto`."""
        if self.resume == 'auto':
            # what an environment draws from the process's generators while it is tried is not the run's
            with GlobalStreams(0, 'env', 'probe'):
                self.resume = self._probe()
            if self.resume != 'replay':
                logger.info("env '%s': episodes are resumed by '%s'", self.name, self.resume)
        return self.resume

    def vector_mode(self):
        """Where the slots are, `sync` or `async`; tries it out, once, where the spec says `auto`."""
        if self.vector == 'auto':
            self.vector = self._find_vector_mode()
        return self.vector

    def _find_vector_mode(self):
        n, shares = self.num_envs, worker_shares(self.num_envs, self._cpus)
        if n == 1 or len(shares) == 1 or self.resume == 'episode':
            return 'sync'
        if self._pick is not None:
            return self._pick()
        with GlobalStreams(0, 'env', 'probe'):
            seconds = step_seconds(self._build, self._seed)
        saved = seconds * (n - len(shares[0]))
        return 'async' if saved > 2 * WORKER_SECONDS * len(shares) else 'sync'

    def _make_workers(self):
        self._close_first()
        return Workers(
            self.name, self._build, self.num_envs, self._seed, self._cpus, self._shape, self._dtype, self.action_space
        )

    def _made(self):
        """The slots, here or in workers."""
        if self._backend is None:
            rngs = [generator(self._seed, 'env', i) for i in range(self.num_envs)]
            envs = [self._first_env] + [None] * (self.num_envs - 1)
            slots = [Slot(self._build, rng, env) for rng, env in zip(rngs, envs, strict=True)]
            self._backend, self._first_env = LocalSlots(slots, self._shape, self._dtype), None
        return self._backend

    def _made_for(self, mode):
        """The same for a way of resuming. An environment that does not repeat itself may draw from the generators of
        the process, which workers do not share: it has none but by the spec."""
        if mode == 'episode' and self._is_picked and self.vector == 'async':
            self._backend.close()
            self._backend, self.vector = None, 'sync'
        return self._made()

    def _close_first(self):
        if self._first_env is not None:
            self._first_env.close()
        self._first_env = None

    def reset(self):
        """Begins a new episode in every slot; returns the first observations (N, *shape)."""
        mode = self.resume_mode()
        self.state = self._made_for(mode).reset(mode)
        return self.state

    def step(self, actions):
        """Steps every slot with its row of `actions` (N, *action shape); slots reset themselves. Returns a Step."""
        outcome, ended = self._made().step(actions)
        next_state, reward, terminated, truncated, first, lives_on = outcome
        if not ended:
            self.state = next_state
            return Step(next_state, reward, terminated, truncated, next_state)
        at_end = terminated | truncated
        self.state = state = next_state.copy()
        state[at_end] = first[at_end]
        lives_on = lives_on & at_end
        return Step(next_state, reward, terminated, truncated, state, lives_on if lives_on.any() else None)

    def forget_episodes(self):
        """No episode is under way from here on, so that none has to be brought back; `reset` begins the next ones."""
        if self._backend is not None:
            self._backend.forget_episodes()
        self.state = None

    def state_dict(self):
        if self._backend is not None:
            slots = self._backend.state_dict()
        else:
            rngs = [generator(self._seed, 'env', i) for i in range(self.num_envs)]
            slots = [unbegun_state(rng, self.action_space) for rng in rngs]
        return {'resume': self.resume, 'slots': slots}

    def load_state_dict(self, tree):
        """Brings every slot's episode back, see `restarted` for those that could not be.

        Raises: ResumeError, before anything is changed, for a state of other wrappers or another number of slots.
        """
        strangers = sorted(set(tree) - {'resume', 'slots'})
        if strangers:
            raise ResumeError(f"env '{self.name}': the saved state has {', '.join(strangers)}, which the spec lacks")
        if len(tree['slots']) != self.num_envs:
            raise ResumeError(
                f"env '{self.name}': the saved state has {len(tree['slots'])} slots, the spec has {self.num_envs}"
            )
        if self.resume == 'auto':
            self.resume = tree['resume']
        state, self.restarted = self._made_for(self.resume).load_state_dict(tree['slots'], self.resume)
        if self.restarted:
            logger.warning(
                "env '%s': %d of %d episodes under way cannot be brought back (resume: %s); a new one begins in each",
                self.name,
                len(self.restarted),
                self.num_envs,
                self.resume,
            )
        self.state = None if tree['slots'][0]['seed'] is None else state

    def load_statistics(self, tree):
        """Takes only what wrappers have gathered about observations; nothing here."""

    def close(self):
        self._close_first()
        if self._backend is not None:
            self._backend.close()

    def __repr__(self):
        return f'<{self.num_envs} x {self.name}>'


def _lab_space(space):
    """The observation space as the lab hands it on: float64 becomes float32."""
    if space.dtype != np.float64:
        return space
    return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)
