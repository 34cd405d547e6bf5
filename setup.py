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
    'tensorboardX>=2.6.2,<3',
    'packaging>=23.1,<27',
]

# Environments by family; all are wheels, but for gym, which is Python alone. What gymnasium's own extras would add for
# the same is left out: sources that need swig, and OpenCV with windows.
EXTRAS_REQUIRE = {
    'atari': [
        'ale-py>=0.11,<1',
        'opencv-python-headless>=4.10,<6',
    ],
    'box2d': [
        'box2d==2.3.10',
    ],
    'mujoco': [
        'mujoco>=3.1,<5',
        'imageio>=2.14.1,<3',
    ],
    'vizdoom': [
        'vizdoom>=1.3,<2',
    ],
    'gym': [
        'gym==0.26.2',
    ],
    # search, and many machines
    'ray': [
        'ray[tune]>=2.40,<3',
        'optuna>=4.0,<6',
    ],
    'test': [
        'pytest>=8.0,<10',
        'pytest-xdist>=3.5,<4',
        'pytest-timeout>=2.2,<3',
        'scipy>=1.13,<2',
        'ruff>=0.9,<1',
    ],
}

# extras that bring others along
EXTRAS_BRING = {
    'envs': ['atari', 'box2d', 'mujoco', 'vizdoom', 'gym'],
    'test': ['atari', 'box2d', 'mujoco', 'gym', 'ray'],
}

HERE = Path(__file__).parent


def whole_extras() -> dict[str, list[str]]:
    """What pip sees: each extra with all that it brings along."""
    whole = {name: list(lines) for name, lines in EXTRAS_REQUIRE.items()}
    for name, others in EXTRAS_BRING.items():
        whole.setdefault(name, []).extend(line for other in others for line in EXTRAS_REQUIRE[other])
    return whole


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
    extras_require=whole_extras(),
    entry_points={'console_scripts': ['slm-lab = run_lab:main']},
)
