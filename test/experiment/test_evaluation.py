"""Evaluation: whose returns they are, what draws them, and what a stop in the middle of one leaves."""

import logging
import time

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from resume import (
    StopAt,
    assert_equal,
    build,
    go_on,
    raw_spec,
    run_to,
    session_spec,
    uninterrupted,
)

from slm_lab.env.vector import Step
from slm_lab.experiment.session import EvaluationStopped, store_of
from slm_lab.experiment.stop import StopRequest
from slm_lab.lib.state import first_difference, snapshot


class ScriptedEnv:
    """Two envs: the first ends its episodes after 2 steps of reward 1, the second after 4 of reward 10."""

    num_envs = 2
    restarted = ()

    def __init__(self):
        self.t, self.actions = 0, []

    def reset(self):
        self.t = 0
        return np.zeros((2, 4), np.float32)

    def step(self, actions):
        self.t += 1
        self.actions.append(actions)
        state = np.zeros((2, 4), np.float32)
        ended = np.array([self.t % 2 == 0, self.t % 4 == 0])
        return Step(state, np.array([1.0, 10.0]), ended & [True, False], ended & [False, True], state)

    def state_dict(self):
        return {}

    def forget_episodes(self):
        pass

    def close(self):
        pass


def test_evaluation_is_the_mean_return_of_the_first_whole_episode_of_each_env(tmp_path):
    """1 + 1 and 10 + 10 + 10 + 10: the second episode of the first env does not count."""
    session = build(session_spec(tmp_path, raw_spec('DQN', meta={'rigorous_eval': 2})), store=False)
    session.eval_env = ScriptedEnv()
    assert session.evaluate() == (2 + 40) / 2
    assert len(session.eval_env.actions) == 4


def test_evaluation_acts_by_the_final_exploration_and_draws_from_its_own_generators(tmp_path, monkeypatch):
    session = build(session_spec(tmp_path, raw_spec('DQN', meta={'rigorous_eval': 2})), store=False)
    session.eval_env = ScriptedEnv()
    seen = []
    algorithm = session.agent.algorithm
    policy = algorithm.policy

    def spy(states, actor, explore_var, rng):
        seen.append((explore_var, rng))
        return policy(states, actor, explore_var, rng)

    monkeypatch.setattr(algorithm, 'policy', spy)
    before = snapshot([session.rng.state_dict(), algorithm.rng.bit_generator.state])
    session.evaluate()
    assert seen == [(0.1, algorithm.eval_rng)] * 4 and algorithm.explore_var == 1.0
    assert first_difference(before, [session.rng.state_dict(), algorithm.rng.bit_generator.state]) is None


def test_rewards_are_scaled_in_training_and_never_in_returns(tmp_path):
    raw = raw_spec('DQN', env={'reward_scale': 0.01}, meta={'rigorous_eval': 1})
    session = build(session_spec(tmp_path, raw), store=False)
    session.run()
    returns = session.agent.body.train_df['total_reward'].dropna()
    assert (returns >= 1).all() and (session.agent.body.eval_df['total_reward'] >= 1).all()
    assert session.agent.memory.arrays['rewards'].max() == np.float32(0.01)


# --- a stop in the middle of an evaluation


class StopAmidEvaluation(StopAt):
    """Stops a session before the step with index `steps` of the evaluation at the first frame from `frame` on."""

    def __init__(self, frame, steps):
        super().__init__(frame)
        self.steps_left = steps

    def __call__(self):
        if not super().__call__():
            return False
        self.steps_left -= 1
        return self.steps_left < 0


EVALUATED = {
    'one env': raw_spec('DQN', meta={'rigorous_eval': 1}),
    'a row is due as well': raw_spec('DQN', meta={'rigorous_eval': 2, 'log_frequency': 50}),
    'statistics, several envs': raw_spec('DoubleDQN', num_envs=4, normalize_state=True, meta={'rigorous_eval': 3}),
    'stacked frames': raw_spec('DQN', env={'frame_op': 'concat', 'frame_op_len': 3}, meta={'rigorous_eval': 2}),
    'categorical': raw_spec('SARSA', algo={'action_pdtype': 'Categorical'}, meta={'rigorous_eval': 2}),
    'random': raw_spec('Random', meta={'rigorous_eval': 2}),
    'envs built anew': raw_spec('DQN', env={'resume': 'fresh'}, meta={'rigorous_eval': 2}),
    'envs in workers': raw_spec('DQN', num_envs=2, env={'vector': 'async'}, meta={'rigorous_eval': 2}),
}


@pytest.mark.parametrize(
    ('name', 'frame'),
    [
        *((name, 200) for name in EVALUATED),
        *(('a row is due as well', frame) for frame in (0, 50, 303)),
        ('random', 303),
    ],
)
def test_an_evaluation_that_is_stopped_is_done_whole_by_the_resumed_run(name, frame, tmp_path, fresh):
    """At frame 303, for which nothing is due, the run ends: its last evaluation is stopped."""
    spec = session_spec(tmp_path, EVALUATED[name])
    stopped = run_to(spec, StopAmidEvaluation(frame, steps=5))
    reached = stopped['tree']['clock']['frame']
    assert reached - frame in range(spec['env'][0].get('num_envs', 1))
    assert stopped['tree']['evaluated_frame'] < reached
    assert all(done < reached for done in stopped['eval_df']['frame'])
    generation = store_of(spec).find().generation
    assert (generation.frame, generation.final) == (reached, False)
    resumed = fresh.call('go_on', spec)
    assert first_difference(stopped['tree'], resumed['loaded']) is None
    assert_equal(resumed, uninterrupted(spec))


def test_a_run_may_be_stopped_in_one_evaluation_again_and_again(tmp_path, fresh):
    spec = session_spec(tmp_path, EVALUATED['a row is due as well'])
    run_to(spec, StopAmidEvaluation(100, steps=6))
    for steps in (0, 7, 2):
        assert go_on(spec, StopAmidEvaluation(100, steps))['tree']['clock']['frame'] == 100
    assert_equal(fresh.call('go_on', spec), uninterrupted(spec))


def test_a_stop_amid_evaluation_leaves_everything_as_before_it(tmp_path):
    session = build(session_spec(tmp_path, EVALUATED['statistics, several envs']), store=False)
    session.run()
    before = snapshot(session.state_dict())
    session.stop = StopAmidEvaluation(0, steps=5)
    session.stop.session = session
    with pytest.raises(EvaluationStopped):
        session.evaluate()
    assert first_difference(before, session.state_dict()) is None


def test_a_stop_that_comes_with_the_last_step_of_an_evaluation_is_too_late_for_it(tmp_path):
    session = build(session_spec(tmp_path, EVALUATED['one env']), store=False)
    session.eval_env = ScriptedEnv()  # 4 steps
    session.stop = lambda: session.eval_env.t >= 4
    assert session.evaluate() == (2 + 40) / 2


class Endless(gymnasium.Env):
    """No episode of it ends, and no limit ends it."""

    observation_space, action_space = spaces.Box(-1.0, 1.0, (4,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action):
        return np.zeros(4, np.float32), 1.0, False, False, {}


def test_an_evaluation_without_end_is_stopped_and_was_warned_of(tmp_path, monkeypatch, caplog):
    entry = gymnasium.envs.registration.EnvSpec('Endless-v0', Endless)
    monkeypatch.setitem(gymnasium.registry, 'Endless-v0', entry)
    raw = raw_spec('DQN', env={'name': 'Endless-v0', 'max_t': None}, meta={'rigorous_eval': 1})
    session = build(session_spec(tmp_path, raw), StopRequest(deadline=time.time() + 0.5))
    with caplog.at_level(logging.WARNING, 'slm_lab'):
        assert not session.run()
    assert session.clock.frame == 0 and store_of(session.spec).find().generation.frame == 0
    assert len(caplog.records) == 1
    assert "'Endless-v0' has no limit on the steps of an episode" in caplog.text and "'max_t'" in caplog.text


@pytest.mark.parametrize('parts', [{'meta': {'rigorous_eval': 1}}, {'env': {'name': 'Endless-v0', 'max_t': None}}])
def test_an_evaluation_that_ends_or_none_at_all_is_not_warned_of(parts, tmp_path, monkeypatch, caplog):
    entry = gymnasium.envs.registration.EnvSpec('Endless-v0', Endless)
    monkeypatch.setitem(gymnasium.registry, 'Endless-v0', entry)
    with caplog.at_level(logging.WARNING, 'slm_lab'):
        build(session_spec(tmp_path, raw_spec('DQN', **parts)), StopAt(10), store=False).run()
    assert not caplog.records


@pytest.mark.parametrize('mode', ['replay', 'fresh', 'episode'])
def test_between_evaluations_there_is_no_episode_to_bring_back(tmp_path, mode):
    """Else an env that cannot be brought back would draw another seed for the next evaluation."""
    raw = raw_spec('DQN', meta={'rigorous_eval': 2}, env={'resume': mode})
    session = build(session_spec(tmp_path, raw), store=False)
    session.env.reset()
    session.evaluate()
    tree = snapshot(session.eval_env.state_dict())
    assert [slot['seed'] for slot in tree['slots']] == [None, None]
    again = build(session_spec(tmp_path, raw), store=False)
    again.eval_env.load_state_dict(tree)
    assert again.eval_env.restarted == []
    assert first_difference(tree, again.eval_env.state_dict()) is None
