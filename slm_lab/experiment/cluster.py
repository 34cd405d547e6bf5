"""The sessions of a trial as Ray tasks: on the cluster that RAY_ADDRESS names, or on this machine (`meta.ray`).

The data folder lies on a file system that all nodes share. The driver holds the run folder's lock; each attempt at a
session holds a numbered ticket (`cluster_worker`), which it looks at before it writes a checkpoint. An attempt that the
driver has given up for dead, but that only was cut off, finds that there is a newer ticket, and stops.
"""

import json
import logging
import os
import pickle
import secrets
import signal
import time
from pathlib import Path

from slm_lab.experiment import cluster_worker, resume, search
from slm_lab.experiment.checkpoint import CheckpointStore, store_of
from slm_lab.experiment.search_worker import WatchedStop
from slm_lab.experiment.session_processes import SessionResult, run_guarded
from slm_lab.lib.errors import MachineError
from slm_lab.lib.files import write_json
from slm_lab.spec import spec_util

logger = logging.getLogger('slm_lab.experiment')

_LONGEST_DELAY = 30  # seconds before the next attempt at a session
# what a session takes over from the driver; Ray sets the latter ones itself where nobody else has
_ENVIRONMENT = ('LAB_DATA_DIR', 'LOG_LEVEL', 'RENDER', 'OMP_NUM_THREADS', 'MKL_NUM_THREADS')


def is_wanted(spec, mode, stop):
    """Whether the sessions of a trial run as Ray tasks. The trials of a search have got their place already."""
    if mode != 'train' or isinstance(stop, WatchedStop) or not (spec['meta'].get('ray') or search.joins_cluster()):
        return False
    if spec['meta'].get('distributed'):
        logger.warning('Hogwild workers share the memory of one machine: they run on this one, without Ray')
        return False
    return True


def revoke(specs):
    """Ends the right to write of every attempt that an earlier driver may have left behind."""
    for spec in specs:
        path = _ticket_path(spec)
        if path.is_file():
            _issue(path)


class Superseded(MachineError):
    """Another attempt at this session has begun."""


class FencedStore(CheckpointStore):
    """A CheckpointStore that writes while its ticket is the newest one.

    Looking and writing are two steps: a save that has begun when the next ticket is issued may still come to its end.
    It is a whole checkpoint of the same run then, of a frame that the next attempt reaches too.

    Raises: Superseded when a save comes too late; nothing is changed then.
    """

    def __init__(self, folder, ticket):
        super().__init__(folder)
        self.ticket = ticket

    def save(self, tree, **kwargs):
        if not self.ticket.is_newest():
            raise Superseded(
                f'attempt {self.ticket.attempt} is not the newest one at this session any more; it ends without a save'
            )
        return super().save(tree, **kwargs)

    def prune(self):
        if self.ticket.is_newest():
            super().prune()


def run_attempt(details, stop):
    """The session of an attempt, in its process on a node. Returns: SessionResult"""
    if stop():
        return SessionResult()
    spec = details['spec']
    store = FencedStore(store_of(spec).folder, stop.ticket)
    return run_guarded(spec, details['mode'], stop, details['resumes'], store=store)


class ClusterSessions:
    """Sessions as Ray tasks, as many at a time as the cluster carries; those that are lost with their node go on.

    Args:
        spec: the trial's
        mode, stop, resumes: as of Trial
    """

    def __init__(self, spec, mode, stop, resumes):
        self.spec, self.mode, self.stop, self.resumes = spec, mode, stop, resumes
        self.max_restarts = spec_util.resolve(spec)['meta']['max_restarts']
        self.results = {}
        self.told = False

    def run(self, specs):
        """Returns: {session index: SessionResult}"""
        with search.running_ray(self.stop):
            import ray

            self.ray = ray
            self.options = self._resources(specs[0])
            logger.info('Running %d sessions as Ray tasks, each with %s', len(specs), _words(self.options))
            self.sessions = [_Attempts(spec, self.resumes) for spec in specs]
            while len(self.results) < len(self.sessions):
                self._step()
        return self.results

    def _resources(self, spec):
        """What a session's task takes: num_cpus, and num_gpus where its nets want a GPU and the cluster has any."""
        resolved = spec_util.resolve(spec)
        nets = [resolved['agent'].get(key) or {} for key in ('net', 'critic_net')]
        has_gpus = self.ray.cluster_resources().get('GPU', 0) > 0
        gpus = resolved['meta']['num_gpus'] if has_gpus and any(net.get('gpu') for net in nets) else 0
        options = {'num_cpus': resolved['meta']['num_cpus'], 'num_gpus': gpus}
        nodes = [node['Resources'] for node in self.ray.nodes() if node['Alive']]
        if not any(n.get('CPU', 0) >= options['num_cpus'] and n.get('GPU', 0) >= gpus for n in nodes):
            logger.warning('No node of the cluster has %s: the sessions wait for one', _words(options))
        return options

    def _step(self):
        open_ones = [s for s in self.sessions if s.index not in self.results]
        if self.stop() and not self.told:
            self._tell()
        for session in open_ones:
            if session.task is None and self.stop():
                self._end(session, SessionResult(frame=session.newest_frame() if session.began else None))
            elif session.task is None and time.monotonic() >= session.not_before:
                self._start(session)
        tasks = {s.task: s for s in open_ones if s.task is not None}
        if not tasks:
            time.sleep(0.05)
            return
        for task in self.ray.wait(list(tasks), timeout=0.2)[0]:  # a signal waits for it
            self._collect(tasks[task])

    def _start(self, session):
        details = {
            'spec': session.spec,
            'mode': self.mode,
            'resumes': session.resumes,
            'ticket': session.issue(),
            'place_path': str(session.place_path),
            'output_path': f'{session.spec["meta"]["log_prepath"]}_output.txt',
            'cwd': os.getcwd(),
            'environment': {name: os.environ.get(name) for name in _ENVIRONMENT},
        }
        function = self.ray.remote(cluster_worker.attempt).options(max_retries=0, **self.options)
        session.task = function.remote(details)

    def _tell(self):
        """To stop. What has not got its place yet never shall."""
        self.told = True
        logger.info('Stopping for %s: every session saves a checkpoint', self.stop.reason)
        for session in self.sessions:
            if session.task is not None and session.index not in self.results:
                session.tell_to_stop()
                if session.place() is None:
                    self.ray.cancel(session.task)

    def _collect(self, session):
        errors, task, session.task = self.ray.exceptions, session.task, None
        session.began = session.began or session.place() is not None
        try:
            report = self.ray.get(task)
        except errors.TaskCancelledError:
            return self._end(session, SessionResult(frame=session.newest_frame() if session.began else None))
        except (errors.RayTaskError, errors.RuntimeEnvSetupError) as e:
            line = (str(e).strip().splitlines() or [type(e).__name__])[-1]
            return self._fail(session, f'its Ray task failed: {line}')
        except errors.RayError as e:
            known = {errors.NodeDiedError: 'the node died', errors.OutOfMemoryError: 'Ray ended it, memory being short'}
            return self._lost(session, known.get(type(e), f'its Ray worker died ({type(e).__name__})'))
        if report['error']:
            return self._fail(session, report['error'])
        if report['result'] is None:
            status = report['status']
            if status < 0:
                return self._lost(session, f'its process was killed by signal {-status}')
            output = f'{session.spec["meta"]["log_prepath"]}_output.txt'
            return self._fail(session, f'its process died (exit {status}); what it printed is in {output}')
        result = pickle.loads(report['result'])
        if result.finished or result.error or self.stop():
            return self._end(session, result)
        by = signal.Signals(result.signal).name if result.signal is not None else 'the end of its Ray worker'
        return self._lost(session, f'it was stopped there by {by}')

    def _lost(self, session, why):
        """Goes on elsewhere, from its last checkpoint, unless it has been lost too often."""
        node = session.place() or 'a node on which it had not begun'
        attempt, session.losses = session.attempt, session.losses + 1
        session.issue()  # whatever is left of it there must not write
        session.resumes = True
        logger.warning('Session %d was lost on %s: %s', session.index, node, why)
        resume.add_history(
            Path(session.spec['meta']['prepath']).parent,
            session.spec['name'],
            'session lost',
            session=session.index,
            attempt=attempt,
            node=node,
            why=why,
        )
        if self.stop():
            self._end(session, SessionResult(frame=session.newest_frame()))
        elif session.losses > self.max_restarts:
            times = 'once' if session.losses == 1 else f'{session.losses} times'
            self._fail(session, f'lost {times}, last on {node}: {why}; meta.max_restarts is {self.max_restarts}')
        else:
            session.not_before = time.monotonic() + min(2 ** (session.losses - 1), _LONGEST_DELAY)

    def _fail(self, session, line):
        self._end(session, SessionResult(error=line, crashed=True))

    def _end(self, session, result):
        if result.error:
            logger.error('Session %d failed: %s', session.index, result.error)
        self.results[session.index] = result


class _Attempts:
    """The attempts at one session."""

    def __init__(self, spec, resumes):
        self.spec, self.resumes, self.index = spec, resumes, spec['meta']['session']
        self.ticket_path = _ticket_path(spec)
        self.place_path = self.ticket_path.with_name(f'{self.ticket_path.stem}_place.json')
        self.task, self.attempt, self.losses, self.not_before = None, 0, 0, 0
        self.began = False  # whether any of them has

    def issue(self):
        """A ticket for the next one, which ends the right of the one before."""
        ticket = _issue(self.ticket_path)
        self.attempt = ticket[1]
        return ticket

    def tell_to_stop(self):
        write_json({**_read(self.ticket_path), 'stop': True}, self.ticket_path, durable=True)

    def place(self):
        """The node on which the attempt has begun, or None."""
        place = _read(self.place_path)
        return place.get('node') if place.get('attempt') == self.attempt else None

    def newest_frame(self):
        generation = store_of(self.spec).find().generation
        return generation and generation.frame


def _ticket_path(spec):
    prepath = Path(spec['meta']['prepath'])
    return prepath.parent / cluster_worker.FOLDER / f'{prepath.name}.json'


def _issue(path):
    """Writes the next ticket: its number is above all that have been, in earlier lives of the run too."""
    ticket = {'attempt': _read(path).get('attempt', 0) + 1, 'token': secrets.token_hex(8), 'stop': False}
    write_json(ticket, path, durable=True)
    return [str(path), ticket['attempt'], ticket['token']]


def _read(path):
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}


def _words(options):
    gpus = f' and {options["num_gpus"]:g} GPUs' if options['num_gpus'] else ''
    return f'{options["num_cpus"]:g} CPUs{gpus}'
