"""`verify@`: trains again from the previous checkpoint to the newest, in memory, and compares bit for bit."""

import logging
import math
from dataclasses import dataclass
from pathlib import Path

from slm_lab.experiment import resume, retro_analysis
from slm_lab.experiment.checkpoint import store_of
from slm_lab.experiment.session import EvaluationStopped, Session
from slm_lab.lib.errors import LabError, ResumeError
from slm_lab.lib.paths import for_display
from slm_lab.lib.state import first_difference

logger = logging.getLogger('slm_lab.experiment')


@dataclass
class Verdict:
    """`difference` is None when the two are identical, else (path, in the newest checkpoint, trained again)."""

    session: str
    from_frame: int
    to_frame: int
    difference: tuple = None

    def __str__(self):
        span = f'{self.session}: frames {self.from_frame} to {self.to_frame}'
        if self.difference is None:
            return f'{span}: identical'
        path, saved, again = self.difference
        return f'{span}: differs first in {path}: {saved} in the checkpoint, {again} when trained again'


class Stopped(LabError):
    """A signal came before the verdict."""

    def __init__(self, exit_status):
        super().__init__('verify was stopped before it had a verdict')
        self.exit_status = exit_status


def verify_run(folder, stop):
    """Verdicts on every session of a run that has two checkpoints. Nothing in the run is touched.

    Raises: ResumeError when no session has two complete checkpoints, or when its env cannot be brought back exactly;
        Stopped.
    """
    if resume.read_saved_spec(Path(folder))['meta'].get('distributed'):
        raise ResumeError(
            f'{for_display(folder)}: its workers trained the same nets at the same time (meta.distributed), in an '
            'order that cannot be repeated; there is nothing to verify'
        )
    verdicts = []
    for session in retro_analysis.find_sessions(folder):
        verdict = _verify_session(retro_analysis.located_spec(session), session.name, stop)
        if verdict is not None:
            verdicts.append(verdict)
    if not verdicts:
        raise ResumeError(f'{for_display(folder)}: no session has two complete checkpoints to compare')
    return verdicts


def _verify_session(spec, name, stop):
    store = store_of(spec)
    newest = store.find().generation
    previous = store.find(before=newest.number).generation if newest else None
    if previous is None:
        return None
    saved = _trained_to(newest, _load(spec, store, newest, stop), stop)
    again = _load(spec, store, previous, stop)
    for learner_name, learner in again.agent.algorithm.learners.items():  # a run in dev mode measures its gradients
        learner.check = not math.isnan(saved['agent']['algorithm']['grad_norm'][learner_name])
    logger.info('%s: training again from frame %d to %d', name, previous.frame, newest.frame)
    difference = first_difference(saved, _trained_to(newest, again, stop))
    return Verdict(name, previous.frame, newest.frame, difference)


def _trained_to(newest, session, stop):
    """Its state at the newest checkpoint's frame, after what is due there: a run may have been stopped in the middle
    of an evaluation, which its checkpoint is then without."""
    session.clock.max_frame = newest.frame
    try:
        session.run_rl()
    except EvaluationStopped:
        raise Stopped(stop.exit_status) from None
    if session.clock.frame < newest.frame:
        raise Stopped(stop.exit_status)
    return session.state_dict()


def _load(spec, store, generation, stop=None):
    session = Session(spec, 'train', stop, store=False)
    session.load_state_dict(store.restore(generation, session.state_dict()))
    if session.env.restarted:
        raise ResumeError(
            f"{Path(spec['meta']['prepath']).name}: its env '{session.env.name}' is not deterministic, so training "
            'again from a checkpoint cannot give the same run; there is nothing to verify'
        )
    return session
