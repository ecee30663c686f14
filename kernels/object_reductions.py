"""Reductions of objects in one compiled call.

Floats, integers of 64 bits, and pairs of these and an integer are reduced by Python's rules, with the association of
mpi4py, see `mpicoll.objects.folding`, so that floats have the same bits. Equal arrays that have no room in records are
reduced by the collective on arrays. What overflows 64 bits, and other objects, are left to Python: `reduce_objects`
returns the list of all objects then.
"""

from .atomics import copy, load, load_float64, store, store_float64
from .decorators import helper, linked
from .dispatch import make_call
from .dispatch_table import ARRAY_TYPE
from .object_arrays import array_like, dtype_in, shape_nbytes
from .object_calls import begin, begins, ended, exchanged, gather_records, gather_rest, left, longest_of, read_all
from .object_items import LIST, TUPLE
from .object_kernels import int_at, object_at, object_kernel
from .object_records import description_of, put_array, put_object
from .object_scalars import NUMBER_BIT
from .object_words import (
    ALL_DATA,
    ARRAY,
    ASIDE,
    COLLECTIVES,
    FLAGS_BIT,
    FLOAT,
    HEAD_NBYTES,
    INT,
    ITEMS,
    KIND_BIT,
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
    VALUES,
    is_apart,
    kind_of,
    nbytes_of,
    pack_word,
    type_of,
)
from .operation_words import ALLREDUCE, EXSCAN, REDUCE, SCAN, get, put
from .python_interface import drop, float_object, forget_error, int_object, set_tuple_item, tuple_object

SUM, PROD, MAX, MIN = 1, 2, 3, 4
"""Numbers of operations, as in `mpicoll.objects.folding`."""
MAXLOC, MINLOC = 11, 12
_BITWISE = (8, 9, 10)
_INTEGERS, _NUMBERS = 0b1_1111_1110, 0b110_1101_1111_1110
"""Bits of the element types of which `_BITWISE`, and SUM and PROD, do to arrays what Python's operators do."""
_REDUCE, _ALLREDUCE, _SCAN, _EXSCAN = (COLLECTIVES.index(name) for name in ("reduce", "allreduce", "scan", "exscan"))
_SHORT, _ANY_LENGTH = 1 << 31, 1 << 62
REDUCTION = 2
"""STAGE while arrays are reduced."""
_PAIR_NBYTES = 40
"""Of ITEMS with two numbers."""


@helper
def _extreme(number, a, b):
    """Return the maximum or minimum as Python's functions of mpi4py do: the first one of two that do not differ."""
    if number == MAX:
        return b if b > a else a
    return b if b < a else a


@helper
def _result(number, a, b):
    """Return the result of an operation on two floats, or on two integers that it fits."""
    if number == SUM:
        return a + b
    return a * b if number == PROD else _extreme(number, a, b)


@helper
def _fits(number, a, b):
    """Return whether the result of an operation on integers has 64 bits; False for some products that have."""
    if number == SUM:
        total = a + b
        return (a ^ total) & (b ^ total) >= 0
    return number != PROD or (-_SHORT <= a < _SHORT and -_SHORT <= b < _SHORT)


@helper
def _is_before(number, a, b):
    return a > b if number == MAXLOC else a < b


@helper
def _combine_pairs(kind, number, a, b):
    """Combine pairs of a value and a place at two addresses into the first."""
    if kind == FLOAT:
        first = _is_before(number, load_float64(a), load_float64(b))
        second = _is_before(number, load_float64(b), load_float64(a))
    else:
        first, second = _is_before(number, load(a), load(b)), _is_before(number, load(b), load(a))
    if second or (not first and load(b + 8) < load(a + 8)):
        copy(a, b, 16)


@helper
def _combine(kind, number, a, b):
    """Combine values at two addresses into the first; return False if the result has no place there."""
    if number >= MAXLOC:
        _combine_pairs(kind, number, a, b)
        return True
    if kind == FLOAT:
        store_float64(a, _result(number, load_float64(a), load_float64(b)))
        return True
    if not _fits(number, load(a), load(b)):
        return False
    store(a, _result(number, load(a), load(b)))
    return True


@helper
def _fold(kind, number, values, count, nbytes):
    """Reduce values of so many bytes into the first one; return False if a result has no place."""
    step = 1
    while step < count:
        for place in range(0, count - step, 2 * step):
            if not _combine(kind, number, values + nbytes * place, values + nbytes * (place + step)):
                return False
        step *= 2
    return True


@helper
def _fold_before(kind, number, values, rank, result):
    """Reduce the values before a rank's, and the one at `result` if that is not 0; return the address of the result.

    0: a result has no place.
    """
    block = 1
    while block <= rank:
        if rank & block:
            first = values + 8 * (rank & ~(2 * block - 1))
            if not _fold(kind, number, first, block, 8):
                return 0
            if result and not _combine(kind, number, first, result):
                return 0
            result = first
        block *= 2
    return result


@helper
def _number_kind(memory, call):
    """Return FLOAT or INT if a record has such a number, else -1."""
    description = description_of(memory, call)
    return description >> KIND_BIT if description in (FLOAT << KIND_BIT, INT << KIND_BIT) else -1


@helper
def _pair_kind(memory, call):
    """Return FLOAT or INT if a record has a pair of such a number and an integer, else -1."""
    if description_of(memory, call) != ITEMS << KIND_BIT or nbytes_of(memory) != _PAIR_NBYTES:
        return -1
    items = memory + HEAD_NBYTES
    container, first = load(items), load(items + 8)
    if container not in (LIST | 2 << NUMBER_BIT, TUPLE | 2 << NUMBER_BIT) or load(items + 24) != INT | 8 << NUMBER_BIT:
        return -1
    return first & 0xFF if first in (FLOAT | 8 << NUMBER_BIT, INT | 8 << NUMBER_BIT) else -1


@helper
def _common_kind(words, call, collective, number):
    """Return FLOAT or INT if all objects are such numbers, or pairs if the operation is one on pairs; else -1."""
    memory, kind, pairs = get(words, ALL_DATA), -1, number >= MAXLOC
    if MIN < number < MAXLOC or (pairs and collective not in (_ALLREDUCE, _REDUCE)):
        return -1
    for rank in range(get(words, RANKS)):
        found = _pair_kind(memory, call) if pairs else _number_kind(memory, call)
        if found < 0 or (rank > 0 and found != kind):
            return -1
        kind = found
        memory += NBYTES
    return kind


@helper
def _read_values(words, number):
    """Copy the numbers or pairs of all ranks to VALUES; return how many bytes each has there."""
    values, data = get(words, VALUES), get(words, ALL_DATA) + HEAD_NBYTES
    for rank in range(get(words, RANKS)):
        if number >= MAXLOC:
            store(values + 16 * rank, load(data + 16))
            store(values + 16 * rank + 8, load(data + 32))
        else:
            store(values + 8 * rank, load(data))
        data += NBYTES
    return 16 if number >= MAXLOC else 8


@helper
def _reduced(words, collective, kind, number):
    """Return the address of the result; 0 if there is none, or none of 64 bits."""
    size, rank, values = get(words, RANKS), get(words, RANK), get(words, VALUES)
    nbytes = _read_values(words, number)
    if collective == _SCAN:
        return _fold_before(kind, number, values, rank, values + 8 * rank)
    if collective == _EXSCAN:
        return _fold_before(kind, number, values, rank, 0)
    return values if _fold(kind, number, values, size, nbytes) else 0


@helper
def _number_object(kind, data):
    return float_object(load_float64(data)) if kind == FLOAT else int_object(load(data))


@helper
def _pair_object(kind, data):
    pair = tuple_object(2)
    if pair:
        set_tuple_item(pair, 0, _number_object(kind, data))
        set_tuple_item(pair, 1, int_object(load(data + 8)))
    return pair


@linked("int64", "int64", "int64", "int64", "int64", "int64", "int64")
def _reduce_numbers(words, call, collective, kind, number, root):
    """Return the result of a reduction of numbers or pairs; the list of them if it has no place in 64 bits."""
    rank = get(words, RANK)
    if (collective == _REDUCE and rank != root) or (collective == _EXSCAN and rank == 0):
        return ended(words, left(words, NOTHING))
    result = _reduced(words, collective, kind, number)
    if result == 0:
        return ended(words, read_all(words, call, 0))
    return ended(words, _pair_object(kind, result) if number >= MAXLOC else _number_object(kind, result))


@linked("int64", "int64", "int64", "int64")
def _are_equal_arrays(words, call, number):
    """Return 1 if all objects are equal arrays that have no room in records and that arrays' collectives reduce."""
    memory = get(words, ALL_DATA)
    mask = ~(READ_ONLY << FLAGS_BIT)
    first = description_of(memory, call) & mask
    types = _INTEGERS if number in _BITWISE else _NUMBERS
    if kind_of(first) != ARRAY or not is_apart(first, nbytes_of(memory)) or not (number <= PROD or number in _BITWISE):
        return 0
    if types >> dtype_in(first) & 1 == 0:
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
    kind = _common_kind(words, call, collective, number)
    if kind >= 0:
        return _reduce_numbers(words, call, collective, kind, number, root)
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
