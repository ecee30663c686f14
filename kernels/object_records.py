"""Records of short Python objects, written and read by compiled code.

A record has a fixed number of bytes, so that one exchange of records is a plain collective. Its first word says which
call the rank makes and of what kind its object is, the second how many bytes the object has; the bytes follow. Numbers,
``bytes``, ``str`` and None travel as they are, small lists, tuples and dictionaries of them as pickles. Where a record
has no room for the bytes, they follow in another collective, see `object_calls`.
"""

from .atomics import copy, load, load_float64, store
from .decorators import helper, linked
from .dispatch_table import HEADER
from .operation_words import get, put
from .python_interface import (
    bytes_data,
    bytes_object,
    bytes_size,
    call_object,
    complex_object,
    dict_next,
    dict_size,
    drop,
    error,
    error_is,
    float_object,
    forget_error,
    int_object,
    int_of,
    keep,
    list_item,
    list_size,
    str_data,
    str_length,
    str_object,
    tuple_item,
    tuple_size,
)

NBYTES = 504
"""Of a record; no round number, which a program may use in calls of its own."""
HEAD_NBYTES = 16
ROOM = NBYTES - HEAD_NBYTES
LONG_ROOM, GATHERED_ROOM = 64 << 10, 256 << 10
"""Bytes of an object that follows its record, and of those of all ranks; longer ones are left to Python."""
NONE, FALSE, TRUE, INT, FLOAT, COMPLEX, BYTES, STR, SCALAR, ARRAY, PICKLE, APART, ERROR = range(13)
"""Kinds of object: APART is a pickle with buffers out of band, ERROR a text in place of an object."""
READ_ONLY, TRUSTED, LONG_SOMEWHERE = 1, 2, 4
"""Flags: of an array; of a pickle whose parts are all exact built-in scalars; of a call with long payloads."""
KIND_BIT, FLAGS_BIT = 32, 50
"""Where kind and flags stand in a record's first word."""
ALIGNMENT = 16
"""Of every object in memory with others, so that an array can stay where it was received."""
FEW = 32
"""Longer containers are not looked through."""

COLLECTIVES = ("bcast", "reduce", "allreduce", "allgather", "gather", "scatter", "alltoall", "scan", "exscan",
               "outcome")  # fmt: skip
"""In the order of their numbers; `outcome` is the end of a reduction that may fail on a rank."""
MAX_ROOT = 1 << 20
_MAGIC_BITS, _ROOT_BIT = 0x6F << 56, 12

(
    IN_USE,  # 1 while a call uses the words and the records
    STATUS,  # of an exchange that is left to Python
    TABLE,  # address of the dispatch table
    RANK,
    RANKS,  # number of ranks
    OWN,  # one record: the array and its data
    OWN_DATA,
    ALL,  # one of each rank
    ALL_DATA,
    SENT,  # one to each rank
    SENT_DATA,
    ASIDE,  # the objects that are returned where something is left to Python
    PENDING,
    UNREAD,
    DUMPS,  # functions that pickle and unpickle
    LOADS,
    ORDINARY,  # the type Exception
    ERRORS,  # address of the name of the handler of errors in texts
    NOTHING,  # None, False and True
    NO,
    YES,
    INT_TYPE,
    FLOAT_TYPE,
    COMPLEX_TYPE,
    BYTES_TYPE,
    STR_TYPE,
    LIST_TYPE,
    TUPLE_TYPE,
    DICT_TYPE,
    BOOL_TYPE,
    NONE_TYPE,
    SCRATCH,  # address of SCRATCH_WORDS words
    VALUES,  # of a word for each rank
    OPS,  # of OP_COUNT addresses of operations, those that object_reductions knows
    STAGE,  # 1 if the exchange of what has no room in records has begun
    LONG,  # LONG_ROOM bytes for that: the array, whose length varies, and its data
    LONG_ADDRESS,
    LONGS,  # GATHERED_ROOM bytes for that of all ranks
    LONGS_ADDRESS,
    LONG_DATA,  # address of this rank's bytes that have no room in its record
    PICKLED,  # the object that has them, if it is a pickle; else 0
) = range(41)
WORDS, SCRATCH_WORDS, OP_COUNT = 41, 3, 4
OTHER, FAILED = -1, -2
"""In place of a number of bytes: the object has no place in a record; an exception is set."""


@helper
def pack_word(collective, op, root):
    """Return the bits of the first word that are the same on all ranks in a correct program."""
    return _MAGIC_BITS | (root % MAX_ROOT) << _ROOT_BIT | op << 4 | collective


@helper
def type_of(words, thing):
    """Return the address of an object's type."""
    return load(thing + get(get(words, TABLE), HEADER) - 8)


@helper
def is_scalar(words, thing):
    """Return whether an object is of an exact built-in type that needs no copy and runs no code of the program."""
    kind = type_of(words, thing)
    number = kind == get(words, FLOAT_TYPE) or kind == get(words, INT_TYPE) or kind == get(words, COMPLEX_TYPE)
    text = kind == get(words, STR_TYPE) or kind == get(words, BYTES_TYPE)
    return number or text or kind == get(words, BOOL_TYPE) or kind == get(words, NONE_TYPE)


@helper
def size_of(words, thing):
    """Return how many items a container has; -1 for other objects."""
    kind = type_of(words, thing)
    if kind == get(words, LIST_TYPE):
        return list_size(thing)
    if kind == get(words, TUPLE_TYPE):
        return tuple_size(thing)
    return dict_size(thing) if kind == get(words, DICT_TYPE) else -1


@helper
def item_of(words, thing, place):
    """Return the item or value of a container at a place; those of a dictionary have to be asked for in order."""
    kind = type_of(words, thing)
    if kind == get(words, LIST_TYPE):
        return list_item(thing, place)
    if kind == get(words, TUPLE_TYPE):
        return tuple_item(thing, place)
    scratch = get(words, SCRATCH)
    dict_next(thing, scratch, scratch + 8, scratch + 16)
    return load(scratch + 16)


@linked("int64", "int64", "int64")
def has_scalars(words, thing):
    """Return 1 for a container of few scalars, 0 for any other object."""
    size = size_of(words, thing)
    if size < 0 or size > FEW:
        return 0
    store(get(words, SCRATCH), 0)
    for place in range(size):
        if not is_scalar(words, item_of(words, thing, place)):
            return 0
    return 1


@linked("int64", "int64", "int64")
def has_simple_items(words, thing):
    """Return 1 for a container of few scalars and containers of these, 0 for any other object."""
    size = size_of(words, thing)
    if size < 0 or size > FEW:
        return 0
    position = 0
    for place in range(size):
        store(get(words, SCRATCH), position)
        item = item_of(words, thing, place)
        position = load(get(words, SCRATCH))
        if not is_scalar(words, item) and has_scalars(words, item) == 0:
            return 0
    return 1


@helper
def _put_head(memory, word, nbytes):
    store(memory, word)
    store(memory + 8, nbytes)
    return nbytes


@helper
def _put_bytes(words, memory, word, data, nbytes, room):
    if nbytes > room:
        return OTHER
    if nbytes > ROOM:
        put(words, LONG_DATA, data)
    else:
        copy(memory + HEAD_NBYTES, data, nbytes)
    return _put_head(memory, word, nbytes)


@helper
def _unless_it_matters(words):
    """Clear an exception, with which the general way meets again; keep one that is none of the object's."""
    if error() != 0 and error_is(get(words, ORDINARY)) == 0:
        return FAILED
    forget_error()
    return OTHER


@helper
def _put_pickle(words, memory, call, thing, room):
    flags = TRUSTED
    if has_scalars(words, thing) == 0:
        flags = 0
        if has_simple_items(words, thing) == 0:
            return OTHER
    elif type_of(words, thing) == get(words, DICT_TYPE):
        flags = 0  # keys may be of any type
    pickled = call_object(get(words, DUMPS), thing)
    if pickled == 0:
        return _unless_it_matters(words)
    nbytes, word = bytes_size(pickled), call | PICKLE << KIND_BIT | flags << FLAGS_BIT
    if nbytes < 0:
        forget_error()
    written = OTHER if nbytes < 0 else _put_bytes(words, memory, word, bytes_data(pickled), nbytes, room)
    if written > ROOM:
        put(words, PICKLED, pickled)
    else:
        drop(pickled)
    return written


@helper
def _put_str(words, memory, call, thing, room):
    if str_length(thing) > room:
        return OTHER
    data = str_data(thing, get(words, SCRATCH))
    if data == 0:
        return _unless_it_matters(words)
    return _put_bytes(words, memory, call | STR << KIND_BIT, data, load(get(words, SCRATCH)), room)


@helper
def _put_int(words, memory, call, thing):
    value = int_of(thing)
    if value == -1 and error() != 0:
        return _unless_it_matters(words)
    store(memory + HEAD_NBYTES, value)
    return _put_head(memory, call | INT << KIND_BIT, 8)


@linked("int64", "int64", "int64", "int64", "int64", "int64")
def put_object(words, memory, call, thing, room):
    """Write a record; return the bytes of the object, or one of `OTHER` and `FAILED`.

    An object of more than ROOM bytes, and up to `room`, is not in its record but at LONG_DATA.
    """
    kind, fields = type_of(words, thing), thing + get(get(words, TABLE), HEADER)
    if kind == get(words, FLOAT_TYPE):
        store(memory + HEAD_NBYTES, load(fields))
        return _put_head(memory, call | FLOAT << KIND_BIT, 8)
    if kind == get(words, INT_TYPE):
        return _put_int(words, memory, call, thing)
    if kind == get(words, BYTES_TYPE):
        return _put_bytes(words, memory, call | BYTES << KIND_BIT, bytes_data(thing), bytes_size(thing), room)
    if kind == get(words, STR_TYPE):
        return _put_str(words, memory, call, thing, room)
    if kind == get(words, NONE_TYPE):
        return _put_head(memory, call | NONE << KIND_BIT, 0)
    if kind == get(words, BOOL_TYPE):
        return _put_head(memory, call | (TRUE if thing == get(words, YES) else FALSE) << KIND_BIT, 0)
    if kind == get(words, COMPLEX_TYPE):
        store(memory + HEAD_NBYTES, load(fields))
        store(memory + HEAD_NBYTES + 8, load(fields + 8))
        return _put_head(memory, call | COMPLEX << KIND_BIT, 16)
    return _put_pickle(words, memory, call, thing, room)


@helper
def is_known(description, nbytes, predictable):
    """Return whether `get_object` reads a record, and runs no code of the program if it has to be `predictable`."""
    plain = description & ((1 << KIND_BIT) - 1) == 0 and 0 <= description >> KIND_BIT <= STR
    trusted = description == PICKLE << KIND_BIT | TRUSTED << FLAGS_BIT
    pickled = description == PICKLE << KIND_BIT and not predictable
    return 0 <= nbytes <= ROOM and (plain or trusted or pickled)


@helper
def is_long(description, nbytes):
    """Return whether a record is of an object that follows it and that `get_object` reads."""
    text = description == BYTES << KIND_BIT or description == STR << KIND_BIT
    pickled = description & ~(TRUSTED << FLAGS_BIT) == PICKLE << KIND_BIT
    return ROOM < nbytes <= LONG_ROOM and (text or pickled)


@linked("int64", "int64", "int64", "int64", "int64")
def get_object(words, data, nbytes, description):
    """Return a new object from its bytes, 0 with an exception set if it cannot be unpickled."""
    kind = description >> KIND_BIT
    if kind == FLOAT:
        return float_object(load_float64(data))
    if kind == INT:
        return int_object(load(data))
    if kind == COMPLEX:
        return complex_object(load_float64(data), load_float64(data + 8))
    if kind == BYTES:
        return bytes_object(data, nbytes)
    if kind == STR:
        return str_object(data, nbytes, get(words, ERRORS))
    if kind <= TRUE:
        constant = get(words, NOTHING + kind)
        keep(constant)
        return constant
    pickled = bytes_object(data, nbytes)
    if pickled == 0:
        return 0
    found = call_object(get(words, LOADS), pickled)
    drop(pickled)
    return found
