"""Entries of derived datatypes as NumPy arrays, without making any: packed copies where the entries have gaps.

`packed_in` takes up what `buffer_views.array_in` leaves as it is::

    [array, column], [array, 2, block]    a view of a packed copy of the entries; of the array, if there are no gaps

A derived datatype is known by its handle. Python enters its layout the first time, and the MPI library calls
`forget_type` when it is freed. Room for packed copies comes with the first call of a communicator whose arguments
Python prepares. After the call the elements of a result are copied to their places.
"""

from .atomics import load, load_int32, store
from .buffer_views import view_of
from .builtin_objects import items_of, whole_number
from .decorators import helper, short_kernel
from .dispatch_table import (
    DTYPE_IDS,
    HEADER,
    ITEMSIZES,
    PACKING,
    READABLE,
    count_of,
    data_of,
    flags_of,
    is_in_c_order,
    is_plain,
    number_of_dtype,
)
from .object_kernels import takes_objects
from .operation_words import DONE, OTHER, TOO_LONG, get
from .strided_copy import (
    ADDRESS,
    CURSOR_WORDS,
    CURSORS,
    DIMENSIONS,
    LAYOUT_WORDS,
    MAX_DIMENSIONS,
    NBYTES,
    RUN,
    SHAPE,
    STRIDES,
    copy_between,
    seek,
)

PACKED_NBYTES = 64 << 10
"""The longest packed copy: with longer ones the time of Python is small. It is `dispatch_table.STAGED_NBYTES` where
calls are made by messages: up to that length a plan serves all buffers."""

(
    TYPES,  # address of the table of known types
    DATATYPE_TYPE,  # id(MPI.Datatype)
    HANDLE_NBYTES,  # bytes of a handle, 4 or 8
    IN_USE,  # 1 from packing to the end of the call
    PENDING,  # 1 if the call has a result that has to be unpacked
    BASE,  # to which the layout of the result is relative
    LONGEST_COPY,  # bytes of the longest packed copy
    BLOCKS,  # number of blocks of entries that the result has, see `packed_blocks`; 0: it has entries alone
    ENTRY_NBYTES,  # bytes of an entry of these blocks
    LAYOUTS,  # layout of the entries of sendbuf, of recvbuf, and of a packed copy
) = range(10)
_FLAT = LAYOUTS + 2 * LAYOUT_WORDS
_CURSORS = _FLAT + LAYOUT_WORDS
COPIES = _CURSORS + CURSORS
"""Words before the packed copies in the room of a communicator. Behind them are two words for each rank: the place of
its block in recvbuf, in bytes, and its number of entries."""

(
    HANDLE,
    EXTENT,
    LOW,  # first byte of an entry, and the one behind the last
    HIGH,
    MOVED,  # number of the element type if elements are only moved, and if they are reduced; -1: none
    REDUCED,
    USED,  # 1 if a call has found it here
    TYPE_LAYOUT,  # of one entry; its NBYTES are 0 where there is no type
) = range(8)
TYPE_WORDS = TYPE_LAYOUT + LAYOUT_WORDS
TYPES_LENGTH = 64
MOST_TYPE_DIMENSIONS = MAX_DIMENSIONS - 1
"""One more is that of the entries."""
MOST_BYTES = 1 << 31
"""Bound of extents and counts that compiled code takes: their products must not overflow."""
PACKED = 256
"""Added to the status of a call that goes on and has the room for packed copies, which Python gives back after it."""


@helper
def type_entry(handle):
    """Return in which row of the table a handle is, if it is known and not in the next one; a multiple of 2."""
    return 2 * ((handle ^ handle >> 5 ^ handle >> 11) % (TYPES_LENGTH // 2))


@helper
def known_type(packing, datatype, header):
    """Return the address of the row of a datatype; 0 for any object that is no known one."""
    if load(datatype + header - 8) != load(packing + 8 * DATATYPE_TYPE):
        return 0
    at = datatype + header
    handle = load(at) if load(packing + 8 * HANDLE_NBYTES) == 8 else load_int32(at)
    row = load(packing + 8 * TYPES) + 8 * TYPE_WORDS * type_entry(handle)
    for _ in range(2):
        if load(row + 8 * HANDLE) == handle and load(row + 8 * (TYPE_LAYOUT + NBYTES)) != 0:
            return row
        row += 8 * TYPE_WORDS
    return 0


@helper
def lie_inside(row, first, count, nbytes):
    """Say whether so many entries, at least one, are in an array of so many bytes, entry number `first` on."""
    extent = load(row + 8 * EXTENT)
    begin, end = first * extent, (first + count - 1) * extent
    return min(begin, end) + load(row + 8 * LOW) >= 0 and max(begin, end) + load(row + 8 * HIGH) <= nbytes


@helper
def _number_of_entries(table, row, items, number, blocks, nbytes):
    """Return how many entries a specification means; -1 if that is left to Python."""
    if number == 3:
        count = whole_number(table, load(items + 8)) * blocks
    else:
        extent = load(row + 8 * EXTENT)
        count = nbytes // extent if extent > 0 and nbytes % extent == 0 else -1
        if count % blocks != 0:
            return -1
    return count if 0 < count < MOST_BYTES and lie_inside(row, 0, count, nbytes) else -1


@helper
def lay_out(layout, row, count):
    """Write the layout of so many entries."""
    one = row + 8 * TYPE_LAYOUT
    added, dimensions = int(count > 1), load(one + 8 * DIMENSIONS)
    store(layout + 8 * ADDRESS, load(one + 8 * ADDRESS))
    store(layout + 8 * NBYTES, load(one + 8 * NBYTES) * count)
    store(layout + 8 * RUN, load(one + 8 * RUN))
    store(layout + 8 * DIMENSIONS, dimensions + added)
    store(layout + 8 * SHAPE, count)
    store(layout + 8 * STRIDES, load(row + 8 * EXTENT))
    for dimension in range(dimensions):
        store(layout + 8 * (SHAPE + added + dimension), load(one + 8 * (SHAPE + dimension)))
        store(layout + 8 * (STRIDES + added + dimension), load(one + 8 * (STRIDES + dimension)))


@helper
def blocks_of(packing):
    """Return the address of the words of blocks."""
    return packing + 8 * COPIES + 2 * load(packing + 8 * LONGEST_COPY)


@helper
def copy_entries(packing, layout, base, packed, packs):
    """Copy the elements of a layout to a packed copy, or from it."""
    flat, cursors, nbytes = packing + 8 * _FLAT, packing + 8 * _CURSORS, load(layout + 8 * NBYTES)
    store(flat + 8 * NBYTES, nbytes)
    store(flat + 8 * RUN, nbytes)
    other = cursors + 8 * CURSOR_WORDS
    seek(cursors, flat, packed, 0)
    seek(other, layout, base, 0)
    if packs:
        copy_between(cursors, other, nbytes)
    else:
        copy_between(other, cursors, nbytes)


@helper
def _packed_view(table, packing, row, place, base, count, dtype, flags, is_read):
    """Return the view of entries, having packed those with gaps if they are read; 0 if they are too long for that."""
    one = row + 8 * TYPE_LAYOUT
    nbytes, itemsize = load(one + 8 * NBYTES) * count, get(table, ITEMSIZES + dtype)
    first, elements = base + load(one + 8 * ADDRESS), nbytes // itemsize
    whole = load(one + 8 * DIMENSIONS) == 0 and (count == 1 or load(one + 8 * RUN) == load(row + 8 * EXTENT))
    if whole and first % itemsize == 0:
        return view_of(table, place, first, get(table, DTYPE_IDS + dtype), elements, flags)
    longest = load(packing + 8 * LONGEST_COPY)
    if nbytes > longest:
        return 0
    layout, packed = packing + 8 * (LAYOUTS + LAYOUT_WORDS * place), packing + 8 * COPIES + longest * place
    lay_out(layout, row, count)
    if is_read:
        copy_entries(packing, layout, base, packed, True)
    if place == 1:
        store(packing + 8 * BASE, base)
        store(packing + 8 * PENDING, 1)
    return view_of(table, place, packed, get(table, DTYPE_IDS + dtype), elements, flags)


@helper
def packed_in(table, thing, place, blocks, reduces, is_read):
    """Return the view of a specification with a known derived datatype; anything else as it is.

    Parameters
    ----------
    table, thing, place, blocks
        As `array_in` takes them, of a blocking call. Elements at place 1 are unpacked after the call.
    reduces : int
        1 if elements are reduced, 0 if they are only moved.
    is_read : bool
        Whether the elements are packed. The call must overwrite all those that are not.
    """
    number, items = items_of(table, thing) if thing != 0 else (0, 0)
    if not 2 <= number <= 3:
        return thing
    array, packing = load(items), get(table, PACKING)
    if not is_plain(table, array, READABLE) or not is_in_c_order(table, array) or number_of_dtype(table, array) < 0:
        return thing
    row = known_type(packing, load(items + 8 * number - 8), get(table, HEADER))
    dtype = load(row + 8 * (MOVED + reduces)) if row != 0 else -1
    if dtype < 0:
        return thing
    store(row + 8 * USED, 1)
    nbytes = count_of(table, array) * get(table, ITEMSIZES + number_of_dtype(table, array))
    count = _number_of_entries(table, row, items, number, blocks, nbytes)
    if count < 0:
        return thing
    base, flags = data_of(table, array), flags_of(table, array)
    view = _packed_view(table, packing, row, place, base, count, dtype, flags, is_read)
    return view if view != 0 else thing


@helper
def begin_packed(table):
    """Take the room for packed copies; return False if there is none, or another call uses it."""
    packing = get(table, PACKING)
    if packing == 0 or load(packing + 8 * IN_USE) != 0:
        return False
    store(packing + 8 * IN_USE, 1)
    store(packing + 8 * PENDING, 0)
    store(packing + 8 * BLOCKS, 0)
    return True


@helper
def keep_places(table):
    """Leave the places of the result as they are, since the call does not write it."""
    store(get(table, PACKING) + 8 * PENDING, 0)


@helper
def copy_block(packing, layout, base, number, packed, packs):
    """Copy block `number` of a result, or of a message, to its place in a packed copy, or from it; return its bytes."""
    block = blocks_of(packing) + 16 * number
    count = load(block + 8)
    nbytes = count * load(packing + 8 * ENTRY_NBYTES)
    store(layout + 8 * SHAPE, count)
    store(layout + 8 * NBYTES, nbytes)
    if nbytes:
        copy_entries(packing, layout, base + load(block), packed, packs)
    return nbytes


@helper
def _unpack(packing):
    """Copy the result, if there is one, from the packed copy to its places, and give the room back."""
    if load(packing + 8 * PENDING) != 0:
        layout, base = packing + 8 * (LAYOUTS + LAYOUT_WORDS), load(packing + 8 * BASE)
        packed, blocks = packing + 8 * COPIES + load(packing + 8 * LONGEST_COPY), load(packing + 8 * BLOCKS)
        if blocks == 0:
            copy_entries(packing, layout, base, packed, False)
        for number in range(blocks):
            packed += copy_block(packing, layout, base, number, packed, False)
    store(packing + 8 * IN_USE, 0)


@helper
def end_packed(table, status):
    """Unpack the result of a call that has ended; return the status, plus PACKED if it goes on and keeps the room."""
    packing = get(table, PACKING)
    if status == DONE:
        _unpack(packing)
    elif status in (OTHER, TOO_LONG):
        store(packing + 8 * IN_USE, 0)
    else:
        status += PACKED
    return status


@short_kernel("int64")
def unpack_later(packing):
    """Unpack the result of a call that Python has completed."""
    if load(packing + 8 * IN_USE) != 0:
        _unpack(packing)


@takes_objects("object", "object", "int64")
def forget_type(datatype, keyval, row):
    """Remove the type of a row: a function that the MPI library calls when the datatype is freed.

    It is compiled, so that no signal handler can keep it from doing so.
    """
    store(row + 8 * (TYPE_LAYOUT + NBYTES), 0)
    return 0
