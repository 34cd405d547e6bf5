"""Random streams derived by name, and the process's generators as one part with a state."""

import hashlib
import random

import numpy as np
import pytest
import torch

from slm_lab.lib import rng
from slm_lab.lib.rng import GlobalStreams
from slm_lab.lib.state import check_tree, first_difference, snapshot


def draw():
    """A few numbers from each of the process's generators; gauss leaves half of a pair behind."""
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(2).tolist()


@pytest.fixture
def process():
    """Puts the process's generators back."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def test_a_stream_depends_on_seed_and_names_alone():
    first = rng.generator(7, 'memory').random(4)
    rng.generator(7, 'explore').random(100)
    assert np.array_equal(rng.generator(7, 'memory').random(4), first)
    others = [(8, 'memory'), (7, 'explore'), (7, 'memory', 0), (7, 'mem', 'ory'), (7,)]
    seeds = {rng.derive_seed(seed, *names) for seed, *names in [*others, (7, 'memory')]}
    assert len(seeds) == len(others) + 1
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_is_the_same_on_every_machine():
    """The first 8 bytes of sha256, little end first, without the lowest bit."""
    digest = hashlib.sha256(b'7:memory/0').digest()
    assert rng.derive_seed(7, 'memory', 0) == sum(byte * 256**i for i, byte in enumerate(digest[:8])) // 2


def test_a_generator_goes_on_from_its_state(tmp_path):
    one = rng.generator(1, 'x')
    one.integers(0, 10, 3, dtype=np.int32)  # leaves half of a 64-bit word behind
    torch.save(rng.generator_state(one), tmp_path / 'x.pt')
    other = rng.generator(2, 'y')
    rng.set_generator_state(other, torch.load(tmp_path / 'x.pt', weights_only=True))
    assert np.array_equal(one.integers(0, 10, 9, dtype=np.int32), other.integers(0, 10, 9, dtype=np.int32))


def test_making_streams_draws_nothing_from_the_process(process):
    before = snapshot(rng._process_state())
    GlobalStreams(5, 'evaluation')
    assert first_difference(rng._process_state(), before) is None


def test_streams_are_those_of_a_seeded_process(process):
    with GlobalStreams(5, 'x'):
        lent = draw()
    seed = rng.derive_seed(5, 'x')
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    assert draw() == lent


def test_streams_are_lent_to_a_block_and_given_back(process):
    draw()
    before = snapshot(rng._process_state())
    streams = GlobalStreams(5, 'evaluation')
    with streams:
        first = draw()
    assert first_difference(rng._process_state(), before) is None
    draw()
    with streams:
        second = draw()
    with GlobalStreams(5, 'evaluation'):
        assert draw() == first
        assert draw() == second
    with GlobalStreams(6, 'evaluation'):
        assert draw() != first


def test_streams_are_given_back_when_the_block_fails(process):
    before = snapshot(rng._process_state())
    with pytest.raises(KeyError), GlobalStreams(5):
        draw()
        raise KeyError
    assert first_difference(rng._process_state(), before) is None


def test_installed_streams_are_the_process_s(process):
    streams = GlobalStreams(5, 'global')
    streams.install()
    draw()
    state = snapshot(streams.state_dict())
    expected = draw()
    draw()
    streams.load_state_dict(state)
    assert draw() == expected
    other = GlobalStreams(9, 'global')
    other.load_state_dict(state)
    other.install()
    assert draw() == expected


def test_lent_streams_go_on_from_their_state():
    one, other = GlobalStreams(5), GlobalStreams(6)
    with one:
        draw()
    other.load_state_dict(snapshot(one.state_dict()))
    with one:
        expected = draw()
    with other:
        assert draw() == expected


def test_the_state_is_a_tree():
    check_tree(GlobalStreams(5).state_dict())
    check_tree(rng.generator_state(rng.generator(5)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU')
def test_a_gpu_s_stream_is_lent_and_given_back(process):
    GlobalStreams(5, 'global').install()
    torch.rand(2, device='cuda')
    before = torch.cuda.get_rng_state()
    streams = GlobalStreams(5, 'evaluation')
    with streams:
        first = torch.rand(2, device='cuda')
    assert torch.equal(torch.cuda.get_rng_state(), before)
    with streams:
        assert not torch.equal(torch.rand(2, device='cuda'), first)
