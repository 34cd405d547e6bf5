"""The agent: an algorithm, its memory and its body."""

from slm_lab.agent.algorithm.base import World
from slm_lab.agent.body import Body
from slm_lab.agent.memory.batch import Layout
from slm_lab.lib import rng as rng_lib
from slm_lab.lib.registry import ALGORITHMS, MEMORIES


class Agent:
    """Acts, remembers, learns.

    Args:
        spec: the resolved spec {agent, env, meta}
        env: gives observation_space, action_space, num_envs, frames_per_state
        seed: the session's seed
        place: counts sessions across a machine; picks the GPU
        check: dev mode: verify every train step
    """

    def __init__(self, spec, env, seed, place=0, check=False):
        agent_spec = spec['agent']
        self.spec, self.name = spec, agent_spec['name']
        world = World(env.observation_space, env.action_space, env.num_envs)
        memory_class = MEMORIES.get(agent_spec['memory']['name'])
        memory_rng = rng_lib.generator(seed, 'memory')
        layout = Layout.of(env.observation_space, env.action_space, env.frames_per_state)
        self.memory = memory_class(agent_spec['memory'], layout, world.num_envs, memory_rng)
        self.algorithm = ALGORITHMS.get(agent_spec['algorithm']['name'])(agent_spec, world, seed, place, check)
        self.body = Body(rigorous_eval=bool(spec['meta']['rigorous_eval']))

    def act(self, states, evaluating=False):
        """Actions (N, …) for states (N, …), both numpy."""
        return self.algorithm.act(states, evaluating)

    def to_env(self, actions):
        """The env's form of actions (N, …): within its bounds."""
        return self.algorithm.to_env(actions)

    def update(self, states, actions, step, frame):
        """Remembers one step of each env, trains if it is due, updates what follows the frame.

        Args:
            states, actions: (N, …) what was acted on, and how
            step: the env's answer: next_state, reward, terminated, truncated
            frame: the clock's frame after the step
        Returns: the number of optimizer steps that were taken
        """
        self.memory.add(states, actions, step.reward, step.next_state, step.terminated, step.truncated)
        trained = self.algorithm.train(self.memory, frame)
        if trained.opt_steps:
            self.body.loss, self.body.entropy = trained.loss, trained.entropy
        self.algorithm.update(frame)
        return trained.opt_steps

    def state_dict(self):
        return {
            'algorithm': self.algorithm.state_dict(),
            'memory': self.memory.state_dict(),
            'body': self.body.state_dict(),
        }

    def load_state_dict(self, state):
        self.algorithm.load_state_dict(state['algorithm'])
        self.memory.load_state_dict(state['memory'])
        self.body.load_state_dict(state['body'])
