"""A report on the lab's place: versions, machine, data folder; to be pasted where help is asked for.

It imports none of the packages but torch, so that it can tell of one that is broken.
"""

import ast
import importlib.metadata
import os
import platform
import shutil
import sys

from packaging.requirements import Requirement

from slm_lab.lib import paths
from slm_lab.lib.machine import available, count_cpus, size

ENVIRONMENT = ('LAB_DATA_DIR', 'RENDER', 'LOG_LEVEL', 'CUDA_OFFSET', 'CUDA_VISIBLE_DEVICES', 'RAY_ADDRESS')


def report(lab_version):
    """Returns: ([line], [problem]); a run cannot be trusted where there is a problem."""
    problems = []
    there = available()
    lines = [
        f'SLM Lab {lab_version} in {paths.CHECKOUT or paths.PACKAGE_DIR}',
        f'Python {platform.python_version()} ({sys.executable}) on {platform.platform()}',
        f'{count_cpus()} CPUs; {size(there.num_bytes)} of memory are there {there.place}',
        f'GPUs: {_gpus(problems)}',
        f'data folder: {_data_folder(problems)}',
        f'set: {" ".join(f"{k}={os.environ[k]}" for k in ENVIRONMENT if os.environ.get(k)) or "nothing"}',
    ]
    needed, extras = requirements()
    lines.append(f'packages: {", ".join(_found(line, problems) for line in needed)}')
    for extra, of_extra in extras.items():
        lacking = []
        found = ', '.join(_found(line, lacking) for line in of_extra)
        lines.append(f'for {extra}: {found}' + (f"; to have it: pip install '.[{extra}]'" if lacking else ''))
    return lines, problems


def requirements():
    """(what every run needs, {extra: what it needs besides}) as lists of `Requirement`.

    By setup.py in a checkout, which need not be installed; else by what was recorded when the lab was installed.
    """
    if paths.CHECKOUT:
        needed, extras = _lists_of((paths.CHECKOUT / 'setup.py').read_text(encoding='utf-8'))
        return [Requirement(line) for line in needed], {k: [Requirement(n) for n in v] for k, v in extras.items()}
    recorded = [Requirement(line) for line in importlib.metadata.requires('slm_lab')]
    needed = [line for line in recorded if line.marker is None or line.marker.evaluate({'extra': ''})]
    extras = {
        extra: [line for line in recorded if line not in needed and line.marker.evaluate({'extra': extra})]
        for extra in importlib.metadata.metadata('slm_lab').get_all('Provides-Extra', [])
    }
    return needed, extras


def _lists_of(setup):
    """INSTALL_REQUIRES and EXTRAS_REQUIRE of the text of setup.py, which is not run."""
    values = {node.targets[0].id: node.value for node in ast.parse(setup).body if isinstance(node, ast.Assign)}
    return [ast.literal_eval(values[name]) for name in ('INSTALL_REQUIRES', 'EXTRAS_REQUIRE')]


def _found(line, problems):
    """A package and the version that is here; what is wrong with it is added to `problems`."""
    try:
        version = importlib.metadata.version(line.name)
    except importlib.metadata.PackageNotFoundError:
        problems.append(f'{line} is not installed')
        return f'{line.name} (none)'
    if not line.specifier.contains(version, prereleases=True):
        problems.append(f'{line.name} is {version}, and {line.specifier} is wanted')
    return f'{line.name} {version}'


def _gpus(problems):
    try:
        import torch
    except (ImportError, OSError) as e:  # OSError: a library of its own that does not load
        problems.append(f'torch cannot be imported: {e}')
        return 'unknown'
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ', '.join(names) or f'none that torch {torch.__version__} can use'


def _data_folder(problems):
    folder = paths.data_dir()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        problems.append(f'the data folder {folder} cannot be written; LAB_DATA_DIR names another')
    return f'{folder}, {size(shutil.disk_usage(existing).free)} free'
