"""What all algorithms share: spec keys, acting, schedules and state."""

from typing import NamedTuple

import numpy as np
import pydash
import torch

from slm_lab.agent import distribution, policy
from slm_lab.agent.net.base import NET_KEYS, build_loss, pick_device
from slm_lab.agent.net.headed import set_log_std
from slm_lab.agent.net.optim import TARGET_KEYS
from slm_lab.lib import rng as rng_lib
from slm_lab.lib.errors import SpecError
from slm_lab.lib.keys import Key, leftover, read_keys
from slm_lab.lib.registry import MEMORIES, NETS, POLICIES
from slm_lab.lib.schedule import Schedule, fill_spec


def schedule_key(default=None, note=''):
    return Key('dict|null', default, fill=fill_spec, note=note)


def policy_key(default):
    return Key('str', default, validate=POLICIES.get, note='how actions are drawn')


COMMON_KEYS = {
    'name': Key('str'),
    'action_pdtype': Key('str|null', 'default', note='action distribution'),
    'action_policy': policy_key('default'),
    'explore_var_spec': schedule_key(note='epsilon or temperature'),
    'gamma': Key('number', low=0, high=1, note='discount'),
    'training_frequency': Key('int', low=1, note='env steps between trainings'),
    'normalize_state': leftover('env.normalize_state does it'),
}


def _check_exploration(algorithm, where):
    name, schedule = algorithm['action_policy'], algorithm['explore_var_spec']
    if name in ('epsilon_greedy', 'boltzmann') and schedule is None:
        raise SpecError(f"{where}: policy '{name}' needs a schedule, not null")
    if name == 'boltzmann' and min(schedule['start_val'], schedule['end_val']) <= 0:
        raise SpecError(f"{where}: policy 'boltzmann' divides by this temperature; its values must be above 0")


class World(NamedTuple):
    """What an agent needs to know of its env."""

    observation_space: object  # of one env, after wrappers
    action_space: object  # of one env
    num_envs: int


class Trained(NamedTuple):
    """What one training did. `loss` is NaN and `opt_steps` 0 when it was not due."""

    loss: float
    opt_steps: int
    entropy: float = float('nan')  # mean of the policy's, where the algorithm calculates it


NOT_TRAINED = Trained(float('nan'), 0)


class Algorithm:
    """Base of all algorithms: acts by a policy over a net's output, trains from a memory.

    Args:
        spec: the resolved agent spec {algorithm, memory, net}
        world: World
        seed: the session's seed; generators are derived from it by name
        place: counts sessions across a machine; picks the GPU
        check: dev mode: verify every train step
    """

    KEYS = COMMON_KEYS
    NEEDS_NET = True
    MEMORIES = ()  # names of the memories that it trains from; empty: any
    SCHEDULED = ('explore_var',)  # values that are functions of the frame, by their keys without `_spec`
    HAS_CRITIC_SPEC = False  # whether `critic_net` beside `net` is read
    HAS_TARGET = False  # whether a target net follows the net
    HAS_LOSS = True  # whether values are compared with targets, by the net's loss_spec
    ACTION_TYPES = ()  # kinds of action spaces that it can act in; empty: any
    entropy_coef = float('nan')  # of algorithms that have none

    def __init__(self, spec, world, seed, place=0, check=False):
        self.spec, self.net_spec, self.world = spec['algorithm'], spec['net'], world
        self.rng = rng_lib.generator(seed, 'explore')
        self.eval_rng = rng_lib.generator(seed, 'evaluation', 'explore')
        # each value is the attribute of its schedule's name, at the frame of the last update
        self.schedules = {name: Schedule(self.spec[f'{name}_spec']) for name in self.SCHEDULED}
        self._set_scheduled(0)
        self.check = check
        self.learners = {}  # name of a net -> Learner
        self.targets = {}  # name of a target net -> TargetNet
        if self.NEEDS_NET:
            pdtype, where = self.spec['action_pdtype'], 'agent.0.algorithm.action_pdtype'
            self._check_action_type()
            self.distribution = distribution.pick(pdtype, world.action_space, where)
            self._check_policy()
            self.policy = POLICIES.get(self.spec['action_policy'])
            self.device = pick_device(self.net_spec['gpu'], place)
            self.loss_fn = build_loss(self.net_spec['loss_spec']) if self.HAS_LOSS else None
            self.init_nets()
            self._set_log_std()
            net = self.learners['net'].net
            # a net that counts running statistics must not count what it acts on, least of all in evaluation
            self._normalised_net = net if any(True for _ in net.buffers()) else None

    @classmethod
    def check_spec(cls, resolved, raw, where):
        """Checks the keys of an agent spec against each other. Raises: SpecError"""
        name = resolved['memory']['name']
        if cls.MEMORIES and name not in cls.MEMORIES:
            raise SpecError(
                f'{where}.memory.name: {cls.__name__} cannot train from {name}; it takes {", ".join(cls.MEMORIES)}'
            )
        if cls.NEEDS_NET:
            _check_exploration(resolved['algorithm'], f'{where}.algorithm.explore_var_spec')

    @classmethod
    def resolve_memory(cls, memory, where):
        """Checks the memory's part of a spec. Returns: (values with defaults, places of keys that nothing reads)."""
        if 'name' not in memory:
            raise SpecError(f"{where}: key 'name' is missing; it names the memory: {', '.join(MEMORIES.names())}")
        checked = read_keys(MEMORIES.get(memory['name'], f'{where}.name').KEYS, memory, where)
        return checked.values, checked.ignored

    @classmethod
    def resolve_net(cls, net, where):
        """Checks the net's part of a spec. Returns: (values with defaults, places of keys that nothing reads)."""
        if 'type' not in net:
            raise SpecError(f"{where}: key 'type' is missing; it names the net: {', '.join(NETS.names())}")
        net_class = NETS.get(net['type'], f'{where}.type')
        if net_class.TAKES_ACTIONS:
            raise SpecError(f"{where}.type: '{net['type']}' takes actions, so it can be a critic but cannot act")
        unread = [] if cls.HAS_LOSS else ['loss_spec']
        checked = read_keys(net_class.KEYS, pydash.omit(net, unread), where)
        if not cls.HAS_TARGET:
            unread += TARGET_KEYS
        elif checked.values['update_type'] == 'replace':
            unread += ['polyak_coef']
        defaults = {key: NET_KEYS[key].default for key in unread}
        return {**checked.values, **defaults}, checked.ignored + [f'{where}.{key}' for key in unread if key in net]

    def _check_action_type(self):
        space = self.world.action_space
        if self.ACTION_TYPES and distribution.action_type(space) not in self.ACTION_TYPES:
            kinds = ' or '.join(self.ACTION_TYPES)
            raise SpecError(f'agent.0.algorithm.name: {type(self).__name__} takes {kinds} actions; the env has {space}')

    def _check_policy(self):
        space, name = self.world.action_space, self.spec['action_policy']
        where = 'agent.0.algorithm.action_policy'
        if name == 'boltzmann' and distribution.action_type(space) != 'discrete':
            raise SpecError(f"{where}: 'boltzmann' divides logits of discrete actions; the env has {space}")
        if name in ('random', 'epsilon_greedy') and self.distribution is distribution.Beta:
            raise SpecError(f"{where}: '{name}' draws the env's actions, not those of Beta; use 'default'")

    def _set_log_std(self):
        value = self.net_spec['log_std_init']
        if value is None:
            return
        if not issubclass(self.distribution, distribution.LocScale):
            name = self.distribution.__name__
            raise SpecError(f'agent.0.net.log_std_init: {name} has no standard deviation; remove the key')
        set_log_std(self.learners['net'].net, value)

    def init_nets(self):
        raise NotImplementedError(f'{type(self).__name__} builds no nets')

    @property
    def state_dim(self):
        """The length of a state of one axis, the shape of any other."""
        shape = self.world.observation_space.shape
        return shape[0] if len(shape) == 1 else shape

    def build_net(self, spec, out_dim):
        """A net from states to `out_dim`, on the algorithm's device."""
        return NETS.get(spec['type'])(spec, self.state_dim, out_dim).to(self.device)

    def trains_from(self, memory):
        """Whether a replay has what a training needs: the warm-up is over and a training period is complete."""
        start = self.spec['training_start_step']
        return memory.is_due(self.spec['training_frequency'], memory.batch_size if start is None else start)

    def to_tensor(self, states):
        """States (N, …) of any dtype as floats on the algorithm's device."""
        return torch.from_numpy(np.ascontiguousarray(states)).to(self.device, torch.float32)

    def logits(self, states):
        """The output of the acting net: states (N, …) as numpy -> (N, A)."""
        return self.learners['net'].net(self.to_tensor(states))

    def to_env(self, actions):
        """The env's form of the agent's actions (N, …)."""
        return actions

    def random_actions(self, n, rng):
        return policy.random_actions(self.world.action_space, n, rng)

    @torch.no_grad()
    def act(self, states, evaluating=False):
        """Actions (N, …) as numpy for states (N, …). Evaluating uses the final explore_var and its own generator."""
        explore_var = self.schedules['explore_var'].final if evaluating else self.explore_var
        rng = self.eval_rng if evaluating else self.rng
        if self._normalised_net is None:
            return self.policy(states, self, explore_var, rng)
        self._normalised_net.eval()
        actions = self.policy(states, self, explore_var, rng)
        self._normalised_net.train()
        return actions

    def sample(self, memory, frame):
        """A batch of the memory on the algorithm's device, its states as floats."""
        batch = memory.sample(frame)
        return batch._replace(
            states=batch.states.to(self.device, torch.float32),
            next_states=batch.next_states.to(self.device, torch.float32),
            **{f: getattr(batch, f).to(self.device) for f in ('actions', 'rewards', 'terminated', 'truncated')},
            weights=None if batch.weights is None else batch.weights.to(self.device),
        )

    def train(self, memory, frame):
        """Trains if it is due. Returns: Trained"""
        raise NotImplementedError(f'{type(self).__name__} does not train')

    def update(self, frame):
        """Called once per env step after training: target nets and scheduled values."""
        for target in self.targets.values():
            target.update(frame, self.world.num_envs)
        self._set_scheduled(frame)

    def _set_scheduled(self, frame):
        for name, schedule in self.schedules.items():
            setattr(self, name, schedule(frame))

    def set_frame(self, frame):
        """Sets everything that is a function of the frame: for runs of which only weights were kept."""
        self._set_scheduled(frame)
        for learner in self.learners.values():
            learner.set_frame(frame)

    def sync_targets(self, names):
        """Makes the named target nets equal to their sources, as at the start of a run."""
        for name, target in self.targets.items():
            if name in names:
                target.target.load_state_dict(target.source.state_dict())

    @property
    def lr(self):
        """Mean learning rate of the optimizers, NaN without any."""
        rates = [learner.lr for learner in self.learners.values()]
        return float(np.mean(rates)) if rates else float('nan')

    @property
    def grad_norm(self):
        norms = [learner.grad_norm for learner in self.learners.values()]
        return float(np.mean(norms)) if norms else float('nan')

    @property
    def nets(self):
        """{name: module} of all nets, trained and target, in the order of their files."""
        nets = {name: learner.net for name, learner in self.learners.items()}
        nets.update({name: target.target for name, target in self.targets.items()})
        return nets

    def state_dict(self):
        return {
            'nets': {name: net.state_dict() for name, net in self.nets.items()},
            'optims': {name: learner.optim.state_dict() for name, learner in self.learners.items()},
            **{name: getattr(self, name) for name in self.schedules},
            'grad_norm': {name: learner.grad_norm for name, learner in self.learners.items()},
            'skipped_steps': {name: learner.skipped_steps for name, learner in self.learners.items()},
            'rng': rng_lib.generator_state(self.rng),
            'eval_rng': rng_lib.generator_state(self.eval_rng),
        }

    def load_state_dict(self, state):
        for name, net in self.nets.items():
            net.load_state_dict(state['nets'][name])
        for name, learner in self.learners.items():
            learner.load_optim(state['optims'][name])
            learner.grad_norm = state['grad_norm'][name]
            learner.skipped_steps = state['skipped_steps'][name]
        for name in self.schedules:
            setattr(self, name, state[name])
        rng_lib.set_generator_state(self.rng, state['rng'])
        rng_lib.set_generator_state(self.eval_rng, state['eval_rng'])
