"""Sessions side by side: as if each ran alone; one that fails fails the trial loudly and costs the others nothing."""

import json
import re
import subprocess
import sys

from lab_process import (
    ROOT,
    SPEC_NAME,
    Lab,
    assert_same_end,
    end_of_session,
    hashes,
    undisturbed,
)

from slm_lab.experiment import analysis
from slm_lab.experiment.session_processes import run_session
from slm_lab.experiment.stop import StopRequest
from slm_lab.experiment.trial import sweep
from slm_lab.lib import logger as lab_logger
from slm_lab.lib.machine import count_cpus
from slm_lab.lib.state import first_difference
from slm_lab.spec import spec_util

TWO = {'max_session': 2, 'num_cpus': 0.1}


def test_two_sessions_in_parallel_are_the_same_two_run_singly(lab, tmp_path, monkeypatch):
    lab.write_spec(**TWO)
    assert lab.train(spawned=True).status == 0
    monkeypatch.setattr(analysis, '_draw', lambda *_: True)
    for index in range(2):
        alone = Lab(tmp_path / f'alone{index}')
        alone.write_spec(max_session=1)
        monkeypatch.setenv('LAB_DATA_DIR', str(alone.data))
        spec = spec_util.get(alone.spec_file, SPEC_NAME)
        spec = spec_util.session_spec(spec_util.tick(spec, 'trial'), index)
        try:
            assert run_session(spec, 'train', StopRequest(), resumes=False).finished
        finally:
            lab_logger.close()
        together = end_of_session(lab.run_folder, index)
        assert first_difference(end_of_session(alone.run_folder, index), together) is None
    first, second = (end_of_session(lab.run_folder, i)['train'] for i in range(2))
    assert first != second  # each has a seed of its own


CRASH = [('slm_lab.agent.agent', 'Agent.update', 151, 'raise RuntimeError("boom")')]


def in_session(index, code):
    """Code that runs only in one session's process."""
    return f"""
import sys
frame = sys._getframe()
while frame and not (frame.f_code.co_name == 'run_session'):
    frame = frame.f_back
if frame and frame.f_locals['spec']['meta']['session'] == {index}:
    {code}
"""


def test_a_session_that_crashes_fails_the_trial_and_keeps_the_others_work(lab):
    lab.write_spec(**TWO)
    crash = in_session(1, 'raise RuntimeError("boom")')
    life = lab.train(hooks=[('slm_lab.agent.agent', 'Agent.update', 151, crash)])
    assert life.status == 1
    error = re.findall(r'^error: .*', life.output, re.MULTILINE)
    assert len(error) == 1
    assert "1 of the trial's sessions failed" in error[0]
    assert f'session 1: RuntimeError: boom; the traceback is in {lab.run_folder}/log/{SPEC_NAME}_t0_s1.log' in error[0]
    assert 'Traceback (most recent call last)' in lab.log(1)
    assert 'RuntimeError: boom' in lab.log(1)
    assert 'Resume it with: ' in life.output
    assert (lab.frame(0), lab.frame(1)) == (600, 100)
    history = (lab.run_folder / 'info' / f'{SPEC_NAME}_history.jsonl').read_text()
    assert json.loads(history.splitlines()[-1])['sessions'] == [1]

    patterns = 'checkpoint/*_s0/*', 'model/*_s0_*', 'info/*_s0_session_df_*', '*_s0_spec.json'
    before = hashes(lab.run_folder, *patterns)
    assert len(before) > 8
    life = lab.train('train@latest')
    assert life.status == 0, life.output
    assert '1 of 2 sessions have nothing left to train' in life.output
    assert 'Resumed trial 0 session 1 from the checkpoint of frame 100' in life.output
    assert 'session 0 from' not in life.output
    assert hashes(lab.run_folder, *patterns) == before
    for i, end in enumerate(undisturbed(**TWO)):
        assert_same_end(lab.run_folder, end, i)


def test_a_single_session_that_crashes_exits_with_1_too(lab):
    lab.write_spec()
    life = lab.train(hooks=CRASH)
    assert life.status == 1
    assert 'session 0: RuntimeError: boom' in life.output
    assert lab.train('train@latest').status == 0
    assert_same_end(lab.run_folder, undisturbed()[0])


def test_input_that_no_session_can_run_is_status_2(lab):
    """Not the lab's fault, so there is no traceback."""
    lab.write_spec(**TWO)
    code = """
if in_session_process():
    from slm_lab.lib.errors import SpecError
    raise SpecError('no such thing')
"""
    life = lab.train(hooks=[('slm_lab.experiment.session', 'Session.__init__', 0, code)])
    assert life.status == 2
    assert 'error: session 0: no such thing; session 1: no such thing' in life.output
    assert 'Traceback' not in life.output + lab.log(0) + lab.log(1)


def test_a_session_that_the_machine_kills_is_named(lab):
    """As the system does when memory runs out."""
    lab.write_spec(**TWO)
    kill = in_session(0, 'os.kill(os.getpid(), signal.SIGKILL)')
    life = lab.train(hooks=[('slm_lab.agent.agent', 'Agent.update', 151, kill)])
    assert life.status == 1
    assert f'session 0: its process died (killed by signal 9); its log is {lab.run_folder}/log/' in life.output
    assert (lab.frame(0), lab.frame(1)) == (100, 600)
    assert lab.train('train@latest').status == 0
    for i, end in enumerate(undisturbed(**TWO)):
        assert_same_end(lab.run_folder, end, i)


def test_results_larger_than_a_pipe_holds_come_through(lab):
    """A pipe holds 64 KiB; 2,000 rows make metrics of some 200."""
    lab.write_spec(**TWO, max_frame=2000, log_frequency=1, warm_up=3000)
    code = 'import slm_lab.experiment.session as s; s.Session.save = lambda *_, **__: None'  # 2,000 of them take long
    life = lab.train(hooks=[('slm_lab.experiment.session', '', 1, code)])
    assert life.status == 0, life.output[-2000:]


def count_side_by_side(life):
    """The most sessions that ran at the same moment, by the starts and ends in the log."""
    running = most = 0
    for line in life.output.splitlines():
        running += ('Running RL loop' in line) - bool(re.search(r'Session \d+ done', line))
        most = max(most, running)
    return most


def test_more_sessions_than_cpus_all_run_and_never_more_at_a_time(lab):
    """Five sessions that take one CPU each, and two CPUs."""
    lab.write_spec(max_session=5, max_frame=200, warm_up=300, num_cpus=1)
    two_cpus = [
        (
            'slm_lab.experiment.session_processes',
            '',
            1,
            'import slm_lab.experiment.session_processes as t; t.count_cpus = lambda: 2',
        )
    ]
    life = lab.train(hooks=two_cpus)
    assert life.status == 0, life.output
    assert 'Running 5 sessions, up to 2 at a time' in life.output
    assert count_side_by_side(life) <= 2
    assert [lab.frame(i) for i in range(5)] == [200] * 5


def test_the_cpus_that_count_are_those_the_process_may_use():
    code = 'import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); '
    code += 'from slm_lab.experiment.session_processes import count_cpus; print(count_cpus())'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == '1\n', done.stderr
    assert count_cpus() >= 1


def test_more_sessions_in_the_spec_start_at_0_beside_the_finished_ones(lab):
    lab.write_spec()
    assert lab.train().status == 0
    before = hashes(lab.run_folder, 'checkpoint/**/*', 'model/*', 'info/*_df_*')
    lab.write_spec(**TWO)
    life = lab.train('train@latest')
    assert life.status == 0, life.output
    assert 'meta.max_session was 1, is 2' in life.output
    assert hashes(lab.run_folder, 'checkpoint/*_s0/*', 'model/*_s0_*', 'info/*_s0_*_df_*') == before
    for i, end in enumerate(undisturbed(**TWO)):
        assert_same_end(lab.run_folder, end, i)


def test_a_finished_run_says_so_and_is_analysed_again(lab):
    lab.write_spec()
    assert lab.train().status == 0
    before = hashes(lab.run_folder, 'checkpoint/**/*', 'model/*', 'info/*_df_*', 'info/*metrics*')
    (lab.run_folder / 'info' / f'{SPEC_NAME}_t0_trial_metrics.json').unlink()
    life = lab.train('train@latest')
    assert life.status == 0
    assert '1 of 1 sessions have nothing left to train' in life.output
    assert 'strength: ' in life.output
    assert hashes(lab.run_folder, 'checkpoint/**/*', 'model/*', 'info/*_df_*', 'info/*metrics*') == before


# --- the lock


def test_a_second_process_that_trains_into_the_folder_is_refused(lab):
    lab.write_spec()
    waits = """
mark('running')
while not os.path.exists(FOLDER + '/go'):
    time.sleep(0.005)
"""
    life = lab.start_train(hooks=[('slm_lab.agent.agent', 'Agent.update', 151, waits)], fresh=True)
    life.wait_for(lambda: lab.has_mark('running'))
    before = hashes(lab.run_folder, 'checkpoint/**/*', '*.json', 'info/*', 'log/*')
    second = lab.train('train@latest')
    assert second.status == 2
    assert re.search(
        rf'^error: .* is being trained by process {life.pid} on \S+ \(since .*\); wait', second.output, re.M
    )
    assert hashes(lab.run_folder, 'checkpoint/**/*', '*.json', 'info/*', 'log/*') == before
    (lab.folder / 'go').touch()
    assert life.wait().status == 0
    assert_same_end(lab.run_folder, undisturbed()[0])


def test_the_lock_of_a_dead_process_is_taken_over(lab):
    lab.write_spec()
    life = lab.train(hooks=[('slm_lab.agent.agent', 'Agent.update', 151, 'os.kill(os.getpid(), signal.SIGKILL)')])
    assert life.status == -9
    assert json.loads((lab.run_folder / 'lock').read_text())['pid'] == life.pid
    assert lab.train('train@latest').status == 0
    assert (lab.run_folder / 'lock').read_text() == ''


# --- temporary files


def test_sweeping_removes_what_dead_processes_left_and_nothing_else(tmp_path):
    dead = subprocess.Popen([sys.executable, '-c', ''])
    dead.wait()
    names = {
        f'info/.x_df.csv.{dead.pid}.tmp': False,
        f'.x_spec.json.{dead.pid}.tmp': False,
        'info/.x_df.csv.1.tmp': True,  # its process lives
        f'checkpoint/x/.000001_0_manifest.json.{dead.pid}.tmp': True,  # the store sees to its own
        'info/x_df.csv': True,
        f'info/x_df.csv.{dead.pid}.tmp': True,  # not of the lab's making
    }
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    sweep(tmp_path)
    assert {name: (tmp_path / name).exists() for name in names} == names
