import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slm_lab.experiment.run_lock import RunLock
from slm_lab.lib.errors import LabError

ROOT = Path(__file__).parents[2]

# takes the lock, runs what the test hands in, says so, and waits
HOLDER = """
import os, subprocess, sys, time
from slm_lab.experiment.run_lock import RunLock
with RunLock(sys.argv[1]):
    {inside}
    print('held', flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def holder(folder, inside='pass'):
    process = subprocess.Popen(
        [sys.executable, '-c', HOLDER.format(inside=inside), str(folder)],
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        process.said = []
        while (line := process.stdout.readline()) != 'held\n':
            assert line, 'the holder ended early'
            process.said.append(line)
        yield process
    finally:
        process.kill()
        process.communicate()


def dead_pid():
    process = subprocess.Popen([sys.executable, '-c', 'pass'])
    process.wait()
    return process.pid


def write_holder(folder, pid, host):
    (folder / 'lock').write_text(json.dumps({'pid': pid, 'host': host, 'since': '2026-01-31T12:00:00+0000'}))


def test_lock_held_by_a_living_process_is_refused_naming_pid_and_host(tmp_path):
    with holder(tmp_path) as process:
        with pytest.raises(LabError) as refused, RunLock(tmp_path):
            pass
        assert f'process {process.pid} on {socket.gethostname()}' in str(refused.value)
        assert '\n' not in str(refused.value)
        # the refused one left the holder's content and lock alone
        assert json.loads((tmp_path / 'lock').read_text())['pid'] == process.pid
        with pytest.raises(LabError), RunLock(tmp_path):
            pass


def test_second_lock_of_the_same_process_is_refused(tmp_path):
    with RunLock(tmp_path), pytest.raises(LabError, match=str(os.getpid())), RunLock(tmp_path):
        pass


def test_lock_of_a_killed_process_is_taken_over(tmp_path):
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert json.loads((tmp_path / 'lock').read_text())['pid'] == process.pid  # it left its content behind
        with RunLock(tmp_path):
            assert json.loads((tmp_path / 'lock').read_text())['pid'] == os.getpid()


def test_holder_writes_pid_host_and_time_and_removes_them_on_leaving(tmp_path):
    with RunLock(tmp_path):
        content = json.loads((tmp_path / 'lock').read_text())
        assert (content['pid'], content['host']) == (os.getpid(), socket.gethostname())
        assert content['since'].startswith(time.strftime('%Y-'))
    assert (tmp_path / 'lock').read_text() == ''
    with holder(tmp_path) as process:
        process.stdin.write('\n')
        process.stdin.flush()
        process.wait()
        assert (tmp_path / 'lock').read_text() == ''


def test_lock_is_free_after_an_error_inside_the_block(tmp_path):
    with pytest.raises(KeyError), RunLock(tmp_path):
        raise KeyError
    with RunLock(tmp_path):
        pass


def test_lock_of_another_host_is_refused_saying_what_to_delete(tmp_path):
    write_holder(tmp_path, 1, 'elsewhere')
    with pytest.raises(LabError) as refused, RunLock(tmp_path):
        pass
    assert 'process 1 on elsewhere' in str(refused.value)
    assert f'delete {tmp_path / "lock"}' in str(refused.value)
    (tmp_path / 'lock').unlink()
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize('content', ['', '{"pid": 12', '[]', 'null', '{"pid": null, "host": "elsewhere"}', '\x00' * 40])
def test_content_cut_short_by_a_crash_does_not_lock(tmp_path, content):
    (tmp_path / 'lock').write_text(content)
    with RunLock(tmp_path):
        assert json.loads((tmp_path / 'lock').read_text())['pid'] == os.getpid()


def test_program_started_by_the_holder_does_not_keep_the_lock(tmp_path):
    inside = "child = subprocess.Popen(['sleep', '60'], close_fds=False); print(child.pid, flush=True)"
    with holder(tmp_path, inside) as process:
        child = int(process.said[0])
        try:
            process.kill()
            process.wait()
            os.kill(child, 0)  # it still runs
            with RunLock(tmp_path):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_forked_worker_that_outlives_a_killed_holder_keeps_the_lock(tmp_path):
    inside = 'worker = os.fork(); worker or (time.sleep(60), os._exit(0)); print(worker, flush=True)'
    with holder(tmp_path, inside) as process:
        worker = int(process.said[0])
        process.kill()
        process.wait()
        try:
            with pytest.raises(LabError, match=str(process.pid)), RunLock(tmp_path):
                pass
        finally:
            os.kill(worker, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with contextlib.suppress(LabError), RunLock(tmp_path):
                return
            time.sleep(0.01)
        pytest.fail('the lock outlived the last process that shared it')


def test_forked_worker_leaving_the_block_does_not_free_its_parents_lock(tmp_path):
    lock = RunLock(tmp_path)
    with lock:
        worker = os.fork()
        if worker == 0:
            lock.__exit__(None, None, None)
            os._exit(0)
        os.waitpid(worker, 0)
        assert json.loads((tmp_path / 'lock').read_text())['pid'] == os.getpid()
        with pytest.raises(LabError), RunLock(tmp_path):
            pass


def test_lock_file_replaced_while_waiting_for_it_is_locked_anew(tmp_path, monkeypatch):
    flock, calls = fcntl.flock, []

    def replace_then_lock(descriptor, operation):
        if not calls:
            (tmp_path / 'lock').unlink()
            (tmp_path / 'lock').touch()
        calls.append(operation)
        return flock(descriptor, operation)

    monkeypatch.setattr(fcntl, 'flock', replace_then_lock)
    with RunLock(tmp_path):
        monkeypatch.undo()
        with pytest.raises(LabError), RunLock(tmp_path):
            pass


def test_file_system_without_locks_goes_by_the_pid(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr(fcntl, 'flock', no_locks)
    write_holder(tmp_path, os.getppid(), socket.gethostname())
    with pytest.raises(LabError, match=f'process {os.getppid()} on'), RunLock(tmp_path):
        pass
    write_holder(tmp_path, dead_pid(), socket.gethostname())
    with RunLock(tmp_path):
        assert json.loads((tmp_path / 'lock').read_text())['pid'] == os.getpid()


def test_missing_run_folder_is_one_line(tmp_path):
    with pytest.raises(LabError, match='cannot be locked: No such file'), RunLock(tmp_path / 'nowhere'):
        pass
