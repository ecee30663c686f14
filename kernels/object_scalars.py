"""Exact built-in scalars as items of containers, written and read by compiled code.

A word says of what kind an item is and how many bytes it has; they follow, filled up to a multiple of 8.
"""

from .atomics import copy, load, load_float64, store
from .decorators import helper, linked
from .dispatch_table import HEADER
from .object_words import (
    BOOL_TYPE,
    BYTES,
    BYTES_TYPE,
    COMPLEX,
    COMPLEX_TYPE,
    CORRUPT,
    ERRORS,
    FALSE,
    FLOAT,
    FLOAT_TYPE,
    INT,
    INT_TYPE,
    NONE,
    NONE_TYPE,
    NOTHING,
    SCRATCH,
    STR,
    STR_TYPE,
    TABLE,
    TRUE,
    YES,
    type_of,
)
from .operation_words import get
from .python_interface import (
    bytes_data,
    bytes_object,
    bytes_size,
    call_object,
    complex_object,
    error,
    float_object,
    forget_error,
    int_object,
    int_of,
    keep,
    str_data,
    str_length,
    str_object,
)

NUMBER_BIT = 8
"""Where the number of bytes, or of items of a container, stands in an item's word."""


@helper
def text_data(words, thing):
    """Return the address of a text in UTF-8, and write its length to SCRATCH; 0 with an exception set."""
    return str_data(thing, get(words, SCRATCH))


@helper
def text_nbytes(words):
    """Return the length that `text_data` has written."""
    return load(get(words, SCRATCH))


@helper
def padded(nbytes):
    """Return the multiple of 8 that so many bytes take up."""
    return nbytes + -nbytes % 8


@helper
def _put_bytes(at, end, kind, data, nbytes):
    if data == 0 or nbytes > end - at - 16:
        forget_error()
        return 0
    store(at, kind | nbytes << NUMBER_BIT)
    copy(at + 8, data, nbytes)
    return at + 8 + padded(nbytes)


@linked("int64", "int64", "int64", "int64", "int64")
def put_item(words, at, end, thing):
    """Write a scalar; return the address after it, 0 if it is none or has no place before `end`."""
    kind, fields = type_of(words, thing), thing + get(get(words, TABLE), HEADER)
    if kind == get(words, STR_TYPE):
        if str_length(thing) > end - at:
            return 0
        data = text_data(words, thing)
        return _put_bytes(at, end, STR, data, text_nbytes(words))
    if kind == get(words, BYTES_TYPE):
        return _put_bytes(at, end, BYTES, bytes_data(thing), bytes_size(thing))
    if end - at < 24:
        return 0
    if kind == get(words, FLOAT_TYPE):
        store(at, FLOAT | 8 << NUMBER_BIT)
        store(at + 8, load(fields))
        return at + 16
    if kind == get(words, INT_TYPE):
        value = int_of(thing)
        if value == -1 and error() != 0:
            forget_error()
            return 0
        store(at, INT | 8 << NUMBER_BIT)
        store(at + 8, value)
        return at + 16
    if kind == get(words, COMPLEX_TYPE):
        return _put_bytes(at, end, COMPLEX, fields, 16)
    if kind == get(words, BOOL_TYPE):
        store(at, TRUE if thing == get(words, YES) else FALSE)
        return at + 8
    store(at, NONE)
    return at + 8 if kind == get(words, NONE_TYPE) else 0


@helper
def is_scalar_size(kind, nbytes):
    """Return whether a scalar of a kind may have so many bytes."""
    if kind <= TRUE:
        return nbytes == 0
    if kind == COMPLEX:
        return nbytes == 16
    return nbytes >= 0 if kind >= BYTES else nbytes == 8


@helper
def get_scalar(words, kind, data, nbytes):
    """Return a new scalar from its bytes, 0 with an exception set if there is none."""
    if kind == FLOAT:
        return float_object(load_float64(data))
    if kind == INT:
        return int_object(load(data))
    if kind == STR:
        return str_object(data, nbytes, get(words, ERRORS))
    if kind == BYTES:
        return bytes_object(data, nbytes)
    if kind == COMPLEX:
        return complex_object(load_float64(data), load_float64(data + 8))
    constant = get(words, NOTHING + kind)
    keep(constant)
    return constant


@helper
def corrupt(words):
    """Set an exception for what cannot be read; return 0."""
    return call_object(get(words, CORRUPT), get(words, NOTHING))


@linked("int64", "int64", "int64", "int64")
def get_item(words, at, end):
    """Return a new scalar; 0 with an exception set if it cannot be read."""
    if end - at < 8:
        return corrupt(words)
    kind, nbytes = load(at) & 0xFF, load(at) >> NUMBER_BIT
    if kind > STR or not is_scalar_size(kind, nbytes) or nbytes > end - at - 8:
        return corrupt(words)
    return get_scalar(words, kind, at + 8, nbytes)
