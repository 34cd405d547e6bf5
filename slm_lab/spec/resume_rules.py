"""What may change in a spec when its run is resumed: only what could not have altered the run's past."""

import json

from slm_lab.lib import files
from slm_lab.lib.errors import ResumeError


def _freely(was, now, frame):
    return True


# places in a resolved spec, and when a change there leaves the past as it was: (was, is, frame reached) -> bool
MAY_CHANGE = {
    'env.max_frame': lambda was, now, frame: now >= min(frame, was),  # the frames behind do not depend on the budget
    'meta.max_session': lambda was, now, frame: now > was,  # more sessions start at 0
    'meta.random_seed': lambda was, now, frame: now is None,  # a seed that was drawn and recorded stands in no file
    'meta.log_frequency': _freely,  # rows and checkpoints from here on
    'meta.eval_frequency': _freely,
    'meta.max_trial': _freely,  # search settings
    'meta.search_alg': _freely,
    'meta.search_scheduler': _freely,
    'meta.search_resources': _freely,
    'meta.num_cpus': _freely,  # resources
    'meta.num_gpus': _freely,
    'meta.ray': _freely,
    'meta.max_restarts': _freely,
    'agent.net.gpu': _freely,
    'env.vector': _freely,  # slots in this process or in workers: the same bits
    'agent.name': _freely,  # a label
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


def _plain(value):
    """Values that JSON writes in more than one way (1e3, 1000.0, 1000) in one of them."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in sorted(value.items())}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _same(a, b):
    return json.dumps(_plain(a)) == json.dumps(_plain(b))


def compare(was, now, frame=0):
    """Compares the resolved spec of a run with the resolved spec it shall go on with.

    Args:
        frame: the furthest frame that a session of the run has reached.
    Returns: [(place, was, is)] of the changes that are taken over.
    Raises: ResumeError with a table of all the changes that would have altered the past.
    """
    old, new = flatten(was), flatten(now)
    changes = [(p, old.get(p), new.get(p)) for p in sorted({*old, *new}) if not _same(old.get(p), new.get(p))]
    refused = [row for row in changes if row[0] not in MAY_CHANGE or not MAY_CHANGE[row[0]](*row[1:], frame)]
    if refused:
        raise ResumeError(
            'this run cannot go on with the changed spec: these keys would have altered its past\n'
            + table([part for row in refused for part in _split(*row)])
            + '\nrestore the values, or start a new run (from these weights, if wanted: "load_net" in the agent spec)'
        )
    return [row for row in changes if row[0] != 'meta.random_seed']


def _split(place, was, now):
    """Rows for the parts in which two dicts differ, where both are dicts: a cut value would hide what changed."""
    if not (isinstance(was, dict) and isinstance(now, dict)):
        return [(place, was, now)]
    keys = [key for key in {**was, **now} if not _same(was.get(key), now.get(key))]
    return [row for key in keys for row in _split(f'{place}.{key}', was.get(key), now.get(key))]


def table(rows):
    """`key | was | is` in columns."""
    cells = [('key', 'was', 'is'), *((place, _short(was), _short(now)) for place, was, now in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(3)]
    return '\n'.join('  ' + ' | '.join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def _short(value):
    text = files.dump_json(value, indent=0).replace('\n', '')
    return text if len(text) <= 60 else text[:57] + '…'
