"""Templates: a spec with `spec_params`, which stands for one spec per combination of its values.

`"spec_params": {"env": ["PongNoFrameskip-v4", "QbertNoFrameskip-v4"]}` in the spec `ppo_atari` makes the specs
`ppo_atari_PongNoFrameskip-v4` and `ppo_atari_QbertNoFrameskip-v4`: in each, `${env}` in any string stands for the
value. With several keys the first one varies slowest. `$$` is a dollar sign.
"""

import copy
import itertools
import re
import string

from slm_lab.lib.errors import SpecError, suggest

KEY = 'spec_params'

_WHOLE = re.compile(r'\$(?:\{(\w+)\}|(\w+))')
IN_A_NAME = r'\w.+=-'  # names are names of folders, too
_NOT_IN_A_NAME = re.compile(f'[^{IN_A_NAME}]+')


def is_template(spec):
    return isinstance(spec, dict) and KEY in spec


def expand(name, spec):
    """The specs that a template stands for.

    Args:
        name: the template's
        spec: as it stands in its file
    Returns: {expanded name: spec}, in the order of the values.
    Raises: SpecError for a key of `spec_params` that no string uses, a `${key}` that has no value there, values that
        are no strings, numbers or booleans, and values that give two specs one name.
    """
    params = _checked_params(name, spec)
    template = {key: value for key, value in spec.items() if key != KEY}
    used = set()
    for text in _strings(template):
        used |= _identifiers(text, name, params)
    unused = [key for key in params if key not in used]
    if unused:
        raise SpecError(f"{name} > {KEY}.{unused[0]}: no string of the spec uses '${{{unused[0]}}}'")
    return {
        expanded: _fill(copy.deepcopy(template), dict(zip(params, values, strict=True)))
        for expanded, values in _combinations(name, params).items()
    }


def names(name, spec):
    """The names alone of the specs that a template stands for. Raises: SpecError"""
    return list(_combinations(name, _checked_params(name, spec)))


def pick(specs, name, source):
    """One spec of a file, by its own name or by the expanded name that a template of the file gives it.

    Args:
        specs: {name: spec} of the file
        source: the file, for errors
    Returns: the spec, nothing left to fill in.
    Raises: SpecError
    """
    known = list(specs)
    for owner, spec in specs.items():
        if not is_template(spec) or not name.startswith(f'{owner}_'):
            continue
        expanded = names(owner, spec)
        if name in expanded:
            _refuse_clash(specs, name, owner, source)
            return expand(owner, spec)[name]
        if name not in specs:
            known += expanded
    if name not in specs:
        raise SpecError(f"{source}: spec '{name}' is unknown{suggest(name, known)}")
    if is_template(specs[name]):
        one = names(name, specs[name])[0]
        raise SpecError(f"{source}: '{name}' is a template; train it as a whole, or name one of its specs, e.g. {one}")
    for text in _strings(specs[name]):
        _identifiers(text, name, {}, only_braced=True)
    return specs[name]


def pick_all(specs, name, source):
    """Like `expand`, for a template of a file: its specs may not share a name with others of the file."""
    expanded = expand(name, specs[name])
    for each in expanded:
        _refuse_clash(specs, each, name, source)
    return expanded


def _refuse_clash(specs, expanded, owner, source):
    for other, spec in specs.items():
        if other == owner:
            continue
        if other == expanded or (
            is_template(spec) and expanded.startswith(f'{other}_') and expanded in names(other, spec)
        ):
            raise SpecError(
                f"{source}: '{owner}' and '{other}' both make a spec named '{expanded}', so their runs could not be "
                'told apart; rename one of them'
            )


def _checked_params(name, spec):
    params, where = spec[KEY], f'{name} > {KEY}'
    if not isinstance(params, dict) or not params:
        raise SpecError(f'{where}: {params!r} is not {{key: [values]}}')
    for key, values in params.items():
        if not re.fullmatch(r'[A-Za-z_]\w*', key, re.ASCII):
            raise SpecError(f"{where}: '{key}' cannot stand in '${{…}}'; use letters, digits and _")
        if not isinstance(values, list) or not values:
            raise SpecError(f'{where}.{key}: {values!r} is not a list of values')
        for value in values:
            if not isinstance(value, (str, int, float)) or value == '':
                raise SpecError(f'{where}.{key}: {value!r} is no value here; give strings, numbers or booleans')
    return params


def _combinations(name, params):
    """{expanded name: values}"""
    combinations = {}
    for values in itertools.product(*params.values()):
        expanded = '_'.join([name, *(_NOT_IN_A_NAME.sub('-', _text(value)) for value in values)])
        if expanded in combinations:
            raise SpecError(f"{name} > {KEY}: two combinations of values make the name '{expanded}'")
        combinations[expanded] = values
    return combinations


def _text(value):
    """As JSON writes it, a string without its quotes."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _strings(part):
    if isinstance(part, str):
        yield part
    elif isinstance(part, list):
        for value in part:
            yield from _strings(value)
    elif isinstance(part, dict):
        for key, value in part.items():
            yield key
            yield from _strings(value)


def _identifiers(text, name, params, only_braced=False):
    """The keys that a string asks for. Raises: SpecError for those that `params` lacks, and for a stray `$`."""
    used = set()
    for match in string.Template.pattern.finditer(text):
        key = match['braced'] or (None if only_braced else match['named'])
        if match['invalid'] is not None and not only_braced:
            raise SpecError(f"{name}: a '$' in '{text}' begins no '${{key}}'; write $$ for a dollar sign")
        if key and key not in params:
            known = suggest(key, params) if params else f'; there is no {KEY}'
            raise SpecError(f"{name}: '${{{key}}}' in '{text}' has no value in {KEY}{known}")
        used |= {key} if key else set()
    return used


def _fill(part, values):
    """A string that is `${key}` and nothing else becomes the value itself; inside of a longer one it becomes text."""
    if isinstance(part, str):
        whole = _WHOLE.fullmatch(part)
        if whole:
            return values[whole[1] or whole[2]]
        return string.Template(part).substitute({key: _text(value) for key, value in values.items()})
    if isinstance(part, list):
        return [_fill(value, values) for value in part]
    if isinstance(part, dict):
        return {_fill_key(key, values): _fill(value, values) for key, value in part.items()}
    return part


def _fill_key(key, values):
    return string.Template(key).substitute({name: _text(value) for name, value in values.items()})
