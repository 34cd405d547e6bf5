"""What the wrappers of a vector env share: passing on, and nesting of state by name."""

from abc import ABC, abstractmethod

from slm_lab.lib.errors import ResumeError


class VectorWrapper:
    """Passes everything on to the env inside; has no state of its own."""

    def __init__(self, env):
        self.env = env
        self.name, self.num_envs, self.max_t = env.name, env.num_envs, env.max_t
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.frames_per_state = env.frames_per_state
        self.state = None

    @property
    def unwrapped(self):
        return self.env.unwrapped

    @property
    def restarted(self):
        return self.env.restarted

    @property
    def total_reward(self):
        return self.env.total_reward

    def reset(self):
        self.state = self.env.reset()
        return self.state

    def step(self, actions):
        step = self.env.step(actions)
        self.state = step.state
        return step

    def forget_episodes(self):
        self.env.forget_episodes()
        self.state = None

    def state_dict(self):
        return self.env.state_dict()

    def load_state_dict(self, tree):
        self.env.load_state_dict(tree)
        self.state = self.env.state

    def load_statistics(self, tree):
        self.env.load_statistics(tree)

    def close(self):
        self.env.close()

    def __repr__(self):
        return f'<{type(self).__name__}{self.env!r}>'


class StatefulWrapper(VectorWrapper, ABC):
    """A wrapper with state, which lies under the wrapper's name in the tree of the env inside."""

    def state_dict(self):
        return {**self.env.state_dict(), type(self).__name__: self.own_state()}

    def load_state_dict(self, tree):
        """Raises: ResumeError, before anything is changed, when the tree holds no state of this wrapper."""
        name = type(self).__name__
        if name not in tree:
            raise ResumeError(f"env '{self.name}': the saved state lacks {name}, which the spec has")
        self.env.load_state_dict({k: v for k, v in tree.items() if k != name})
        self.state = self.env.state
        self.load_own_state(tree[name])
        for i in self.restarted:
            self.restart(i)

    @abstractmethod
    def own_state(self):
        """A tree of what this wrapper alone changes."""

    @abstractmethod
    def load_own_state(self, state):
        """Takes the tree back; the env inside is restored already, and `self.state` is its state."""

    @abstractmethod
    def restart(self, i):
        """Slot i begins a new episode instead of the one that was saved: drops what belonged to that episode."""
