"""Hogwild (Recht et al. 2011; A3C, Mnih et al. 2016): the sessions of a trial train one set of nets, without locks.

`meta.distributed` says how. The sessions are then called workers; the nets that all train, and what their optimizers
keep from the start (GlobalAdam, GlobalRMSprop, the slow weights of Lookahead), lie in memory that processes share:

- `shared`: the weights of a worker's nets are the global ones, and change under its hands
- `synced`: a worker has weights of its own; each optimizer step takes its gradients to the global weights, and copies
  those back

The trial's process makes the global tensors (`build`) and hands them to its workers (`Worker`). Target nets, memories,
envs, clocks and generators are each worker's own.
"""

import contextlib
import dataclasses
import datetime
import logging
import shutil
from pathlib import Path

import torch
import torch.multiprocessing  # noqa: F401 (teaches multiprocessing to hand over shared tensors)

from slm_lab.experiment import model_files, resume, retro_analysis
from slm_lab.experiment.checkpoint import store_of
from slm_lab.experiment.session import Session
from slm_lab.lib.errors import MachineError
from slm_lab.lib.state import walk

logger = logging.getLogger('slm_lab.experiment')

SHARED_MEMORY = Path('/dev/shm')


def tensors_of(learner):
    """{place: tensor} of what workers share: `net.…` for parameters and buffers, `optim.…` for the optimizer's state.

    To be asked of a new learner: what an optimizer allocates at its first step is each worker's own.
    """
    tensors = {f'net.{name}': p for name, p in (*learner.net.named_parameters(), *learner.net.named_buffers())}
    state = {f'optim.{path}': leaf for path, leaf in walk(learner.optim.state_dict())}
    return {**tensors, **{place: leaf for place, leaf in state.items() if isinstance(leaf, torch.Tensor)}}


# --- in the trial's process


def build(specs, resumes, start):
    """Builds the nets and optimizers of a throw-away session, and moves them to shared memory.

    Args:
        specs: of all workers, ticked to their sessions
        resumes: whether to go on from the newest that any worker has left
        start: gives a session the trained nets that a new run begins with, if any, and returns their paths
    Returns: {learner: {place: tensor}}, which lives as long as any process holds it
    Raises: MachineError where shared memory will not do
    """
    session = Session(specs[0], store=False)
    algorithm = session.agent.algorithm
    tensors = {name: tensors_of(learner) for name, learner in algorithm.learners.items()}
    if not (resumes and load_newest(algorithm, session, specs)):
        for path in start(session):
            logger.info('Global nets: starting from the trained nets of %s', path)
    session.close()
    _check_room(tensors)
    return {name: {k: t.detach().share_memory_() for k, t in places.items()} for name, places in tensors.items()}


def _check_room(tensors):
    """A process that writes to shared memory which is not there is killed, without a word on why."""
    needed = sum(t.nbytes for places in tensors.values() for t in places.values() if t.device.type == 'cpu')
    if SHARED_MEMORY.is_dir() and needed > shutil.disk_usage(SHARED_MEMORY).free:
        raise MachineError(
            f'the global nets take {needed / 1e6:.0f} MB of shared memory, and {SHARED_MEMORY} has '
            f'{shutil.disk_usage(SHARED_MEMORY).free / 1e6:.0f} MB free; give it more (in a container: --shm-size)'
        )


def load_newest(algorithm, session, specs):
    """Loads the newest nets and optimizers of all workers: of one checkpoint, or of classic files where there is none.

    Newest by the time of writing, then by frame. Returns: whether there were any.
    """
    found = [(spec, store_of(spec).find().generation) for spec in specs]
    found = [(spec, generation) for spec, generation in found if generation is not None]
    if not found:
        return _load_newest_classic(algorithm, specs)
    spec, newest = max(found, key=lambda pair: _age_key(pair[1]))
    # the worker's memory is not wanted here
    without_memory = dataclasses.replace(newest, lost_rings=list(newest.manifest['rings']))
    state = store_of(spec).restore(without_memory, session.state_dict())['agent']['algorithm']
    for name, learner in algorithm.learners.items():
        learner.net.load_state_dict(state['nets'][name])
        learner.load_optim(state['optims'][name])
    logger.info(
        'Global nets and optimizers: those of session %d at frame %d, the newest', spec['meta']['session'], newest.frame
    )
    return True


def _age_key(generation):
    written = datetime.datetime.strptime(generation.manifest['time'], '%Y-%m-%dT%H:%M:%S%z')
    return written, generation.frame


def _load_newest_classic(algorithm, specs):
    best_frame, newest = -1, None
    for spec in specs:
        classic = resume.classic_files(spec)
        if classic is None or not classic.nets:
            continue
        train_df, _ = retro_analysis.load_session_data(classic)
        frame = int(train_df['frame'].max()) if train_df is not None and len(train_df) else 0
        if frame > best_frame:
            best_frame, newest = frame, classic
    if newest is None:
        return False
    model_files.load_models(algorithm, newest.nets)
    logger.info('Global nets and optimizers: the files of %s at frame %d, the newest', newest.name, best_frame)
    return True


# --- in a worker's process


class Worker(Session):
    """A session that trains the global nets together with others.

    It is built, and restored, with tensors of its own; `join` puts the global ones in their place. So a worker never
    writes what it has restored over what the others have trained since.

    Args:
        spec, mode, stop: as of Session
        shared: what `build` has returned
    """

    def __init__(self, spec, mode, stop, shared):
        super().__init__(spec, mode, stop)
        self._shared = shared
        self._own = {name: tensors_of(learner) for name, learner in self.agent.algorithm.learners.items()}
        self._joined = []  # (tensor of a net or an optimizer here, global tensor whose memory it uses)
        self._is_resting = False

    def join(self, restored):
        """Goes over to the global nets and optimizers.

        Args:
            restored: whether this worker goes on from a state of its own: target nets and, if synced, buffers stay
        """
        algorithm, syncs = self.agent.algorithm, self.resolved['meta']['distributed'] == 'synced'
        for name, learner in algorithm.learners.items():
            shared, own = self._shared[name], self._own[name]
            if syncs:
                _copy_weights(own, shared, learner.net, with_buffers=not restored)
                trained = [key for key, p in learner.net.named_parameters() if p.requires_grad]
                learner.follow([shared[f'net.{key}'] for key in trained])
            places = [place for place in own if place.startswith('optim.') or not syncs]
            self._joined += [(own[place], shared[place]) for place in places]
        _point(self._joined)
        if not restored:
            algorithm.sync_targets(list(algorithm.targets))

    def save(self, state=None, final=False):
        with self._at_rest():
            super().save(state, final)

    def finish(self):
        with self._at_rest():
            super().finish()

    @contextlib.contextmanager
    def _at_rest(self):
        """Copies stand in for the global tensors: a file must not change between its writing and its checksum."""
        if self._is_resting:
            yield
            return
        self._is_resting = True
        _point([(own, shared.clone()) for own, shared in self._joined])
        try:
            yield
        finally:
            _point(self._joined)
            self._is_resting = False


def _point(pairs):
    """Lets each first tensor use the memory of the second, for whoever holds it."""
    for own, other in pairs:
        own.data = other


@torch.no_grad()
def _copy_weights(own, shared, net, with_buffers):
    names = [name for name, _ in (*net.named_parameters(), *(net.named_buffers() if with_buffers else ()))]
    for name in names:
        own[f'net.{name}'].copy_(shared[f'net.{name}'])
