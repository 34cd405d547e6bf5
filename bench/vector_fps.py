"""Frames per second of 8 Atari games, preprocessing and frame stacks included, in one run side by side:

    python bench/vector_fps.py [--env ALE/Pong-v5] [--num-envs 8] [--steps 1500] [--rounds 5]

- the lab's env, with its slots in this process and in workers
- gymnasium's AtariPreprocessing and FrameStackObservation in its AsyncVectorEnv
- the Arcade Learning Environment's own vector env, in C++

Each plays the same number of random steps per round, the rounds in turn; the medians and their ratios are printed. One
frame is one step of one game, of 4 frames of the console. Nothing here trains.
"""

import argparse
import functools
import statistics
import time

import ale_py
import gymnasium
import numpy as np
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from slm_lab.env import make_env


def lab_env(name, num_envs, vector):
    env = {'name': name, 'num_envs': num_envs, 'frame_op': 'concat', 'frame_op_len': 4, 'max_frame': 1}
    return make_env({'env': [{**env, 'vector': vector}], 'meta': {'max_session': 1}}, seed=1)


def one_gymnasium_env(name):
    gymnasium.register_envs(ale_py)
    env = gymnasium.make(name, frameskip=1)
    return FrameStackObservation(AtariPreprocessing(env, terminal_on_life_loss=True), 4)


def gymnasium_env(name, num_envs):
    return gymnasium.vector.AsyncVectorEnv([functools.partial(one_gymnasium_env, name)] * num_envs)


def native_env(name, num_envs):
    gymnasium.register_envs(ale_py)
    return gymnasium.make_vec(name, num_envs=num_envs, vectorization_mode='vector_entry_point')


def time_steps(env, actions):
    began = time.perf_counter()
    for action in actions:
        env.step(action)
    return actions.size / (time.perf_counter() - began)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--env', default='ALE/Pong-v5')
    parser.add_argument('--num-envs', type=int, default=8)
    parser.add_argument('--steps', type=int, default=1500)
    parser.add_argument('--rounds', type=int, default=5)
    args = parser.parse_args()
    envs = {
        'gymnasium async': gymnasium_env(args.env, args.num_envs),
        'lab async': lab_env(args.env, args.num_envs, 'async'),
        'lab sync': lab_env(args.env, args.num_envs, 'sync'),
        'ALE native': native_env(args.env, args.num_envs),
    }
    num_actions = int(envs['lab sync'].action_space.n)
    actions = np.random.default_rng(1).integers(num_actions, size=(args.steps, args.num_envs))
    for env in envs.values():
        env.reset()
        time_steps(env, actions[:100])
    rates = {name: [] for name in envs}
    for _ in range(args.rounds):
        for name, env in envs.items():
            rates[name].append(time_steps(env, actions))
    base = statistics.median(rates['gymnasium async'])
    for name, each in rates.items():
        median = statistics.median(each)
        print(
            f'{name:16} {median:8,.0f} frames/s ({min(each):,.0f} to {max(each):,.0f}), {median / base:.2f} x gymnasium'
        )
    for env in envs.values():
        env.close()


if __name__ == '__main__':
    main()
