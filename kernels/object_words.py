"""Words of the compiled collectives of Python objects, and layout of their records.

A record has a fixed number of bytes, so that one exchange of records is a plain collective. Its first word says which
call the rank makes and of what kind its object is, the second how many bytes the object has; the shape of an array and
the bytes follow. Where a record has no room for the bytes, they follow in another collective, see `object_calls`.
"""

from .atomics import load
from .decorators import helper
from .dispatch_table import HEADER
from .operation_words import get

NBYTES = 504
"""Of a record; no round number, which a program may use in calls of its own."""
HEAD_NBYTES = 16
ROOM = NBYTES - HEAD_NBYTES
LONG_ROOM, GATHERED_ROOM = 64 << 10, 256 << 10
"""Bytes of an object that follows its record, and of those of all ranks; longer ones are left to Python."""
NONE, FALSE, TRUE, INT, FLOAT, COMPLEX, BYTES, STR, SCALAR, ARRAY, ITEMS, PICKLE, APART, ERROR = range(14)
"""Kinds of object: ITEMS is a list, tuple or dictionary, see `object_items`; APART a pickle with buffers out of band;
ERROR a text in place of an object."""
READ_ONLY, TRUSTED, LONG_SOMEWHERE = 1, 2, 4
"""Flags: of an array; of a pickle whose parts are all exact built-in scalars; of a call with long payloads."""
KIND_BIT, DTYPE_BIT, NDIM_BIT, FLAGS_BIT = 32, 36, 44, 50
"""Where kind, element type, number of axes and flags stand in a record's first word."""
CALL_BITS = (1 << KIND_BIT) - 1 | -1 << 56
"""Bits of the first word that are those of the call."""
ROOM_BIT = 56
"""Where it stands in the second word how many bytes each long object of a rank takes up, as an exponent of 2."""
MAX_NDIM, DTYPE_COUNT = 32, 16
"""Arrays with more axes, and of other element types, are pickled."""
ALIGNMENT = 16
"""Of every object in memory with others, so that an array can stay where it was received."""
MAX_DEPTH, FRAME_WORDS, MAX_SEEN = 8, 7, 64
"""Of ITEMS: containers inside each other, and lists, dictionaries and arrays in all; others are pickled."""

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
    PICKLED,
    DUMPS,  # functions that pickle, with buffers apart, and that unpickle
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
    SCRATCH,  # address of a word, for the length of a text
    STACK,  # of MAX_DEPTH frames of FRAME_WORDS words
    SEEN,  # of MAX_SEEN addresses of objects
    VALUES,  # of two words for each rank
    OPS,  # of OP_COUNT addresses of operations, those that object_reductions knows
    STAGE,  # 1 if the exchange of what has no room in records has begun
    LONG,  # LONG_ROOM bytes for that: the array, whose length varies, and its data
    LONG_ADDRESS,
    LONGS,  # GATHERED_ROOM bytes for that of all ranks
    LONGS_ADDRESS,
    SENT_LONGS,  # and for that to all ranks
    SENT_LONGS_ADDRESS,
    LONG_DATA,  # address of RANKS addresses: of bytes that have no room in this rank's record to each
    HELD,  # address of 2 * RANKS objects that own such bytes, and how many there are
    HELD_COUNT,
    SPACE,  # address of GATHERED_ROOM bytes that long ITEMS are written to, and how many are used
    SPACE_USED,
    DTYPES,  # of DTYPE_COUNT addresses of element types, and then of their itemsizes
    NEW_ARRAY,  # addresses of NumPy's functions that make an array and a scalar; 0 if they cannot be used
    NEW_SCALAR,
    SCALAR_TYPES,  # of DTYPE_COUNT addresses of types of scalars
    CORRUPT,  # a function that raises an exception for a record that cannot be read
    PICKLE_APART,  # what DUMPS has returned, if it is too long or has buffers; else 0
    RECORD_COUNT,  # and how many records to other ranks are before it
    RESULT,  # the array that a reduction has made for its result; else 0
) = range(57)
WORDS, OP_COUNT = 57, 12
OTHER, FAILED, APART_ALREADY = -1, -2, -3
"""In place of a number of bytes: the object has no place in a record; an exception is set; it has none, but a pickle of
it, or records of others, are there."""


@helper
def pack_word(collective, op, root):
    """Return the bits of the first word that are the same on all ranks in a correct program."""
    return _MAGIC_BITS | (root % MAX_ROOT) << _ROOT_BIT | op << 4 | collective


@helper
def type_of(words, thing):
    """Return the address of an object's type."""
    return load(thing + get(get(words, TABLE), HEADER) - 8)


@helper
def kind_of(description):
    """Return the kind of object of a record, by its first word without the bits of the call."""
    return description >> KIND_BIT & 0xF


@helper
def ndim_of(description):
    """Return how many axes an array has."""
    return description >> NDIM_BIT & 0x3F


@helper
def nbytes_of(memory):
    """Return how many bytes the object of a record has."""
    return load(memory + 8) & (1 << ROOM_BIT) - 1


@helper
def is_apart(description, nbytes):
    """Return whether a record has no room for its object, whose bytes follow."""
    return nbytes + 8 * ndim_of(description) > ROOM
