"""Tables of spec keys: declared once beside the class that reads them, used to check a spec and to fill defaults."""

from dataclasses import dataclass, field

from slm_lab.lib.errors import SpecError, suggest

REQUIRED = object()

_TYPES = {
    'int': (int,),
    'number': (int, float),
    'bool': (bool,),
    'str': (str,),
    'list': (list, tuple),
    'dict': (dict,),
    'null': (type(None),),
}


@dataclass(frozen=True)
class Key:
    """One spec key.

    Args:
        type: names of what JSON may hold, parted by `|`: int, number, bool, str, list, dict, null.
        default: the value when the key is absent; `REQUIRED` when it must be there.
        choices: the allowed values, if they are few.
        low, high: inclusive bounds of a number; `above`: an exclusive lower bound.
        validate: a function (value, place) that raises SpecError, for values with a grammar of their own.
        fill: a function (value, place) that returns the value with its own defaults filled in, or raises SpecError.
        note: what it means, and its unit.
        read: False for a key that old specs carry and nothing reads: accepted with one warning line.
    """

    type: str
    default: object = REQUIRED
    choices: tuple = ()
    low: float = None
    high: float = None
    above: float = None
    validate: object = None
    fill: object = None
    note: str = ''
    read: bool = True

    def check(self, value, where):
        """Returns the value (a whole float as an int where ints are meant, inner defaults filled in).

        Raises: SpecError
        """
        kinds = self.type.split('|')
        if 'int' in kinds and 'number' not in kinds and isinstance(value, float) and value.is_integer():
            value = int(value)
        allowed = tuple(t for kind in kinds for t in _TYPES[kind])
        is_stray_bool = isinstance(value, bool) and 'bool' not in kinds
        if not isinstance(value, allowed) or is_stray_bool:
            raise SpecError(f'{where}: {value!r} is not of the type wanted here: {" or ".join(kinds)}')
        if self.choices and value not in self.choices:
            raise SpecError(f"{where}: '{value}' is unknown{suggest(value, self.choices)}")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            self._check_bounds(value, where)
        if self.validate is not None and value is not None:
            self.validate(value, where)
        return value if self.fill is None or value is None else self.fill(value, where)

    def _check_bounds(self, value, where):
        if self.low is not None and value < self.low:
            raise SpecError(f'{where}: {value} is too small; the least is {self.low:g}')
        if self.high is not None and value > self.high:
            raise SpecError(f'{where}: {value} is too large; the most is {self.high:g}')
        if self.above is not None and value <= self.above:
            raise SpecError(f'{where}: {value} is too small; it must be above {self.above:g}')


def leftover(note=''):
    """A key that old specs carry and nothing reads, whatever its value."""
    return Key('', default=None, note=note, read=False)


@dataclass
class Checked:
    """What `read_keys` found: values with defaults filled in, and the places of keys that nothing reads."""

    values: dict
    ignored: list = field(default_factory=list)


def read_keys(table, spec, where, others=()):
    """Checks a dict of a spec against a table of keys.

    Args:
        table: {key: Key}
        spec: the part of the spec to check
        where: its place, e.g. `dqn_cartpole > agent.0.net`
        others: further keys that may be there and are checked elsewhere
    Raises: SpecError for a missing, unknown or wrong key, with its place, what came and what is allowed.
    """
    if not isinstance(spec, dict):
        raise SpecError(f'{where}: {spec!r} is not of the type wanted here: dict')
    for key in spec:
        if key not in table and key not in others:
            raise SpecError(f"{where}.{key}: key '{key}' is unknown{suggest(key, [*table, *others])}")
    checked = Checked({})
    for name, key in table.items():
        if not key.read:
            checked.ignored += [f'{where}.{name}'] if name in spec else []
        elif name in spec:
            checked.values[name] = key.check(spec[name], f'{where}.{name}')
        elif key.default is REQUIRED:
            raise SpecError(f"{where}: key '{name}' is missing ({key.type}{': ' + key.note if key.note else ''})")
        else:
            checked.values[name] = key.default
    return checked


def read_values(table, spec, where, others=()):
    """The values alone, for the constructor of the class that declares the table."""
    return read_keys(table, spec, where, others).values
