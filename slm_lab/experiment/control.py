"""The units of a run that a user builds by name; see `session`, `trial` and `experiment`."""

from slm_lab.experiment.experiment import Experiment, SearchOutcome
from slm_lab.experiment.session import Session
from slm_lab.experiment.trial import Outcome, Trial

__all__ = ['Experiment', 'Outcome', 'SearchOutcome', 'Session', 'Trial']
