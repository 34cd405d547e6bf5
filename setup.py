"""The package and the one list of what it needs: test/test_setup.py holds environment.yml and constraints.txt to it."""

import re
from pathlib import Path

from setuptools import find_packages, setup

# Upper bounds stop before the next major; plotly 7 would need kaleido 1 and a browser to draw a static image.
INSTALL_REQUIRES = [
    'torch>=2.6,<3',
    'numpy>=2.0,<3',
    'pandas>=2.2.2,<4',
    'pydash>=8.0,<9',
    'gymnasium[classic-control]>=1.1,<2',
    'ujson>=5.10,<7',
    'plotly>=5.20,<7',
    'kaleido==0.2.1',
    'zstandard>=0.22,<1',
    'tqdm>=4.66,<5',
    'colorlog>=6.7,<7',
    'psutil>=5.9,<8',
]

EXTRAS_REQUIRE = {
    'test': [
        'pytest>=8.0,<10',
        'pytest-xdist>=3.5,<4',
        'pytest-timeout>=2.2,<3',
        'scipy>=1.13,<2',
        'ruff>=0.9,<1',
    ],
}

HERE = Path(__file__).parent


def read_version() -> str:
    """The version in slm_lab/__init__.py, read as text: importing the package here would need its dependencies."""
    text = (HERE / 'slm_lab' / '__init__.py').read_text(encoding='utf-8')
    return re.search(r"^__version__ = '([^']+)'$", text, re.MULTILINE).group(1)


setup(
    name='slm_lab',
    version=read_version(),
    description='Deep reinforcement learning in PyTorch: one JSON spec per experiment, resumed bit for bit',
    license='MIT',
    python_requires='>=3.10',
    packages=find_packages(include=['slm_lab', 'slm_lab.*']),
    package_data={'slm_lab': ['spec/**/*.json']},
    py_modules=['run_lab'],
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={'console_scripts': ['slm-lab = run_lab:main']},
)
