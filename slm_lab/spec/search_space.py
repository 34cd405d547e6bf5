"""What a search varies: `{key}__{kind}` in a tree that mirrors the spec, and the values of each trial.

Values of a trial are a pure function of the experiment's seed, the trial's index and the key, so that a search that
was stopped draws the same ones again. Kinds and their arguments are Ray Tune's.
"""

import copy
import itertools
import math
from dataclasses import dataclass

from slm_lab.lib import rng as rng_lib
from slm_lab.lib.errors import SpecError, suggest
from slm_lab.spec import spec_util

ROOMS = ('agent', 'env', 'meta')
_EPSILON = 1e-9  # of a quantum: what rounding of floats may be off by


@dataclass(frozen=True)
class Kind:
    """How the values of a space are drawn.

    Args:
        args: names of its arguments; () for a list of values
        whole: draws whole numbers
        log: uniform in the logarithm
        normal: by mean and standard deviation
        quantum: the last argument is one, of which values are multiples
    """

    args: tuple = ()
    whole: bool = False
    log: bool = False
    normal: bool = False
    quantum: bool = False


_RANGE, _NORMAL = ('low', 'high'), ('mean', 'sd')
KINDS = {
    'grid_search': Kind(),
    'choice': Kind(),
    'uniform': Kind(_RANGE),
    'quniform': Kind((*_RANGE, 'q'), quantum=True),
    'loguniform': Kind(_RANGE, log=True),
    'qloguniform': Kind((*_RANGE, 'q'), log=True, quantum=True),
    'randint': Kind(_RANGE, whole=True),
    'qrandint': Kind((*_RANGE, 'q'), whole=True, quantum=True),
    'lograndint': Kind(_RANGE, whole=True, log=True),
    'qlograndint': Kind((*_RANGE, 'q'), whole=True, log=True, quantum=True),
    'normal': Kind(_NORMAL, normal=True),
    'qnormal': Kind((*_NORMAL, 'q'), normal=True, quantum=True),
    'randn': Kind(_NORMAL, normal=True),
    'qrandn': Kind((*_NORMAL, 'q'), normal=True, quantum=True),
}


@dataclass(frozen=True)
class Space:
    """The values that one key of a spec may take.

    Args:
        kind: a name in KINDS
        args: the list of values, or [low, high], [mean, sd], and the quantum where the kind has one. Ranges hold low;
            they hold high only where values are multiples of a quantum.
    """

    kind: str
    args: tuple

    @property
    def how(self):
        return KINDS[self.kind]

    def draw(self, rng):
        """A value drawn with a numpy Generator."""
        how = self.how
        if not how.args:
            return self.args[int(rng.integers(len(self.args)))]
        if how.normal:
            return self.quantize(float(rng.normal(*self.args[:2])))
        low, high = self.args[:2]
        if how.whole and not how.log and not how.quantum:
            return int(rng.integers(low, high))
        low, high = (math.log(low), math.log(high)) if how.log else (low, high)
        value = low + (high - low) * float(rng.random())
        value = math.exp(value) if how.log else value
        if how.quantum:
            return self.quantize(value)
        return min(int(value), self.args[1] - 1) if how.whole else value

    def quantize(self, value):
        """The multiple of the quantum (if there is one) nearest to a value, inside of the range."""
        if not self.how.quantum:
            return value
        quantum = self.args[-1]
        count = round(value / quantum)
        if not self.how.normal:
            count = min(max(count, _first(self.args)), _last(self.args))
        return count * quantum if self.how.whole else float(f'{count * quantum:.12g}')


def _first(args):
    return math.ceil(args[0] / args[2] - _EPSILON)


def _last(args):
    return math.floor(args[1] / args[2] + _EPSILON)


def parse(spec):
    """The spaces of a spec's `search`.

    Returns: {place such as 'agent.0.algorithm.gamma': Space}, in the order of the spec.
    Raises: SpecError for a key or kind that is not understood, with its place and the nearest that is.
    """
    name, search = spec['name'], spec.get('search')
    if not isinstance(search, dict) or not search:
        raise SpecError(f"{name}: key 'search' is missing or empty, so there is nothing to search over")
    spaces = {}
    for room, part in search.items():
        if room not in ROOMS:
            raise SpecError(f"{name} > search.{room}: key '{room}' is unknown{suggest(room, ROOMS)}")
        in_list = room != 'meta' and isinstance(part, dict)  # `agent: {…}` is short for `agent: [{…}]`
        _collect([part] if in_list else part, [room], f'{name} > search', spaces)
    if not spaces:
        raise SpecError(f"{name} > search: it holds no key of the form 'key__kind'; kinds: {', '.join(KINDS)}")
    return spaces


def _collect(part, path, where, spaces):
    if isinstance(part, list) and part and all(isinstance(item, dict) for item in part):
        part = dict(enumerate(part))
    if not isinstance(part, dict):
        raise SpecError(f"{where}.{'.'.join(path)}: '{path[-1]}' names no kind of space{_spelling(path[-1])}")
    for key, value in part.items():
        key, parted, kind = str(key).rpartition('__')
        if not parted:
            _collect(value, [*path, kind], where, spaces)
            continue
        place = '.'.join([*path, key])
        here = f'{where}.{place}__{kind}'
        if kind not in KINDS:
            raise SpecError(f"{here}: kind '{kind}' is unknown{suggest(kind, KINDS)}")
        if place in spaces:
            raise SpecError(f'{here}: this key is searched over twice')
        spaces[place] = Space(kind, _check_args(KINDS[kind], value, here))


def _spelling(key):
    for kind in sorted(KINDS, key=len, reverse=True):
        if key.endswith(f'_{kind}'):
            return f"; did you mean '{key[: -len(kind) - 1]}__{kind}'?"
    return f"; write '{key}__kind'. Kinds: {', '.join(KINDS)}"


def _check_args(how, args, here):
    if not isinstance(args, list) or not args:
        raise SpecError(f'{here}: {args!r} is not of the type wanted here: a list that is not empty')
    if not how.args:
        return tuple(args)
    if len(args) != len(how.args) or not all(_is_number(arg) for arg in args):
        raise SpecError(f'{here}: {args!r} is not of the form wanted here: [{", ".join(how.args)}], all numbers')
    if how.whole:
        if not all(float(arg).is_integer() for arg in args):
            raise SpecError(f'{here}: {args!r} must hold whole numbers')
        args = [int(arg) for arg in args]
    if how.normal and args[1] < 0:
        raise SpecError(f'{here}: the standard deviation {args[1]:g} is below 0')
    if not how.normal and args[0] >= args[1]:
        raise SpecError(f'{here}: the low end {args[0]:g} is not below the high end {args[1]:g}')
    if how.log and args[0] <= 0:
        raise SpecError(f'{here}: the low end {args[0]:g} has no logarithm; it must be above 0')
    if how.quantum and args[2] <= 0:
        raise SpecError(f'{here}: the quantum {args[2]:g} must be above 0')
    if how.quantum and not how.normal and _first(args) > _last(args):
        raise SpecError(f'{here}: there is no multiple of {args[2]:g} between {args[0]:g} and {args[1]:g}')
    return tuple(args)


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def grid(spaces):
    """[{place: value}] of all points of the grids' product; the first key varies slowest. Without grids: [{}]"""
    grids = {place: space.args for place, space in spaces.items() if space.kind == 'grid_search'}
    return [dict(zip(grids, values, strict=True)) for values in itertools.product(*grids.values())]


def count_trials(spec):
    """The product of the grids, `meta.max_trial` times over."""
    return len(grid(parse(spec))) * (spec['meta'].get('max_trial') or 1)


def draw(spaces, seed, trial):
    """{place: value} of a trial, each key by a stream of its own.

    Args:
        seed: the experiment's
        trial: its index; each point of the grids comes once before any comes a second time
    """
    points = grid(spaces)
    point = points[trial % len(points)]
    return {
        place: point[place] if place in point else space.draw(rng_lib.generator(seed, 'search', trial, place))
        for place, space in spaces.items()
    }


def apply(spec, values):
    """A copy of a spec, without its `search`, in which the places have these values.

    Raises: SpecError where a place leads into something that has no keys.
    """
    spec = copy.deepcopy({key: part for key, part in spec.items() if key != 'search'})
    for place, value in values.items():
        *path, last = place.split('.')
        part = spec
        for i, key in enumerate(path):
            if isinstance(part, dict) and part.get(key) is None:
                part[key] = {}
            part = _step(part, key, f'{spec["name"]} > search.{".".join(path[: i + 1])}')
        if not isinstance(part, dict):
            raise SpecError(f'{spec["name"]} > search.{place}: the spec has no dict at {".".join(path)}')
        part[last] = copy.deepcopy(value)
    return spec


def _step(part, key, where):
    try:
        return part[int(key)] if isinstance(part, list) else part[key]
    except (ValueError, IndexError, KeyError, TypeError):
        raise SpecError(f'{where}: the spec has no such place') from None


def check(spec, spaces, values):
    """Checks the spec that a trial with these values gets, like one that was written out.

    Raises: SpecError
    """
    for place in values:
        room, _, key = place.partition('.')
        if room == 'meta' and (key in spec_util.RUN_KEYS or key.startswith('search_') or key == 'max_trial'):
            raise SpecError(f'{spec["name"]} > search.{place}: a trial cannot have a value of its own of this key')
    try:
        spec_util.resolve(apply(spec, values))
    except SpecError as e:
        text = ', '.join(f'{place} = {value!r}' for place, value in values.items())
        raise SpecError(f'{e} (searched over: {text})') from None
