"""Kills one run many times, resumes it each time, and compares its end with that of a run which nobody disturbed.

    python test/kill_many.py 100                  # exit status 1 when a frame is lost or the end differs
    python test/kill_many.py 100 --seed 3 --sessions 2
    python test/kill_many.py 20 --game ALE/Breakout-v5        # its memory of 250 frames is full all the time

The moments are drawn from a seed and spread over a whole life: while the lab is being imported, in the loop, at a file
operation (most are in the midst of a save), and at the end, in the last save and the analysis. All processes of the run
get SIGKILL at once, as when the machine is reset.
"""

import argparse
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

TEST = Path(__file__).resolve().parent
sys.path[:0] = [path for path in (str(TEST), str(TEST.parent)) if path not in sys.path]

from lab_process import SPEC_NAME, Lab, assert_same_end, fork_server, leftovers, resumed_frames, undisturbed  # noqa: E402

KILL = 'os.killpg(os.getpgrp(), signal.SIGKILL)'
FILE_OPERATIONS = ('replace', 'fsync', 'unlink')
LOG_FREQUENCY = 50
FRAMES_PER_KILL = 100  # about as far as a life gets on average


class Victim:
    """A run that is killed again and again.

    Args:
        lab: Lab with the spec written
        rng: random.Random that all moments are drawn from
        num_sessions, max_frame: of the run
    """

    def __init__(self, lab, rng, num_sessions, max_frame):
        self.lab, self.rng, self.num_sessions, self.max_frame = lab, rng, num_sessions, max_frame
        self.frames = [None] * num_sessions  # of the newest complete checkpoints
        self.kills = []  # (moment, frames then)
        self.lives = 0

    def kill_once(self, moment):
        """One life, which ends by SIGKILL unless it is done before. Returns: whether it was killed."""
        self.lives += 1
        assert self.lives < 10 + 3 * len(self.kills), 'most lives end before they are killed'
        life = getattr(self, f'_start_for_{moment}')()
        life.kill()
        life.wait_for_no_process()
        assert life.status in (0, -signal.SIGKILL), life.output
        if life.status:
            self.kills.append((moment, self.frames))
        self._check(life)
        return life.status != 0

    @property
    def is_done(self):
        return self.frames == [self.max_frame] * len(self.frames)

    def finish(self):
        life = self._start()
        assert life.wait().status == 0, life.output
        self._check(life)

    def _start(self, **kwargs):
        """The command that goes on with the run, or begins it where the kill left no run to speak of."""
        has_run = self.lab.data.is_dir() and any(self.lab.data.glob('*/*_spec.json'))
        if not has_run:
            shutil.rmtree(self.lab.data, ignore_errors=True)  # an empty run folder, which says nothing
        return self.lab.start_train('train@latest' if has_run else 'train', **kwargs)

    def _start_for_import(self):
        life = self._start(fresh=True)
        _wait(life, self.rng.uniform(0, 3))
        return life

    def _start_for_loop(self):
        """Some time after the loop has begun; 0.3 s are some 200 frames."""
        mark = f'loop{self.lives}'
        life = self._start(hooks=[('slm_lab.experiment.session', 'Session.run_rl', 1, f'mark({mark!r})')])
        life.wait_for(lambda: self.lab.has_mark(mark) or life.poll() is not None)
        _wait(life, self.rng.uniform(0, 0.3))
        return life

    def _start_for_file(self):
        operation, call = self.rng.choice(FILE_OPERATIONS), self.rng.randint(1, 30)
        life = self._start(hooks=[('os', operation, call, KILL)])
        _wait(life, 60)
        return life

    def _start_for_end(self):
        """At the n-th file operation since the loop was over, or since the analysis of a run that was over before."""
        operation, call = self.rng.choice(FILE_OPERATIONS), self.rng.randint(1, 8)
        if self.is_done:
            operation, call = 'replace', self.rng.randint(1, 4)  # what an analysis does for certain
        code = f'mark("end{self.lives}") and wrap(os, {operation!r}, {call}, {KILL!r})'
        hooks = [
            ('slm_lab.experiment.session', 'Session.finish', 1, code),
            ('slm_lab.experiment.trial', 'Trial._analyze', 1, code),
        ]
        life = self._start(hooks=hooks)
        _wait(life, 90)
        return life

    def _check(self, life):
        """Nothing before the newest checkpoint is lost, and the life went on from the newest there was."""
        before = self.frames
        if not self.lab.data.is_dir():
            return
        folders = [p for p in self.lab.data.iterdir() if any(p.glob('*_spec.json'))]
        if not folders:
            return
        self.frames = [self.lab.frame(session) for session in range(self.num_sessions)]
        for session, (was, now) in enumerate(zip(before, self.frames, strict=True)):
            assert was is None or now >= was, f'session {session} had a checkpoint of frame {was}, now of {now}'
            rows = re.findall(r'\[train_df\] .*?frame: (\d+) ', self.lab.log(session))
            reached = max(map(int, rows), default=0)
            assert (now or 0) >= reached - LOG_FREQUENCY, f'session {session} was at {reached}, and resumes at {now}'
        text = life.output
        if self.num_sessions == 1 and resumed_frames(text):
            assert resumed_frames(text) == before, text
        assert 'Traceback' not in text, text


def _wait(life, seconds):
    """Until the life ends, at most so long."""
    until = time.monotonic() + seconds
    while life.poll() is None and time.monotonic() < until:
        time.sleep(0.002)


def kill_many(folder, num_kills, seed=0, num_sessions=1, say=lambda line: None, game=None):
    """Raises AssertionError when a frame is lost or the end is another than the undisturbed run's.

    Returns: [(moment, frames of the newest checkpoints)] of the kills.
    """
    spec = {'max_frame': 200 + FRAMES_PER_KILL * num_kills, 'log_frequency': LOG_FREQUENCY, 'max_session': num_sessions}
    spec.update(num_cpus=0.1, **({'game': game} if game else {}))
    lab = Lab(folder, fork_server())
    lab.write_spec(**spec)
    victim = Victim(lab, random.Random(seed), num_sessions, spec['max_frame'])
    num_end = max(1, num_kills // 8)
    moments = ['import', *victim.rng.choices(['import', 'loop', 'file'], [1, 4, 5], k=num_kills - num_end - 1)]
    moments += ['end'] * num_end
    while len(victim.kills) < num_kills:
        moment = 'end' if victim.is_done else moments[len(victim.kills)]
        killed = victim.kill_once(moment)
        say(f'{len(victim.kills)} of {num_kills}: {moment}, {"killed" if killed else "done before"}; {victim.frames}')
    victim.finish()
    for session, end in enumerate(undisturbed(**spec)):
        assert_same_end(lab.run_folder, end, session)
    assert leftovers(lab.run_folder) == []
    return victim.kills


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('kills', type=int)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--sessions', type=int, default=1)
    parser.add_argument('--game', help='an Atari game in place of CartPole')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            kill_many(folder, args.kills, args.seed, args.sessions, lambda line: print(line, flush=True), args.game)
        except AssertionError as e:
            print(f'NOT the same: {e}', file=sys.stderr)
            return 1
    print(f'{SPEC_NAME}: {args.kills} kills, and the end is that of the undisturbed run')
    return 0


if __name__ == '__main__':
    sys.exit(main())
