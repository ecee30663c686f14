"""Objects of any type as pickles in records, and what else writes bytes to records."""

from .atomics import copy, load, store
from .decorators import helper, linked
from .object_items import DICT, container_of, item_of, size_of
from .object_words import (
    APART_ALREADY,
    BOOL_TYPE,
    BYTES_TYPE,
    COMPLEX_TYPE,
    DUMPS,
    DUMPS_APART,
    FAILED,
    FEW,
    FLAGS_BIT,
    FLOAT_TYPE,
    HEAD_NBYTES,
    HELD,
    HELD_COUNT,
    INT_TYPE,
    KIND_BIT,
    LOADS,
    LONG_DATA,
    LONG_ROOM,
    NONE_TYPE,
    ORDINARY,
    OTHER,
    PICKLE,
    PICKLE_APART,
    RECORD_COUNT,
    ROOM,
    SCRATCH,
    STR_TYPE,
    TRUSTED,
    type_of,
)
from .operation_words import get, put
from .python_interface import (
    bytes_data,
    bytes_object,
    bytes_size,
    call_object,
    drop,
    error,
    error_is,
    forget_error,
    keep,
    tuple_item,
)


@helper
def is_scalar(words, thing):
    """Return whether an object is of an exact built-in type that needs no copy and runs no code of the program."""
    kind = type_of(words, thing)
    number = kind == get(words, FLOAT_TYPE) or kind == get(words, INT_TYPE) or kind == get(words, COMPLEX_TYPE)
    text = kind == get(words, STR_TYPE) or kind == get(words, BYTES_TYPE)
    return number or text or kind == get(words, BOOL_TYPE) or kind == get(words, NONE_TYPE)


@linked("int64", "int64", "int64")
def has_scalars(words, thing):
    """Return 1 for a container of few scalars, 0 for any other object."""
    container = container_of(words, thing)
    size = -1 if container < 0 else size_of(container, thing)
    if size < 0 or size > FEW:
        return 0
    for place in range(size):
        if not is_scalar(words, item_of(words, container, thing, place)):
            return 0
    return 1


@linked("int64", "int64", "int64")
def has_simple_items(words, thing):
    """Return 1 for a container of few scalars and containers of these, 0 for any other object."""
    container = container_of(words, thing)
    size = -1 if container < 0 else size_of(container, thing)
    if size < 0 or size > FEW:
        return 0
    position = 0
    for place in range(size):
        store(get(words, SCRATCH), position)
        item = item_of(words, container, thing, place)
        position = load(get(words, SCRATCH))
        if not is_scalar(words, item) and has_scalars(words, item) == 0:
            return 0
    return 1


@helper
def put_head(memory, word, nbytes):
    """Write the two words of a record; return the bytes of the object."""
    store(memory, word)
    store(memory + 8, nbytes)
    return nbytes


@helper
def put_bytes(words, memory, word, data, nbytes, slot):
    """Write a record and the bytes of its object, or in LONG_DATA where they are; see `put_object`."""
    if nbytes > LONG_ROOM:
        return OTHER
    if nbytes > ROOM:
        store(get(words, LONG_DATA) + 8 * slot, data)
    else:
        copy(memory + HEAD_NBYTES, data, nbytes)
    return put_head(memory, word, nbytes)


@helper
def unless_it_matters(words):
    """Clear an exception, with which the general way meets again; keep one that is none of the object's."""
    if error() != 0 and error_is(get(words, ORDINARY)) == 0:
        return FAILED
    forget_error()
    return OTHER


@helper
def hold(words, thing):
    """Keep a reference for as long as the object's bytes are needed, see `object_calls.ended`."""
    count = get(words, HELD_COUNT)
    store(get(words, HELD) + 8 * count, thing)
    put(words, HELD_COUNT, count + 1)


@helper
def _put_pickled(words, memory, word, pickled, slot):
    """Write the record of a pickle, and take over the reference to it."""
    nbytes = bytes_size(pickled)
    written = put_bytes(words, memory, word, bytes_data(pickled), nbytes, slot) if nbytes >= 0 else OTHER
    if written > ROOM:
        hold(words, pickled)
    else:
        forget_error()
        drop(pickled)
    return written


@linked("int64", "int64", "int64", "int64", "int64", "int64")
def put_any(words, memory, call, thing, slot):
    """Write the record of an object of any type, by its pickle; see `put_object`."""
    pair = call_object(get(words, DUMPS_APART), thing)
    if pair == 0:
        return unless_it_matters(words)
    pickled, buffers = tuple_item(pair, 0), tuple_item(pair, 1)
    if type_of(words, pickled) == get(words, BYTES_TYPE) and bytes_size(pickled) <= LONG_ROOM:
        container = container_of(words, buffers)
        if container >= 0 and size_of(container, buffers) == 0:
            keep(pickled)
            drop(pair)
            return _put_pickled(words, memory, call | PICKLE << KIND_BIT, pickled, slot)
    put(words, PICKLE_APART, pair)
    put(words, RECORD_COUNT, slot)
    return APART_ALREADY


@linked("int64", "int64", "int64", "int64", "int64", "int64")
def put_pickle(words, memory, call, thing, slot):
    """Write the record of a container, by its pickle; see `put_object`."""
    flags = TRUSTED
    if has_scalars(words, thing) == 0:
        flags = 0
        if has_simple_items(words, thing) == 0:
            return put_any(words, memory, call, thing, slot)
    elif container_of(words, thing) == DICT:
        flags = 0  # keys may be of any type
    pickled = call_object(get(words, DUMPS), thing)
    if pickled == 0:
        return unless_it_matters(words)
    return _put_pickled(words, memory, call | PICKLE << KIND_BIT | flags << FLAGS_BIT, pickled, slot)


@helper
def get_pickled(words, data, nbytes):
    """Return the new object of a pickle; 0 with an exception set if it cannot be made."""
    pickled = bytes_object(data, nbytes)
    if pickled == 0:
        return 0
    found = call_object(get(words, LOADS), pickled)
    drop(pickled)
    return found
