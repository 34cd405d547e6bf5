"""The two units of a run that a user builds by name; see `session` and `trial`."""

from slm_lab.experiment.session import Session
from slm_lab.experiment.trial import Outcome, Trial

__all__ = ['Outcome', 'Session', 'Trial']
