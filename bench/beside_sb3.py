"""Frames per second of whole trainings, the lab and Stable-Baselines3 in turn in one process:

    pip install stable-baselines3 opencv-python-headless
    python bench/beside_sb3.py [dqn_cartpole ppo_cartpole sac_pendulum dqn_pong] [--rounds 5]

Both train the same algorithm with the same nets, batches and frequencies on one torch thread; neither evaluates nor
saves. A round is the same number of frames for each, after a first one that is not counted. Time is the process's own
(CPU seconds), so that other work on the machine counts for neither; the medians, also of the ratios, are printed.
"""

import argparse
import logging
import statistics
import time

import torch

from slm_lab.experiment.session import Session
from slm_lab.spec import spec_util


def lab_spec(algorithm, memory, net, env):
    agent = {
        'algorithm': {'action_pdtype': 'default', 'action_policy': 'default', 'gamma': 0.99, **algorithm},
        'memory': memory,
        'net': {'type': 'MLPNet', 'hid_layers_activation': 'relu', 'gpu': False, **net},
    }
    meta = {'log_frequency': 500, 'max_session': 1, 'random_seed': 1}
    return {'name': 'beside_sb3', 'agent': [agent], 'env': [{'max_t': None, 'max_frame': 10**7, **env}], 'meta': meta}


def dqn_algorithm(start):
    decay = {'name': 'linear_decay', 'start_val': 1.0, 'end_val': 0.05, 'start_step': 0, 'end_step': 10_000}
    return {
        'name': 'DQN',
        'action_pdtype': 'Argmax',
        'action_policy': 'epsilon_greedy',
        'explore_var_spec': decay,
        'training_frequency': 4,
        'training_iter': 1,
        'training_batch_iter': 1,
        'training_start_step': start,
    }


def replay(batch_size, max_size):
    return {'name': 'Replay', 'batch_size': batch_size, 'max_size': max_size, 'use_cer': False}


def adam(lr):
    return {'name': 'Adam', 'lr': lr}


def lab_dqn_cartpole():
    net = {
        'hid_layers': [64, 64],
        'clip_grad_val': 10.0,
        'loss_spec': {'name': 'SmoothL1Loss'},
        'optim_spec': adam(1e-3),
    }
    return lab_spec(dqn_algorithm(500), replay(64, 50_000), {**net, 'update_frequency': 500}, {'name': 'CartPole-v1'})


def sb3_dqn_cartpole():
    from stable_baselines3 import DQN

    return DQN(
        'MlpPolicy',
        'CartPole-v1',
        learning_rate=1e-3,
        batch_size=64,
        buffer_size=50_000,
        learning_starts=500,
        train_freq=4,
        gradient_steps=1,
        target_update_interval=500,
        max_grad_norm=10,
        device='cpu',
    )


def lab_ppo_cartpole():
    algorithm = {
        'name': 'PPO',
        'lam': 0.95,
        'clip_eps_spec': {'name': 'no_decay', 'start_val': 0.2},
        'entropy_coef_spec': {'name': 'no_decay', 'start_val': 0.01},
        'val_loss_coef': 0.5,
        'time_horizon': 128,
        'minibatch_size': 128,
        'training_epoch': 8,
    }
    net = {
        'shared': False,
        'hid_layers': [64, 64],
        'hid_layers_activation': 'tanh',
        'clip_grad_val': 0.5,
        'use_same_optim': True,
        'optim_spec': adam(1e-3),
    }
    return lab_spec(algorithm, {'name': 'OnPolicyBatchReplay'}, net, {'name': 'CartPole-v1', 'num_envs': 4})


def sb3_ppo_cartpole():
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    env = make_vec_env('CartPole-v1', n_envs=4)
    kwargs = {'n_steps': 128, 'batch_size': 128, 'n_epochs': 8, 'ent_coef': 0.01, 'learning_rate': 1e-3}
    return PPO('MlpPolicy', env, device='cpu', **kwargs)


def lab_sac_pendulum():
    algorithm = {'name': 'SoftActorCritic', 'training_frequency': 1, 'training_iter': 1, 'training_start_step': 500}
    net = {'hid_layers': [256, 256], 'optim_spec': adam(1e-3), 'update_type': 'polyak', 'polyak_coef': 0.005}
    return lab_spec(algorithm, replay(256, 100_000), net, {'name': 'Pendulum-v1'})


def sb3_sac_pendulum():
    from stable_baselines3 import SAC

    kwargs = {'learning_rate': 1e-3, 'batch_size': 256, 'buffer_size': 100_000, 'learning_starts': 500, 'tau': 0.005}
    return SAC('MlpPolicy', 'Pendulum-v1', device='cpu', **kwargs)


def lab_dqn_pong():
    net = {
        'type': 'ConvNet',
        'conv_hid_layers': [[32, 8, 4, 0, 1], [64, 4, 2, 0, 1], [64, 3, 1, 0, 1]],
        'fc_hid_layers': [512],
        'clip_grad_val': 10.0,
        'loss_spec': {'name': 'SmoothL1Loss'},
        'optim_spec': adam(1e-4),
        'update_frequency': 1000,
    }
    env = {'name': 'PongNoFrameskip-v4', 'frame_op': 'concat', 'frame_op_len': 4, 'reward_scale': 'sign'}
    return lab_spec(dqn_algorithm(500), replay(32, 10_000), net, env)


def sb3_dqn_pong():
    from stable_baselines3 import DQN
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    return DQN(
        'CnnPolicy',
        VecFrameStack(make_atari_env('PongNoFrameskip-v4', n_envs=1), 4),
        learning_rate=1e-4,
        batch_size=32,
        buffer_size=10_000,
        learning_starts=500,
        train_freq=4,
        gradient_steps=1,
        target_update_interval=1000,
        max_grad_norm=10,
        device='cpu',
    )


# name: (the lab's spec, Stable-Baselines3's model, frames of a round)
TRAININGS = {
    'dqn_cartpole': (lab_dqn_cartpole, sb3_dqn_cartpole, 8_000),
    'ppo_cartpole': (lab_ppo_cartpole, sb3_ppo_cartpole, 8_192),
    'sac_pendulum': (lab_sac_pendulum, sb3_sac_pendulum, 1_000),
    'dqn_pong': (lab_dqn_pong, sb3_dqn_pong, 1_000),
}


class Lab:
    def __init__(self, spec):
        spec_util.prepare(spec)
        self.session = Session(spec_util.session_spec(spec, 0), store=False)
        self.session.env.reset()

    def train(self, frames):
        self.session.clock.max_frame = self.session.clock.frame + frames
        self.session.run_rl()


class StableBaselines3:
    def __init__(self, model):
        self.model = model

    def train(self, frames):
        self.model.learn(frames, reset_num_timesteps=False)


def frames_per_second(trainer, frames):
    began = time.process_time()
    trainer.train(frames)
    return frames / (time.process_time() - began)


def compare(name, rounds):
    spec_of, model_of, frames = TRAININGS[name]
    trainers = Lab(spec_of()), StableBaselines3(model_of())
    measured = [[frames_per_second(trainer, frames) for trainer in trainers] for _ in range(rounds + 1)][1:]
    ours, theirs = (statistics.median(values) for values in zip(*measured, strict=True))
    ratios = [a / b for a, b in measured]
    print(
        f'{name}: the lab {ours:,.0f} frames/s, Stable-Baselines3 {theirs:,.0f}: '
        f'{statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})',
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('trainings', nargs='*', metavar='TRAINING', default=list(TRAININGS), help=', '.join(TRAININGS))
    parser.add_argument('--rounds', type=int, default=5)
    args = parser.parse_args()
    unknown = set(args.trainings) - TRAININGS.keys()
    if unknown:
        parser.error(f'unknown training {", ".join(sorted(unknown))}; there are {", ".join(TRAININGS)}')
    logging.getLogger('slm_lab').setLevel(logging.WARNING)
    torch.set_num_threads(1)
    for name in args.trainings:
        compare(name, args.rounds)


if __name__ == '__main__':
    main()
