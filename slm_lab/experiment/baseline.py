"""Mean return of the random policy: the zero that a run's strength is measured from.

`python -m slm_lab.experiment.baseline ENV_ID...` measures environments and puts them into the shipped table.
"""

import logging
import statistics
import sys
import time
from pathlib import Path

from slm_lab import env as env_room
from slm_lab.lib.errors import LabError
from slm_lab.lib.files import dump_json, read_json, write_json

SHIPPED = Path(__file__).parents[1] / 'spec' / '_random_baseline.json'
NUM_EPISODES = 100
MAX_SECONDS = 20

_logger = logging.getLogger('slm_lab.experiment.baseline')
_known = {}  # {(env, folder): mean}: a run asks at each of its checkpoints


def random_mean(env_spec, folder):
    """Mean return of the random policy in an environment, with the keywords and time limit of its spec.

    It is the shipped value, else the one that this run measured before (`info/random_baseline.json`), else it is
    measured now and kept there. An environment that cannot be measured counts as 0, with one warning.

    Args:
        env_spec: an env spec; old ids count as what they are mapped to
        folder: the run's folder
    """
    key = env_key(env_spec), str(folder)
    if key not in _known:
        _known[key] = _find_mean(env_spec, Path(folder) / 'info' / 'random_baseline.json')
    return _known[key]


def env_key(env_spec):
    """The env's id, and whatever else in its spec changes what the random policy gets there."""
    name, max_t, kwargs = env_room.what_is_made(env_spec)
    others = {**({} if max_t is None else {'max_t': max_t}), **kwargs}
    return name if not others else f'{name} {dump_json(dict(sorted(others.items())), indent=0)}'


def measure(env_spec, num_episodes=NUM_EPISODES, max_seconds=None):
    """Plays whole episodes with random actions; episode i has seed i, for the environment and for the actions.

    Args:
        max_seconds: stop after these many seconds and leave out the unfinished episode; None: no limit
    Returns: {'mean', 'std' (of the population), 'episodes'}
    Raises: LabError when not one episode ended in time, and whatever the environment raises.
    """
    env = env_room.make_raw(env_spec)
    deadline = time.monotonic() + (max_seconds or float('inf'))
    returns = []
    try:
        for seed in range(num_episodes):
            episode_return = _play_episode(env, seed, deadline)
            if episode_return is None:
                break
            returns.append(episode_return)
    finally:
        env.close()
    if not returns:
        raise LabError(f'{env_key(env_spec)}: no episode of the random policy ended within {max_seconds:g} s')
    return {'mean': statistics.fmean(returns), 'std': statistics.pstdev(returns), 'episodes': len(returns)}


def _play_episode(env, seed, deadline):
    """The return, or None when the deadline came first."""
    env.action_space.seed(seed)
    env.reset(seed=seed)
    episode_return, ended = 0.0, False
    while not ended:
        if time.monotonic() > deadline:
            return None
        _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        episode_return += float(reward)
        ended = terminated or truncated
    return episode_return


def _find_mean(env_spec, cache_path):
    key, shipped = env_key(env_spec), read_json(SHIPPED)
    if key in shipped:
        return shipped[key]['mean']
    cached = _read_cache(cache_path)
    if key in cached:
        return cached[key]['mean']
    _logger.info(
        'measuring the random policy in %s, which has no baseline yet (%d episodes, at most %d s)',
        key,
        NUM_EPISODES,
        MAX_SECONDS,
    )
    try:
        baseline = measure(env_spec, max_seconds=MAX_SECONDS)
    except Exception as e:  # third-party environments fail in ways of their own; a metric's zero is no reason to stop
        _logger.warning('%s: the random policy cannot be measured (%s); strength counts from 0', key, e)
        return 0.0
    cached = _read_cache(cache_path)
    # a session of the same trial may have been quicker: all sessions of a run count from one value
    baseline = cached.setdefault(key, baseline)
    try:
        write_json(cached, cache_path)
    except OSError as e:
        _logger.warning('cannot keep the baseline of %s: %s', key, e)
    return baseline['mean']


def _read_cache(path):
    return read_json(path) if path.exists() else {}


def main(env_names):
    """Measures environments, prints their baselines and puts them into the shipped table. Returns the exit status."""
    if not env_names or env_names[0].startswith('-'):
        print('usage: python -m slm_lab.experiment.baseline ENV_ID...', file=sys.stderr)
        return 2
    table = read_json(SHIPPED) if SHIPPED.exists() else {}
    try:
        for name in env_names:
            baseline = measure({'name': name, 'max_frame': 1})
            table[name] = {'mean': baseline['mean'], 'std': baseline['std']}
            print(f'{name}: mean {baseline["mean"]:g}, std {baseline["std"]:g}')
        write_json(dict(sorted(table.items())), SHIPPED)
    except Exception as e:
        print(f'error: {e}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
