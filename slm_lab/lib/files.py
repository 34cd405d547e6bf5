"""Reading and writing files: lenient JSON, CSV, and writes that are either whole or invisible."""

import io
import json
import os
import re
import warnings
from pathlib import Path

import pandas as pd
import ujson

from slm_lab.lib.errors import LabError

# a whole JSON string (kept as it is), or a comma that only white space parts from the bracket that closes its list
_STRING_OR_TRAILING_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])', re.DOTALL)
# a string, with the colon that makes a key of it, or a bracket of an object
_KEY_OR_BRACE = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|[{}]', re.DOTALL)


def parse_json(text, where='JSON text'):
    """Parses JSON in which lists and objects may end in a comma, as specs in the wild do.

    Raises: LabError naming `where`, line and column when the text is not JSON even so, or has a key twice in an object.
    """
    strict = _STRING_OR_TRAILING_COMMA.sub(lambda m: m.group(1) or ' ', text)  # a space, so that columns stay
    data = _load_json(strict, where)
    _refuse_repeated_keys(strict, where)
    return data


def _load_json(text, where):
    try:
        return ujson.loads(text)
    except ValueError:
        pass
    try:
        return json.loads(text)  # slower, but it says where it stopped
    except ValueError as e:
        raise LabError(f'{where} is not valid JSON: {e}') from None


def _refuse_repeated_keys(text, where):
    """Readers of JSON take the last one of two without a word."""
    open_objects = []  # [{key: where it begins}], the innermost last
    for match in _KEY_OR_BRACE.finditer(text):
        string, colon = match.groups()
        if match[0] == '{':
            open_objects.append({})
        elif match[0] == '}':
            open_objects.pop()
        elif colon:
            key, at = _load_json(string, where), match.start()
            first = open_objects[-1].setdefault(key, at)
            if first != at:
                raise LabError(
                    f"{where}: key '{key}' is there twice, at {_place(text, first)} and at {_place(text, at)}; "
                    'remove one of the two'
                )


def _place(text, at):
    lines = text[:at].split('\n')
    return f'line {len(lines)} column {len(lines[-1]) + 1}'


def read_json(path):
    try:
        text = Path(path).read_text(encoding='utf-8-sig')
    except UnicodeDecodeError as e:
        raise LabError(f'{path} is not UTF-8 text: {e}') from None
    return parse_json(text, str(path))


def dump_json(data, indent=2):
    """NaN and infinity, which JSON lacks, are written as null."""
    return ujson.dumps(_finite(data), indent=indent, escape_forward_slashes=False, ensure_ascii=False)


def _finite(data):
    if isinstance(data, dict):
        return {str(k): _finite(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(v) for v in data]
    if hasattr(data, 'item') and getattr(data, 'ndim', None) == 0:  # numpy scalar
        data = data.item()
    if hasattr(data, 'tolist'):
        return _finite(data.tolist())
    if isinstance(data, float) and (data != data or data in (float('inf'), float('-inf'))):
        return None
    if isinstance(data, Path):
        return str(data)
    return data


def write_json(data, path, durable=False):
    write_atomic(path, (dump_json(data) + '\n').encode('utf-8'), durable)


def read_csv(path):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)  # of pandas 3, which always reads floats exactly
        return pd.read_csv(path, float_precision='round_trip')


def dump_csv(df):
    """Bytes of a CSV whose floats have all the digits that reading them back exactly needs."""
    buffer = io.StringIO()
    df.to_csv(buffer, index=False)
    return buffer.getvalue().encode('utf-8')


def write_csv(df, path, durable=False):
    write_atomic(path, dump_csv(df), durable)


def write_atomic(path, content, durable=False):
    """Writes bytes under a temporary name, then renames: a reader sees the old file or the new one, never half.

    Args:
        durable: also survive a power cut (fsync of the file and of its folder).
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
    try:
        with open(temporary, 'wb') as f:
            f.write(content)
            if durable:
                f.flush()
                os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


def fsync_folder(path):
    """Makes the names in a folder (creations, renames) durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
