"""Mean return of the random policy: the zero that a run's strength is measured from.

`python -m slm_lab.experiment.baseline ENV_ID...` measures environments and puts them into the shipped table.
"""

import logging
import statistics
import sys
import time
from pathlib import Path

from slm_lab.lib.errors import LabError
from slm_lab.lib.files import read_json, write_json

SHIPPED = Path(__file__).parents[1] / 'spec' / '_random_baseline.json'
NUM_EPISODES = 100
MAX_SECONDS = 20

_logger = logging.getLogger('slm_lab.experiment.baseline')
_known = {}  # {(env name, folder): mean}: a run asks at each of its checkpoints


def random_mean(env_name, folder):
    """Mean return of the random policy in an environment.

    It is the shipped value, else the one that this run measured before (`info/random_baseline.json`), else it is
    measured now and kept there. An environment that cannot be measured counts as 0, with one warning.

    Args:
        env_name: an environment id; old ids count as what they are mapped to
        folder: the run's folder
    """
    key = env_name, str(folder)
    if key not in _known:
        _known[key] = _find_mean(env_name, Path(folder) / 'info' / 'random_baseline.json')
    return _known[key]


def measure(env_name, num_episodes=NUM_EPISODES, max_seconds=None):
    """Plays whole episodes with random actions; episode i has seed i, for the environment and for the actions.

    Args:
        max_seconds: stop after these many seconds and leave out the unfinished episode; None: no limit
    Returns: {'mean', 'std' (of the population), 'episodes'}
    Raises: LabError when not one episode ended in time, and whatever the environment raises.
    """
    import gymnasium

    env = gymnasium.make(_current_id(env_name), disable_env_checker=True)
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
        raise LabError(f'{env_name}: no episode of the random policy ended within {max_seconds:g} s')
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


def _find_mean(env_name, cache_path):
    shipped = read_json(SHIPPED)
    name = env_name if env_name in shipped else _current_id(env_name)
    if name in shipped:
        return shipped[name]['mean']
    cached = _read_cache(cache_path)
    if env_name in cached:
        return cached[env_name]['mean']
    _logger.info(
        'measuring the random policy in %s, which has no baseline yet (%d episodes, at most %d s)',
        env_name,
        NUM_EPISODES,
        MAX_SECONDS,
    )
    try:
        baseline = measure(env_name, max_seconds=MAX_SECONDS)
    except Exception as e:  # third-party environments fail in ways of their own; a metric's zero is no reason to stop
        _logger.warning('%s: the random policy cannot be measured (%s); strength counts from 0', env_name, e)
        return 0.0
    cached = _read_cache(cache_path)
    # a session of the same trial may have been quicker: all sessions of a run count from one value
    baseline = cached.setdefault(env_name, baseline)
    try:
        write_json(cached, cache_path)
    except OSError as e:
        _logger.warning('cannot keep the baseline of %s: %s', env_name, e)
    return baseline['mean']


def _read_cache(path):
    return read_json(path) if path.exists() else {}


def _current_id(env_name):
    from slm_lab.env.registration import current_id

    return current_id(env_name)


def main(env_names):
    """Measures environments, prints their baselines and puts them into the shipped table. Returns the exit status."""
    if not env_names or env_names[0].startswith('-'):
        print('usage: python -m slm_lab.experiment.baseline ENV_ID...', file=sys.stderr)
        return 2
    table = read_json(SHIPPED) if SHIPPED.exists() else {}
    try:
        for name in env_names:
            baseline = measure(name)
            table[name] = {'mean': baseline['mean'], 'std': baseline['std']}
            print(f'{name}: mean {baseline["mean"]:g}, std {baseline["std"]:g}')
        write_json(dict(sorted(table.items())), SHIPPED)
    except Exception as e:
        print(f'error: {e}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
