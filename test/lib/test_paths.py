import importlib

from slm_lab.lib import paths


def test_data_lies_where_LAB_DATA_DIR_says_else_in_the_checkout_else_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('LAB_DATA_DIR', raising=False)
    monkeypatch.setattr(paths, 'CHECKOUT', None)
    assert paths.data_dir() == tmp_path / 'data'
    monkeypatch.setattr(paths, 'CHECKOUT', tmp_path / 'checkout')
    assert paths.data_dir() == tmp_path / 'checkout' / 'data'
    monkeypatch.setenv('LAB_DATA_DIR', 'runs')
    assert paths.data_dir() == tmp_path / 'runs'


def test_the_checkout_is_where_setup_py_lies_beside_the_package():
    module = importlib.reload(paths)
    assert module.CHECKOUT is not None
    assert (module.CHECKOUT / 'setup.py').is_file()
