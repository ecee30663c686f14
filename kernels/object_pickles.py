"""Objects of any type as pickles in records, and what else writes bytes to records."""

from .atomics import copy, store
from .decorators import helper, linked
from .object_items import container_of, size_of
from .object_words import (
    APART_ALREADY,
    BOOL_TYPE,
    BYTES_TYPE,
    COMPLEX_TYPE,
    DUMPS,
    FAILED,
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
    STR_TYPE,
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
    tuple_item,
)


@helper
def is_scalar(words, thing):
    """Return whether an object is of an exact built-in type that needs no copy and runs no code of the program."""
    kind = type_of(words, thing)
    number = kind == get(words, FLOAT_TYPE) or kind == get(words, INT_TYPE) or kind == get(words, COMPLEX_TYPE)
    text = kind == get(words, STR_TYPE) or kind == get(words, BYTES_TYPE)
    return number or text or kind == get(words, BOOL_TYPE) or kind == get(words, NONE_TYPE)


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
def _has_room(words, pair):
    """Return whether an object that has been pickled is short, and has no buffers apart."""
    pickled, buffers = tuple_item(pair, 0), tuple_item(pair, 1)
    if type_of(words, pickled) != get(words, BYTES_TYPE) or bytes_size(pickled) > LONG_ROOM:
        return False
    container = container_of(words, buffers)
    return container >= 0 and size_of(container, buffers) == 0


@linked("int64", "int64", "int64", "int64", "int64", "int64")
def put_pickle(words, memory, call, thing, slot):
    """Write the record of an object of any type, by its pickle; see `put_object`."""
    pair = call_object(get(words, DUMPS), thing)
    if pair == 0:
        return unless_it_matters(words)
    if not _has_room(words, pair):
        put(words, PICKLE_APART, pair)
        put(words, RECORD_COUNT, slot)
        return APART_ALREADY
    pickled = tuple_item(pair, 0)
    nbytes = bytes_size(pickled)
    put_bytes(words, memory, call | PICKLE << KIND_BIT, bytes_data(pickled), nbytes, slot)
    if nbytes > ROOM:
        hold(words, pair)
    else:
        drop(pair)
    return nbytes


@helper
def get_pickled(words, data, nbytes):
    """Return the new object of a pickle; 0 with an exception set if it cannot be made."""
    pickled = bytes_object(data, nbytes)
    if pickled == 0:
        return 0
    found = call_object(get(words, LOADS), pickled)
    drop(pickled)
    return found
