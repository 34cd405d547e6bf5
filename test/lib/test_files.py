"""Lenient JSON, exact numbers, and writes that are whole or invisible."""

import json
import math
import os

import numpy as np
import pandas as pd
import pytest
import torch

from slm_lab.lib import files
from slm_lab.lib.errors import LabError


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('{"a": 1,}', {'a': 1}),
        ('[1, 2, ]', [1, 2]),
        ('{"a": [1, {"b": [2,\n],\t},],\n}', {'a': [1, {'b': [2]}]}),
        ('{"a": "x,}", "b": ",]", }', {'a': 'x,}', 'b': ',]'}),
        (r'{"a": "say \"hi\",}", "b": "\\",}', {'a': 'say "hi",}', 'b': '\\'}),
        (r'{"a": "\\\",}",}', {'a': '\\",}'}),
        ('{"a": "", "b": "",}', {'a': '', 'b': ''}),
        ('{"a": "x\\ny", "b": "ä,]",}', {'a': 'x\ny', 'b': 'ä,]'}),
        ('{"frames": 1e7, "n": 1e-3}', {'frames': 10000000.0, 'n': 0.001}),
        ('{}', {}),
    ],
)
def test_trailing_commas_go_and_strings_stay(text, expected):
    assert files.parse_json(text) == expected


@pytest.mark.parametrize(
    ('text', 'place'),
    [
        ('{"a": 1\n "b": 2}', 'line 2 column 2'),
        ('{"a": 1,, "b": 2}', 'column 9'),
        ('[1, 2,\n 3,\n 4 5,]', 'line 3 column 4'),
        ('{"a": 1} x', 'column 10'),
        ('[1, [2,], 3 4]', 'column 13'),
        ('', 'column 1'),
    ],
)
def test_broken_json_says_file_line_and_column(tmp_path, text, place):
    path = tmp_path / 'spec.json'
    path.write_text(text)
    with pytest.raises(LabError) as e:
        files.read_json(path)
    assert str(e.value).startswith(f'{path} is not valid JSON: ') and place in str(e.value)


@pytest.mark.parametrize(
    ('text', 'line'),
    [
        (
            '{"gamma": 0.9,\n "lam": 1, "gamma": 0.5,}',
            "key 'gamma' is there twice, at line 1 column 2 and at line 2 column 12",
        ),
        (
            '{"a": [{"b": {},\n"c": "{",\n "b" : 3}]}',
            "key 'b' is there twice, at line 1 column 9 and at line 3 column 2",
        ),
        ('{"a": {"a": 1}, "\\u0061": 1}', "key 'a' is there twice, at line 1 column 2 and at line 1 column 17"),
        ('{"s": "dev", "s": "dev"}', "key 's' is there twice"),
    ],
)
def test_a_key_twice_in_an_object_is_refused_with_both_places(text, line, tmp_path):
    path = tmp_path / 'spec.json'
    path.write_text(text)
    with pytest.raises(LabError) as e:
        files.read_json(path)
    assert str(e.value).startswith(f'{path}: {line}') and '\n' not in str(e.value)


@pytest.mark.parametrize(
    'text',
    [
        '{"a": {"a": {"a": 1}}}',
        '{"x": [{"a": 1}, {"a": 2}], "y": {"a": 3}}',
        '{"a": "a", "b": "\\"a\\": 1, {", "c": ["a", "a"]}',
        '{"a": 1, "A": 2, "a ": 3}',
    ],
)
def test_keys_of_several_objects_and_strings_that_are_no_keys_may_be_alike(text):
    assert files.parse_json(text) == json.loads(text)


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / 'spec.json'
    path.write_bytes(b'\xff\xfe\x00{')
    with pytest.raises(LabError, match='spec.json is not UTF-8 text'):
        files.read_json(path)


def test_numbers_that_json_lacks_are_null_and_arrays_are_lists():
    data = {
        'nan': math.nan,
        'inf': [math.inf, -math.inf],
        'array': np.array([[1.5, math.nan], [2.0, 3.0]]),
        'scalar': np.float32(0.5),
        'int': np.int64(3),
        'bool': np.bool_(True),
        'tensor': torch.tensor([1, 2]),
        3: (1, None, 'a/b'),
    }
    assert json.loads(files.dump_json(data)) == {
        'nan': None,
        'inf': [None, None],
        'array': [[1.5, None], [2.0, 3.0]],
        'scalar': 0.5,
        'int': 3,
        'bool': True,
        'tensor': [1, 2],
        '3': [1, None, 'a/b'],
    }
    assert 'a/b' in files.dump_json(data)


NUMBERS = [0.1 + 0.2, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 1e22, 123456789.123456789, float(2**53), 1e-7]


def test_json_floats_and_ints_come_back_exactly(tmp_path):
    data = {'floats': NUMBERS, 'ints': [2**24 + 1, 2**53 + 1, 2**63 - 1]}
    files.write_json(data, tmp_path / 'x.json')
    back = files.read_json(tmp_path / 'x.json')
    assert np.array(back['floats']).tobytes() == np.array(NUMBERS).tobytes()
    assert back['ints'] == data['ints']


def test_csv_floats_and_ints_come_back_exactly(tmp_path):
    bits = np.random.default_rng(0).integers(0, 2**63, 3000)
    floats = bits.view(np.float64)
    floats = np.array([*NUMBERS, math.nan, *floats[np.isfinite(floats)]])
    df = pd.DataFrame({'x': floats, 'n': 2**53 + 1 + np.arange(len(floats))})
    files.write_csv(df, tmp_path / 'x.csv')
    back = files.read_csv(tmp_path / 'x.csv')
    assert list(back.columns) == ['x', 'n']
    assert back['x'].to_numpy().tobytes() == floats.tobytes()
    assert back['n'].tolist() == df['n'].tolist()


@pytest.mark.parametrize('durable', [False, True])
def test_a_write_makes_its_folders_and_leaves_no_temporary_file(tmp_path, durable):
    path = tmp_path / 'a' / 'b' / 'x.txt'
    files.write_atomic(path, b'one', durable)
    files.write_atomic(path, b'two', durable)
    assert path.read_bytes() == b'two'
    assert os.listdir(path.parent) == ['x.txt']


@pytest.mark.parametrize('broken', ['write', 'fsync', 'replace'])
def test_when_writing_fails_the_old_file_stays(tmp_path, monkeypatch, broken):
    path = tmp_path / 'x.txt'
    path.write_bytes(b'old')

    def fail(*_):
        raise OSError('disk full')

    content = b'new'
    if broken == 'write':
        content = 'text is no bytes'
    else:
        monkeypatch.setattr(os, broken, fail)
    with pytest.raises((OSError, TypeError)):
        files.write_atomic(path, content, durable=True)
    assert path.read_bytes() == b'old'
    assert os.listdir(tmp_path) == ['x.txt']
