"""Reductions of floats and of integers of 64 bits, by Python's rules, in one compiled call.

The association is that of mpi4py, see `mpicoll.objects.folding`, so that floats have the same bits. What overflows 64
bits, and other objects, are left to Python: `reduce_objects` returns the list of all objects then.
"""

from .atomics import load, load_float64, store, store_float64
from .decorators import helper, linked
from .object_calls import begins, ended, gather_records, left, longest_of, read_all
from .object_kernels import int_at, object_at, object_kernel
from .object_records import (
    ALL_DATA,
    ASIDE,
    COLLECTIVES,
    FLOAT,
    HEAD_NBYTES,
    INT,
    KIND_BIT,
    NBYTES,
    NOTHING,
    OP_COUNT,
    OPS,
    RANK,
    RANKS,
    ROOM,
    UNREAD,
    VALUES,
    pack_word,
)
from .operation_words import get
from .python_interface import float_object, forget_error, int_object

SUM, PROD, MAX, MIN = 1, 2, 3, 4
"""Numbers of operations, as in `mpicoll.objects.folding`."""
_REDUCE, _SCAN, _EXSCAN = (COLLECTIVES.index(name) for name in ("reduce", "scan", "exscan"))
_SHORT = 1 << 31


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
def _combine(kind, number, a, b):
    """Combine values at two addresses into the first; return False if the result has no place there."""
    if kind == FLOAT:
        store_float64(a, _result(number, load_float64(a), load_float64(b)))
        return True
    if not _fits(number, load(a), load(b)):
        return False
    store(a, _result(number, load(a), load(b)))
    return True


@helper
def _fold(kind, number, values, count):
    """Reduce values into the first one; return False if a result has no place."""
    step = 1
    while step < count:
        for place in range(0, count - step, 2 * step):
            if not _combine(kind, number, values + 8 * place, values + 8 * (place + step)):
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
            if not _fold(kind, number, first, block):
                return 0
            if result and not _combine(kind, number, first, result):
                return 0
            result = first
        block *= 2
    return result


@helper
def _common_kind(words, call):
    """Return FLOAT or INT if all objects are such numbers, else -1."""
    memory = get(words, ALL_DATA)
    first = load(memory) ^ call
    if first != FLOAT << KIND_BIT and first != INT << KIND_BIT:
        return -1
    for rank in range(get(words, RANKS)):
        if load(memory + NBYTES * rank) ^ call != first:
            return -1
    return first >> KIND_BIT


@helper
def _reduced(words, collective, kind, number):
    """Return the address of the result; 0 if there is none, or none of 64 bits."""
    size, rank, values = get(words, RANKS), get(words, RANK), get(words, VALUES)
    for place in range(size):
        store(values + 8 * place, load(get(words, ALL_DATA) + NBYTES * place + HEAD_NBYTES))
    if collective == _SCAN:
        return _fold_before(kind, number, values, rank, values + 8 * rank)
    if collective == _EXSCAN:
        return _fold_before(kind, number, values, rank, 0)
    return values if _fold(kind, number, values, size) else 0


@linked("int64", "int64", "int64", "int64", "int64", "int64")
def reduce_records(words, call, collective, number, root):
    """Return the result of a reduction from known records; the list of all objects if it is left to Python."""
    kind, rank = _common_kind(words, call), get(words, RANK)
    if kind >= 0 and ((collective == _REDUCE and rank != root) or (collective == _EXSCAN and rank == 0)):
        return ended(words, left(words, NOTHING))
    result = 0 if kind < 0 else _reduced(words, collective, kind, number)
    if result == 0:
        return ended(words, read_all(words, call, 0))
    return ended(words, float_object(load_float64(result)) if kind == FLOAT else int_object(load(result)))


@helper
def _number_of(words, operation):
    for place in range(OP_COUNT):
        if load(get(words, OPS) + 8 * place) == operation:
            return place + 1
    return 0


@object_kernel
def reduce_objects(module, arguments, count):
    """Reduce objects by one of the four operations.

    Arguments: the words, the object, the operation, the number of the collective, the root.
    """
    words, collective, root = int_at(arguments, 0), int_at(arguments, 3), int_at(arguments, 4)
    number = _number_of(words, object_at(arguments, 2))
    if number == 0 or not 0 <= root < get(words, RANKS) or not begins(words, count, 5):
        forget_error()
        return left(words, ASIDE)
    call = pack_word(collective, number, root)
    gathered = gather_records(words, object_at(arguments, 1), call, ROOM, count > 5)
    if gathered != 1:
        return gathered
    if longest_of(words, call, True) != 0:
        return left(words, UNREAD)
    return reduce_records(words, call, collective, number, root)
