"""Makes `agent_cases` importable for the tests of the folders below, which compute on one thread."""

import agent_cases  # noqa: F401
import pytest
import torch


@pytest.fixture(autouse=True, scope='session')
def one_thread():
    """As in a session: on nets as small as these, threads spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
