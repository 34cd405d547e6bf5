"""N environments that step together; one code path also for N = 1.

- `Step`: what a step yields.
- `VectorEnv`: the slots in this process, without any wrapper.
"""

import logging
from typing import NamedTuple

import numpy as np
from gymnasium import spaces

from slm_lab.env.slot import Slot
from slm_lab.lib.errors import ResumeError
from slm_lab.lib.rng import GlobalStreams, generator

logger = logging.getLogger('slm_lab.env')


class Step(NamedTuple):
    """One step of N slots; arrays of their own, that no later step writes into.

    Attributes:
        next_state: (N, *shape), each slot's true successor, also where its episode ended.
        reward: (N,) float64.
        terminated, truncated: (N,) bool.
        state: (N, *shape), where each slot goes on: the next episode's first observation where one ended. It is
            the very object `next_state` when no episode ended.
    """

    next_state: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    state: np.ndarray


def ended_slots(step):
    """The indices of the slots whose episode ended."""
    return np.flatnonzero(step.terminated | step.truncated)


class VectorEnv:
    """N slots in this process.

    Args:
        name: the environment's name, for messages.
        build: function without arguments that makes one environment.
        num_envs: N.
        seed: the seed that the slots' generators are derived from.
        resume: `replay`, `fresh`, `episode`, or `auto`: found by `probe` before the first reset.
        probe: function without arguments that returns one of the first three.
        build_first: makes slot 0 instead of `build`, e.g. with a window.

    Attributes:
        observation_space, action_space: of one slot.
        max_t: steps after which an episode is truncated, None without a limit.
        state: (N, *shape), the observation to act on next; None before the first reset.
        restarted: the slots that the last `load_state_dict` could not bring back: a new episode begins in each.
    """

    def __init__(self, name, build, num_envs, seed, resume, probe, build_first=None):
        self.name, self.num_envs = name, num_envs
        self.resume, self._probe = resume, probe
        self.slots = [
            Slot(build_first if i == 0 and build_first else build, generator(seed, 'env', i)) for i in range(num_envs)
        ]
        env = self.slots[0].env
        self.observation_space, self.action_space = _lab_space(env.observation_space), env.action_space
        self.max_t = env.spec.max_episode_steps
        self.state, self.restarted = None, []
        self._shape, self._dtype = (num_envs, *self.observation_space.shape), self.observation_space.dtype

    @property
    def unwrapped(self):
        return self

    def resume_mode(self):
        """Which way an episode is brought back; tries it out, once, where the spec says `auto`."""
        if self.resume == 'auto':
            # what an environment draws from the process's generators while it is tried is not the run's
            with GlobalStreams(0, 'env', 'probe'):
                self.resume = self._probe()
            if self.resume != 'replay':
                logger.info("env '%s': episodes are resumed by '%s'", self.name, self.resume)
        return self.resume

    def reset(self):
        """Begins a new episode in every slot; returns the first observations (N, *shape)."""
        mode = self.resume_mode()
        state = np.empty(self._shape, self._dtype)
        for i, slot in enumerate(self.slots):
            slot.resume = mode
            state[i] = slot.reset()
        self.state = state
        return state

    def step(self, actions):
        """Steps every slot with its row of `actions` (N, *action shape); slots reset themselves. Returns a Step."""
        next_state = np.empty(self._shape, self._dtype)
        reward = np.empty(self.num_envs)
        terminated, truncated = np.empty(self.num_envs, np.bool_), np.empty(self.num_envs, np.bool_)
        firsts = None
        for i, slot in enumerate(self.slots):
            next_state[i], reward[i], terminated[i], truncated[i], first = slot.step(actions[i])
            if first is not None:
                firsts = firsts or []
                firsts.append((i, first))
        state = next_state
        if firsts is not None:
            state = next_state.copy()
            for i, first in firsts:
                state[i] = first
        self.state = state
        return Step(next_state, reward, terminated, truncated, state)

    def forget_episodes(self):
        """No episode is under way from here on, so that none has to be brought back; `reset` begins the next ones."""
        for slot in self.slots:
            slot.forget_episode()
        self.state = None

    def state_dict(self):
        return {'resume': self.resume, 'slots': [slot.state_dict() for slot in self.slots]}

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
        with GlobalStreams(0, 'env', 'replay'):
            for slot, state in zip(self.slots, tree['slots'], strict=True):
                slot.resume = self.resume
                slot.load_state_dict(state)
        self.restarted = [i for i, slot in enumerate(self.slots) if slot.restarted]
        if self.restarted:
            logger.warning(
                "env '%s': %d of %d episodes under way cannot be brought back (resume: %s); a new one begins in each",
                self.name,
                len(self.restarted),
                self.num_envs,
                self.resume,
            )
        self.state = None
        if self.slots[0].observation is not None:
            self.state = np.empty(self._shape, self._dtype)
            for i, slot in enumerate(self.slots):
                self.state[i] = slot.observation

    def load_statistics(self, tree):
        """Takes only what wrappers have gathered about observations; nothing here."""

    def close(self):
        for slot in self.slots:
            slot.close()

    def __repr__(self):
        return f'<{self.num_envs} x {self.name}>'


def _lab_space(space):
    """The observation space as the lab hands it on: float64 becomes float32."""
    if space.dtype != np.float64:
        return space
    return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)
