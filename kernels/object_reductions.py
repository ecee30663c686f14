"""Reductions of objects in one compiled call.

Numbers and pairs of them are reduced here (`object_numbers`), equal arrays that have no room in records by the
collective on arrays. What overflows 64 bits, and other objects, are left to Python: `reduce_objects` returns the list
of all objects then.
"""

from .atomics import load
from .decorators import helper, linked
from .dispatch import make_call
from .dispatch_table import ARRAY_TYPE
from .object_arrays import array_like, dtype_in, shape_nbytes
from .object_calls import begin, begins, ended, exchanged, gather_records, gather_rest, left, longest_of
from .object_kernels import int_at, object_at, object_kernel
from .object_numbers import PROD, SUM, common_kind, reduce_numbers
from .object_records import description_of, put_array, put_object
from .object_words import (
    ALL_DATA,
    ARRAY,
    ASIDE,
    COLLECTIVES,
    FLAGS_BIT,
    HEAD_NBYTES,
    NBYTES,
    NOTHING,
    OP_COUNT,
    OPS,
    OWN_DATA,
    PENDING,
    RANK,
    RANKS,
    READ_ONLY,
    RESULT,
    STAGE,
    TABLE,
    UNREAD,
    is_apart,
    kind_of,
    nbytes_of,
    pack_word,
    type_of,
)
from .operation_words import ALLREDUCE, EXSCAN, REDUCE, SCAN, get, put
from .python_interface import drop, forget_error

_BITWISE = (8, 9, 10)
_INTEGERS, _NUMBERS = 0b1_1111_1110, 0b110_1101_1111_1110
"""Sets of element types, a bit for each number."""
_REDUCE, _ALLREDUCE, _SCAN, _EXSCAN = (COLLECTIVES.index(name) for name in ("reduce", "allreduce", "scan", "exscan"))
_ANY_LENGTH = 1 << 62
REDUCTION = 2
"""STAGE while arrays are reduced."""


@helper
def reduced_types(number):
    """Return the set of element types for which the collective on arrays does what Python's operators do."""
    if number in _BITWISE:
        return _INTEGERS
    return _NUMBERS if SUM <= number <= PROD else 0


@linked("int64", "int64", "int64", "int64")
def _are_equal_arrays(words, call, number):
    """Return 1 if all objects are equal arrays that have no room in records and that arrays' collectives reduce."""
    memory = get(words, ALL_DATA)
    mask = ~(READ_ONLY << FLAGS_BIT)
    first = description_of(memory, call) & mask
    if kind_of(first) != ARRAY or not is_apart(first, nbytes_of(memory)):
        return 0
    if reduced_types(number) >> dtype_in(first) & 1 == 0:
        return 0
    for rank in range(1, get(words, RANKS)):
        other = memory + NBYTES * rank
        if description_of(other, call) & mask != first:
            return 0
        for place in range(0, shape_nbytes(first), 8):
            if load(other + HEAD_NBYTES + place) != load(memory + HEAD_NBYTES + place):
                return 0
    return 1


@helper
def _collective_of(collective):
    """Return the number of the collective on arrays."""
    if collective == _ALLREDUCE:
        return ALLREDUCE
    if collective == _REDUCE:
        return REDUCE
    return SCAN if collective == _SCAN else EXSCAN


@helper
def _array_result(words, collective):
    """Return the result of a reduction of arrays that is complete."""
    result = get(words, RESULT)
    put(words, RESULT, 0)
    if result == 0:
        return ended(words, left(words, NOTHING))
    if collective == _EXSCAN and get(words, RANK) == 0:
        drop(result)
        result = left(words, NOTHING)
    return ended(words, result)


@linked("int64", "int64", "int64", "int64", "int64", "int64", "int64")
def _reduce_arrays(words, thing, call, collective, number, root):
    """Reduce equal arrays, whose records have come, by the collective on arrays."""
    if get(words, STAGE) == 0:
        put(words, STAGE, REDUCTION)
        result = 0
        if collective != _REDUCE or get(words, RANK) == root:
            result = array_like(words, get(words, OWN_DATA), description_of(get(words, OWN_DATA), call))
            if result == 0:
                forget_error()  # the general way meets it again, and tells the others
                return left(words, UNREAD)
        put(words, RESULT, result)
        into, operation = result if result else get(words, NOTHING), load(get(words, OPS) + 8 * (number - 1))
        status = make_call(get(words, TABLE), _collective_of(collective), thing, into, operation, root)
        if not exchanged(words, status):
            return left(words, PENDING)
    return _array_result(words, collective)


@helper
def _number_of(words, operation):
    for place in range(OP_COUNT):
        if load(get(words, OPS) + 8 * place) == operation:
            return place + 1
    return 0


@helper
def _put(words, call, thing):
    """Write this rank's record; arrays may have any length."""
    if type_of(words, thing) == get(get(words, TABLE), ARRAY_TYPE):
        return put_array(words, get(words, OWN_DATA), call, thing, _ANY_LENGTH, 0)
    return put_object(words, get(words, OWN_DATA), call, thing, 0)


@linked("int64", "int64", "int64", "int64", "int64", "int64", "int64")
def _reduce_records(words, thing, call, collective, number, root):
    """Return the result of a reduction whose records have come, or what stands for what is left."""
    kind = common_kind(words, call, collective, number)
    if kind >= 0:
        return reduce_numbers(words, call, collective, kind, number, root)
    if _are_equal_arrays(words, call, number):
        return _reduce_arrays(words, thing, call, collective, number, root)
    return gather_rest(words, call, longest_of(words, call, 1), -1)


@object_kernel
def reduce_objects(module, arguments, count):
    """Reduce objects by a predefined operation.

    Arguments: the words, the object, the operation, the number of the collective, the root.
    """
    words, collective, root = int_at(arguments, 0), int_at(arguments, 3), int_at(arguments, 4)
    thing, number = object_at(arguments, 1), _number_of(words, object_at(arguments, 2))
    if number == 0 or not 0 <= root < get(words, RANKS) or not begins(words, count, 5):
        forget_error()
        return left(words, ASIDE)
    call = pack_word(collective, number, root)
    if count == 5:
        begin(words)
        gathered = gather_records(words, _put(words, call, thing))
        if gathered != 1:
            return gathered
    return _reduce_records(words, thing, call, collective, number, root)
