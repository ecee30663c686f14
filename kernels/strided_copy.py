"""Copies between two layouts of equal length: runs of bytes at regular distances, in up to twelve dimensions.

A layout is a row of words in memory::

    ADDRESS  of the first byte, relative to a base that the caller has
    NBYTES   of all runs together
    RUN      bytes of a run, at least 1
    DIMENSIONS, SHAPE..., STRIDES...   runs in each dimension and their distances in bytes, the outermost first

Two layouts with the same bytes may have other runs and dimensions. A *cursor* is a place in a layout. A copy goes on by
the longest piece that is contiguous in both, and takes together pieces at equal distances.
"""

from .atomics import copy, load, store
from .decorators import helper, inline_helper, kernel_for

MAX_DIMENSIONS = 12
ADDRESS, NBYTES, RUN, DIMENSIONS, SHAPE = range(5)
STRIDES = SHAPE + MAX_DIMENSIONS
LAYOUT_WORDS = STRIDES + MAX_DIMENSIONS

_LAYOUT, _NOW, _LEFT, _COUNTERS = range(4)
"""Words of a cursor: its layout, the address of the next byte, what is left of the run, numbers of the run."""
CURSOR_WORDS = _COUNTERS + MAX_DIMENSIONS
CURSORS = 2 * CURSOR_WORDS
"""Words of memory for `copy_block`."""
_WORD_COPY_NBYTES = 128
"""Pieces up to this length are copied word by word, which is quicker than a call of memcpy."""


@helper
def reach(layout):
    """Return the first byte of a layout relative to its base, and the one behind the last."""
    low = load(layout + 8 * ADDRESS)
    high = low + load(layout + 8 * RUN)
    for dimension in range(load(layout + 8 * DIMENSIONS)):
        width = (load(layout + 8 * (SHAPE + dimension)) - 1) * load(layout + 8 * (STRIDES + dimension))
        low += min(width, 0)
        high += max(width, 0)
    return low, high


@helper
def seek(cursor, layout, base, first):
    """Set a cursor to byte `first` of a layout, counted without holes."""
    run = load(layout + 8 * RUN)
    number = first // run
    offset = first - number * run
    address = base + load(layout + 8 * ADDRESS)
    for dimension in range(load(layout + 8 * DIMENSIONS) - 1, -1, -1):
        count = load(layout + 8 * (SHAPE + dimension))
        store(cursor + 8 * (_COUNTERS + dimension), number % count)
        address += number % count * load(layout + 8 * (STRIDES + dimension))
        number //= count
    store(cursor + 8 * _LAYOUT, layout)
    store(cursor + 8 * _NOW, address + offset)
    store(cursor + 8 * _LEFT, run - offset)


@helper
def next_byte(cursor):
    """Return the address of the next byte."""
    return load(cursor + 8 * _NOW)


@helper
def bytes_left(cursor):
    """Return how many bytes are left of the run, at least one."""
    return load(cursor + 8 * _LEFT)


@inline_helper
def _pieces(cursor, nbytes):
    """Return how many pieces of so many bytes, no more than are left of the run, follow, and their distance."""
    layout, left = load(cursor + 8 * _LAYOUT), load(cursor + 8 * _LEFT)
    if left > nbytes:
        return left // nbytes, nbytes
    last = load(layout + 8 * DIMENSIONS) - 1
    if last < 0 or load(layout + 8 * RUN) != nbytes:
        return 1, nbytes
    rest = load(layout + 8 * (SHAPE + last)) - load(cursor + 8 * (_COUNTERS + last))
    return rest, load(layout + 8 * (STRIDES + last))


@inline_helper
def go_on(cursor, nbytes, pieces):
    """Move a cursor on by pieces that `_pieces` has found."""
    left = load(cursor + 8 * _LEFT)
    if left > nbytes:
        left -= nbytes * pieces
        store(cursor + 8 * _NOW, load(cursor + 8 * _NOW) + nbytes * pieces)
        store(cursor + 8 * _LEFT, left)
        if left == 0:
            _next_run(cursor, 1, load(cursor + 8 * _NOW))
    else:
        _next_run(cursor, pieces, load(cursor + 8 * _NOW) + nbytes)


@helper
def _next_run(cursor, runs, behind):
    """Move a cursor on by runs of the innermost dimension; `behind` is the address behind the run where it is."""
    layout = load(cursor + 8 * _LAYOUT)
    run = load(layout + 8 * RUN)
    address, step = behind - run, runs
    for dimension in range(load(layout + 8 * DIMENSIONS) - 1, -1, -1):
        count, stride = load(layout + 8 * (SHAPE + dimension)), load(layout + 8 * (STRIDES + dimension))
        counter = load(cursor + 8 * (_COUNTERS + dimension)) + step
        address += step * stride
        if counter < count:
            store(cursor + 8 * (_COUNTERS + dimension), counter)
            break
        store(cursor + 8 * (_COUNTERS + dimension), 0)
        address -= count * stride
        step = 1
    store(cursor + 8 * _NOW, address)
    store(cursor + 8 * _LEFT, run)


@helper
def _copy_pieces(target, target_step, source, source_step, nbytes, pieces):
    """Copy pieces of `nbytes` bytes at equal distances."""
    if target_step == nbytes and source_step == nbytes:
        copy(target, source, nbytes * pieces)
    elif nbytes <= _WORD_COPY_NBYTES and (nbytes | target | source | target_step | source_step) & 7 == 0:
        for piece in range(pieces):
            to, origin = target + piece * target_step, source + piece * source_step
            for offset in range(0, nbytes, 8):
                store(to + offset, load(origin + offset))
    else:
        for piece in range(pieces):
            copy(target + piece * target_step, source + piece * source_step, nbytes)


@helper
def copy_between(target, source, nbytes):
    """Copy the next `nbytes` bytes from one cursor to another; both move on."""
    while nbytes > 0:
        piece = min(nbytes, bytes_left(target), bytes_left(source))
        targets, target_step = _pieces(target, piece)
        sources, source_step = _pieces(source, piece)
        pieces = min(targets, sources, nbytes // piece)
        _copy_pieces(next_byte(target), target_step, next_byte(source), source_step, piece, pieces)
        go_on(target, piece, pieces)
        go_on(source, piece, pieces)
        nbytes -= piece * pieces


@kernel_for("int64", "int64", "int64", "int64", "int64")
def copy_block(target, target_base, source, source_base, cursors):
    """Copy a block between two layouts of equal length that do not overlap."""
    other = cursors + 8 * CURSOR_WORDS
    seek(cursors, target, target_base, 0)
    seek(other, source, source_base, 0)
    copy_between(cursors, other, load(source + 8 * NBYTES))
