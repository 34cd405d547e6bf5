"""Who may import whom: run_lab -> experiment -> {agent, env} -> lib, spec -> lib, algorithm -> {net, memory}."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {
    'lib': {'lib'},
    'spec': {'spec', 'lib'},
    'env': {'env', 'lib'},
    'agent': {'agent', 'lib'},
    'experiment': {'experiment', 'agent', 'env', 'spec', 'lib'},
    'run_lab': {'experiment', 'spec', 'lib'},
}
# Within rooms: a module whose name starts with the first never imports one whose name starts with the second, or is it.
MUST_NOT_IMPORT = [
    ('slm_lab.agent.memory', 'slm_lab.agent.algorithm'),
    ('slm_lab.agent.net', 'slm_lab.agent.algorithm'),
    ('slm_lab.agent.memory', 'slm_lab.agent.net'),
    ('slm_lab.agent.net', 'slm_lab.agent.memory'),
    ('slm_lab.experiment.search', 'slm_lab.experiment.control'),
]
# What algorithm, memory and net are parts of: they are handed to it, and never reach for it.
AGENT_PARTS = ('slm_lab.agent.algorithm', 'slm_lab.agent.memory', 'slm_lab.agent.net')
WHOLES = ('slm_lab.agent', 'slm_lab.agent.agent', 'slm_lab.agent.body')


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def is_module(name):
    path = ROOT.joinpath(*name.split('.'))
    return path.is_dir() or path.with_suffix('.py').is_file()


def imported(node, module, is_package):
    """Full names of the modules that an import statement names; `from room import part` names room.part."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ''
    if node.level:
        kept = module.split('.')[: len(module.split('.')) - node.level + is_package]
        base = '.'.join([*kept, base] if base else kept)
    parts = [f'{base}.{alias.name}' for alias in node.names]
    return [part if is_module(part) else base for part in parts]


def within(module, package):
    return module == package or module.startswith(package + '.')


def room_of(module):
    """The room of a module of the lab ('' for the package itself), None for modules of others."""
    first, _, rest = module.partition('.')
    if first == 'run_lab':
        return 'run_lab'
    return rest.split('.')[0] if first == 'slm_lab' else None


def is_allowed(module, target):
    room, target_room = room_of(module), room_of(target)
    if target_room is None or room == '':
        return target_room is None
    if target_room == '':
        return room != 'lib'
    if target_room not in MAY_IMPORT[room]:
        return False
    if any(within(module, part) for part in AGENT_PARTS) and target in WHOLES:
        return False
    return not any(within(module, a) and within(target, b) for a, b in MUST_NOT_IMPORT)


def runs_at_import(tree):
    """All nodes but those inside functions."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            nodes.extend(ast.iter_child_nodes(node))


def reads_lab_mode(node):
    """Whether an expression takes 'lab_mode' from the process environment."""
    if not isinstance(node, (ast.Subscript, ast.Call, ast.Compare)):
        return False
    inside = list(ast.walk(node))
    names = {getattr(n, 'id', getattr(n, 'attr', None)) for n in inside}
    return bool(names & {'environ', 'getenv'}) and any(getattr(n, 'value', None) == 'lab_mode' for n in inside)


def violations(source, module, is_package=False):
    """One line for each import or read in a source that breaks an arrow."""
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            targets = imported(node, module, is_package)
            found += [f'{module}:{node.lineno} imports {t}' for t in targets if not is_allowed(module, t)]
        elif reads_lab_mode(node):
            found.append(f'{module}:{node.lineno} reads lab_mode from the environment')
    for node in runs_at_import(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and any(
            within(target, 'ray') for target in imported(node, module, is_package)
        ):
            found.append(f'{module}:{node.lineno} imports ray when it is itself imported')
    return found


SOURCES = [*sorted((ROOT / 'slm_lab').rglob('*.py')), ROOT / 'run_lab.py']


@pytest.mark.parametrize('path', SOURCES, ids=module_name)
def test_imports_follow_the_arrows(path):
    assert violations(path.read_text(), module_name(path), path.name == '__init__.py') == []


@pytest.mark.parametrize(
    ('module', 'source'),
    [
        ('slm_lab.lib.files', 'from slm_lab import spec'),
        ('slm_lab.lib.files', 'import slm_lab'),
        ('slm_lab.spec.spec_util', 'import slm_lab.agent.net'),
        ('slm_lab.env.base', 'from slm_lab.agent import Agent'),
        ('slm_lab.env.base', 'def f():\n    from ..agent import net'),
        ('slm_lab.agent.body', 'from slm_lab.env.clock import Clock'),
        ('slm_lab.agent.body', 'import slm_lab.experiment.control as control'),
        ('slm_lab.agent.memory.replay', 'from slm_lab.agent.algorithm.dqn import DQN'),
        ('slm_lab.agent.memory.replay', 'from ..algorithm import dqn'),
        ('slm_lab.agent.net.mlp', 'from slm_lab.agent.algorithm import DQN'),
        ('slm_lab.agent.net.mlp', 'from slm_lab.agent.memory.replay import Replay'),
        ('slm_lab.agent.algorithm.dqn', 'from slm_lab.agent import Agent'),
        ('slm_lab.experiment.search', 'from slm_lab.experiment.control import Trial'),
        ('slm_lab.experiment.search', 'from .control import Trial'),
        ('slm_lab.experiment.control', 'import run_lab'),
        ('run_lab', 'from slm_lab.agent import Agent'),
        ('slm_lab.lib.logger', "mode = os.environ['lab_mode']"),
        ('slm_lab.lib.logger', "mode = os.environ.get('lab_mode', 'dev')"),
        ('slm_lab.lib.logger', "if os.getenv('lab_mode') == 'dev': pass"),
        ('slm_lab.lib.logger', "eager = 'lab_mode' in environ"),
        ('slm_lab.experiment.search', 'import ray.tune'),
        ('slm_lab.experiment.search', 'try:\n    from ray import tune\nexcept ImportError:\n    pass'),
    ],
)
def test_a_planted_violation_is_found(module, source):
    assert violations(source, module)


@pytest.mark.parametrize(
    ('module', 'source'),
    [
        ('slm_lab.lib.files', 'import os\nimport torch\nfrom slm_lab.lib.errors import LabError'),
        ('slm_lab.lib.files', 'from .errors import LabError'),
        ('slm_lab.lib.logger', "os.environ['LAB_DATA_DIR']\nmode = spec['lab_mode']"),
        (
            'slm_lab.agent.algorithm.dqn',
            'from slm_lab.agent.net import MLPNet\nfrom slm_lab.agent.memory import Replay',
        ),
        ('slm_lab.agent.algorithm.dqn', 'from slm_lab.agent.policy import boltzmann\nfrom ...lib import rng'),
        ('slm_lab.experiment.control', 'from slm_lab.agent import Agent\nfrom slm_lab.env import make_env'),
        ('slm_lab.experiment.control', 'from slm_lab.experiment import search'),
        ('slm_lab.experiment.search', 'def run():\n    from ray import tune'),
        ('run_lab', 'from slm_lab import __version__\nfrom slm_lab.spec import spec_util'),
    ],
)
def test_what_the_arrows_allow_is_let_through(module, source):
    assert violations(source, module) == []


def test_a_relative_import_in_a_package_counts_from_that_package():
    (node,) = ast.parse('from .errors import LabError').body
    assert imported(node, 'slm_lab.lib', is_package=True) == ['slm_lab.lib.errors']
    assert imported(node, 'slm_lab.lib.files', is_package=False) == ['slm_lab.lib.errors']


def test_no_module_loads_ray_when_imported(tmp_path):
    """Also through a registry or another library's import: a stand-in for ray must stay unloaded."""
    (tmp_path / 'ray.py').write_text('')
    modules = [module_name(path) for path in SOURCES]
    code = (
        f'import importlib, sys\nfor name in {modules}: importlib.import_module(name)\nsys.exit("ray" in sys.modules)'
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run([sys.executable, '-c', code], env=os.environ | {'PYTHONPATH': path}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
