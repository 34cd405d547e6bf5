"""Ring rows on disk: each save appends one compressed segment with the rows written since the save before.

Layout of a segment file: `MAGIC`, then chunks, each a header (number of the array in name order, rows, first row, bytes
that follow) and one zstd frame with that many consecutive rows of that one array, so that like bytes lie together. No
chunk crosses the end of the ring: it is compressed from the ring's own memory and decompressed straight into it. Only
of a ring that has grown since, a chunk may lie over the end and is read by way of a copy.
"""

import struct

import numpy as np
import zstandard

from slm_lab.lib.errors import LabError

LEVEL = 1
# a ring with more segments than this is written anew as one
MAX_SEGMENTS = 512

MAGIC = b'slmseg1\n'
_HEADER = struct.Struct('<IIQQ')

# Frames resemble each other, so a chunk of 256 shrinks six times better than each alone; small rows need more company.
_ROWS_PER_CHUNK = 256
_SMALL_ROW = 1024
_SMALL_ROWS_CHUNK = 2 * 2**20
_LARGEST_CHUNK = 32 * 2**20


class SegmentError(LabError):
    """A segment file that does not hold the rows that it should hold."""


def plan_segment(ring, saved):
    """Decides which rows a save has to write.

    Args:
        saved: what the save before recorded of this ring, {'capacity', 'layout', 'written', 'segments': [{'start',
            'stop', …}]}, or None.
    Returns: (the saved segments that are still needed, first row to write); the new segment is [first row, written).
    """
    if (
        saved is None
        or (saved['capacity'] != ring.capacity and not ring.grows)
        or saved['layout'] != ring.layout()
        or saved['written'] > ring.written
    ):
        return [], ring.first_row
    kept = [segment for segment in saved['segments'] if segment['stop'] > ring.first_row]
    if len(kept) >= MAX_SEGMENTS and ring.written > saved['written']:
        return [], ring.first_row
    return kept, max(saved['written'], ring.first_row)


def rows_per_chunk(row_bytes):
    """How many consecutive rows of `row_bytes` bytes are compressed together."""
    if row_bytes < _SMALL_ROW:
        return _SMALL_ROWS_CHUNK // row_bytes
    return max(1, min(_ROWS_PER_CHUNK, _LARGEST_CHUNK // row_bytes))


def write_segment(file, ring, start, stop):
    """Writes rows [start, stop), which must all be in the ring still. Takes the memory of one compressed chunk."""
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    file.write(MAGIC)
    for index, array in enumerate(_arrays(ring)):
        step = rows_per_chunk(_row_bytes(array))
        row = start
        for span in ring.slots(start, stop):
            for slot in range(span.start, span.stop, step):
                rows = array[slot : min(slot + step, span.stop)]
                packed = compressor.compress(_as_bytes(rows))
                file.write(_HEADER.pack(index, len(rows), row, len(packed)))
                file.write(packed)
                row += len(rows)
                del packed  # or it would still be there beside the next one


def read_segment(file, ring, start, stop, first_row):
    """Decompresses rows [start, stop) from a segment into the slots of `ring`; its `written` is not looked at.

    Chunks wholly before `first_row` are passed over. Rows before it that share a chunk with needed ones do land in the
    ring, where the rows that once overwrote them do so again: read segments in the order of their rows.

    Raises: SegmentError where the file holds anything else than exactly those rows; the ring is then partly written.
    """
    arrays = _arrays(ring)
    decompressor = zstandard.ZstdDecompressor()
    next_row = [start] * len(arrays)
    if file.read(len(MAGIC)) != MAGIC:
        raise SegmentError('does not begin as a segment does')
    while header := file.read(_HEADER.size):
        if len(header) < _HEADER.size:
            raise SegmentError('ends inside a chunk header')
        index, rows, row, length = _HEADER.unpack(header)
        if index >= len(arrays) or row != next_row[index] or rows == 0 or row + rows > stop:
            raise SegmentError(f'holds rows {row} to {row + rows} of array {index} where others belong')
        spans = ring.slots(row, row + rows)
        if rows > ring.capacity or (len(spans) > 1 and not ring.grows):
            raise SegmentError(f'holds a chunk at row {row} that crosses the end of the ring')
        next_row[index] += rows
        packed = file.read(length)
        if len(packed) < length:
            raise SegmentError('ends inside a chunk')
        if row + rows > first_row:
            _unpack_into(decompressor, packed, arrays[index], spans)
        del packed
    if any(row != stop for row in next_row):
        raise SegmentError(f'ends before row {stop}')


def _unpack_into(decompressor, packed, array, spans):
    if len(spans) == 1:
        _unpack(decompressor, packed, array[spans[0]])
        return
    first, last = spans
    length = first.stop - first.start
    rows = np.empty((length + last.stop, *array.shape[1:]), array.dtype)
    _unpack(decompressor, packed, rows)
    array[first], array[last] = rows[:length], rows[length:]


def _unpack(decompressor, packed, rows):
    target = rows if rows.flags.c_contiguous else rows.copy()
    view = _as_bytes(target)
    try:
        size = zstandard.get_frame_parameters(packed).content_size
        if size != view.nbytes:
            raise SegmentError(f'holds a chunk of {size} bytes where {view.nbytes} belong')
        # one call that fits the whole frame: zstd then writes into the ring with no buffer in between
        with decompressor.stream_reader(packed) as reader:
            done = reader.readinto(view)
    except zstandard.ZstdError as e:
        raise SegmentError(f'holds a chunk that cannot be decompressed: {e}') from None
    if done != view.nbytes:
        raise SegmentError(f'holds a chunk that ends after {done} of {view.nbytes} bytes')
    if target is not rows:
        rows[...] = target


def _arrays(ring):
    """In the order of their names, which two rings of one layout share; rows without bytes need no chunks."""
    return [ring.arrays[name] for name in sorted(ring.arrays) if _row_bytes(ring.arrays[name])]


def _row_bytes(array):
    count = 1
    for n in array.shape[1:]:
        count *= n
    return count * array.itemsize


def _as_bytes(rows):
    """The memory of contiguous rows (else of a copy of them) as a flat run of bytes."""
    if not rows.flags.c_contiguous:
        rows = rows.copy(order='C')
    return memoryview(rows.reshape(-1).view('uint8'))
