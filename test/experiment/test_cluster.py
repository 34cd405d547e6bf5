"""Sessions as Ray tasks on nodes that die, are cut off, or stop with their driver; those that start Ray are last."""

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import types

import numpy as np
import psutil
import pytest
import resume
from lab_process import (
    ROOT,
    SPEC_NAME,
    assert_same_end,
    hashes,
    leftovers,
    make_spec,
    resume_command,
    resumed_frames,
    undisturbed,
)

from slm_lab.experiment import cluster, cluster_worker, search
from slm_lab.experiment.cluster import FencedStore, Superseded
from slm_lab.experiment.cluster_worker import AttemptStop, Ticket
from slm_lab.experiment.search_worker import WatchedStop
from slm_lab.experiment.session_processes import SessionResult
from slm_lab.experiment.stop import StopRequest
from slm_lab.lib.errors import SpecError
from slm_lab.lib.files import read_json, write_json
from slm_lab.spec import spec_util

NUM_SESSIONS = 2
SESSION = 'slm_lab.experiment.cluster_worker'  # in the commands of keepers and of sessions
# The first processes of the sessions wait at frame 250 until a file says that they may go on: a while between the
# checkpoint of frame 200 and that of 300 in which a test can do what it likes.
WAIT = """
if any(mark(f'waiting_{i}') for i in range(2)):
    with open(os.path.join(FOLDER, f'pid_{os.getpid()}'), 'w'):
        pass
    while not os.path.exists(os.path.join(FOLDER, 'go_on')):
        time.sleep(0.02)
"""
HOOKS = [('slm_lab.agent.agent', 'Agent.update', 251, WAIT)]


@pytest.fixture
def ticket(tmp_path):
    path = tmp_path / 'run' / 'cluster' / 'tiny_t0_s0.json'
    return Ticket(*cluster._issue(path))


# --- tickets


def test_only_the_newest_attempt_may_save(tmp_path, ticket):
    old = FencedStore(tmp_path / 'checkpoint', ticket)
    old.save({'a': np.arange(3)}, frame=100, spec={})
    new = FencedStore(tmp_path / 'checkpoint', Ticket(*cluster._issue(ticket.path)))
    before = hashes(tmp_path / 'checkpoint')
    with pytest.raises(Superseded, match='attempt 1 is not the newest one'):
        old.save({'a': np.arange(3)}, frame=200, spec={})
    old.prune()
    assert hashes(tmp_path / 'checkpoint') == before
    new.save({'a': np.arange(4)}, frame=200, spec={})
    assert new.find().generation.frame == 200


def test_an_attempt_that_is_superseded_in_the_middle_of_a_save_removes_nothing_of_its_successor(tmp_path, ticket):
    """It writes its own files to the end; what the next attempt has begun to write lies beside them."""
    old = FencedStore(tmp_path, ticket)
    write_state, begun = old._write_generation, tmp_path / '000009_300_state.pt'

    def write_slowly(*args):
        written = write_state(*args)
        cluster._issue(ticket.path)
        begun.write_bytes(b'of the next attempt')
        return written

    old._write_generation = write_slowly
    old.save({'a': np.arange(3)}, frame=100, spec={})
    assert begun.exists() and old.find().generation.frame == 100


def test_a_session_stops_once_it_is_told_to_or_superseded(ticket, monkeypatch):
    monkeypatch.setattr(cluster_worker, '_LOOK', 0)
    stop = AttemptStop(ticket, os.getppid())
    assert not stop()
    attempts = cluster._Attempts({'meta': {'session': 0, 'prepath': str(ticket.path.parents[1] / 'tiny_t0_s0')}}, False)
    attempts.tell_to_stop()
    assert stop() and ticket.is_newest()
    newer = Ticket(*attempts.issue())
    assert newer.attempt == 2 and newer.may_go_on() and not ticket.is_newest()
    assert AttemptStop(ticket, os.getppid())() and not AttemptStop(newer, os.getppid())()
    assert AttemptStop(newer, os.getpid())()  # its keeper is gone


def test_a_ticket_of_another_driver_with_the_same_number_is_not_taken_for_ours(ticket):
    ticket.path.unlink()
    assert cluster._issue(ticket.path)[1] == ticket.attempt
    assert not ticket.is_newest()


def test_a_node_that_does_not_see_the_run_folder_says_so(tmp_path, monkeypatch, ticket):
    monkeypatch.setattr(cluster_worker, 'PATIENCE', 0)
    monkeypatch.setattr(cluster_worker, 'node_name', lambda: 'worker3')
    elsewhere = tmp_path / 'elsewhere'
    report = cluster_worker.attempt({'ticket': [str(elsewhere / 'cluster' / 'x.json'), 1, 'token']})
    assert report['error'] == (
        f'node worker3 does not see {elsewhere}; set LAB_DATA_DIR to a folder that all nodes share'
    )
    (elsewhere / 'cluster').mkdir(parents=True)  # a folder of the same name, on a disk of its own
    report = cluster_worker.attempt({'ticket': [str(elsewhere / 'cluster' / 'x.json'), 1, 'token']})
    assert report['error'].startswith(f'node worker3 does not see what is written to {elsewhere};')


# --- what runs where


def test_who_asks_for_it(monkeypatch):
    monkeypatch.delenv('RAY_ADDRESS', raising=False)
    plain, asks = ({'meta': {'ray': ray}} for ray in (False, True))
    stop = StopRequest()
    assert not cluster.is_wanted(plain, 'train', stop) and cluster.is_wanted(asks, 'train', stop)
    assert not cluster.is_wanted(asks, 'dev', stop)
    assert not cluster.is_wanted(asks, 'train', WatchedStop(os.getppid()))  # a trial of a search
    assert not cluster.is_wanted({'meta': {'ray': True, 'distributed': 'shared'}}, 'train', stop)
    monkeypatch.setenv('RAY_ADDRESS', 'head:6379')
    assert cluster.is_wanted(plain, 'train', stop)


@pytest.mark.parametrize(('key', 'value'), [('ray', 1), ('max_restarts', -1), ('max_restarts', 0.5)])
def test_wrong_values_are_refused(key, value):
    with pytest.raises(SpecError, match=f'meta.{key}'):
        spec_util.prepare({**make_spec(**{key: value}), 'name': SPEC_NAME})


@pytest.mark.parametrize('address', [None, 'head:6379'])
def test_without_ray_it_says_how_to_install_it(command, hide, monkeypatch, tmp_path, capsys, address):
    import run_lab

    hide('ray')
    monkeypatch.delenv('RAY_ADDRESS', raising=False)
    if address:
        monkeypatch.setenv('RAY_ADDRESS', address)
    path = tmp_path / 'spec.json'
    path.write_text(json.dumps({SPEC_NAME: make_spec(ray=address is None)}))
    assert run_lab.main([str(path), SPEC_NAME, 'train']) == 2
    who = 'RAY_ADDRESS' if address else 'meta.ray'
    assert capsys.readouterr().err == f"error: {who} needs Ray: pip install '.[ray]'\n"
    assert not (tmp_path / 'data').exists()


# --- what becomes of the attempts, with a stand-in for Ray


class StandIn:
    """Ray, as far as the driver needs it: attempts end as a list for each session says.

    Args:
        ends: [[what an attempt gives: a report, an exception, or a function that returns one of these, or None while
            it runs; None: it waits for a place]]
        on_start: called with the details of each attempt
    """

    class exceptions:
        class RayError(Exception):
            pass

        NodeDiedError = type('NodeDiedError', (RayError,), {})
        OutOfMemoryError = type('OutOfMemoryError', (RayError,), {})
        WorkerCrashedError = type('WorkerCrashedError', (RayError,), {})
        TaskCancelledError = type('TaskCancelledError', (RayError,), {})
        RayTaskError = type('RayTaskError', (RayError,), {})
        RuntimeEnvSetupError = type('RuntimeEnvSetupError', (RayError,), {})

    def __init__(self, ends, on_start=lambda details: None):
        self.ends, self.on_start, self.started, self.tasks = [list(e) for e in ends], on_start, [], {}

    def cluster_resources(self):
        return {'CPU': 1.0}

    def nodes(self):
        return [{'Alive': True, 'Resources': {'CPU': 1.0}}]

    def remote(self, function):
        assert function is cluster_worker.attempt
        return types.SimpleNamespace(options=self.options)

    def options(self, **options):
        assert options == {'max_retries': 0, 'num_cpus': 1, 'num_gpus': 0}
        return types.SimpleNamespace(remote=self.start)

    def start(self, details):
        session = details['spec']['meta']['session']
        self.started.append((session, details['ticket'][1], details['resumes']))
        task = f'task {len(self.started)}'
        self.tasks[task] = self.ends[session].pop(0)
        if self.tasks[task] is not None:
            write_json({'attempt': details['ticket'][1], 'node': 'worker3'}, details['place_path'])
        self.on_start(details)
        return task

    def wait(self, tasks, timeout):
        for task in filter(lambda task: callable(self.tasks[task]), tasks):
            self.tasks[task] = self.tasks[task]() or self.tasks[task]
        ready = [task for task in tasks if self.tasks[task] is not None and not callable(self.tasks[task])]
        return ready[:1], []

    def get(self, task):
        end = self.tasks.pop(task)
        if isinstance(end, Exception):
            raise end
        return end

    def cancel(self, task):
        assert self.tasks[task] is None, 'this one has begun'
        self.tasks[task] = self.exceptions.TaskCancelledError()


def report(result=None, status=0, error=None):
    return {'node': 'worker3', 'result': result and pickle.dumps(result), 'status': status, 'error': error}


def done():
    return report(SessionResult(finished=True, metrics={'strength': 1.0}, frame=600))


@pytest.fixture
def run_with(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, '_LONGEST_DELAY', 0)
    monkeypatch.setattr(search, 'running_ray', contextlib.nullcontext)

    def run(ray, stop=None, max_restarts=2):
        monkeypatch.setitem(sys.modules, 'ray', ray)
        raw = make_spec(max_session=len(ray.ends), max_restarts=max_restarts)
        specs = [resume.session_spec(tmp_path, raw, session) for session in range(len(ray.ends))]
        return cluster.ClusterSessions(specs[0], 'train', stop or StopRequest(), False).run(specs)

    return run


def test_lost_sessions_go_on_until_there_were_too_many(run_with, caplog):
    errors = StandIn.exceptions
    stopped = report(SessionResult(frame=251, signal=signal.SIGTERM))  # its node is taken back
    ray = StandIn([[errors.NodeDiedError(), stopped, done()], [report(status=-9)] * 3])
    results = run_with(ray)
    assert results[0].finished and results[0].error is None
    assert results[1].error == (
        'lost 3 times, last on worker3: its process was killed by signal 9; meta.max_restarts is 2'
    )
    attempts = {session: [rest for s, *rest in ray.started if s == session] for session in (0, 1)}
    # a loss ends the ticket, a start takes the next one; and what has begun once is resumed
    assert attempts == {session: [[1, False], [3, True], [5, True]] for session in (0, 1)}
    assert 'Session 0 was lost on worker3: the node died' in caplog.text
    assert 'Session 0 was lost on worker3: it was stopped there by SIGTERM' in caplog.text


@pytest.mark.parametrize(
    ('end', 'line'),
    [
        (report(error='node worker3 does not see /data/run; …'), 'node worker3 does not see /data/run; …'),
        (report(status=1), r'its process died \(exit 1\); what it printed is in .*/log/tiny_t0_s0_output.txt'),
        (report(SessionResult(error='ValueError: x', crashed=True)), 'ValueError: x'),
        (StandIn.exceptions.RayTaskError('a\nNo module named slm_lab'), 'its Ray task failed: No module named slm_lab'),
    ],
)
def test_what_would_happen_again_is_not_tried_again(run_with, end, line):
    ray = StandIn([[end], [done()]])
    results = run_with(ray)
    assert re.fullmatch(line, results[0].error) and results[1].finished
    assert len(ray.started) == 2


def test_a_stop_tells_those_that_have_begun_and_takes_back_the_others(run_with, tmp_path):
    stop = StopRequest()

    def saves_when_told():
        (ticket,) = (read_json(path) for path in tmp_path.rglob('tiny_t0_s0.json'))
        return report(SessionResult(frame=251)) if ticket['stop'] else None

    def on_start(details):
        stop.signal = int(signal.SIGTERM) if details['spec']['meta']['session'] == 1 else None

    ray = StandIn([[saves_when_told], [None], [done()]], on_start)
    results = run_with(ray, stop)
    assert [(r.finished, r.frame, r.error) for _, r in sorted(results.items())] == [
        (False, 251, None),
        (False, None, None),
        (False, None, None),
    ]
    assert [session for session, *_ in ray.started] == [0, 1]


# --- the Slurm script of docs/cluster.md, with programs in the place of Slurm and of the lab

FAKE_LAB = """#!/bin/bash
echo "$@" >> calls
run="$LAB_DATA_DIR/dqn_cartpole_1"
[ -e "$run/lock" ] && exit 2
mkdir -p "$run"
touch "$run/dqn_cartpole_spec.json" "$run/lock"
stop() { trap '' USR1 TERM; sleep 0.4; exit "$1"; } # the first signal counts
trap 'stop 138' USR1
trap 'stop 143' TERM
touch "ready_$(wc -l < calls)"
while [ ! -e finish ]; do sleep 0.02; done
"""


@pytest.fixture
def slurm_job(tmp_path):
    """Starts the script as Slurm would, and returns its process once the lab is running."""
    script = tmp_path / 'job.sh'
    script.write_text(re.search(r'```bash\n(.*?)```', (ROOT / 'docs' / 'cluster.md').read_text(), re.DOTALL)[1])
    programs = {'python': FAKE_LAB, 'scontrol': '#!/bin/bash\necho "$@" >> requeued\n'}
    (tmp_path / 'bin').mkdir()
    for name, text in programs.items():
        path = tmp_path / 'bin' / name
        path.write_text(text)
        path.chmod(0o755)
    path = f'{tmp_path / "bin"}{os.pathsep}{os.environ["PATH"]}'
    env = {**os.environ, 'PATH': path, 'SLURM_SUBMIT_DIR': str(tmp_path), 'SLURM_JOB_ID': '17'}
    jobs = []

    def start():
        jobs.append(subprocess.Popen(['bash', str(script)], env=env, cwd='/', start_new_session=True))
        until = time.monotonic() + 20
        while not (tmp_path / f'ready_{len(jobs)}').exists() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.2)  # the script waits
        return jobs[-1]

    yield start
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


def test_the_slurm_script_goes_on_until_the_run_is_finished(slurm_job, tmp_path):
    run = tmp_path / 'data' / 'job_17' / 'dqn_cartpole_1'
    job = slurm_job()
    job.send_signal(signal.SIGUSR1)  # to the script alone, as B: says
    time.sleep(0.1)
    job.send_signal(signal.SIGTERM)  # another one while it saves
    assert job.wait(20) == 138
    assert (tmp_path / 'requeued').read_text() == 'requeue 17\n'

    job = slurm_job()
    job.send_signal(signal.SIGTERM)  # preempted: Slurm requeues it by itself
    assert job.wait(20) == 143
    assert (tmp_path / 'requeued').read_text() == 'requeue 17\n'

    job = slurm_job()
    os.killpg(job.pid, signal.SIGKILL)  # the node fails
    job.wait(20)
    assert (run / 'lock').exists()  # it may name another host
    (tmp_path / 'finish').touch()
    job = slurm_job()
    assert job.wait(20) == 0
    first, *others = (tmp_path / 'calls').read_text().splitlines()
    assert first == 'run_lab.py demo.json dqn_cartpole train'
    assert others == ['run_lab.py demo.json dqn_cartpole train@latest'] * 3
    assert (tmp_path / 'requeued').read_text() == 'requeue 17\n'


# --- on a cluster: nodes with one CPU each, so that each carries one session


class Nodes:
    """A cluster whose nodes are groups of processes on this machine."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        notices_soon = {'health_check_initial_delay_ms': 0, 'health_check_period_ms': 500}
        head = {'num_cpus': 0, 'include_dashboard': False, '_system_config': notices_soon}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address, self.nodes = self.cluster.address, []

    def raise_to(self, number):
        self.nodes = [node for node in self.nodes if node.any_processes_alive()]
        while len(self.nodes) < number:
            self.nodes.append(self.cluster.add_node(num_cpus=1))

    def processes(self, node):
        """Those of a node, down to its sessions."""
        found = []
        for infos in node.all_processes.values():
            for info in infos:
                process = psutil.Process(info.process.pid)
                found += [process, *process.children(recursive=True)]
        return found

    def close(self):
        self.cluster.shutdown()


@pytest.fixture(scope='module')
def nodes():
    pytest.importorskip('ray')
    search.require_ray()
    nodes = Nodes()
    yield nodes
    nodes.close()
    left = [p for p in psutil.Process().children(recursive=True) if p.status() != 'zombie' and is_of_ray(p)]
    _, left = psutil.wait_procs(left, timeout=10)
    for process in left:
        process.kill()
    assert left == []


def is_of_ray(process):
    return any('/ray/' in word or word.startswith('ray::') for word in process.cmdline())


@pytest.fixture
def lab(lab):
    yield lab
    go_on(lab)
    lab.close()
    lab.kill_living(SESSION)


def start(lab, nodes, *args, hooks=HOOKS):
    args = args or (lab.spec_file, SPEC_NAME, 'train')
    return lab.start(*args, hooks=hooks, env={'RAY_ADDRESS': nodes.address})


def until_all_wait(lab, life):
    """Returns: the pids of the session processes"""
    found = life.wait_for(lambda: list(lab.folder.glob('pid_*')) if count(lab) == NUM_SESSIONS else None)
    return [int(path.name.removeprefix('pid_')) for path in found]


def count(lab):
    return len(list(lab.folder.glob('pid_*')))


def tickets(lab):
    return {p.stem: json.loads(p.read_text()) for p in lab.run_folder.glob('cluster/*_s?.json')}


def go_on(lab):
    (lab.folder / 'go_on').touch()


def assert_ends_as_undisturbed(lab):
    for session, end in enumerate(undisturbed(max_session=NUM_SESSIONS)):
        assert_same_end(lab.run_folder, end, session)
    assert leftovers(lab.run_folder) == []


def test_a_node_dies_and_its_session_goes_on_elsewhere_while_one_that_was_only_cut_off_writes_nothing(lab, nodes):
    """All of a node is killed but its session, which is frozen until its successor has come to the end."""
    nodes.raise_to(2)
    lab.write_spec(max_session=NUM_SESSIONS)
    life = start(lab, nodes)
    pids = until_all_wait(lab, life)
    victims = nodes.processes(nodes.nodes[0])
    (cut_off,) = [p for p in victims if p.pid in pids]
    cut_off.suspend()
    for process in victims:
        if process != cut_off:
            process.kill()
    go_on(lab)
    life.wait()
    assert life.status == 0, life.output
    assert re.search(r'Session \d was lost on .* \(Ray node \w{8}\): the node died', life.output)
    assert_ends_as_undisturbed(lab)
    history = (lab.run_folder / 'info' / f'{SPEC_NAME}_history.jsonl').read_text().splitlines()
    (lost,) = [e for e in map(json.loads, history) if e['event'] == 'session lost']
    assert (lost['attempt'], lost['why']) == (1, 'the node died')
    assert [json.loads(line)['frame'] for line in history if 'session resumed' in line] == [200]
    before = hashes(lab.run_folder, 'checkpoint/**/*', 'model/*', 'info/*')
    cut_off.resume()
    lab.assert_nothing_lives(SESSION)
    assert hashes(lab.run_folder, 'checkpoint/**/*', 'model/*', 'info/*') == before
    assert 'attempt 1 is not the newest one' in lab.log(lost['session'])


def test_a_session_that_is_lost_too_often_fails_and_the_others_go_on(lab, nodes):
    """The resume is a local one."""
    nodes.raise_to(2)
    lab.write_spec(max_session=NUM_SESSIONS, max_restarts=0)
    life = start(lab, nodes)
    os.kill(until_all_wait(lab, life)[0], signal.SIGKILL)
    go_on(lab)
    life.wait()
    assert life.status == 1
    (line,) = [line for line in life.output.splitlines() if line.startswith('error:')]
    assert re.search(
        r'session \d: lost once, last on .* \(Ray node \w{8}\): its process was killed by signal 9; '
        'meta.max_restarts is 0',
        line,
    )
    assert sorted(lab.frame(session) for session in range(NUM_SESSIONS)) == [200, 600]
    life = lab.run(*resume_command(life.output)[1])
    assert life.status == 0 and resumed_frames(life.output) == [200], life.output
    assert_ends_as_undisturbed(lab)


def test_a_stop_and_the_death_of_the_driver_leave_checkpoints(lab, nodes):
    """SIGTERM at frame 250; then, in the life that goes on, kill -9 of the driver. The third one ends it, by a Ray of
    this machine's."""
    nodes.raise_to(2)
    lab.write_spec(max_session=NUM_SESSIONS)
    life = start(lab, nodes)
    until_all_wait(lab, life)
    life.signal(signal.SIGTERM)
    life.wait_for(lambda: all(t['stop'] for t in tickets(lab).values()))
    time.sleep(cluster_worker._LOOK)
    go_on(lab)
    life.wait()
    assert life.status == 143, life.output
    assert 'Stopped by SIGTERM; complete checkpoints: session 0 at frame 251, session 1 at frame 251' in life.output
    lab.assert_nothing_lives(SESSION)
    args = resume_command(life.output)[1]

    for path in (*lab.folder.glob('pid_*'), *lab.folder.glob('waiting_*'), lab.folder / 'go_on'):
        path.unlink()
    life = start(lab, nodes, *args)  # 250 frames on
    until_all_wait(lab, life)
    life.kill()
    time.sleep(cluster_worker._LOOK)
    go_on(lab)
    lab.assert_nothing_lives(SESSION)
    assert [lab.frame(session) for session in range(NUM_SESSIONS)] == [502, 502]
    lab.write_spec(max_session=NUM_SESSIONS, ray=True)
    life = lab.run(*args)
    assert life.status == 0, life.output
    assert 'Running 2 sessions as Ray tasks' in life.output
    assert sorted(t['attempt'] for t in tickets(lab).values()) == [
        5,
        5,
    ]  # two for each resume: one to end what was, one to begin
    assert_ends_as_undisturbed(lab)
