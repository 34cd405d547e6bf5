"""How much memory a spec will take, held against what the machine has, before a run starts.

- `estimate`: what each part of so many sessions takes
- `check`: refuses what cannot fit

Not counted: what envs and GPU libraries allocate for themselves, activations, graphs, and the last frames of episodes,
one for each, which a replay of stacked frames keeps besides. Nets are counted as if they lay in main memory.
"""

from dataclasses import dataclass

import numpy as np

from slm_lab.agent.algorithm.base import World
from slm_lab.agent.memory.batch import Layout
from slm_lab.agent.memory.on_policy import OnPolicyReplay
from slm_lab.agent.memory.prioritized import PrioritizedReplay
from slm_lab.agent.memory.storage import make_storage
from slm_lab.env import make_env
from slm_lab.env.workers import worker_shares
from slm_lab.lib.errors import LabError
from slm_lab.lib.machine import MB, available, count_cpus, size
from slm_lab.lib.registry import ALGORITHMS, MEMORIES
from slm_lab.spec import spec_util

# The demo's dqn_cartpole, one session: 383 MB of RSS once it is built (of which importing torch takes 230 MB), 423 MB
# after training and drawing its graphs, 441 MB at the highest. At the end 286 MB were its own (USS), the rest code of
# libraries, which processes share. Measured by psutil's memory_full_info and ru_maxrss: Linux x86-64, Python 3.11,
# torch 2.13 for CPUs.
SHARED = 140 * MB
PROCESS = 300 * MB
# An env worker, forked, after 2000 steps: 7 MB of its own with CartPole, 9 with LunarLander, 13 with HalfCheetah.
WORKER = 13 * MB

TRAINED_COPIES = 7  # of a weight: itself, its gradient, two moments; all but the gradient again, as the best so far
TARGET_COPIES = 2  # of a weight of a target net: itself, and as the best so far


class NotEnoughMemory(LabError):
    """What a run needs, what is there, and what to change."""


@dataclass(frozen=True)
class Estimate:
    """What the sessions of a spec take that run at the same time.

    Args:
        total: bytes, of all parts
        parts: {name: bytes of all sessions together}
        num_parallel: how many sessions
        mapped: bytes of address space that one session reserves beyond its process, used or not
        changes: what in the spec would lower the total
    """

    total: int
    parts: dict
    num_parallel: int = 1
    mapped: int = 0
    changes: tuple = ()

    def __str__(self):
        parts = ', '.join(f'{name} {size(n)}' for name, n in self.parts.items())
        sessions = '1 session' if self.num_parallel == 1 else f'{self.num_parallel} sessions at a time'
        return f'about {size(self.total)} for {sessions} ({parts})'


# --- what is needed


def estimate(spec, num_parallel=1):
    """What `num_parallel` sessions of a checked spec take at their largest, and their parent where there are several.

    Builds one env for its spaces, and the algorithm for its nets, and lets both go.

    Returns: Estimate. Raises: SpecError
    """
    resolved = spec_util.resolve(spec)
    env = make_env(spec, 0, num_envs=1)
    env.close()
    num_envs, max_frame = resolved['env']['num_envs'], spec_util.session_max_frame(resolved)
    world = World(env.observation_space, env.action_space, num_envs)
    algorithm = _build_algorithm(resolved['agent'], world)
    memory, replay = _split(resolved['agent']['memory'])
    layout = Layout.of(env.observation_space, env.action_space)

    parts, unused = {}, 0
    if replay is not None:
        # self-imitation keeps whole states, of which it gets batches
        row_bytes = transition_bytes(layout._replace(frames_per_state=env.frames_per_state if replay is memory else 1))
        rows = min(replay['max_size'], max_frame)  # slots that are never written take no memory
        parts[f'replay of {rows:,} transitions'] = rows * row_bytes
        unused = (replay['max_size'] - rows) * row_bytes
        if issubclass(MEMORIES.get(replay['name']), PrioritizedReplay):
            parts['priorities'] = tree_bytes(replay['max_size'])
    if memory is not replay:
        steps = _steps_kept(memory, algorithm, env.max_t, num_envs, max_frame)
        parts['on-policy batch'] = on_policy_bytes(layout, steps, num_envs)
    parts['nets and optimizers'] = _net_bytes(algorithm)
    mapped = sum(parts.values()) + unused
    if num_workers := _count_workers(resolved, num_parallel):
        parts[f'env workers ({num_workers} each)' if num_parallel > 1 else 'env workers'] = num_workers * WORKER
    parts = {name: n * num_parallel for name, n in parts.items()}
    num_processes = num_parallel + (num_parallel > 1)
    parts = {'processes': SHARED + num_processes * PROCESS, **parts}
    changes = {
        'memory.max_size': replay is not None,
        'meta.max_session (or raise meta.num_cpus: fewer at a time)': num_parallel > 1,
        'env.num_envs': num_envs > 1 and (memory is not replay or num_workers > 0),
    }
    return Estimate(
        sum(parts.values()), parts, num_parallel, mapped, tuple(name for name, helps in changes.items() if helps)
    )


def transition_bytes(layout):
    """Bytes of a transition in a replay, by the storage that the replay keeps it in."""
    return _row_bytes(make_storage(layout, 1, 1).arrays)


def _row_bytes(arrays):
    return sum(a[:1].nbytes for a in arrays.values())


def tree_bytes(capacity):
    """Bytes of the sum tree over so many priorities: two doubles for each of the next power of two."""
    return 16 * 2 ** max(1, (capacity - 1).bit_length())


def on_policy_bytes(layout, steps, num_envs):
    """Bytes of a memory of so many steps of each env, which grows by doubling, and of the batch that is taken from it,
    the states of which become floats."""
    if not steps:
        return 0
    row = _row_bytes(layout.allocate((1,)))
    floats = 0 if layout.state_dtype == np.float32 else 2 * 4 * int(np.prod(layout.state_shape))
    capacity = max(32, 2 ** (steps - 1).bit_length())
    return num_envs * (capacity * row + steps * (row + floats))


def _split(memory):
    """A memory spec as (that of the memory, that of the replay: the same, or the one within it, or None)."""
    if not MEMORIES.get(memory['name']).ON_POLICY:
        return memory, memory
    return memory, memory.get('sil_replay')


def _build_algorithm(agent, world):
    """In main memory, without the transitions of a replay of its own."""
    agent = spec_util.copy_of(agent)
    for key in ('net', 'critic_net'):
        if agent.get(key):
            agent[key]['gpu'] = False
    if agent['memory'].get('sil_replay'):
        agent['memory']['sil_replay']['max_size'] = 1
    return ALGORITHMS.get(agent['algorithm']['name'])(agent, world, 0)


def _net_bytes(algorithm):
    trained = sum(_bytes_of(learner.net) for learner in algorithm.learners.values())
    targets = sum(_bytes_of(target.target) for target in algorithm.targets.values())
    return TRAINED_COPIES * trained + TARGET_COPIES * targets


def _bytes_of(net):
    return sum(tensor.nbytes for tensor in (*net.parameters(), *net.buffers()))


def _steps_kept(memory, algorithm, max_t, num_envs, max_frame):
    """The most steps of each env that an on-policy memory holds; 0 where episodes have no end that is known."""
    frequency = algorithm.spec.get('training_frequency', 1)
    if issubclass(MEMORIES.get(memory['name']), OnPolicyReplay):
        if max_t is None:
            return 0
        # whole episodes of all envs together, and in all envs but one the next, which has begun
        frequency = max_t * (-(-frequency // num_envs) + (num_envs > 1))
    return min(frequency, -(-max_frame // num_envs))


def _count_workers(resolved, num_parallel):
    """Of one session's envs for training and evaluation, at most: `auto` may well decide for none."""
    if resolved['env']['vector'] == 'sync':
        return 0
    cpus = max(1, count_cpus() // num_parallel)
    numbers = [n for n in (resolved['env']['num_envs'], int(resolved['meta']['rigorous_eval'] or 0)) if n > 1]
    return sum(len(worker_shares(n, cpus)) for n in numbers) if cpus > 1 else 0


# --- the two together


def check(needed, force=False, there=None):
    """Refuses what cannot fit.

    Args:
        needed: Estimate
        force: try it all the same
        there: Available; None: as it is now
    Returns: one line for the log
    Raises: NotEnoughMemory
    """
    there = there or available()
    cannot_map = there.address_space is not None and needed.mapped > there.address_space
    cannot_fit = needed.total > there.num_bytes or cannot_map
    if cannot_fit and not force:
        raise refusal(needed, there, reserves=cannot_map)
    line = f'Memory: {needed}; {_there(there)}'
    return f'{line}; it cannot fit, and is tried because of --force' if cannot_fit else line


def refusal(needed, there=None, forced=False, reserves=False):
    """The error that says that so much is not there.

    Args:
        needed, there: as of `check`
        forced: --force was tried already
        reserves: what is lacking is address space
    """
    text = f'not enough memory: it takes {needed}'
    if reserves:
        text += f', and a session reserves {size(needed.mapped)} of address space at once'
    ways = [f'Lower {", ".join(needed.changes)}'] if needed.changes else ['Free some']
    if not forced:
        ways.append('try all the same with --force')
    return NotEnoughMemory(f'{text}; {_there(there or available())}. {", or ".join(ways)}')


def _there(there):
    text = f'{size(there.num_bytes)} are there {there.place}'
    if there.address_space is not None:
        text += f', and a process may map {size(there.address_space)} more (ulimit -v)'
    return text
