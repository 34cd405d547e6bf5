"""Makes `resume` and its like importable for the tests of the folders below, and lends them what their runs need."""

import signal
import sys

import pytest
import resume
from lab_process import Lab, fork_server


@pytest.fixture(scope='session')
def fresh():
    """A process that shares nothing with this one; one for all tests of a worker, since importing torch takes long."""
    process = resume.FreshProcess()
    yield process
    process.close()


@pytest.fixture
def lab(tmp_path):
    """A folder to run the lab in, in processes of their own that end with the test."""
    lab = Lab(tmp_path, fork_server())
    yield lab
    lab.close()


@pytest.fixture
def hide(monkeypatch):
    """Makes a package fail to import as if it were not installed, whatever the tests before this one imported of it."""

    def hide(package):
        inside = [name for name in sys.modules if name.startswith(f'{package}.')]
        for name in inside:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)

    return hide


@pytest.fixture
def command(monkeypatch, tmp_path):
    """`run_lab.main` in this process: no graphs, which have tests of their own, no windows, data below tmp_path, and
    signals and logging afterwards as they were."""
    from slm_lab.experiment import analysis
    from slm_lab.experiment.stop import SIGNALS
    from slm_lab.lib import logger

    monkeypatch.setattr(analysis, '_draw', lambda *args: True)
    monkeypatch.setenv('LAB_DATA_DIR', str(tmp_path / 'data'))
    monkeypatch.setenv('RENDER', 'false')
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    logger.close()
