"""setup.py is the one list of dependencies: everything else that names one agrees with it."""

import ast
import contextlib
import os
import re
import runpy
import sys
from importlib import metadata
from pathlib import Path

import pytest
import ujson
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def read_lists():
    """INSTALL_REQUIRES, EXTRAS_REQUIRE and EXTRAS_BRING as written in setup.py, without running it."""
    tree = ast.parse((ROOT / 'setup.py').read_text())
    values = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    return [ast.literal_eval(values[name]) for name in ('INSTALL_REQUIRES', 'EXTRAS_REQUIRE', 'EXTRAS_BRING')]


INSTALL, EXTRAS, BRING = read_lists()
TEST = EXTRAS['test'] + [line for extra in BRING['test'] for line in EXTRAS[extra]]
ALL = INSTALL + [line for lines in EXTRAS.values() for line in lines]

# packages that are imported under another name
IMPORTED_AS = {'opencv-python-headless': 'cv2', 'tensorboardx': 'tensorboardX'}


def by_name(lines):
    requirements = [Requirement(line) for line in lines]
    return {canonicalize_name(req.name): req for req in requirements}


def read_constraints():
    lines = (ROOT / 'constraints.txt').read_text().splitlines()
    return by_name(line for line in lines if line and not line.startswith('#'))


def third_party_imports(source):
    """Top-level names of all modules that a source imports, wherever in it, but for Python's own and the lab's."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name.split('.')[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.split('.')[0])
    return names - set(sys.stdlib_module_names) - {'slm_lab', 'run_lab'}


def test_environment_yml_lists_what_setup_lists():
    text = (ROOT / 'environment.yml').read_text()
    pip_section = text.split('- pip:\n')[1]
    listed = re.findall(r'^ +- (.+)$', pip_section, re.MULTILINE)
    assert listed == INSTALL + TEST
    assert re.findall(r'channels:\n((?:  - .+\n)+)', text) == ['  - conda-forge\n']


def test_each_package_is_listed_once():
    assert len(by_name(ALL)) == len(ALL)


def test_pip_gets_each_extra_with_what_it_brings(monkeypatch):
    told = {}
    monkeypatch.setattr('setuptools.setup', lambda **arguments: told.update(arguments))
    runpy.run_path(str(ROOT / 'setup.py'))
    assert told['install_requires'] == INSTALL
    assert told['extras_require']['test'] == TEST
    assert told['extras_require']['atari'] == EXTRAS['atari']
    assert sorted(told['extras_require']['envs'] + INSTALL + EXTRAS['test'] + EXTRAS['ray']) == sorted(ALL)


@pytest.mark.parametrize('line', ALL)
def test_constraint_lies_in_the_range(line):
    req = Requirement(line)
    tried = read_constraints()[canonicalize_name(req.name)]
    (pin,) = tried.specifier
    assert pin.operator == '=='
    assert req.specifier.contains(pin.version), f'{tried} is outside {req}'


def needed_names(lines):
    """Names of all packages that requirements bring along here, from what the installed packages say they need."""
    names, todo = set(), [Requirement(line) for line in lines]
    while todo:
        req = todo.pop()
        name = canonicalize_name(req.name)
        names.add(name)
        with contextlib.suppress(metadata.PackageNotFoundError):
            for needed in map(Requirement, metadata.requires(name) or ()):
                wanted = needed.marker is None or any(needed.marker.evaluate({'extra': x}) for x in ['', *req.extras])
                if wanted and canonicalize_name(needed.name) not in names:
                    todo.append(needed)
    return names


@pytest.mark.skipif(sys.version_info < (3, 11), reason='constraints.txt was tried with Python 3.11')
def test_constraints_leave_no_package_open():
    pinned = {name for name, req in read_constraints().items() if req.marker is None or req.marker.evaluate()}
    added_by_gpu_builds = {name for name in needed_names(['torch']) if name.startswith(('nvidia', 'cuda', 'triton'))}
    assert needed_names(ALL) - added_by_gpu_builds - pinned == set()


def test_every_range_has_both_ends():
    for line in ALL:
        operators = {spec.operator for spec in Requirement(line).specifier}
        assert operators in ({'=='}, {'>=', '<'}), line


def test_every_import_is_listed():
    for_users = INSTALL + [line for extra, lines in EXTRAS.items() if extra != 'test' for line in lines]
    listed = {IMPORTED_AS.get(name, name).replace('-', '_') for name in by_name(for_users)}
    for path in [*(ROOT / 'slm_lab').rglob('*.py'), ROOT / 'run_lab.py']:
        missing = third_party_imports(path.read_text()) - listed
        assert not missing, f'{path.relative_to(ROOT)} imports {sorted(missing)}, which setup.py does not list'


def test_third_party_imports_are_found_anywhere_in_a_file():
    source = 'import os\nfrom slm_lab.lib import files\ndef f():\n    import torch.nn\n    from pandas import DataFrame'
    assert third_party_imports(source) == {'torch', 'pandas'}


@pytest.mark.parametrize('script', ['bin/lab', 'bin/test', '.ci/run'])
def test_commands_are_executable(script):
    assert os.access(ROOT / script, os.X_OK)


def test_every_shipped_spec_is_strict_json():
    paths = list((ROOT / 'slm_lab/spec').rglob('*.json'))
    assert ROOT / 'slm_lab/spec/demo.json' in paths
    for path in paths:
        assert ujson.loads(path.read_text()), path
