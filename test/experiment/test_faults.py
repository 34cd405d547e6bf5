"""What users of other labs suffered when they resumed cannot happen here: each kind has a test.

`COVERED` says which: the number or name is that of a report (a public issue, in our own words), the value the test that
would fail if it happened here; `test_each_kind_has_its_test` sees to it that these exist. Short ones are below.
"""

import ast
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from resume import (
    ROOT,
    StopAt,
    build,
    environment,
    load_only,
    never,
    raw_spec,
    run_to,
    session_spec,
    uninterrupted,
)
from test_resume_soft import soft_spec

import run_lab
from slm_lab.experiment import resume
from slm_lab.experiment.session import store_of
from slm_lab.lib import files
from slm_lab.lib.state import first_difference, walk
from slm_lab.spec import spec_util

HERE = 'experiment/test_faults.py'
EQUAL = 'experiment/test_resume_equality.py::test_a_resumed_run_equals_the_uninterrupted_one'
OPTIONS = 'experiment/test_resume_equality.py::test_equal_with_each_option'
RULES = 'experiment/test_resume_rules_e2e.py'
FORGOTTEN = 'experiment/test_forgotten_state.py::test_what_training_changes_comes_back'
KILLS = 'experiment/test_checkpoint_kill.py'
STORE = 'experiment/test_checkpoint.py'

COVERED = {
    '1 exploration starts anew': [f'{HERE}::test_exploration_goes_on_from_the_restored_frame'],
    '2 step counter not restored': [f'{HERE}::test_exploration_goes_on_from_the_restored_frame'],
    '3 schedule and replay lost by the command line': [f'{RULES}::test_a_resumed_run_is_the_uninterrupted_one'],
    '4 counter restarts by default': [f'{RULES}::test_a_resumed_run_is_the_uninterrupted_one'],
    '5 a knob that nobody understands': [f'{HERE}::test_there_is_no_flag_to_reset_and_transfer_has_another_name'],
    '6 seed applied again on load': ['experiment/test_resume_equality.py::test_five_resumes_in_a_row'],
    '7 generators not saved': [EQUAL, OPTIONS],
    '8 no contract of what is kept': [
        'test_docs.py::test_the_table_of_what_is_kept_names_every_part_of_the_state_tree'
    ],
    '9 nobody can tell whether it is exact': ['experiment/test_verify.py::test_a_good_run_is_identical'],
    '11 periodic checkpoints lack the replay': [f'{HERE}::test_the_memory_is_that_of_the_checkpoint'],
    '12 a lost replay goes unnoticed': [f'{RULES}::test_the_report_names_what_is_lost'],
    '13 replay lost': [f'{HERE}::test_the_memory_is_that_of_the_checkpoint'],
    '16 optimizer detached from the loaded weights': [f'{HERE}::test_optimizers_step_the_weights_that_were_loaded'],
    '17 target net not saved': [f'{HERE}::test_the_target_net_is_the_saved_one_and_no_copy'],
    '18 optimizer state not saved': [f'{HERE}::test_the_first_update_after_a_resume_is_the_same'],
    '19 optimizer state dropped after a crash': [f'{HERE}::test_moments_are_there_straight_after_loading'],
    '21 statistics of observations lost': [f'{HERE}::test_statistics_of_observations_are_equal'],
    '22 statistics of observations lost in play': [
        'experiment/test_enjoy.py::test_it_plays_the_best_nets_with_their_statistics'
    ],
    '23 counters inside the env restart': [f'{HERE}::test_an_episode_is_cut_by_its_time_limit_at_the_same_step'],
    '24 a partial restore looks successful': [
        'experiment/test_session.py::test_where_an_episode_cannot_be_brought_back_a_new_one_begins',
        'env/test_slot.py::test_an_observation_that_differs_in_one_bit_is_another',
    ],
    '25 progress starts at 0': ['experiment/test_session.py::test_the_progress_bar_goes_on_where_the_run_does'],
    '28 rows overwritten': [f'{RULES}::test_a_resumed_run_is_the_uninterrupted_one'],
    '29 history wiped on each resume': [
        f'{RULES}::test_a_change_that_leaves_the_past_as_it_was_is_taken_over',
        f'{RULES}::test_the_history_is_only_ever_appended',
    ],
    '30 curves split into new folders': [f'{RULES}::test_a_run_is_found_in_every_form'],
    '33 curves start at 0 in silence': [f'{RULES}::test_a_resumed_run_is_the_uninterrupted_one'],
    '34 a kill during a save leaves half a file': [
        f'{KILLS}::test_fifty_kills_at_random_times_lose_nothing_that_was_saved'
    ],
    '35 two checkpoints mixed, orphans left': [
        f'{KILLS}::test_kill_at_any_step_of_a_save_leaves_the_old_or_the_new_generation',
        f'{STORE}::test_prune_sweeps_orphans_and_temporary_files_of_dead_writers_but_nothing_foreign',
    ],
    '37 saving exists and is never called': [
        'experiment/test_signals.py::test_one_run_stopped_at_every_moment_ends_as_the_undisturbed_one'
    ],
    '39 a queue ends the job before it saves': [
        'experiment/test_signals.py::test_a_time_limit_leaves_a_checkpoint_of_the_moment'
    ],
    '40 saving takes as much memory again': [f'{STORE}::test_extra_memory_is_a_chunk_at_most'],
    '42 replay newer than the weights': [f'{HERE}::test_the_memory_is_that_of_the_checkpoint'],
    '43 the device is baked in': [
        f'{HERE}::test_a_checkpoint_holds_tensors_of_no_device',
        f'{HERE}::test_a_run_on_a_gpu_goes_on_without_one',
    ],
    '45 changed hyperparameters are ignored in silence': [
        f'{RULES}::test_a_change_that_would_have_altered_the_past_is_refused',
        f'{RULES}::test_a_change_that_leaves_the_past_as_it_was_is_taken_over',
    ],
    '46 a warm start keeps the old step count': [
        'experiment/test_load_net.py::test_it_starts_at_frame_0_with_these_nets'
    ],
    '47 files that a safe reader refuses': [
        'experiment/test_session.py::test_every_pt_file_of_a_run_is_read_without_running_anything'
    ],
    '50 each resume replays the first stretch': ['experiment/test_resume_equality.py::test_five_resumes_in_a_row'],
    'SLM Lab 444, 445, 455 going on, and from whose nets': [
        EQUAL,
        'experiment/test_load_net.py::test_it_starts_at_frame_0_with_these_nets',
    ],
    'SLM Lab 455 edits must fit past and future': [
        f'{RULES}::test_a_change_that_would_have_altered_the_past_is_refused'
    ],
    'SLM Lab 469 enjoy cannot read the path of a spec': [
        'experiment/test_enjoy.py::test_a_session_is_named_by_its_spec',
        'experiment/test_enjoy.py::test_the_spec_of_a_trial_or_of_the_run_means_its_best_session',
        'experiment/test_enjoy.py::test_what_is_missing_is_named',
    ],
    'SLM Lab 198 resume trained anew': [
        f'{RULES}::test_a_run_whose_checkpoints_and_nets_are_all_damaged_never_starts_anew'
    ],
    'SLM Lab 128, 183, 243 the only checkpoint deleted': [f'{STORE}::test_prune_leaves_all_where_nothing_is_complete'],
    'SLM Lab 451 graphs end a run': [
        'experiment/test_analysis.py::test_a_run_ends_well_where_graphs_cannot_be_written'
    ],
    'SLM Lab 4.2 best model lost on resume': ['experiment/test_session.py::test_the_best_survives_a_resume'],
    'SLM Lab 4.2 final exploration until the first update': [
        f'{HERE}::test_exploration_goes_on_from_the_restored_frame'
    ],
    'SLM Lab 4.2 learning rate repeats or misses decays': [
        'experiment/test_resume_equality.py::test_equal_with_each_learning_rate_schedule'
    ],
    'SLM Lab 4.2 evaluation rows replaced by training rows': [
        f'{HERE}::test_evaluation_rows_are_its_own_after_a_resume'
    ],
    'SLM Lab 4.2 episode cut short after a resume': [
        f'{HERE}::test_an_episode_is_cut_by_its_time_limit_at_the_same_step'
    ],
    'SLM Lab 4.2 counters become floats': [f'{HERE}::test_counters_are_whole_numbers_of_any_size'],
    'SLM Lab 4.2 enjoy overwrites the rows that a resume reads': [
        'experiment/test_enjoy.py::test_it_plays_the_best_nets_with_their_statistics'
    ],
    'SLM Lab 4.2 nets without rows restart the clock in silence': [
        'experiment/test_classic_folder.py::test_too_little_is_refused_and_nothing_is_lost'
    ],
    'SLM Lab 4.2 two processes in one folder': [
        'experiment/test_run_lock.py::test_lock_held_by_a_living_process_is_refused_naming_pid_and_host'
    ],
    'SLM Lab 4.2 a wrong spec name makes a new folder': [f'{RULES}::test_another_specs_run_is_refused_by_name'],
    'SLM Lab 5.3 the saved spec wins and trains a new trial': [f'{RULES}::test_a_resumed_run_is_the_uninterrupted_one'],
    'a part forgets its state': [FORGOTTEN],
    '14, 15 learned temperature of SAC': [f'{HERE}::test_the_learned_temperature_and_its_optimizer_go_on'],
    '20 clipping and entropy coefficients': ['experiment/test_faults.py::test_coefficients_go_on_across_the_seam'],
    'SLM Lab 383 hidden state of recurrent nets': [
        'experiment/test_resume_policy.py::test_equal_with_each_cell',
    ],
    '48 an interrupted search': [
        'experiment/test_search_ray.py::test_a_search_that_is_killed_and_stopped_ends_as_if_it_had_not_been'
    ],
    'SLM Lab 442, 492 a search ends with an error after its trials ran': [
        'experiment/test_search_ray.py::test_asha_stops_what_is_worse_than_what_came_before_and_failures_are_rows'
    ],
    'SLM Lab 75, 493, 522, 525 it does not run here, and nobody can tell why': [
        'lib/test_doctor.py::test_a_package_out_of_range_or_missing_is_a_problem',
        'test_run_lab.py::test_a_python_without_the_packages_is_told_what_to_do',
    ],
    "SLM Lab 378, 516 a user's environment is unknown in workers": [
        'env/test_user_env.py::test_the_worked_example_trains_in_two_sessions_and_is_resumed_in_the_middle_of_its_episodes'
    ],
    'SLM Lab 384, 385, 165, 163 memory of searches and of images': [
        'experiment/test_memory_estimate.py::test_a_new_run_that_cannot_fit_writes_nothing',
        'experiment/test_memory_estimate.py::test_a_million_stacks_of_4_frames_take_little_more_than_a_million_frames',
    ],
}


@pytest.mark.parametrize('kind', COVERED)
def test_each_kind_has_its_test(kind):
    for place in COVERED[kind]:
        path, name = place.split('::')
        tree = ast.parse((ROOT / 'test' / path).read_text())
        assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], place


# --- short tests


@pytest.fixture
def stopped(tmp_path):
    """A DQN that was stopped at frame 150: (its spec, its tree then)"""
    spec = session_spec(tmp_path, raw_spec('DQN', normalize_state=True, meta={'rigorous_eval': 1}))
    return spec, run_to(spec, StopAt(150, 'inside'))['tree']


def loaded(spec, stop=None):
    session = build(spec, stop or StopAt(150))
    resume.restore_session(session)
    return session


def test_the_learned_temperature_and_its_optimizer_go_on(tmp_path):
    """Neither alpha's first value nor fresh moments of its optimizer; a changed alpha comes back changed."""
    spec = session_spec(tmp_path, soft_spec('SoftActorCritic', 'Replay', 'MLPNet', 1, 'continuous'))
    saved = run_to(spec, StopAt(150))['tree']['agent']['algorithm']
    session = loaded(spec)
    algorithm = session.agent.algorithm
    log_alpha = saved['nets']['alpha']['log_alpha']
    assert log_alpha != 0 and torch.equal(algorithm.log_alpha.detach(), log_alpha)
    moments = algorithm.learners['alpha'].optim.state_dict()['state'][0]
    assert moments['exp_avg_sq'] > 0 and moments['step'] > 1
    assert first_difference(saved['optims']['alpha']['state'][0], moments) is None


def test_exploration_goes_on_from_the_restored_frame(stopped):
    """Also before the first update: neither the first nor the last value of the schedule."""
    spec, _ = stopped
    session = loaded(spec, StopAt(200))
    assert session.agent.algorithm.explore_var == pytest.approx(1 - 0.9 * (150 - 20) / 230)
    session.run()
    df = session.agent.body.train_df
    assert list(df['frame']) == [0, 61, 122, 183]
    whole = uninterrupted(spec)['train_df']
    assert list(df['explore_var']) == list(whole['explore_var'])[:4] == sorted(df['explore_var'], reverse=True)


def test_there_is_no_flag_to_reset_and_transfer_has_another_name(capsys):
    with pytest.raises(SystemExit):
        run_lab.main(['--help'])
    text = capsys.readouterr().out
    assert 'reset' not in text and 'load_net' in text and 'train@' in text


def test_the_memory_is_that_of_the_checkpoint(tmp_path):
    """Killed at frame 150, 28 after the checkpoint: the memory holds 122 transitions of the 500 that fit, not 150."""
    spec = session_spec(tmp_path, raw_spec('DQN', mem={'max_size': 500}))
    session = build(spec, StopAt(150))
    session.env.reset()
    session.run_rl()  # saves at 0, 61 and 122; what would save at the stop is never reached
    assert session.agent.memory.size == 150
    memory = loaded(spec).agent.memory
    assert (memory.size, memory.seen_size) == (122, 122)
    for name, array in memory.arrays.items():
        assert np.array_equal(array[:122], session.agent.memory.arrays[name][:122]) and not array[122:].any()


def test_optimizers_step_the_weights_that_were_loaded(stopped):
    spec, _ = stopped
    session = loaded(spec, StopAt(170))
    learner = session.agent.algorithm.learners['net']
    owned = [id(p) for group in learner.optim.param_groups for p in group['params']]
    assert owned == [id(p) for p in session.agent.algorithm.nets['net'].parameters()]
    before = [p.detach().clone() for p in learner.params]
    session.run()
    assert not any(torch.equal(old, new) for old, new in zip(before, learner.params, strict=True))


def test_the_target_net_is_the_saved_one_and_no_copy(stopped):
    spec, tree = stopped
    nets = loaded(spec).agent.algorithm.nets
    was = tree['agent']['algorithm']['nets']
    assert first_difference(dict(was['target_net']), dict(nets['target_net'].state_dict())) is None
    assert first_difference(dict(nets['net'].state_dict()), dict(nets['target_net'].state_dict())) is not None


def test_the_first_update_after_a_resume_is_the_same(stopped, tmp_path):
    """Trained on to the first frame at which the weights move, with and without the interruption."""
    spec, tree = stopped
    before = tree['agent']['algorithm']['nets']['net']['model.0.weight']
    for frame in range(151, 160):
        weights = []
        for session in (loaded(spec, StopAt(frame)), build(spec, StopAt(frame), store=False)):
            session.store = False
            session.run()
            weights.append(session.agent.algorithm.nets['net'].state_dict()['model.0.weight'].clone())
        assert torch.equal(*weights)
        if not torch.equal(weights[0], before):
            return
    raise AssertionError('nothing was trained')


def test_moments_are_there_straight_after_loading(stopped):
    spec, tree = stopped
    state = loaded(spec).agent.algorithm.learners['net'].optim.state_dict()['state']
    assert all(
        entry['exp_avg'].norm() > 0 and float(entry['step']) == tree['clock']['opt_step'] for entry in state.values()
    )


def test_statistics_of_observations_are_equal(stopped):
    spec, tree = stopped
    was, now = tree['env']['NormalizeState'], load_only(spec)['env']['NormalizeState']
    assert was['count'] == now['count'] > 150
    assert first_difference(was, now) is None


def test_an_episode_is_cut_by_its_time_limit_at_the_same_step(tmp_path):
    """Acting always the same way a pendulum's episode of 40 steps never ends by itself: stopped at its 15th step it
    ends 25 later."""
    raw = raw_spec('Random', env={'name': 'Pendulum-v1', 'max_t': 40, 'max_frame': 200})
    spec = session_spec(tmp_path, raw)
    run_to(spec, StopAt(95))
    session = loaded(spec, StopAt(119))
    assert (session.clock.t, session.clock.epi) == (15, 2)
    session.run()
    assert (session.clock.t, session.clock.epi) == (39, 2)
    session.stop.frame = 120
    session.run()
    assert (session.clock.t, session.clock.epi) == (0, 3)


def test_evaluation_rows_are_its_own_after_a_resume(stopped):
    spec, tree = stopped
    body = loaded(spec).agent.body
    # that of frame 150, amid which it was stopped, is still to come
    assert list(body.eval_df['frame']) == [0, 50, 100] and list(body.train_df['frame']) == [0, 61, 122]
    assert list(body.eval_df['total_reward']) == list(tree['agent']['body']['rows']['eval']['total_reward'])


def test_coefficients_go_on_across_the_seam(tmp_path):
    """PPO's clipping range and entropy weight, and all that its rows say, as in the run that was never stopped."""
    from test_resume_policy import policy_spec

    raw = policy_spec('PPO', 'OnPolicyBatchReplay', 0, 'MLPNet', True, 1, 'discrete')
    spec = session_spec(tmp_path, raw)
    before = run_to(spec, StopAt(150))['tree']['agent']['algorithm']
    session = loaded(spec, never)
    assert session.agent.algorithm.clip_eps == before['clip_eps'] == pytest.approx(0.2 - 0.19 * (150 - 20) / 260)
    assert session.agent.algorithm.entropy_coef == before['entropy_coef'] == before['clip_eps']  # the same schedule
    session.run()
    rows = session.agent.body.train_df
    assert list(rows['entropy_coef']) == sorted(rows['entropy_coef'], reverse=True)
    assert rows['entropy'].notna().any()


def test_counters_are_whole_numbers_of_any_size(stopped):
    """2 ** 24 + 1 is the first whole number that a float32 of a data frame does not hold."""
    spec, _ = stopped
    session = loaded(spec)
    large = 2**24 + 1
    state = session.state_dict()
    state['clock'] = {**state['clock'], 'frame': large, 'opt_step': large, 'epi': large}
    session.store.save(state, frame=large, spec=spec_util.record_of(session.spec))
    clock = loaded(spec).clock
    assert (clock.frame, clock.opt_step, clock.epi) == (large, large, large)
    assert all(type(value) is int for value in (clock.frame, clock.opt_step, clock.epi, clock.t))


def test_a_checkpoint_holds_tensors_of_no_device(stopped):
    spec, _ = stopped
    tree = store_of(spec).restore(store_of(spec).find().generation, build(spec, store=False).state_dict())
    tensors = [leaf for _, leaf in walk(tree) if isinstance(leaf, torch.Tensor)]
    assert tensors and {str(tensor.device) for tensor in tensors} == {'cpu'}


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_a_run_on_a_gpu_goes_on_without_one(tmp_path):
    spec = session_spec(tmp_path, raw_spec('DQN', 'PrioritizedReplay', nets={'gpu': 'auto'}))
    was = run_to(spec, StopAt(150))['tree']
    files.write_json(spec, tmp_path / 'spec.json')
    code = (
        'import json, sys, torch, resume\n'
        'assert not torch.cuda.is_available()\n'
        'result = resume.go_on(json.load(open(sys.argv[1])))\n'
        'print(result["loaded"]["clock"]["frame"], result["tree"]["clock"]["frame"])'
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / 'test')])
    env = environment(CUDA_VISIBLE_DEVICES='', PYTHONPATH=path)
    done = subprocess.run([sys.executable, '-c', code, tmp_path / 'spec.json'], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == [str(was['clock']['frame']), '303']
