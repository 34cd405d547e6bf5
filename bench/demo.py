"""Figures of the demo spec, measured side by side in one run: `python bench/demo.py [--frames 4000]`.

- updates per second of its training step, beside a plain eager torch loop over the same net and batches with default
  Adam (what one would write by hand), the two timed in turn
- frames per second of the demo
- the share of its time that checkpoints take, and the bytes that each writes
- the time from starting the process of a resume to its first training step
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from torch import nn

from slm_lab.experiment.session import Session
from slm_lab.lib import files
from slm_lab.spec import spec_util

SPEC_NAME = 'dqn_cartpole'


def demo_spec(max_frame):
    spec = spec_util.get('demo.json', SPEC_NAME)
    spec['meta'].update(random_seed=1, max_session=1)
    spec['env'][0]['max_frame'] = max_frame
    return spec_util.session_spec(spec, 0)


def warmed_session(frames=500):
    session = Session(demo_spec(frames), store=False)
    session.env.reset()
    session.run_rl()
    return session


class PlainLoop:
    """The same update by hand: DQN's target net, clipping, Adam as torch makes it by default."""

    def __init__(self):
        def build():
            return nn.Sequential(nn.Linear(4, 64), nn.SELU(), nn.Linear(64, 2))

        self.net, self.target_net = build(), build()
        self.target_net.load_state_dict(self.net.state_dict())
        self.optim = torch.optim.Adam(self.net.parameters(), lr=0.02)
        self.loss_fn = nn.MSELoss()

    def train(self, batches, iterations):
        for states, actions, rewards, next_states, terminated in batches:
            for _ in range(iterations):
                q = self.net(states).gather(1, actions.unsqueeze(1)).squeeze(1)
                with torch.no_grad():
                    next_q = self.target_net(next_states).max(dim=1).values
                    y = rewards + 0.99 * (1 - terminated) * next_q
                loss = self.loss_fn(q, y)
                self.optim.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
                self.optim.step()
                loss.item()


def time_updates(rounds=15, trainings=12):
    """Median updates per second of the lab's training and of the plain loop, and the median of their ratios."""
    session, plain = warmed_session(), PlainLoop()
    algorithm, memory = session.agent.algorithm, session.agent.memory
    memory.is_due = lambda *_: True
    updates = trainings * algorithm.spec['training_iter'] * algorithm.spec['training_batch_iter']
    batches = []
    for _ in range(trainings * algorithm.spec['training_iter']):
        b = memory.sample(0)
        batches.append([t.clone() for t in (b.states, b.actions, b.rewards, b.next_states, b.terminated)])
    ours, theirs = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(trainings):
            algorithm.train(memory, 500)
        middle = time.perf_counter()
        plain.train(batches, algorithm.spec['training_batch_iter'])
        ours.append(updates / (middle - began))
        theirs.append(updates / (time.perf_counter() - middle))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return statistics.median(ours), statistics.median(theirs), statistics.median(ratios)


def time_run(frames):
    """Frames per second of a run with checkpoints, the share of its time that they take, and bytes of each."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ['LAB_DATA_DIR'] = folder
        session = Session(demo_spec(frames))
        seconds, sizes = [], []
        save, store_save = session.save, session.store.save

        def timed_save(*args, **kwargs):
            began = time.perf_counter()
            save(*args, **kwargs)
            seconds.append(time.perf_counter() - began)

        def sized_save(*args, **kwargs):
            saved = store_save(*args, **kwargs)
            sizes.append(saved.bytes_written)
            return saved

        session.save, session.store.save = timed_save, sized_save
        began = time.perf_counter()
        session.run()
        total = time.perf_counter() - began
        session.close()
    return frames / total, sum(seconds) / total, statistics.median(seconds), statistics.median(sizes)


FIRST_TRAINING = """
import sys, time
import run_lab
from slm_lab.agent.net.optim import Learner
def step(self, loss):
    print('FIRST', time.time(), flush=True)
    raise SystemExit
Learner.step = step
run_lab.main(sys.argv[1:])
"""


def time_resume(frames):
    """Seconds from the start of a resume's process to its first training step, and from its imports' end."""
    with tempfile.TemporaryDirectory() as folder:
        spec_file = os.path.join(folder, 'spec.json')
        environment = {**os.environ, 'LAB_DATA_DIR': folder}
        command = [sys.executable, '-c', FIRST_TRAINING, spec_file, SPEC_NAME]
        for max_frame, mode in ((frames, 'train'), (2 * frames, 'train@latest')):
            spec = files.read_json(spec_util.find_file('demo.json'))
            spec[SPEC_NAME]['meta'].update(random_seed=1, max_session=1)
            spec[SPEC_NAME]['env'][0]['max_frame'] = max_frame
            files.write_json(spec, spec_file)
            if mode == 'train':
                program = [sys.executable, 'run_lab.py', spec_file, SPEC_NAME, mode]
                subprocess.run(program, env=environment, capture_output=True, check=True)
        began = time.time()
        out = subprocess.run([*command, mode], env=environment, capture_output=True, text=True)
        first = next(line for line in out.stdout.splitlines() if line.startswith('FIRST'))
    return float(first.split()[1]) - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--frames', type=int, default=4000)
    frames = parser.parse_args().frames
    ours, theirs, ratio = time_updates()
    print(f'updates per second: {ours:,.0f}; a plain eager loop with default Adam: {theirs:,.0f}; ratio {ratio:.2f}')
    fps, share, seconds, size = time_run(frames)
    print(f'frames per second of the demo: {fps:,.0f} (1 session, {frames} frames, 8 updates a frame)')
    print(f'checkpoints: {share:.2%} of the time, {seconds * 1e3:.0f} ms and {size:,.0f} bytes each')
    print(f'resume: {time_resume(500):.1f} s from starting the process to the first training step')


if __name__ == '__main__':
    main()
