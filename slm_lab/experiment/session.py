"""Session: one agent in one env with one seed, from its first frame or from a checkpoint."""

import logging
import os
import secrets
from pathlib import Path

import numpy as np
import torch

from slm_lab.agent.agent import Agent
from slm_lab.env import Clock, make_env
from slm_lab.experiment import analysis, model_files
from slm_lab.experiment.checkpoint import store_of
from slm_lab.experiment.event_files import EventFiles
from slm_lab.experiment.stop import StopRequest
from slm_lab.lib import rng as rng_lib
from slm_lab.lib.progress import Progress
from slm_lab.lib.state import snapshot
from slm_lab.spec import spec_util

logger = logging.getLogger('slm_lab.experiment')


def wants_rendering(mode):
    """`dev` and `enjoy` render unless RENDER says otherwise; `train` does where RENDER=true."""
    return os.environ.get('RENDER', 'true' if mode in ('dev', 'enjoy') else 'false') == 'true'


class EvaluationStopped(Exception):
    """A stop came in the middle of an evaluation. All is as before it began: it is still due."""


class Session:
    """Builds agent and env from a spec and trains.

    Args:
        spec: a checked spec, ticked to a session
        mode: `train` or `dev` (checks every train step, renders), or `enjoy` (plays, writes nothing)
        stop: StopRequest, or any function; asked once per step, of training and of evaluation
        store: where checkpoints go; None: the run folder's; False: nowhere (nothing at all is written)
    """

    def __init__(self, spec, mode='train', stop=None, store=None):
        self.spec, self.mode, self.stop = spec, mode, stop or StopRequest()
        self.tell_of_row = getattr(self.stop, 'row_logged', lambda row: None)
        self.resolved = spec_util.resolve(spec)
        meta = self.resolved['meta']
        self.index = max(spec['meta']['session'], 0)
        torch.set_num_threads(meta['torch_num_threads'])
        if meta['random_seed'] is None:
            meta['random_seed'] = spec['meta']['random_seed'] = secrets.randbelow(2**31)
        trial = max(spec['meta']['trial'], 0)
        seed = rng_lib.derive_seed(meta['random_seed'], trial, self.index)
        self.rng = rng_lib.GlobalStreams(seed, 'global')
        self.rng.install()
        self.eval_rng = rng_lib.GlobalStreams(seed, 'evaluation')
        env_seed, renders = rng_lib.derive_seed(seed, 'train'), wants_rendering(mode)
        is_playing = mode == 'enjoy'
        num_envs = 1 if is_playing else None
        self.env = make_env(spec, env_seed, evaluating=is_playing, num_envs=num_envs, render=renders)
        self.clock = Clock(spec_util.session_max_frame(self.resolved), self.env.num_envs)
        on_one_gpu = bool(meta['distributed'])  # that of the first session, where the global nets lie
        place = trial * meta['max_session'] + (0 if on_one_gpu else self.index) + spec['meta'].get('cuda_offset', 0)
        self.agent = Agent(self.resolved, self.env, seed, place, check=mode == 'dev')
        num_eval_envs = 0 if is_playing else meta['rigorous_eval']
        self.eval_env = self._build_eval_env(num_eval_envs, rng_lib.derive_seed(seed, 'evaluation'))
        self.log_frequency, self.eval_frequency = meta['log_frequency'], meta['eval_frequency']
        self.logged_frame, self.evaluated_frame = -1, -1
        self.label = f'{spec["name"]} t{max(spec["meta"]["trial"], 0)} s{self.index}'
        self._new_best = None
        self._saved_frame = -1
        self.store = store_of(spec) if store is None else store
        shows_events = mode == 'dev' and self.index == 0 and self.store
        self.events = EventFiles(Path(spec['meta']['log_prepath']).parent) if shows_events else None

    def _build_eval_env(self, num_envs, seed):
        if not num_envs:
            return None
        return make_env(self.spec, seed, evaluating=True, train_env=self.env, num_envs=int(num_envs))

    # --- the loop

    def run(self):
        """Trains to max_frame or until it is asked to stop. Returns: whether the run is finished."""
        if self.env.state is None:
            self.env.reset()
        if self.eval_env is not None and self.eval_env.max_t is None:
            logger.warning(
                "env '%s' has no limit on the steps of an episode: an evaluation lasts until its episodes end by "
                "themselves; 'max_t' in the env spec sets a limit",
                self.eval_env.name,
            )
        try:
            self.run_rl()
            finished = self.clock.frame >= self.clock.max_frame
            if finished:
                self.finish()
        except EvaluationStopped:
            finished = False
        if not finished and self._saved_frame != self.clock.frame:
            self.save()
        return finished

    def run_rl(self):
        """One transition a turn. What is due at a frame happens between two of them, where all state is at rest.

        Raises: EvaluationStopped
        """
        clock, env, agent, events = self.clock, self.env, self.agent, self.events
        self.progress = progress = Progress(clock.max_frame, clock.frame, self.label, self.index)
        try:
            next_due = self.at_frame()
            while clock.frame < clock.max_frame and not self.stop():
                state = env.state
                action = agent.act(state)
                if events is not None:
                    events.add_actions(action)
                step = env.step(agent.to_env(action))
                clock.tick_step(step.terminated | step.truncated)
                clock.tick_opt_step(agent.update(state, action, step, clock.frame))
                if clock.frame >= next_due:
                    next_due = self.at_frame()
                progress.update(clock.frame)
        finally:
            progress.close(clock.frame)

    def at_frame(self):
        """Does what is due at the clock's frame, once: an evaluation, then a row and a checkpoint.

        Returns: the frame at which something is due next.
        Raises: EvaluationStopped: all of it is still due, so that a resumed session begins with it.
        """
        frame = self.clock.frame
        evaluates = self.eval_env is not None and self._is_due(self.eval_frequency, self.evaluated_frame)
        logs = self._is_due(self.log_frequency, self.logged_frame)
        if evaluates:
            self.add_eval_row()
            self.evaluated_frame = frame
        if logs:
            row = self.add_train_row()
            self.logged_frame = frame
            if frame < self.clock.max_frame:  # else `finish` saves
                self.save()
                self.tell_of_row(row)
        frequencies = [self.log_frequency] + [self.eval_frequency] * (self.eval_env is not None)
        return min((frame // f + 1) * f for f in frequencies)

    def _is_due(self, frequency, done_frame):
        """At frame 0 and at the first frame that reaches each multiple of the frequency."""
        return done_frame < self.clock.frame and self.clock.frame % frequency < self.env.num_envs

    # --- rows

    def add_train_row(self, keep_best=True):
        row = self.agent.body.add_row('train', self.calc_row(self.env.total_reward))
        self.log_row('train', row)
        if keep_best and self.agent.body.take_best('train'):
            self.remember_best(row)
        return row

    def add_eval_row(self, keep_best=True):
        row = self.agent.body.add_row('eval', self.calc_row(self.evaluate()))
        self.log_row('eval', row)
        if keep_best and self.agent.body.take_best('eval'):
            self.remember_best(row)
        return row

    def calc_row(self, total_reward):
        clock, body, algorithm = self.clock, self.agent.body, self.agent.algorithm
        wall_t = clock.wall_t
        return {
            'epi': clock.epi,
            't': clock.t,
            'wall_t': round(wall_t, 3),
            'opt_step': clock.opt_step,
            'frame': clock.frame,
            'fps': round(clock.frame / wall_t, 1) if wall_t else 0.0,
            'total_reward': total_reward,
            'loss': body.loss,
            'lr': algorithm.lr,
            'explore_var': algorithm.explore_var,
            'entropy_coef': algorithm.entropy_coef,
            'entropy': body.entropy,
            'grad_norm': algorithm.grad_norm,
        }

    def log_row(self, df_mode, row):
        meta = self.spec['meta']
        items = '  '.join(f'{key}: {value:g}' for key, value in row.items())
        prefix = f'Trial {meta["trial"]} session {meta["session"]} {Path(meta["prepath"]).name}'
        logger.info('%s [%s_df] %s', prefix, df_mode, items)
        if df_mode == 'train':
            self.progress.set_return(row['total_reward_ma'])
        if self.events is not None:
            nets = {name: learner.net for name, learner in self.agent.algorithm.learners.items()}
            self.events.add_row(df_mode, row, nets)

    def remember_best(self, row):
        """Keeps what plays best, with the observation statistics that it plays by, for the next checkpoint."""
        trained = snapshot(model_files.trained_state(self.agent.algorithm))
        statistics = self.env.state_dict().get('NormalizeState')
        if statistics is not None:
            trained[model_files.STATISTICS] = snapshot({'NormalizeState': statistics})
        self._new_best = {'frame': self.clock.frame, 'value': row['total_reward_ma'], 'nets': trained}

    def evaluate(self):
        """The mean return of one whole episode in each evaluation env; draws nothing from training's generators.

        Raises: EvaluationStopped
        """
        env, before = self.eval_env, snapshot(self._evaluation_state())
        with self.eval_rng:
            state = env.reset()
            returns, running = np.zeros(env.num_envs), np.ones(env.num_envs, dtype=bool)
            while running.any() and not self.stop():
                step = env.step(self.agent.to_env(self.agent.act(state, evaluating=True)))
                returns += np.where(running, step.reward, 0.0)
                running &= ~(step.terminated | step.truncated)
                state = step.state
        if running.any():
            self._load_evaluation_state(before)
            raise EvaluationStopped
        env.forget_episodes()  # each evaluation begins new ones: there is nothing to bring back between two
        return float(returns.mean())

    def _evaluation_state(self):
        """All that evaluating changes."""
        policy_rng = rng_lib.generator_state(self.agent.algorithm.eval_rng)
        return {'env': self.eval_env.state_dict(), 'rng': self.eval_rng.state_dict(), 'policy_rng': policy_rng}

    def _load_evaluation_state(self, state):
        self.eval_env.load_state_dict(state['env'])
        self.eval_rng.load_state_dict(state['rng'])
        rng_lib.set_generator_state(self.agent.algorithm.eval_rng, state['policy_rng'])

    # --- state and files

    def save(self, state=None, final=False):
        """Writes a checkpoint, then the classic files, which are copies for reading."""
        if not self.store:
            return
        state = self.state_dict() if state is None else state
        saved = self.store.save(
            state, frame=self.clock.frame, spec=spec_util.record_of(self.spec), best=self._new_best, final=final
        )
        self._saved_frame = self.clock.frame
        best = None if self._new_best is None else self._new_best['nets']
        model_files.publish(self.spec['meta'], self.agent.algorithm, self.agent.body, best)
        self._new_best = None
        logger.debug('checkpoint at frame %d: %d bytes, %.3f s', saved.frame, saved.bytes_written, saved.seconds)

    def finish(self):
        """The end of a run: a last row where none was due, the final checkpoint, metrics.

        The last row and evaluation are shown but are no part of the state: a longer run would not have had them.
        Raises: EvaluationStopped
        """
        state = self.state_dict()
        state['eval_env'], state['eval_rng'] = snapshot(state['eval_env']), snapshot(state['eval_rng'])
        if self.eval_env is not None and self.evaluated_frame < self.clock.frame:
            self.add_eval_row(keep_best=False)
        if self.logged_frame < self.clock.frame:
            self.add_train_row(keep_best=False)
        self.save(state, final=True)

    def analyze(self, plot=True):
        """Metrics and graphs of what is in the data frames. Returns: the metrics"""
        return analysis.analyze_session(self.spec, self.agent.body.eval_df, 'eval', plot)

    def close(self):
        if self.events is not None:
            self.events.close()
        self.env.close()
        if self.eval_env is not None:
            self.eval_env.close()

    def state_dict(self):
        return {
            'clock': self.clock.state_dict(),
            'env': self.env.state_dict(),
            'eval_env': None if self.eval_env is None else self.eval_env.state_dict(),
            'agent': self.agent.state_dict(),
            'rng': self.rng.state_dict(),
            'eval_rng': self.eval_rng.state_dict(),
            'logged_frame': self.logged_frame,
            'evaluated_frame': self.evaluated_frame,
        }

    def load_state_dict(self, state):
        self.clock.load_state_dict(state['clock'])
        self.env.load_state_dict(state['env'])
        if self.eval_env is not None:
            self.eval_env.load_state_dict(state['eval_env'])
        self.agent.load_state_dict(state['agent'])
        if self.env.restarted:
            self._begin_new_episodes()
        self.logged_frame, self.evaluated_frame = state['logged_frame'], state['evaluated_frame']
        self.eval_rng.load_state_dict(state['eval_rng'])
        self._saved_frame = self.clock.frame
        self.rng.load_state_dict(state['rng'])  # last: building and replaying may have drawn from the process's

    def _begin_new_episodes(self):
        """In the envs whose running episodes could not be brought back."""
        self.agent.memory.cut(self.env.restarted)
        for _ in self.env.restarted:
            self.clock.new_episode()
