"""The flag that signals, a time limit and the parent's death set."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slm_lab.experiment.stop import SIGNALS, StopRequest, parse_duration

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ('text', 'seconds'),
    [
        ('5h50m', 5 * 3600 + 50 * 60),
        ('90s', 90),
        ('20', 20),
        ('1.5', 1.5),
        ('2d', 2 * 86400),
        ('1d2h3m4s', 86400 + 2 * 3600 + 180 + 4),
        ('0', 0),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize('text', ['', ' ', 'soon', '5x', '-5', '5m4h', '1h 2m', 'm', '1e3', 'nan'])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match='is no duration; write e.g. 5h50m'):
        parse_duration(text)


# --- reasons to stop


def test_without_a_reason_it_goes_on():
    stop = StopRequest()
    assert not stop()
    assert stop.exit_status == 0


def test_a_time_limit_ends_with_status_0():
    stop = StopRequest(deadline=time.time() + 0.05)
    assert not stop()
    time.sleep(0.06)
    assert stop()
    assert (stop.reason, stop.exit_status) == ('the time limit', 0)


def test_the_time_limit_is_named_also_when_only_a_session_has_met_it():
    stop = StopRequest(deadline=1.0)
    assert stop.reason == 'the time limit'  # nobody had asked this one
    assert stop.exit_status == 0


def test_the_death_of_the_parent_is_a_reason():
    assert not StopRequest(parent=os.getppid())()
    stop = StopRequest(parent=os.getpid())  # who is not its own parent
    assert stop()
    assert (stop.reason, stop.exit_status) == ('the end of its parent process', 0)


# --- signals, in a process of their own

LOOP = """
import sys, time
from slm_lab.experiment.stop import StopRequest
stop = StopRequest().install({install})
print('ready', flush=True)
while not stop():
    time.sleep(0.002)
print(stop.reason, flush=True)
{then}
sys.exit(stop.exit_status)
"""


def start(install='', then=''):
    process = subprocess.Popen(
        [sys.executable, '-c', LOOP.format(install=install, then=then)],
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == 'ready\n'
    return process


@pytest.mark.parametrize('number', SIGNALS, ids=lambda n: n.name)
def test_a_signal_sets_the_flag_and_the_status(number):
    process = start()
    process.send_signal(number)
    output, errors = process.communicate(timeout=20)
    assert output == f'{number.name}\n'
    assert process.returncode == 128 + number
    assert errors == ''


@pytest.mark.parametrize('first', SIGNALS, ids=lambda n: n.name)
def test_ctrl_c_while_it_stops_leaves_at_once(first):
    process = start(then='time.sleep(60)')
    process.send_signal(first)
    assert process.stdout.readline() == f'{first.name}\n'
    time.sleep(0.4)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert 'left at once' in errors


def test_one_ctrl_c_that_comes_twice_is_one():
    """As `timeout` sends it: to the process, then to its group."""
    process = start(then='time.sleep(0.3)')
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == 'SIGINT\n'
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors == ''


def test_signals_that_insist_less_than_ctrl_c_change_nothing():
    process = start(then='time.sleep(0.8)')
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == 'SIGUSR1\n'
    time.sleep(0.4)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGUSR1
    assert errors == ''


def test_leaving_at_once_ends_the_children():
    children = """
import subprocess
class Child(subprocess.Popen):
    def is_alive(self): return self.poll() is None
stop.children.append(Child(['sleep', '60']))
print(stop.children[0].pid, flush=True)
time.sleep(60)"""
    process = start(then=children)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == 'SIGINT\n'
    child = int(process.stdout.readline())
    time.sleep(0.4)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    until = time.monotonic() + 10
    while _runs(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _runs(child)


def _runs(pid):
    import psutil

    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_session_process_leaves_ctrl_c_to_its_parent():
    process = start(install='ignore_interrupt=True')
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143


def test_a_signal_that_came_while_signals_were_blocked_counts():
    """A session process is born with its signals blocked, until it can take them."""
    code = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.kill(os.getpid(), signal.SIGTERM)
from slm_lab.experiment.stop import StopRequest
sys.exit(StopRequest().install().exit_status)
"""
    done = subprocess.run([sys.executable, '-c', code], env={**os.environ, 'PYTHONPATH': str(ROOT)}, timeout=30)
    assert done.returncode == 143


def test_outside_the_main_thread_signals_stay_as_they_are():
    import threading

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: StopRequest().install())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
