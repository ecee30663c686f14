"""NumPy's arrays and scalars of plain element types in records, written and read by compiled code."""

from .atomics import copy, load
from .decorators import helper, linked
from .dispatch_table import HEADER, READABLE, WRITABLE, count_of, data_of, dtype_of, is_in_c_order, is_plain
from .object_words import (
    ARRAY,
    DTYPE_BIT,
    DTYPE_COUNT,
    DTYPES,
    FLAGS_BIT,
    HEAD_NBYTES,
    KIND_BIT,
    MAX_NDIM,
    NDIM_BIT,
    NEW_ARRAY,
    NEW_SCALAR,
    READ_ONLY,
    SCALAR,
    SCALAR_TYPES,
    TABLE,
    ndim_of,
)
from .operation_words import get
from .python_interface import keep, new_array, new_scalar

_NDIM, _SHAPE = 8, 16
"""Offsets behind the object header of an array, see `dispatch_table`."""


@helper
def _place_in(table, thing):
    for place in range(DTYPE_COUNT):
        if load(table + 8 * place) == thing:
            return place
    return -1


@helper
def itemsize_at(words, number):
    """Return the bytes of an element of the type with this number."""
    return load(get(words, DTYPES) + 8 * (DTYPE_COUNT + number))


@helper
def dtype_in(description):
    """Return the number of the element type of an array or scalar in a record."""
    return description >> DTYPE_BIT & 0xFF


@helper
def shape_nbytes(description):
    """Return the bytes of a record in which the shape of an array stands."""
    return 8 * ndim_of(description)


@linked("int64", "int64", "int64")
def describe_array(words, array):
    """Return what the first word of a record says of an array; 0 if it has no place in records."""
    table = get(words, TABLE)
    number = _place_in(get(words, DTYPES), dtype_of(table, array))
    ndim = load(array + get(table, HEADER) + _NDIM) & 0xFFFFFFFF
    if number < 0 or ndim > MAX_NDIM or get(words, NEW_ARRAY) == 0:
        return 0
    if not is_plain(table, array, READABLE) or not is_in_c_order(table, array):
        return 0
    flags = 0 if is_plain(table, array, WRITABLE) else READ_ONLY
    return ARRAY << KIND_BIT | number << DTYPE_BIT | ndim << NDIM_BIT | flags << FLAGS_BIT


@helper
def array_nbytes(words, array, description):
    """Return the bytes of an array's elements."""
    return count_of(get(words, TABLE), array) * itemsize_at(words, dtype_in(description)) if description else 0


@helper
def shape_of(words, array):
    """Return the address of an array's shape."""
    return load(array + get(get(words, TABLE), HEADER) + _SHAPE)


@linked("int64", "int64", "int64")
def describe_scalar(words, kind):
    """Return what the first word of a record says of a scalar of NumPy of this type; 0 for any other type."""
    number = _place_in(get(words, SCALAR_TYPES), kind)
    return 0 if number < 0 or get(words, NEW_ARRAY) == 0 else SCALAR << KIND_BIT | number << DTYPE_BIT


@linked("int64", "int64", "int64", "int64", "int64")
def is_known_array(words, memory, description, nbytes):
    """Return 1 if `get_array` or `get_scalar_of_numpy` can read a record, else 0."""
    number, ndim = dtype_in(description), ndim_of(description)
    if get(words, NEW_ARRAY) == 0 or number >= DTYPE_COUNT or description >> FLAGS_BIT != 0 or ndim > MAX_NDIM:
        return 0
    expected = itemsize_at(words, number)
    for axis in range(ndim):
        if load(memory + HEAD_NBYTES + 8 * axis) == 0:
            expected = 0  # the other lengths may be any
    for axis in range(ndim):
        length = load(memory + HEAD_NBYTES + 8 * axis)
        if length < 0 or (expected != 0 and (length >= 1 << 31 or expected >= 1 << 31)):
            return 0
        expected *= length
    return 1 if nbytes == expected else 0


@linked("int64", "int64", "int64", "int64")
def array_like(words, memory, description):
    """Return a new array of the shape and element type of a record; 0 with an exception set."""
    dtype = load(get(words, DTYPES) + 8 * dtype_in(description))
    keep(dtype)
    return new_array(get(words, NEW_ARRAY), ndim_of(description), memory + HEAD_NBYTES, dtype)


@helper
def get_array(words, memory, description, data, nbytes):
    """Return a new array with elements from `data`; 0 with an exception set."""
    found = array_like(words, memory, description)
    if found:
        copy(data_of(get(words, TABLE), found), data, nbytes)
    return found


@helper
def get_scalar_of_numpy(words, description, data):
    """Return a new scalar of NumPy; 0 with an exception set."""
    return new_scalar(get(words, NEW_SCALAR), data, load(get(words, DTYPES) + 8 * dtype_in(description)))
