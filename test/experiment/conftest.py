"""Lends the tests of this folder searches that need no Ray, and a place for a checkpoint."""

import pytest
import search_trials


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Searches in this process without Ray, one trial after another; stand-ins for their trials; no graphs."""
    from slm_lab.experiment import analysis, experiment_analysis, search
    from slm_lab.lib import logger

    monkeypatch.setattr(search, 'run', search_trials.run_without_ray)
    monkeypatch.setattr(search, 'require_ray', lambda: None)
    monkeypatch.setattr(analysis, '_draw', lambda *args: True)
    monkeypatch.setattr(experiment_analysis, 'draw_experiment', lambda *args: True)
    monkeypatch.setenv('LAB_DATA_DIR', str(tmp_path / 'data'))
    yield
    logger.close()


@pytest.fixture
def folder(tmp_path):
    """Where the checkpoints of a session lie, not made yet."""
    return tmp_path / 'checkpoint' / 'demo_t0_s0'
