"""Where things are: the checkout, the specs that come with the lab, and the data of runs."""

import os
from pathlib import Path

PACKAGE_DIR = Path(__file__).resolve().parents[1]
SPEC_DIR = PACKAGE_DIR / 'spec'
# a checkout has setup.py beside the package; an installed package has no root of its own
CHECKOUT = PACKAGE_DIR.parent if (PACKAGE_DIR.parent / 'setup.py').is_file() else None


def data_dir():
    """LAB_DATA_DIR, else `data/` in the checkout, else `data/` in the current directory."""
    if os.environ.get('LAB_DATA_DIR'):
        return Path(os.environ['LAB_DATA_DIR']).expanduser().absolute()
    return (CHECKOUT or Path.cwd()) / 'data'


def for_display(path):
    """The path relative to the current directory where that is shorter, else absolute: what a user can paste."""
    path = Path(path)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
