"""Errors that a user can mend. `run_lab.py` prints them as one line and exits with status 2."""

import difflib


class LabError(Exception):
    """What was wrong, where, and what to do about it, in one line."""

    exit_status = 2


class MachineError(LabError):
    """What the input is not to blame for: a full disk, a crash. Exit status 1."""

    exit_status = 1


class SpecError(LabError):
    """A spec, a spec file or a command line that cannot be run as it is written."""


class ResumeError(LabError):
    """A data folder that cannot be continued, or not with this spec."""


def suggest(name, known):
    """Returns e.g. `; did you mean 'MLPNet'? Known: DuelingMLPNet, MLPNet` for the end of an error line."""
    names = sorted(str(k) for k in known)
    lowered = {n.lower(): n for n in reversed(names)}
    close = difflib.get_close_matches(str(name).lower(), lowered, n=1)
    hint = f"; did you mean '{lowered[close[0]]}'?" if close else '.'
    return f'{hint} Known: {", ".join(names) if names else "none"}'
