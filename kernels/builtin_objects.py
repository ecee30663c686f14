"""Lists, tuples and ints of CPython by address, as they stand in specifications of buffers.

`knows_lists` and `knows_numbers` check the layouts before they are used.
"""

import sys

import numpy as np

from .atomics import load, load_int32
from .decorators import helper, kernel_for
from .dispatch_table import HEADER, INT_HAS_TAG, INT_TYPE, LIST_TYPE, TUPLE_ITEMS, TUPLE_TYPE, header_nbytes
from .operation_words import get

MOST = 1 << 48
"""Larger numbers are left to Python: sums of counts, in bytes, must not overflow."""
LIST_SIZE, LIST_ITEMS, _LIST_NBYTES = 0, 8, 24
"""Offsets behind the object header: Py_ssize_t ob_size; PyObject **ob_item; Py_ssize_t allocated; and their length."""


_DIGITS, _DIGIT_BITS = 8, 30
"""Of an int behind the object header: a word of sign and length, and 32-bit digits of 30 bits."""
_TUPLE_SIZE = 0
_TAG_BITS, _NEGATIVE = 3, 2
"""From Python 3.12 on: the length is above these bits; in the lowest two the sign."""


@helper
def _digits_of(tag, has_tag):
    """Return how many digits an int has; -1 for a negative one."""
    if has_tag:
        return -1 if tag & 3 == _NEGATIVE else tag >> _TAG_BITS
    return max(tag, -1)


@helper
def number_at(fields, has_tag):
    """Return an int of at most two digits, which is not negative; -1 for any other."""
    digits = _digits_of(load(fields), has_tag)
    if digits == 0:
        return 0
    if digits == 1:
        return load_int32(fields + _DIGITS)
    if digits == 2:
        return load_int32(fields + _DIGITS) | load_int32(fields + _DIGITS + 4) << _DIGIT_BITS
    return -1


@kernel_for("int64", "int64")
def _read_number(fields, has_tag):
    """Return what would be read of an int."""
    return number_at(fields, has_tag)


@kernel_for("int64", "int64", "int64", "int64[1C]")
def _look_at_tuple(thing, header, first, out):
    """Write what would be read of a tuple to `out`: type, size, first and last item."""
    out[0], out[1] = load(thing + header - 8), load(thing + header + _TUPLE_SIZE)
    out[2], out[3] = load(thing + first), load(thing + first + 8 * out[1] - 8)


def has_tags() -> bool:
    """Return whether this interpreter's ints have a word of sign and length together."""
    return sys.version_info >= (3, 12)


def tuple_items() -> int:
    """Return the offset of a tuple's first item."""
    return tuple.__basicsize__


def knows_numbers(header: int) -> bool:
    """Return whether ints and tuples are laid out as expected, behind headers of this length; for CPython."""
    if sys.int_info.bits_per_digit != _DIGIT_BITS or tuple.__itemsize__ != 8:
        return False
    thing, seen = (object(), object(), object()), np.zeros(4, np.int64)
    _look_at_tuple(id(thing), header, tuple_items(), seen)
    if seen.tolist() != [id(tuple), 3, id(thing[0]), id(thing[2])]:
        return False
    expected = {number: number for number in (0, 1, 77, (1 << 30) - 1, 1 << 30, (1 << 60) - 3)}
    expected |= dict.fromkeys((-1, -5, -(1 << 30), -(1 << 45), 1 << 60, 1 << 90), -1)
    return all(_read_number(id(number) + header, int(has_tags())) == wanted for number, wanted in expected.items())


@helper
def items_of(table, thing):
    """Return how many items a list or tuple has, and where their addresses are; -1 for anything else."""
    fields = thing + get(table, HEADER)
    kind = load(fields - 8)
    if kind == get(table, LIST_TYPE):
        return load(fields + LIST_SIZE), load(fields + LIST_ITEMS)
    if kind == get(table, TUPLE_TYPE):
        return load(fields + _TUPLE_SIZE), thing + get(table, TUPLE_ITEMS)
    return -1, 0


@helper
def whole_number(table, thing):
    """Return the value of an int; -1 for other objects, and for numbers that are none of elements."""
    fields = thing + get(table, HEADER)
    if get(table, INT_TYPE) == 0 or load(fields - 8) != get(table, INT_TYPE):
        return -1
    value = number_at(fields, get(table, INT_HAS_TAG))
    return value if 0 <= value < MOST else -1


@kernel_for("int64", "int64", "int64[1C]")
def _look_at_list(thing, header, out):
    """Write what `call` would read of a list to `out`: type, size, first and last item."""
    out[0], out[1] = load(thing + header - 8), load(thing + header + LIST_SIZE)
    items = load(thing + header + LIST_ITEMS)
    out[2], out[3] = load(items), load(items + 8 * out[1] - 8)


def knows_lists() -> bool:
    """Return whether lists of this interpreter are laid out as expected; for where `layout_error` returns ""."""
    if list.__basicsize__ != header_nbytes() + _LIST_NBYTES:
        return False
    thing, seen = [object(), object(), object()], np.zeros(4, np.int64)
    _look_at_list(id(thing), header_nbytes(), seen)
    return bool(seen.tolist() == [id(list), 3, id(thing[0]), id(thing[2])])
