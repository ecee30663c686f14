"""Buffers and specifications of buffers as NumPy arrays, without making any.

`array_in` turns what callers of mpi4py give into the address of something with the fields of a NumPy array, which
`dispatch_arguments` reads:

    array                                 the array itself
    [array, MPI.DOUBLE], (array, "d")     the array
    [array, 6], [array, 6, MPI.DOUBLE]    a view of its first 6 elements
    numpy.float64(2), array.array         a view of the memory

A view is an array's fields in a few words of the dispatch table: its type, place, length, element type and flags. It is
valid until the next call, and nobody but `array_in`'s caller ever sees it.

Of NumPy's scalars, `array.array`, `bytearray` and `bytes` a row of `shown_rows` says where the elements are. A row is
there only if an object of this interpreter has been found to be laid out so.
"""

import array
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

from .atomics import load, store
from .builtin_objects import items_of, whole_number
from .decorators import helper
from .dispatch_table import (
    ARRAY_TYPE,
    DATA,
    DTYPE,
    DTYPE_IDS,
    FLAGS,
    HEADER,
    NDIM,
    READABLE,
    SHAPE,
    SHOWN,
    SHOWN_COUNT,
    VIEW_WORDS,
    VIEWS,
    WRITABLE,
    count_of,
    data_of,
    datatype_number,
    dtype_of,
    flags_of,
    header_nbytes,
    is_in_c_order,
    is_plain,
    number_of_dtype,
)
from .operation_words import get
from .reduce import DTYPES

SHOWN_WORDS = 9
(
    _TYPE,  # id of the type
    _KEY_AT,  # offset, behind the object header, of a word that is KEY
    _KEY,
    _DATA_AT,  # offset of the elements, or of their address
    _IS_INDIRECT,  # 1 if it is their address
    _LENGTH_AT,  # offset of their number, -1 if there is one
    _DTYPE_NUMBER,
    _FLAGS,
    _MAY_MOVE,  # 1 if the program can resize it while it is in use
) = range(SHOWN_WORDS)
_CONTIGUOUS = 0x3


@helper
def view_of(table, place, data, dtype, count, flags):
    """Return the address of a view of `count` elements at `data`, the first view or the second."""
    view = table + 8 * (VIEWS + VIEW_WORDS * place)
    fields = view + get(table, HEADER)
    store(fields - 8, get(table, ARRAY_TYPE))
    store(fields + DATA, data)
    store(fields + NDIM, 1)
    store(fields + SHAPE, fields + FLAGS + 8)
    store(fields + DTYPE, dtype)
    store(fields + FLAGS, flags)
    store(fields + FLAGS + 8, count)
    return view


@helper
def _shown(table, thing, place, may_move):
    """Return the view of a buffer that is no NumPy array; anything else as it is."""
    fields = thing + get(table, HEADER)
    kind = load(fields - 8)
    for number in range(get(table, SHOWN_COUNT)):
        row = get(table, SHOWN) + 8 * SHOWN_WORDS * number
        if load(row + 8 * _TYPE) != kind or load(fields + load(row + 8 * _KEY_AT)) != load(row + 8 * _KEY):
            continue
        if load(row + 8 * _MAY_MOVE) and not may_move:
            return thing
        data = fields + load(row + 8 * _DATA_AT)
        if load(row + 8 * _IS_INDIRECT):
            data = load(data)
        count = load(fields + load(row + 8 * _LENGTH_AT)) if load(row + 8 * _LENGTH_AT) >= 0 else 1
        dtype = get(table, DTYPE_IDS + load(row + 8 * _DTYPE_NUMBER))
        return view_of(table, place, data, dtype, count, load(row + 8 * _FLAGS))
    return thing


@helper
def whole_in(table, thing):
    """Return the array of ``[array, MPI.DOUBLE]`` and the like; anything else as it is."""
    number, items = items_of(table, thing)
    if number != 2:
        return thing
    array = load(items)
    if not is_plain(table, array, READABLE):
        return thing
    dtype = number_of_dtype(table, array)
    return array if dtype >= 0 and datatype_number(table, load(items + 8)) == dtype else thing


@helper
def array_in(table, thing, place, blocks, may_move):
    """Return an array, or a view, of what a specification says; anything else as it is.

    Parameters
    ----------
    table, thing : int
        Address of a table for plain calls; what `id` says of the specification, or 0.
    place : int
        Which view is used, 0 or 1.
    blocks : int
        So many times the count of the specification are meant.
    may_move : bool
        Whether buffers that the program can resize are wanted, too.
    """
    if thing == 0 or is_plain(table, thing, 0):
        return thing
    number, items = items_of(table, thing)
    if number < 0:
        return _shown(table, thing, place, may_move)
    if not 2 <= number <= 3:
        return thing
    array = _shown(table, load(items), place, may_move)
    if not is_plain(table, array, READABLE):
        return thing
    dtype, last = number_of_dtype(table, array), load(items + 8 * number - 8)
    is_typed = dtype >= 0 and datatype_number(table, last) == dtype
    if is_typed and number == 2:
        return array
    count, total = whole_number(table, load(items + 8)), count_of(table, array)
    if not is_typed and (number == 3 or dtype < 0):
        return thing
    if not 0 <= count <= total or count * blocks > total or not is_in_c_order(table, array):
        return thing
    return view_of(table, place, data_of(table, array), dtype_of(table, array), count * blocks, flags_of(table, array))


def shown_rows() -> np.ndarray:
    """Return the rows of buffers whose layout is as expected, int64 of shape (rows, SHOWN_WORDS)."""
    rows = [*_scalars(), *_arrays(), *_bytes()]
    return np.array(rows, np.int64).reshape(-1, SHOWN_WORDS)


def _scalars() -> Iterator[tuple[int, ...]]:
    for number, dtype in enumerate(DTYPES):
        scalar = dtype.type(3)
        nbytes = header_nbytes() + dtype.itemsize
        if type(scalar).__basicsize__ >= nbytes and _bytes_at(scalar, 0, dtype.itemsize) == scalar.tobytes():
            yield id(dtype.type), -8, id(dtype.type), 0, 0, -1, number, READABLE | _CONTIGUOUS, 0


def _arrays() -> Iterator[tuple[int, ...]]:
    """Of arrays of the standard library, whose element type is a pointer: it is the same for all of one letter."""
    for code in "bBhHiIlLqQfd":
        dtype, made = np.dtype(code), array.array(code, [1, 2, 3])
        if dtype not in DTYPES or array.array.__basicsize__ < header_nbytes() + 5 * 8:
            continue
        length, data, _, kind, *_ = _words_of(made, 5)
        other = _words_of(array.array(code), 4)[3]
        if (data, length) == made.buffer_info() and kind == other and kind:
            number = DTYPES.index(dtype)
            yield id(array.array), 24, kind, 8, 1, 0, number, WRITABLE | _CONTIGUOUS, 1


def _bytes() -> Iterator[tuple[int, ...]]:
    number, text = DTYPES.index(np.dtype(np.uint8)), b"0123456789"
    if _words_of(text, 1) == [len(text)] and _bytes_at(text, 16, len(text)) == text:
        yield id(bytes), -8, id(bytes), 16, 0, 0, number, READABLE | _CONTIGUOUS, 0
    made = bytearray(text)
    if bytearray.__basicsize__ < header_nbytes() + 4 * 8:
        return
    length, _, _, data = _words_of(made, 4)
    if (length, data) == (len(made), ctypes.addressof(ctypes.c_char.from_buffer(made))):
        yield id(bytearray), -8, id(bytearray), 24, 1, 0, number, WRITABLE | _CONTIGUOUS, 1


def _words_of(thing: Any, count: int) -> list[int]:
    """Return the first words behind the header of an object that is at least as long."""
    return list((ctypes.c_int64 * count).from_address(id(thing) + header_nbytes()))


def _bytes_at(thing: Any, offset: int, nbytes: int) -> bytes:
    return ctypes.string_at(id(thing) + header_nbytes() + offset, nbytes)
