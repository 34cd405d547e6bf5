import io

import numpy as np
import pytest
import zstandard

from slm_lab.experiment import segment_log
from slm_lab.experiment.segment_log import (
    MAGIC,
    SegmentError,
    plan_segment,
    read_segment,
    rows_per_chunk,
    write_segment,
)
from slm_lab.lib.state import Ring

CAPACITY = 7


def empty_ring(capacity=CAPACITY):
    """Of all kinds of rows: scalars, wide ones, an odd dtype, and rows of no bytes."""
    arrays = {
        'action': np.zeros(capacity, np.int64),
        'frame': np.zeros((capacity, 3, 2), np.uint8),
        'done': np.zeros(capacity, bool),
        'half': np.zeros((capacity, 2), np.float16),
        'nothing': np.zeros((capacity, 0), np.float32),
    }
    return Ring(arrays, 0)


def write_rows(ring, stop):
    for row in range(ring.written, stop):
        slot = row % ring.capacity
        ring.arrays['action'][slot] = row
        ring.arrays['frame'][slot] = np.arange(6).reshape(3, 2) + row
        ring.arrays['done'][slot] = row % 3 == 0
        ring.arrays['half'][slot] = row / 2
    ring.written = max(ring.written, stop)
    return ring


def rows_of(ring):
    return [int(ring.arrays['action'][row % ring.capacity]) for row in range(ring.first_row, ring.written)]


def record(ring, segments):
    return {'capacity': ring.capacity, 'layout': ring.layout(), 'written': ring.written, 'segments': segments}


class Log:
    """What a store does with segments, in memory: one save after another of one ring."""

    def __init__(self):
        self.saved, self.content = None, {}

    def save(self, ring):
        kept, start = plan_segment(ring, self.saved)
        if start < ring.written:
            file = io.BytesIO()
            write_segment(file, ring, start, ring.written)
            name = f'{len(self.content)}'
            self.content[name] = file.getvalue()
            kept = [*kept, {'file': name, 'start': start, 'stop': ring.written}]
        self.saved = record(ring, kept)

    def read(self, ring):
        first_row = max(0, self.saved['written'] - self.saved['capacity'])
        for s in self.saved['segments']:
            read_segment(io.BytesIO(self.content[s['file']]), ring, s['start'], s['stop'], first_row)
        return Ring(ring.arrays, self.saved['written'])


def same(a, b):
    return all(
        a.arrays[name][slots].tobytes() == b.arrays[name][slots].tobytes()
        for name in a.arrays
        for slots in a.slots(a.first_row, a.written)
    )


@pytest.mark.parametrize('first', range(2 * CAPACITY + 2))
def test_ring_comes_back_at_every_offset_and_distance_of_three_saves(first):
    for second in range(first, first + 2 * CAPACITY + 2):
        for third in range(second, second + CAPACITY + 2):
            ring, log = empty_ring(), Log()
            for stop in (first, second, third):
                log.save(write_rows(ring, stop))
            back = log.read(empty_ring())
            assert back.written == third
            assert rows_of(back) == list(range(max(0, third - CAPACITY), third))
            assert same(ring, back)


def test_only_rows_since_the_save_before_are_written():
    ring, log = empty_ring(), Log()
    for stop in (3, 5, 5, 9):
        log.save(write_rows(ring, stop))
    # rows 0 and 1 are overwritten, row 2 of the first segment is not
    assert [(s['start'], s['stop']) for s in log.saved['segments']] == [(0, 3), (3, 5), (5, 9)]
    log.save(write_rows(ring, 10))
    assert [(s['start'], s['stop']) for s in log.saved['segments']] == [(3, 5), (5, 9), (9, 10)]


def test_segments_wholly_overwritten_are_dropped():
    ring, log = empty_ring(), Log()
    log.save(write_rows(ring, 5))
    log.save(write_rows(ring, 40))
    assert [(s['start'], s['stop']) for s in log.saved['segments']] == [(33, 40)]


def test_ring_that_does_not_continue_the_saved_one_is_written_whole():
    ring = write_rows(empty_ring(), 5)
    saved = record(ring, [{'file': 'a', 'start': 0, 'stop': 5}])
    assert plan_segment(ring, saved) == (saved['segments'], 5)
    assert plan_segment(ring, None) == ([], 0)
    assert plan_segment(ring, saved | {'written': 6}) == ([], 0)
    assert plan_segment(ring, saved | {'capacity': 8}) == ([], 0)
    assert plan_segment(ring, saved | {'layout': {}}) == ([], 0)


def grown(ring, capacity, first_row):
    """The rows from `first_row` on in a ring of another capacity."""
    larger = empty_ring(capacity)
    for row in range(first_row, ring.written):
        for name, array in larger.arrays.items():
            array[row % capacity] = ring.arrays[name][row % ring.capacity]
    return Ring(larger.arrays, ring.written, first_row)


@pytest.mark.parametrize('capacity', [8, 9, 11, 13, 14, 40])
@pytest.mark.parametrize('stop', range(5, 30))
def test_a_ring_that_grew_needs_no_row_written_again(stop, capacity):
    """Whatever the old segments' chunks look like in the new capacity."""
    for needed in range(CAPACITY + 1):
        first_row = max(0, stop - needed)
        ring, log = Ring(empty_ring().arrays, 0, 0), Log()
        for end in (*range(0, stop, 6), stop):
            ring = Ring(write_rows(ring, end).arrays, end, max(0, end - CAPACITY))
            log.save(ring)
        ring = write_rows(grown(ring, capacity, first_row), stop + 1)
        log.save(ring)
        assert log.saved['segments'][-1]['start'] == stop
        assert all(s['stop'] > first_row for s in log.saved['segments'])
        back = Ring(empty_ring(capacity).arrays, stop + 1, first_row)
        for s in log.saved['segments']:
            read_segment(io.BytesIO(log.content[s['file']]), back, s['start'], s['stop'], first_row)
        assert same(ring, back) and rows_of(back) == list(range(first_row, stop + 1))


def test_only_a_ring_that_grows_may_have_chunks_over_its_end():
    file = io.BytesIO()
    write_segment(file, write_rows(empty_ring(), 7), 3, 7)
    with pytest.raises(SegmentError, match='crosses the end of the ring'):
        read_segment(io.BytesIO(file.getvalue()), empty_ring(5), 3, 7, 3)
    read_segment(io.BytesIO(file.getvalue()), Ring(empty_ring(5).arrays, 7, 3), 3, 7, 3)
    with pytest.raises(SegmentError, match='crosses the end of the ring'):  # more rows than it has slots
        read_segment(io.BytesIO(file.getvalue()), Ring(empty_ring(3).arrays, 7, 4), 3, 7, 4)


def test_number_of_segments_is_bounded(monkeypatch):
    monkeypatch.setattr(segment_log, 'MAX_SEGMENTS', 3)
    ring, log, counts = empty_ring(), Log(), []
    for stop in range(1, 9):
        log.save(write_rows(ring, stop))
        counts.append(len(log.saved['segments']))
        assert same(ring, log.read(empty_ring()))
    assert counts == [1, 2, 3, 1, 2, 3, 1, 2]
    log.save(ring)  # nothing new: no reason to write all again
    assert len(log.saved['segments']) == 2


def test_chunks_hold_256_large_rows_or_2_mib_of_small_ones():
    assert rows_per_chunk(84 * 84) == 256
    assert rows_per_chunk(1024) == 256
    assert rows_per_chunk(8) == 2**21 // 8
    assert rows_per_chunk(1023) == 2**21 // 1023
    assert rows_per_chunk(2**20) == 32  # never more than 32 MiB
    assert rows_per_chunk(2**30) == 1


def test_segment_is_one_zstd_frame_per_array_and_chunk():
    ring = Ring({'frame': np.zeros((600, 1024), np.uint8)}, 600)
    ring.arrays['frame'][:] = np.arange(600)[:, None] % 251
    file = io.BytesIO()
    write_segment(file, ring, 0, 600)
    content, sizes = file.getvalue()[len(MAGIC) :], []
    while content:
        index, rows, row, length = segment_log._HEADER.unpack(content[:24])
        raw = zstandard.ZstdDecompressor().decompress(content[24 : 24 + length])
        assert raw == ring.arrays['frame'][row : row + rows].tobytes()
        sizes.append((index, rows, row))
        content = content[24 + length :]
    assert sizes == [(0, 256, 0), (0, 256, 256), (0, 88, 512)]


def test_chunks_before_the_first_row_are_not_decompressed():
    ring = write_rows(empty_ring(), 3)
    file = io.BytesIO()
    write_segment(file, ring, 0, 3)
    target = empty_ring()
    read_segment(io.BytesIO(file.getvalue()), target, 0, 3, first_row=3)
    assert not target.arrays['frame'].any()
    read_segment(io.BytesIO(file.getvalue()), target, 0, 3, first_row=2)
    assert target.arrays['action'][2] == 2


def test_arrays_that_do_not_lie_in_one_piece_are_written_and_read():
    def ring():
        return Ring({'x': np.zeros((CAPACITY, 4), np.float32)[:, ::2], 'y': np.zeros((2, CAPACITY)).T}, 0)

    source, target = ring(), ring()
    source.arrays['x'][:] = np.arange(14).reshape(CAPACITY, 2)
    source.arrays['y'][:] = np.arange(14).reshape(CAPACITY, 2) + 0.5
    file = io.BytesIO()
    write_segment(file, source, 2, 9)
    read_segment(io.BytesIO(file.getvalue()), target, 2, 9, 2)
    assert (target.arrays['x'] == np.arange(14).reshape(CAPACITY, 2)).all()
    assert (target.arrays['y'] == np.arange(14).reshape(CAPACITY, 2) + 0.5).all()


def test_every_cut_of_a_segment_is_noticed():
    file = io.BytesIO()
    write_segment(file, write_rows(empty_ring(), 9), 2, 9)
    content = file.getvalue()
    for length in range(len(content)):
        with pytest.raises(SegmentError):
            read_segment(io.BytesIO(content[:length]), empty_ring(), 2, 9, 2)


@pytest.mark.parametrize(('start', 'stop'), [(1, 9), (2, 8), (3, 9), (2, 10)])
def test_segment_of_other_rows_is_noticed(start, stop):
    file = io.BytesIO()
    write_segment(file, write_rows(empty_ring(), 9), 2, 9)
    with pytest.raises(SegmentError):
        read_segment(io.BytesIO(file.getvalue()), empty_ring(), start, stop, 2)


def test_chunk_that_unpacks_to_more_than_its_rows_is_refused():
    packed = zstandard.ZstdCompressor().compress(bytes(10_000))
    content = MAGIC + segment_log._HEADER.pack(0, 1, 0, len(packed)) + packed
    with pytest.raises(SegmentError, match='10000 bytes where 1 belong'):
        read_segment(io.BytesIO(content), Ring({'x': np.zeros(2, np.uint8)}, 0), 0, 1, 0)


def test_chunks_in_another_order_are_refused():
    def chunk(row):
        packed = zstandard.ZstdCompressor().compress(bytes([row]))
        return segment_log._HEADER.pack(0, 1, row, len(packed)) + packed

    def read(content):
        ring = Ring({'x': np.full(3, 9, np.uint8)}, 0)
        read_segment(io.BytesIO(content), ring, 0, 2, 0)
        return list(ring.arrays['x'])

    assert read(MAGIC + chunk(0) + chunk(1)) == [0, 1, 9]
    for wrong in (chunk(1) + chunk(0), chunk(0) + chunk(0), chunk(0) + chunk(1) + chunk(2)):
        with pytest.raises(SegmentError, match='where others belong'):
            read(MAGIC + wrong)
