"""n frames, save, load into a fresh process, n more: bit for bit the run of 2n frames."""

import itertools

import pytest
from resume import (
    MEMORIES,
    FreshProcess,
    StopAt,
    assert_equal,
    build,
    raw_spec,
    result_of,
    run_to,
    session_spec,
    uninterrupted,
)

from slm_lab.agent.net import optim
from slm_lab.experiment.session import EvaluationStopped, Session, store_of
from slm_lab.lib import files
from slm_lab.lib.registry import ALGORITHMS, NETS
from slm_lab.lib.registry import MEMORIES as MEMORY_TABLE
from slm_lab.lib.schedule import scheduler_names
from slm_lab.lib.state import first_difference
from slm_lab.spec import spec_util

HALF = 150


def check_resume(folder, raw, fresh, stop):
    spec = session_spec(folder, raw)
    first_half = run_to(spec, stop)
    assert HALF <= first_half['tree']['clock']['frame'] < 250
    resumed = fresh.call('go_on', spec)
    assert resumed['exact'], resumed['missing']
    assert first_difference(first_half['tree'], resumed['loaded']) is None
    assert resumed['tree']['clock']['frame'] >= 303
    assert_equal(resumed, uninterrupted(spec))


# What is left out here is caught below; policy gradients and nets over sequences are in test_resume_policy.py.
PRODUCT = [
    (algorithm, memory, net, num_envs, normalize_state)
    for algorithm, memories in MEMORIES.items()
    for memory, net, num_envs, normalize_state in itertools.product(
        memories, ['MLPNet', 'DuelingMLPNet'] if algorithm != 'Random' else [None], [1, 4], [False, True]
    )
]


def in_normal_run(case):
    """Two opposite corners of (net, num_envs, normalize_state) for each algorithm and memory, in turn each of the four
    diagonals: every pair of choices is there. The rest of the product is slow."""
    algorithm, memory, net, num_envs, normalize_state = case
    pair = list(dict.fromkeys(c[:2] for c in PRODUCT)).index((algorithm, memory))
    if net is None:
        return (num_envs == 4) == (normalize_state != pair % 2)
    corner = (net == 'DuelingMLPNet', num_envs == 4, normalize_state)
    diagonal = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)][pair % 4]
    return corner in (diagonal, tuple(1 - c for c in diagonal))


def test_the_normal_run_has_every_pair_of_choices():
    chosen = [case for case in PRODUCT if in_normal_run(case)]
    assert len(chosen) == 26

    def pairs(cases):
        # an algorithm and its memory are one choice
        rows = [((algorithm, memory), *more) for algorithm, memory, *more in cases]
        return {((i, row[i]), (j, row[j])) for row in rows for i, j in itertools.combinations(range(4), 2)}

    assert pairs(chosen) == pairs(PRODUCT)


@pytest.mark.parametrize(
    ('algorithm', 'memory', 'net', 'num_envs', 'normalize_state'),
    [pytest.param(*case, marks=() if in_normal_run(case) else pytest.mark.slow) for case in PRODUCT],
    ids=str,
)
def test_a_resumed_run_equals_the_uninterrupted_one(algorithm, memory, net, num_envs, normalize_state, tmp_path, fresh):
    """Every algorithm with each memory that it takes, each net, one env and several, with and without statistics."""
    raw = raw_spec(algorithm, memory, net, num_envs, normalize_state)
    check_resume(tmp_path, raw, fresh, StopAt(HALF))


def test_no_algorithm_memory_or_net_is_left_out():
    import test_resume_policy as policy
    import test_resume_soft as soft
    import test_resume_spaces as spaces

    own = {name for name in NETS.names() if NETS.get(name).__module__.startswith('slm_lab.')}
    tested = {**MEMORIES, **policy.MEMORIES, **soft.MEMORIES}
    assert set(tested) == set(ALGORITHMS.names())
    assert {memory for _, memory, *_ in PRODUCT} == set(MEMORY_TABLE.names())
    own -= {name for name in own if NETS.get(name).TAKES_ACTIONS}  # the critics of SAC, which come with its nets
    own -= {'HydraMLPNet'}  # it takes several inputs, which no env here gives
    assert {net for _, _, net, *_ in PRODUCT if net} | set(policy.NETS) | set(spaces.IMAGE_NETS) == own
    for name, memories in tested.items():
        assert set(memories) == set(ALGORITHMS.get(name).MEMORIES or MEMORY_TABLE.names())


TAU = {'name': 'linear_decay', 'start_val': 3.0, 'end_val': 1.0, 'start_step': 0, 'end_step': 250}
BETA = {'name': 'linear_decay', 'start_val': 0.4, 'end_val': 1.0, 'start_step': 0, 'end_step': 250}
BOLTZMANN = {'action_policy': 'boltzmann', 'explore_var_spec': TAU}
CATEGORICAL = {'action_pdtype': 'Categorical'}
CONCAT = {'frame_op': 'concat', 'frame_op_len': 3}
# What these have in common with the product above is not repeated; each adds what a spec may choose besides.
OPTIONS = {
    'boltzmann, argmax': raw_spec('DQN', algo=BOLTZMANN, mem={'use_cer': True}),
    'boltzmann, categorical': raw_spec('SARSA', algo={**BOLTZMANN, **CATEGORICAL}, num_envs=4, env=CONCAT),
    'epsilon, categorical': raw_spec('DoubleDQN', algo=CATEGORICAL, meta={'rigorous_eval': 1}),
    'default policy, categorical': raw_spec(
        'SARSA', 'OnPolicyBatchReplay', algo={'action_policy': 'default', **CATEGORICAL}, meta={'rigorous_eval': 2}
    ),
    'random policy': raw_spec('VanillaDQN', algo={'action_policy': 'random'}, env=CONCAT, normalize_state=True),
    'cer, several envs': raw_spec('DQN', num_envs=4, mem={'use_cer': True}, env={'reward_scale': 'sign'}),
    'per with cer and beta': raw_spec(
        'DoubleDQN', 'PrioritizedReplay', mem={'use_cer': True, 'beta_spec': BETA}, meta={'rigorous_eval': 1}
    ),
    'per with beta, several envs': raw_spec(
        'DQN', 'PrioritizedReplay', num_envs=4, normalize_state=True, mem={'beta_spec': BETA}, env=CONCAT
    ),
    'statistics shared with evaluation': raw_spec('DQN', normalize_state=True, meta={'rigorous_eval': 4}),
    'evaluation between checkpoints': raw_spec('DQN', meta={'rigorous_eval': 1, 'eval_frequency': 23}),
    'often a row': raw_spec('SARSA', meta={'log_frequency': 15, 'rigorous_eval': 1, 'eval_frequency': 4}),
    'seldom a row': raw_spec('DQN', num_envs=4, meta={'log_frequency': 10**6}),
    'replace': raw_spec('DoubleDQN', nets={'update_type': 'replace', 'update_frequency': 20}),
    'replace at every step': raw_spec('DQN', num_envs=4, nets={'update_type': 'replace', 'update_frequency': 1}),
    'init, loss, no clipping': raw_spec(
        'DQN', nets={'init_fn': 'orthogonal_', 'loss_spec': {'name': 'SmoothL1Loss'}, 'clip_grad_val': None}
    ),
    'continuous actions': raw_spec('Random', env={'name': 'Pendulum-v1', 'reward_scale': 0.1}),
    'another env': raw_spec('DQN', env={'name': 'Acrobot-v1'}, num_envs=4),
    'an env built anew at each reset': raw_spec('DQN', env={'resume': 'fresh'}, normalize_state=True),
}


@pytest.mark.parametrize('name', OPTIONS)
def test_equal_with_each_option(name, tmp_path, fresh):
    check_resume(tmp_path, OPTIONS[name], fresh, StopAt(HALF))


OPTIMIZERS = {
    'Adam': {'amsgrad': True},
    'RMSprop': {'momentum': 0.5, 'centered': True},
    'SGD': {'momentum': 0.9, 'nesterov': True},
    'AdamW': {},
    'RAdam': {},
    'NAdam': {},
    'Adamax': {},
    'Adagrad': {},
    'Adadelta': {},
    'Adafactor': {},
    'ASGD': {'t0': 10},
    'Rprop': {},
    'GlobalAdam': {'weight_decay': 0.01},
    'GlobalRMSprop': {'alpha': 0.9},
    'Lookahead': {'alpha': 0.8, 'k': 4},
}
INNER_OPTIMIZERS = ['SGD', 'Adam', 'GlobalAdam', 'GlobalRMSprop']


def test_no_optimizer_is_left_out():
    """But Muon, which takes weights of two axes alone and so no net with biases."""
    assert {*OPTIMIZERS, 'Muon'} == {*optim.OPTIMIZERS, 'Muon'}


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_equal_with_each_optimizer(name, tmp_path, fresh):
    raw = raw_spec('DQN', nets={'optim_spec': {'name': name, 'lr': 0.01, **OPTIMIZERS[name]}})
    check_resume(tmp_path, raw, fresh, StopAt(HALF))


@pytest.mark.parametrize('inner', INNER_OPTIMIZERS)
def test_equal_with_each_inner_optimizer_of_lookahead(inner, tmp_path, fresh):
    optim_spec = {'name': 'Lookahead', 'optimizer': inner, 'lr': 0.01}
    raw = raw_spec('DQN', nets={'optim_spec': optim_spec, 'lr_scheduler_spec': {'name': 'LinearToZero', 'frame': 400}})
    check_resume(tmp_path, raw, fresh, StopAt(HALF))


SCHEDULERS = {
    'LinearToZero': {'frame': 400},
    'StepLR': {'step_size': 30, 'gamma': 0.8},
    'MultiStepLR': {'milestones': [100, 160, 200], 'gamma': 0.5},
    'ExponentialLR': {'gamma': 0.99},
    'ConstantLR': {'factor': 0.5, 'total_iters': 200},
    'LinearLR': {'total_iters': 250},
    'PolynomialLR': {'total_iters': 250, 'power': 2.0},
    'CosineAnnealingLR': {'T_max': 90},
    'CosineAnnealingWarmRestarts': {'T_0': 40, 'T_mult': 2},
    'CyclicLR': {'base_lr': 0.001, 'max_lr': 0.01, 'step_size_up': 35},
    'OneCycleLR': {'max_lr': 0.01, 'total_steps': 280},
}


def test_no_learning_rate_schedule_is_left_out():
    assert set(SCHEDULERS) == set(scheduler_names())


@pytest.mark.parametrize('name', SCHEDULERS)
def test_equal_with_each_learning_rate_schedule(name, tmp_path, fresh):
    raw = raw_spec('VanillaDQN', nets={'lr_scheduler_spec': {'name': name, **SCHEDULERS[name]}})
    check_resume(tmp_path, raw, fresh, StopAt(HALF))


@pytest.mark.parametrize('num_envs', [1, 4])
@pytest.mark.parametrize('where', ['inside', 'between'])
@pytest.mark.parametrize('algorithm', ['SARSA', 'DoubleDQN'])
def test_equal_inside_an_episode_and_between_two(algorithm, where, num_envs, tmp_path, fresh):
    check_resume(tmp_path, raw_spec(algorithm, num_envs=num_envs), fresh, StopAt(HALF, where))


@pytest.mark.parametrize('frame', [0, 1, 61])
def test_equal_from_the_first_frame_and_from_one_with_a_row(frame, tmp_path, fresh):
    spec = session_spec(tmp_path, raw_spec('DQN', meta={'rigorous_eval': 1}))
    assert run_to(spec, StopAt(frame))['tree']['clock']['frame'] == frame
    assert_equal(fresh.call('go_on', spec), uninterrupted(spec))


def test_equal_from_the_last_checkpoint_when_the_process_was_killed(tmp_path, fresh):
    """What was trained since is lost, and trained again: kill -9 leaves the rows' frame 122 of 150."""
    spec = session_spec(tmp_path, raw_spec('DQN', 'PrioritizedReplay', meta={'rigorous_eval': 1}))
    session = build(spec, StopAt(HALF))
    spec_util.save(spec)
    session.env.reset()
    with pytest.raises(EvaluationStopped):
        session.run_rl()  # and nothing after it
    resumed = fresh.call('go_on', spec)
    assert resumed['loaded']['clock']['frame'] == 122
    assert_equal(resumed, uninterrupted(spec))


@pytest.mark.parametrize('num_envs', [1, 4])
def test_five_resumes_in_a_row(num_envs, tmp_path, fresh):
    """Each goes on where the one before stopped: no two see the same episodes again."""
    spec = session_spec(tmp_path, raw_spec('DQN', 'PrioritizedReplay', num_envs=num_envs, normalize_state=True))
    run_to(spec, StopAt(44))
    streams, seeds = [], []
    for frame in (88, 132, 180, 220, 303):
        result = fresh.call('go_on', spec, StopAt(frame))
        streams.append(result['loaded']['agent']['algorithm']['rng']['state']['state'])
        seeds.append(tuple(slot['seed'] for slot in result['loaded']['env']['slots']))
    assert len(set(streams)) == len(set(seeds)) == 5
    assert_equal(result, uninterrupted(spec))


def test_a_process_of_its_own_goes_on_as_the_one_that_tests_share(tmp_path, fresh):
    """Nothing is left over in the shared one from the cases before."""
    results = []
    for folder in ('own', 'shared'):
        spec = session_spec(tmp_path / folder, raw_spec('DoubleDQN', 'PrioritizedReplay', normalize_state=True))
        run_to(spec, StopAt(HALF))
        process = FreshProcess() if folder == 'own' else fresh
        results.append(process.call('go_on', spec))
        if folder == 'own':
            process.close()
    assert_equal(*results)


# --- saving, evaluating, ending and extending leave no mark


class SaveAtEveryFrame:
    """Asked between two steps of training; an evaluation, in the midst of which nothing may be saved, goes without."""

    saves = 0

    def __init__(self, session):
        self.session, session.stop, session.evaluate = session, self, self.evaluate

    def __call__(self):
        self.session.save()
        self.saves += 1
        return False

    def evaluate(self):
        self.session.stop = lambda: False
        value = Session.evaluate(self.session)
        self.session.stop = self
        return value


@pytest.mark.parametrize('memory', ['Replay', 'PrioritizedReplay'])
def test_saving_leaves_no_mark(memory, tmp_path):
    """A run that saves at every frame equals one that never does."""
    keys = {'env': {'max_frame': 70}, 'meta': {'rigorous_eval': 1}}
    spec = session_spec(tmp_path, raw_spec('DoubleDQN', memory, normalize_state=True, **keys))
    session = build(spec)
    often = SaveAtEveryFrame(session)
    session.run()
    assert often.saves == 70
    assert_equal(result_of(session), uninterrupted(spec))


@pytest.mark.parametrize(('algorithm', 'num_envs'), [('DQN', 1), ('SARSA', 4)])
def test_evaluating_leaves_no_mark(algorithm, num_envs, tmp_path):
    """With or without evaluation: the same weights, memory, generators, env and rows."""
    policy = {**(BOLTZMANN if algorithm == 'SARSA' else {}), **CATEGORICAL}  # either draws from the process's streams

    def trained(rigorous_eval):
        meta = {'rigorous_eval': rigorous_eval, 'eval_frequency': 10}
        raw = raw_spec(algorithm, num_envs=num_envs, normalize_state=True, algo=policy, meta=meta)
        result = uninterrupted(session_spec(tmp_path, raw))
        tree = result['tree']
        evaluation_only = [
            tree.pop('eval_env'),
            tree.pop('eval_rng'),
            tree.pop('evaluated_frame'),
            tree['agent']['algorithm'].pop('eval_rng'),
            tree['agent']['body']['rows'].pop('eval', None),
            tree['agent']['body'].pop('best_total_reward_ma'),  # judged by what evaluation says
        ]
        return tree, evaluation_only

    (plain, nothing), (evaluated, own) = trained(0), trained(2)
    assert first_difference(plain, evaluated) is None
    assert first_difference(nothing, own) is not None
    assert len(own[4]['frame']) == len(range(0, 303, 10)) + 1  # at 0, at or just after each multiple of 10, at the end


@pytest.mark.parametrize(
    ('num_envs', 'end', 'rigorous_eval'), [(1, 122, 0), (1, 150, 0), (1, 150, 1), (4, 150, 2), (4, 122, 0)]
)
def test_a_finished_run_is_extended(num_envs, end, rigorous_eval, tmp_path, fresh):
    """As if it had had the larger max_frame from the start; the row logged only because it ended is gone."""
    raw = raw_spec('DQN', num_envs=num_envs, normalize_state=True, env={'max_frame': end})
    raw['meta']['rigorous_eval'] = rigorous_eval
    ended = run_to(session_spec(tmp_path, raw))
    assert ended['train_df']['frame'].iloc[-1] >= end  # a row at the end, due or not
    raw['env'][0]['max_frame'] = 303
    spec = session_spec(tmp_path, raw)
    resumed, whole = fresh.call('go_on', spec), uninterrupted(spec)
    assert_equal(resumed, whole)
    frames = list(resumed['train_df']['frame'])
    assert (ended['train_df']['frame'].iloc[-1] in frames) == (end == 122)
    written = files.read_csv(f'{spec["meta"]["info_prepath"]}_session_df_train.csv')
    assert list(written['frame']) == frames == sorted(set(frames))


def test_a_row_that_is_there_only_because_the_run_ended_is_never_the_best(tmp_path, fresh):
    """Seed 3: the end row at 150 has the highest mean return of all, yet the longer run would not have had it."""
    raw = raw_spec('DQN', env={'max_frame': 150}, meta={'random_seed': 3})
    spec = session_spec(tmp_path, raw)
    ended = run_to(spec)
    returns = list(ended['train_df']['total_reward_ma'])
    assert returns[-1] > max(returns[1:-1])
    loaded = fresh.call('load_only', spec)
    assert loaded['agent']['body']['best_total_reward_ma'] == max(returns[1:-1])
    best = store_of(spec).best(store_of(spec).find().generation)
    assert best['value'] == max(returns[1:-1])


def test_a_finished_run_that_is_resumed_as_it_is_does_not_change(tmp_path, fresh):
    spec = session_spec(tmp_path, raw_spec('DQN', meta={'rigorous_eval': 1}))
    ended = run_to(spec)
    assert_equal(fresh.call('go_on', spec), ended)
