"""How episodes under way are brought back, and how long it takes: `python bench/restore_env.py [NAME …]`.

For each environment: what `auto` finds, whether the episode came back bit for bit in a new env, after how many steps of
it, and the seconds that took (building included), the median of three. Episodes last as long as random play, or up to
`--steps`.
"""

import argparse
import statistics
import time

import numpy as np

from slm_lab.env import make_env
from slm_lab.lib.state import first_difference, snapshot

NAMES = (
    'CartPole-v1',
    'Acrobot-v1',
    'Pendulum-v1',
    'MountainCar-v0',
    'LunarLander-v3',
    'BipedalWalker-v3',
    'Hopper-v5',
    'HalfCheetah-v5',
    'Humanoid-v5',
    'ALE/Pong-v5',
    'PongNoFrameskip-v4',
    'ALE/Breakout-v5',
    'gym:CartPole-v1',
)


def build(name):
    stacked = {'frame_op': 'concat', 'frame_op_len': 4} if 'Pong' in name or 'Breakout' in name else {}
    env = {'name': name, 'num_envs': 1, 'max_frame': 1, **stacked}
    return make_env({'env': [env], 'meta': {'max_session': 1}}, seed=1)


def longest_under_way(env, steps):
    """Plays at random. Returns: (its state where an episode had lasted longest, how long that was)"""
    rng = np.random.default_rng(1)
    space = env.action_space
    space.seed(1)
    env.reset()
    lasted, best, state = 0, -1, None
    for _ in range(steps):
        action = np.array([space.sample()])
        step = env.step(action)
        lasted = 0 if (step.terminated | step.truncated)[0] else lasted + 1
        if lasted > best and (lasted % 10 == 0 or rng.random() < 0.1):
            best, state = lasted, snapshot(env.state_dict())
    return state, best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('names', nargs='*', default=NAMES)
    parser.add_argument('--steps', type=int, default=4000)
    args = parser.parse_args()
    for name in args.names:
        env = build(name)
        state, lasted = longest_under_way(env, args.steps)
        times = []
        for _ in range(3):
            again = build(name)
            began = time.perf_counter()
            again.load_state_dict(state)
            times.append(time.perf_counter() - began)
            exact = not again.restarted and first_difference(state, again.state_dict()) is None
            again.close()
        way, how = state['resume'], 'exact' if exact else 'new episode'
        print(f'{name:20} {way:8} {how:12} after {lasted:5} steps in {statistics.median(times):.3f} s')
        env.close()


if __name__ == '__main__':
    main()
