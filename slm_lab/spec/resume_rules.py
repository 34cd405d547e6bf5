"""What may change in a spec when its run is resumed: only what could not have altered the run's past."""

import hashlib
from fnmatch import fnmatchcase

from slm_lab.lib import files
from slm_lab.lib.errors import ResumeError

# places in a resolved spec, and why a change there leaves the past as it was
MAY_CHANGE = {
    'env.max_frame': 'the budget ahead; the frames behind do not depend on it',
    'meta.max_session': 'more sessions start at 0',
    'meta.log_frequency': 'rows and checkpoints from here on',
    'meta.eval_frequency': 'evaluations from here on',
    'meta.max_trial': 'search settings',
    'meta.num_cpus': 'resources',
    'meta.num_gpus': 'resources',
    'agent.net.gpu': 'where the nets live',
    'agent.name': 'a label',
    'env.resume': 'how an env is restored, not how it runs',
    'meta.random_seed': 'null takes the recorded seed; another seed is refused below',
}


def flatten(resolved):
    """{'agent.net.hid_layers': [64], …}: lists and schedules stay whole values."""
    flat = {}
    for room, part in resolved.items():
        for key, value in part.items():
            if room == 'agent' and key in ('algorithm', 'memory', 'net'):
                flat.update({f'agent.{key}.{k}': v for k, v in value.items()})
            else:
                flat[f'{room}.{key}'] = value
    return flat


def may_change(place):
    return any(fnmatchcase(place, pattern) for pattern in MAY_CHANGE)


def fingerprint(resolved):
    """A hash of everything in a resolved spec that must stay as it was."""
    fixed = {place: value for place, value in sorted(flatten(resolved).items()) if not may_change(place)}
    return hashlib.sha256(files.dump_json(fixed, indent=0).encode()).hexdigest()


def compare(was, now, frame=0):
    """Compares the resolved spec of a run with the resolved spec it shall go on with.

    Args:
        frame: the furthest frame that a session of the run has reached.
    Returns: [(place, was, is)] of the changes that are taken over.
    Raises: ResumeError with a table of all the changes that would have altered the past.
    """
    old, new = flatten(was), flatten(now)
    changes = [(p, old.get(p), new.get(p)) for p in sorted({*old, *new}) if old.get(p) != new.get(p)]
    refused = [row for row in changes if not _is_allowed(*row, frame=frame)]
    if refused:
        raise ResumeError(
            'this run cannot go on with the changed spec: these keys would have altered its past\n'
            + table(refused)
            + '\nrestore the values, or start a new run (from these weights, if wanted: "load_net" in the agent spec)'
        )
    return [row for row in changes if row[0] != 'meta.random_seed']


def _is_allowed(place, was, now, frame):
    if place == 'meta.random_seed':  # a seed that was drawn and recorded stands in no spec file
        return now is None
    if place == 'meta.max_session':
        return now > was
    if place == 'env.max_frame':
        return now >= min(frame, was)
    return may_change(place)


def table(rows):
    """`key | was | is` in columns."""
    cells = [('key', 'was', 'is'), *((place, _short(was), _short(now)) for place, was, now in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(3)]
    return '\n'.join('  ' + ' | '.join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def _short(value):
    text = files.dump_json(value, indent=0).replace('\n', '')
    return text if len(text) <= 60 else text[:57] + '…'
