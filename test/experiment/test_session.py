"""Session: what is due at which frame, rows, the best, seeds, and what it leaves on disk."""

import copy
import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from resume import (
    StopAt,
    build,
    hash_files,
    raw_spec,
    run_to,
    session_spec,
    uninterrupted,
)

from slm_lab.agent.body import COLUMNS
from slm_lab.experiment import resume
from slm_lab.experiment import session as session_module
from slm_lab.experiment.session import Session, store_of
from slm_lab.lib import files
from slm_lab.lib.state import first_difference, snapshot


def frames_of(df):
    return list(df['frame'])


# --- rows


def test_rows_are_due_at_0_at_each_multiple_and_at_the_end(tmp_path):
    result = uninterrupted(session_spec(tmp_path, raw_spec('DQN', meta={'log_frequency': 100})))
    assert frames_of(result['train_df']) == [0, 100, 200, 300, 303]


def test_with_several_envs_at_the_first_frame_that_reaches_a_multiple(tmp_path):
    """4 envs: frames are 0, 4, 8, …; 303 is first reached at 304, which is the end."""
    result = uninterrupted(session_spec(tmp_path, raw_spec('DQN', num_envs=4)))
    assert frames_of(result['train_df']) == [0, 64, 124, 184, 244, 304]


def test_a_frequency_below_the_number_of_envs_gives_one_row_a_step(tmp_path):
    raw = raw_spec('Random', num_envs=4, env={'max_frame': 14}, meta={'log_frequency': 1})
    assert frames_of(uninterrupted(session_spec(tmp_path, raw))['train_df']) == [0, 4, 8, 12, 16]


def test_an_end_that_is_a_multiple_has_one_row(tmp_path):
    raw = raw_spec('DQN', env={'max_frame': 122})
    assert frames_of(uninterrupted(session_spec(tmp_path, raw))['train_df']) == [0, 61, 122]


def test_evaluation_has_rows_of_its_own_frequency(tmp_path):
    raw = raw_spec('DQN', meta={'rigorous_eval': 2, 'eval_frequency': 100})
    result = uninterrupted(session_spec(tmp_path, raw))
    assert frames_of(result['eval_df']) == [0, 100, 200, 300, 303]
    assert frames_of(result['train_df']) == [0, 61, 122, 183, 244, 303]
    assert result['eval_df']['total_reward'].notna().all()


def test_a_row_says_what_is_true_at_its_frame(tmp_path):
    spec = session_spec(tmp_path, raw_spec('DQN', meta={'log_frequency': 150}))
    session = build(spec, StopAt(150), store=False)
    session.run()
    df = session.agent.body.train_df
    assert tuple(df.columns) == COLUMNS
    row = df.iloc[1]
    # training begins after 8 transitions and comes with each 6th slot of a memory of 90: 13, 19, … 91, 97, … 145;
    # each takes 2 steps; the rate is that of the last training
    trainings = [frame for frame in range(1, 151) if frame > 8 and (frame - 1) % 90 % 6 == 0]
    assert row['opt_step'] == 2 * len(trainings)
    assert row['lr'] == pytest.approx(0.02 * 0.9 ** (trainings[-1] // 40))
    assert row['explore_var'] == pytest.approx(1 - 0.9 * (150 - 20) / 230)
    assert (row['epi'], row['t']) == (session.clock.epi, session.clock.t)
    assert row['fps'] == pytest.approx(150 / row['wall_t'], rel=0.1)
    assert math.isfinite(row['loss']) and math.isnan(row['entropy'])
    assert row['total_reward'] == session.env.total_reward
    assert all(df[column].dtype == np.int64 for column in ('epi', 't', 'opt_step', 'frame'))


def test_the_first_row_has_no_return_yet(tmp_path):
    df = uninterrupted(session_spec(tmp_path, raw_spec('DQN')))['train_df']
    assert math.isnan(df['total_reward'][0]) and math.isnan(df['total_reward_ma'][0])
    assert (df['explore_var'][0], df['lr'][0], df['opt_step'][0]) == (1.0, 0.02, 0)


def test_wall_time_is_the_sum_of_all_runs(tmp_path):
    spec = session_spec(tmp_path, raw_spec('DQN'))
    run_to(spec, StopAt(150))
    generation = store_of(spec).find().generation
    session = build(spec)
    tree = session.store.restore(generation, session.state_dict())
    tree['clock']['wall_t'] = 1000.0
    session.load_state_dict(tree)
    session.run()
    df = session.agent.body.train_df
    assert 1000 < df['wall_t'].iloc[-1] < 1100
    assert df['fps'].iloc[-1] == pytest.approx(303 / df['wall_t'].iloc[-1], abs=0.05)


def test_the_progress_bar_goes_on_where_the_run_does(tmp_path, monkeypatch):
    bars = []

    class Bar:
        def __init__(self, total, initial, label, position):
            bars.append((total, initial))

        def update(self, frame):
            bars.append(frame)

        def set_return(self, value):
            pass

        def close(self, frame):
            bars.append(('closed', frame))

    monkeypatch.setattr(session_module, 'Progress', Bar)
    spec = session_spec(tmp_path, raw_spec('DQN'))
    run_to(spec, StopAt(150))
    assert bars[0] == (303, 0) and bars[-1] == ('closed', 150)
    bars.clear()
    session = build(spec)
    resume.restore_session(session)
    session.run()
    assert bars[:2] == [(303, 150), 151] and bars[-1] == ('closed', 303)


# --- the best


def test_the_best_nets_are_those_of_the_row_with_the_highest_mean_return(tmp_path):
    spec = session_spec(tmp_path, raw_spec('DQN'))
    df = run_to(spec)['train_df'].iloc[:-1]  # the last row is there only because the run ended
    best = store_of(spec).best(store_of(spec).find().generation)
    highest = df['total_reward_ma'].max()
    assert best['value'] == highest
    assert best['frame'] == df['frame'][df['total_reward_ma'] == highest].iloc[-1]  # the later of two equals
    then = run_to(session_spec(tmp_path / 'then', raw_spec('DQN')), StopAt(best['frame']))
    for name, state in then['tree']['agent']['algorithm']['nets'].items():
        assert first_difference(dict(state), dict(best['nets'][f'{name}_model'])) is None
        path = f'{spec["meta"]["model_prepath"]}_ckpt-best_{name}_model.pt'
        assert first_difference(dict(state), dict(torch.load(path, weights_only=True))) is None


def test_with_evaluation_the_best_is_judged_by_it(tmp_path):
    spec = session_spec(tmp_path, raw_spec('DQN', meta={'rigorous_eval': 2}))
    df = run_to(spec)['eval_df'].iloc[:-1]
    assert store_of(spec).best(store_of(spec).find().generation)['value'] == df['total_reward_ma'].max()


def test_best_nets_found_between_two_checkpoints_are_those_of_their_frame(tmp_path):
    """Evaluated at frame 100, saved at 122: what is kept is what was evaluated."""
    raw = raw_spec('DQN', meta={'rigorous_eval': 2, 'eval_frequency': 100, 'log_frequency': 61})
    spec = session_spec(tmp_path, raw)
    session = build(spec, StopAt(130))
    session.agent.body.take_best = lambda df_mode: df_mode == 'eval' and session.clock.frame == 100
    session.run()
    best = store_of(spec).best(store_of(spec).find().generation)
    assert best['frame'] == 100
    then = run_to(session_spec(tmp_path / 'then', raw), StopAt(100))['tree']['agent']['algorithm']['nets']
    assert first_difference(dict(then['net']), dict(best['nets']['net_model'])) is None


def test_the_best_survives_a_resume(tmp_path, fresh):
    """The run that was stopped has the best nets of the one that was not."""
    specs = [session_spec(tmp_path / name, raw_spec('DQN', normalize_state=True)) for name in ('whole', 'stopped')]
    run_to(specs[0])
    run_to(specs[1], StopAt(200))
    first_best = store_of(specs[1]).best(store_of(specs[1]).find().generation)
    fresh.call('go_on', specs[1])
    bests = [store_of(spec).best(store_of(spec).find().generation) for spec in specs]
    assert first_difference(*bests) is None
    assert bests[0]['value'] >= first_best['value']


def test_best_nets_that_were_found_after_the_newest_checkpoint_are_not_kept(tmp_path):
    """The classic copies are put back to the checkpoint's: what came after is trained again."""
    spec = session_spec(tmp_path, raw_spec('DQN'))
    run_to(spec, StopAt(250))
    path = Path(f'{spec["meta"]["model_prepath"]}_ckpt-best_net_model.pt')
    kept = torch.load(path, weights_only=True)
    torch.save({name: tensor + 1 for name, tensor in kept.items()}, path)
    session = build(spec)
    resume.restore_session(session)
    assert first_difference(dict(kept), dict(torch.load(path, weights_only=True))) is None


# --- files


def test_each_row_leaves_a_checkpoint_and_current_classic_files(tmp_path):
    spec = session_spec(tmp_path, raw_spec('DQN'))
    result = run_to(spec, StopAt(130))
    folder = Path(spec['meta']['predir'])
    assert [g.split('_')[1] for g in sorted(p.name for p in folder.glob('checkpoint/*/*_manifest.json'))] == [
        '122',
        '130',
    ]
    prefix = spec['meta']['model_prepath']
    for name, state in result['tree']['agent']['algorithm']['nets'].items():
        assert first_difference(dict(state), dict(torch.load(f'{prefix}_{name}_model.pt', weights_only=True))) is None
    optim = torch.load(f'{prefix}_net_optim.pt', weights_only=True)
    assert first_difference(result['tree']['agent']['algorithm']['optims']['net'], optim) is None
    for mode in ('train', 'eval'):
        written = files.read_csv(f'{spec["meta"]["info_prepath"]}_session_df_{mode}.csv')
        assert written.equals(result['train_df']), mode  # to the last digit


def test_every_pt_file_of_a_run_is_read_without_running_anything(tmp_path):
    spec = session_spec(tmp_path, raw_spec('DQN', 'PrioritizedReplay', normalize_state=True, meta={'rigorous_eval': 1}))
    run_to(spec)
    paths = list(Path(spec['meta']['predir']).rglob('*.pt'))
    assert len(paths) >= 8
    for path in paths:
        torch.load(path, weights_only=True)


def test_without_a_store_nothing_is_written(tmp_path):
    uninterrupted(session_spec(tmp_path, raw_spec('DQN', meta={'rigorous_eval': 1})))
    assert hash_files(tmp_path) == {}


def test_stopped_before_its_first_step_it_has_a_checkpoint_of_frame_0(tmp_path):
    spec = session_spec(tmp_path, raw_spec('DQN'))
    run_to(spec, StopAt(0))
    assert store_of(spec).find().generation.frame == 0


@pytest.mark.parametrize('frame', [150, 122])
def test_a_stop_saves_once(frame, tmp_path, monkeypatch):
    """At a frame with a row the checkpoint is there already."""
    saved = []
    save = Session.save
    monkeypatch.setattr(Session, 'save', lambda self, *a, **k: (saved.append(self.clock.frame), save(self, *a, **k)))
    run_to(session_spec(tmp_path, raw_spec('DQN')), StopAt(frame))
    assert saved == [0, 61, 122, 150][: 4 if frame == 150 else 3]


def test_the_final_checkpoint_says_so_and_no_other(tmp_path):
    spec = session_spec(tmp_path, raw_spec('DQN'))
    run_to(spec, StopAt(150))
    assert not store_of(spec).find().generation.final and not resume.is_finished(spec)
    session = build(spec)
    resume.restore_session(session)
    assert session.run()
    assert store_of(spec).find().generation.final and resume.is_finished(spec)
    longer = copy.deepcopy(spec)
    longer['env'][0]['max_frame'] = 304
    assert not resume.is_finished(longer)


# --- seeds


def test_runs_of_one_seed_are_equal_and_sessions_trials_and_seeds_differ(tmp_path):
    def first_states(session=0, trial=0, seed=7):
        raw = raw_spec('DQN', env={'max_frame': 20}, meta={'random_seed': seed})
        spec = session_spec(tmp_path, raw, session)
        spec['meta']['trial'] = trial
        session = build(spec, store=False)
        session.run()
        return session.agent.memory.arrays['states'][:20].tobytes()

    runs = [first_states(), first_states(session=1), first_states(trial=1), first_states(seed=8), first_states(seed=0)]
    assert first_states() == runs[0]
    assert len(set(runs)) == 5


def test_without_a_seed_one_is_drawn_and_recorded(tmp_path):
    raw = raw_spec('DQN')
    del raw['meta']['random_seed']
    specs = [session_spec(tmp_path, raw) for _ in range(2)]
    seeds = [build(spec, store=False).spec['meta']['random_seed'] for spec in specs]
    assert all(type(seed) is int for seed in seeds) and seeds[0] != seeds[1]
    again = [
        build(copy.deepcopy(spec), store=False).agent.algorithm.nets['net'].state_dict() for spec in (specs[0],) * 2
    ]
    assert first_difference(*map(dict, again)) is None  # by the recorded one, which is now in the spec


# --- dev mode, and envs that cannot be brought back


def test_dev_mode_measures_gradients_and_trains_alike(tmp_path, monkeypatch):
    monkeypatch.setenv('RENDER', 'false')
    spec = session_spec(tmp_path, raw_spec('DQN'))
    dev, train = run_to(spec, store=False, mode='dev'), uninterrupted(spec)
    assert dev['train_df']['grad_norm'].iloc[1:].gt(0).all() and train['train_df']['grad_norm'].isna().all()
    for part in ('nets', 'optims'):
        assert (
            first_difference(dev['tree']['agent']['algorithm'][part], train['tree']['agent']['algorithm'][part]) is None
        )


@pytest.mark.parametrize('num_envs', [1, 3])
def test_where_an_episode_cannot_be_brought_back_a_new_one_begins(num_envs, tmp_path, caplog):
    """`episode`, which is what an env that does not repeat itself gets: all but the episode is exact."""
    spec = session_spec(tmp_path, raw_spec('DQN', num_envs=num_envs, env={'resume': 'episode'}))
    before = run_to(spec, StopAt(150, 'inside'))['tree']
    session = build(spec)
    with caplog.at_level(logging.WARNING, 'slm_lab'):
        restored = resume.restore_session(session)
    warnings = [record for record in caplog.records if record.levelname == 'WARNING']
    assert len(warnings) == 1 and 'CartPole-v1' in warnings[0].getMessage()
    assert not restored.exact and 'the running episode of env 0' in restored.missing[0]
    now = snapshot(session.state_dict())
    assert now['clock']['epi'] == before['clock']['epi'] + num_envs
    assert now['clock']['t'] == (0 if num_envs == 1 else before['clock']['frame'])
    assert now['clock']['frame'] == before['clock']['frame']
    for part in ('agent', 'rng'):
        assert first_difference(before[part], now[part]) is None
    assert 'env' not in restored.parts
    session.run()
    assert session.clock.frame >= 303 and np.isfinite(session.env.total_reward)


def test_an_episode_that_cannot_be_brought_back_is_cut_in_the_memory_too(tmp_path):
    spec = session_spec(tmp_path, raw_spec('SARSA', 'OnPolicyBatchReplay', env={'resume': 'episode'}))
    run_to(spec, StopAt(150, 'inside'))
    session = build(spec)
    resume.restore_session(session)
    memory = session.agent.memory
    assert session.env.restarted == [0] and memory.length
    assert memory.storage.arrays['truncated'][memory.length - 1].tolist() == [1]


def test_damaged_best_nets_are_replaced_by_the_next_good_ones(tmp_path):
    spec = session_spec(tmp_path, raw_spec('DQN'))
    run_to(spec, StopAt(150))
    store = store_of(spec)
    assert store.best(store.find().generation) is not None
    for path in store.folder.glob('*_best.pt'):
        path.write_bytes(b'')
    session = build(spec)
    resume.restore_session(session)
    assert session.agent.body.best_total_reward_ma == -math.inf
    session.run()
    assert store.best(store.find().generation) is not None
