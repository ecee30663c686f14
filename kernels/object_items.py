"""Lists, tuples and dictionaries of exact built-in scalars as bytes, written and read by compiled code.

A pickle of a small dictionary takes longer than its broadcast. Here a word says which container it is and how many
items it has; the items follow, of a dictionary a key and a value each. A word says of what kind an item is and how
many bytes it has, which follow, filled up to a multiple of 8.
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
    DICT_TYPE,
    ERRORS,
    FALSE,
    FLOAT,
    FLOAT_TYPE,
    INT,
    INT_TYPE,
    LIST_TYPE,
    NONE,
    NONE_TYPE,
    NOTHING,
    SCRATCH,
    STR,
    STR_TYPE,
    TABLE,
    TRUE,
    TUPLE_TYPE,
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
    dict_next,
    dict_object,
    dict_size,
    drop,
    error,
    float_object,
    forget_error,
    int_object,
    int_of,
    keep,
    list_item,
    list_object,
    list_size,
    set_dict_item,
    set_item,
    set_tuple_item,
    str_data,
    str_length,
    str_object,
    tuple_item,
    tuple_object,
    tuple_size,
)

LIST, TUPLE, DICT = range(3)
NUMBER_BIT = 8
"""Where the number of items, or of bytes of an item, stands in its word."""


@helper
def container_of(words, thing):
    """Return which container an object is; -1 for any other."""
    kind = type_of(words, thing)
    if kind == get(words, LIST_TYPE):
        return LIST
    if kind == get(words, TUPLE_TYPE):
        return TUPLE
    return DICT if kind == get(words, DICT_TYPE) else -1


@helper
def size_of(container, thing):
    """Return how many items a container has."""
    if container == LIST:
        return list_size(thing)
    return tuple_size(thing) if container == TUPLE else dict_size(thing)


@helper
def item_of(words, container, thing, place):
    """Return the item or value of a container at a place.

    Those of a dictionary have to be asked for in order; the key is in SCRATCH then.
    """
    if container == LIST:
        return list_item(thing, place)
    if container == TUPLE:
        return tuple_item(thing, place)
    scratch = get(words, SCRATCH)
    if place == 0:
        store(scratch, 0)
    dict_next(thing, scratch, scratch + 8, scratch + 16)
    return load(scratch + 16)


@helper
def text_data(words, thing):
    """Return the address of a text in UTF-8, and write its length to SCRATCH; 0 with an exception set."""
    return str_data(thing, get(words, SCRATCH) + 24)


@helper
def text_nbytes(words):
    """Return the length that `text_data` has written."""
    return load(get(words, SCRATCH) + 24)


@helper
def _end_of(at, nbytes):
    return at + 8 + nbytes + -nbytes % 8


@helper
def _put_bytes(at, end, kind, data, nbytes):
    if data == 0 or nbytes > end - at - 16:
        forget_error()
        return 0
    store(at, kind | nbytes << NUMBER_BIT)
    copy(at + 8, data, nbytes)
    return _end_of(at, nbytes)


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


@linked("int64", "int64", "int64", "int64", "int64")
def put_items(words, thing, target, room):
    """Write a container; return its bytes, 0 if there are more than `room` or an item is no scalar."""
    container = container_of(words, thing)
    if container < 0:
        return 0
    size, at, end = size_of(container, thing), target + 8, target + room
    if size > room >> 3:
        return 0
    store(target, container | size << NUMBER_BIT)
    for place in range(size):
        item = item_of(words, container, thing, place)
        if container == DICT:
            at = put_item(words, at, end, load(get(words, SCRATCH) + 8))
        if at != 0:
            at = put_item(words, at, end, item)
        if at == 0:
            return 0
    return at - target


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
def _corrupt(words):
    return call_object(get(words, CORRUPT), get(words, NOTHING))


@linked("int64", "int64", "int64", "int64")
def get_item(words, at, end):
    """Return a new scalar; 0 with an exception set if it cannot be read."""
    if end - at < 8:
        return _corrupt(words)
    kind, nbytes = load(at) & 0xFF, load(at) >> NUMBER_BIT
    if kind > STR or not is_scalar_size(kind, nbytes) or nbytes > end - at - 8:
        return _corrupt(words)
    return get_scalar(words, kind, at + 8, nbytes)


@helper
def _after(at):
    """Return the address after an item that has been read."""
    return _end_of(at, load(at) >> NUMBER_BIT)


@linked("int64", "int64", "int64", "int64", "int64")
def _get_sequence(words, found, data, end):
    """Set the items of a new list or tuple; return 0 with an exception set if one cannot be read."""
    is_list, at = load(data) & 0xFF == LIST, data + 8
    for place in range(load(data) >> NUMBER_BIT):
        item = get_item(words, at, end)
        if item == 0:
            return 0
        if is_list:
            set_item(found, place, item)
        else:
            set_tuple_item(found, place, item)
        at = _after(at)
    return 1


@linked("int64", "int64", "int64", "int64", "int64")
def _get_dict(words, found, data, end):
    """Set the items of a new dictionary; return 0 with an exception set if one cannot be read."""
    at = data + 8
    for _place in range(load(data) >> NUMBER_BIT):
        key = get_item(words, at, end)
        if key == 0:
            return 0
        at = _after(at)
        value = get_item(words, at, end)
        status = -1
        if value:
            status = set_dict_item(found, key, value)
            drop(value)
            at = _after(at)
        drop(key)
        if status != 0:
            return 0
    return 1


@linked("int64", "int64", "int64", "int64")
def get_items(words, data, nbytes):
    """Return a new container from its bytes; 0 with an exception set if it cannot be read."""
    if nbytes < 8:
        return _corrupt(words)
    container, size = load(data) & 0xFF, load(data) >> NUMBER_BIT
    if container > DICT or not 0 <= size <= nbytes >> 3:
        return _corrupt(words)
    if container == DICT:
        found = dict_object()
    else:
        found = list_object(size) if container == LIST else tuple_object(size)
    if found == 0:
        return 0
    if container == DICT:
        complete = _get_dict(words, found, data, data + nbytes)
    else:
        complete = _get_sequence(words, found, data, data + nbytes)
    if complete == 0:
        drop(found)
        return 0
    return found
