"""Blocks of entries of derived datatypes, as vector collectives take them, packed one after the other.

A matrix of 4 x 4 elements in blocks of 2 x 2, of which every rank has one, ``[matrix, [1] * 4, [0, 1, 4, 5], block]``::

    a a b b
    a a b b     the packed copy:  a a a a  b b b b  c c c c  d d d d
    c c d d
    c c d d

See `packed_views` for datatypes that are known, and for the room in which copies are.
"""

from .atomics import load, store
from .buffer_views import view_of
from .builtin_objects import items_of
from .decorators import helper
from .dispatch_table import (
    DTYPE_IDS,
    HEADER,
    INT_TYPE,
    ITEMSIZES,
    PACKING,
    READABLE,
    WRITABLE,
    data_of,
    flags_of,
    is_in_c_order,
    is_plain,
    number_of_dtype,
)
from .operation_words import get
from .packed_views import (
    BASE,
    BLOCKS,
    COPIES,
    ENTRY_NBYTES,
    EXTENT,
    LAYOUTS,
    LONGEST_COPY,
    MOST_BYTES,
    MOVED,
    PENDING,
    TYPE_LAYOUT,
    USED,
    blocks_of,
    copy_block,
    known_type,
    lay_out,
    lie_inside,
)
from .strided_copy import LAYOUT_WORDS, NBYTES
from .vector_specs import nbytes_of, read_places


@helper
def _place_blocks(packing, row, size, numbers, available, is_written):
    """Write the places of blocks; return the bytes of all, -1 if they are not in the array, overlap, or are too long.

    Entries that are written stand in rank order.
    """
    each, extent = load(row + 8 * (TYPE_LAYOUT + NBYTES)), load(row + 8 * EXTENT)
    longest = load(packing + 8 * LONGEST_COPY)
    blocks, total, end = blocks_of(packing), 0, 0
    for rank in range(size):
        count, displ = load(numbers + 8 * rank), load(numbers + 8 * (size + rank))
        if count:
            if max(count, displ) >= MOST_BYTES or not lie_inside(row, displ, count, available):
                return -1
            if is_written and displ < end:
                return -1
            end = displ + count
        total += count * each
        if total > longest:
            return -1
        store(blocks + 16 * rank, displ * extent if count else 0)
        store(blocks + 16 * rank + 8, count)
    return total


@helper
def _known_entries(table, packing, array, datatype, place):
    """Return the row of a known datatype whose entries may be in an array; 0 for others."""
    if not is_plain(table, array, READABLE if place == 0 else WRITABLE) or not is_in_c_order(table, array):
        return 0
    if number_of_dtype(table, array) < 0:
        return 0
    row = known_type(packing, datatype, get(table, HEADER))
    return row if row != 0 and load(row + 8 * MOVED) >= 0 else 0


@helper
def _pack(packing, layout, size, numbers, base, packed, itemsize, is_read):
    """Copy the blocks if they are read, and write their counts and displacements in elements."""
    begin = 0
    for rank in range(size):
        if is_read:
            nbytes = copy_block(packing, layout, base, rank, packed + begin, True)
        else:
            nbytes = load(blocks_of(packing) + 16 * rank + 8) * load(packing + 8 * ENTRY_NBYTES)
        store(numbers + 8 * rank, nbytes // itemsize)
        store(numbers + 8 * (size + rank), begin // itemsize)
        begin += nbytes


@helper
def packed_blocks(table, thing, place, size, numbers, is_read):
    """Return the view of blocks of entries of a known derived datatype, one after the other; 0 for anything else.

    Parameters
    ----------
    table, thing, place, is_read
        As `packed_in` takes them. Only one of the buffers of a call can have such blocks.
    numbers : int
        Address of 2 * size words, which are written, for counts and displacements of blocks in elements of the view.
    """
    number, items = items_of(table, thing) if thing != 0 and get(table, INT_TYPE) != 0 else (0, 0)
    if not 3 <= number <= 4:
        return 0
    array, packing = load(items), get(table, PACKING)
    row = _known_entries(table, packing, array, load(items + 8 * number - 8), place)
    if row == 0 or not read_places(table, items, number - 1, size, numbers, numbers + 8 * size):
        return 0
    store(row + 8 * USED, 1)
    nbytes = _place_blocks(packing, row, size, numbers, nbytes_of(table, array), place == 1)
    if nbytes <= 0:
        return 0
    base, dtype = data_of(table, array), load(row + 8 * MOVED)
    layout, itemsize = packing + 8 * (LAYOUTS + LAYOUT_WORDS * place), get(table, ITEMSIZES + dtype)
    packed = packing + 8 * COPIES + load(packing + 8 * LONGEST_COPY) * place
    lay_out(layout, row, 2)  # entries are a dimension of each block
    store(packing + 8 * ENTRY_NBYTES, load(row + 8 * (TYPE_LAYOUT + NBYTES)))
    _pack(packing, layout, size, numbers, base, packed, itemsize, is_read)
    if place == 1:
        store(packing + 8 * BASE, base)
        store(packing + 8 * BLOCKS, size)
        store(packing + 8 * PENDING, 1)
    return view_of(table, place, packed, get(table, DTYPE_IDS + dtype), nbytes // itemsize, flags_of(table, array))
