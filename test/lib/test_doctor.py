"""The report that a user pastes where help is asked for: what is here, and what a run could not bear."""

import email
import importlib.metadata
import os

import pytest

from slm_lab.lib import doctor, paths


@pytest.fixture(autouse=True)
def data_dir(tmp_path, monkeypatch):
    monkeypatch.setenv('LAB_DATA_DIR', str(tmp_path / 'data'))


def version(**versions):
    """`importlib.metadata.version` with other versions of some packages; None: not installed."""
    real = importlib.metadata.version

    def version(name):
        if versions.get(name, '') is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions.get(name) or real(name)

    return version


def test_it_names_versions_machine_and_data_folder(tmp_path):
    lines, problems = doctor.report('4.9')
    text = '\n'.join(lines)
    assert problems == []
    for wanted in (
        'SLM Lab 4.9 in ',
        f'torch {importlib.metadata.version("torch")}',
        f'gym {importlib.metadata.version("gym")}',
        f'{len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()} CPUs; ',
        f'LAB_DATA_DIR={tmp_path}/data',
        f'data folder: {tmp_path}/data, ',
    ):
        assert wanted in text
    assert not (tmp_path / 'data').exists()  # it looks, and leaves nothing behind


def test_a_package_out_of_range_or_missing_is_a_problem(monkeypatch):
    monkeypatch.setattr(importlib.metadata, 'version', version(numpy='1.26.4', ujson=None))
    lines, problems = doctor.report('4.9')
    assert problems == ['numpy is 1.26.4, and <3,>=2.0 is wanted', 'ujson<7,>=5.10 is not installed']
    assert 'numpy 1.26.4' in '\n'.join(lines) and 'ujson (none)' in '\n'.join(lines)


def test_an_extra_that_is_missing_is_none_but_said(monkeypatch):
    monkeypatch.setattr(importlib.metadata, 'version', version(**{'ale-py': None}))
    lines, problems = doctor.report('4.9')
    assert problems == []
    (atari,) = [line for line in lines if line.startswith('for atari: ')]
    assert 'ale-py (none)' in atari and atari.endswith("; to have it: pip install '.[atari]'")


def test_a_torch_that_cannot_be_imported_is_a_problem(hide):
    hide('torch')
    _, problems = doctor.report('4.9')
    assert len(problems) == 1 and problems[0].startswith('torch cannot be imported: ')


def test_a_data_folder_that_cannot_be_is_a_problem(tmp_path, monkeypatch):
    (tmp_path / 'file').touch()
    monkeypatch.setenv('LAB_DATA_DIR', str(tmp_path / 'file' / 'data'))
    _, problems = doctor.report('4.9')
    assert problems == [f'the data folder {tmp_path}/file/data cannot be written; LAB_DATA_DIR names another']


def test_without_a_checkout_what_was_recorded_at_installing_counts(monkeypatch):
    recorded = ['torch>=2.6', 'tomli; python_version < "3"', 'ale-py<1; extra == "atari"', 'gym; extra == "gym"']
    metadata = email.message_from_string('Provides-Extra: atari\nProvides-Extra: gym\n')
    monkeypatch.setattr(paths, 'CHECKOUT', None)
    monkeypatch.setattr(importlib.metadata, 'requires', {'slm_lab': recorded}.get)
    monkeypatch.setattr(importlib.metadata, 'metadata', {'slm_lab': metadata}.get)
    needed, extras = doctor.requirements()
    assert [line.name for line in needed] == ['torch']
    assert {extra: [line.name for line in lines] for extra, lines in extras.items()} == {
        'atari': ['ale-py'],
        'gym': ['gym'],
    }
