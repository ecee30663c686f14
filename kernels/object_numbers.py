"""Reductions of floats, of integers of 64 bits, and of pairs of these and an integer, by Python's rules.

The association is that of mpi4py, see `mpicoll.objects.folding`, so that floats have the same bits.
"""

from .atomics import copy, load, load_float64, store, store_float64
from .decorators import helper, linked
from .object_calls import ended, left, read_all
from .object_items import LIST, TUPLE
from .object_records import description_of
from .object_scalars import NUMBER_BIT
from .object_words import (
    ALL_DATA,
    COLLECTIVES,
    FLOAT,
    HEAD_NBYTES,
    INT,
    ITEMS,
    KIND_BIT,
    NBYTES,
    NOTHING,
    RANK,
    RANKS,
    VALUES,
    nbytes_of,
)
from .operation_words import get
from .python_interface import drop, float_object, int_object, set_tuple_item, tuple_object

SUM, PROD, MAX, MIN, MAXLOC, MINLOC = 1, 2, 3, 4, 11, 12
"""Numbers of operations, as in `mpicoll.objects.folding`."""
_REDUCE, _ALLREDUCE, _SCAN, _EXSCAN = (COLLECTIVES.index(name) for name in ("reduce", "allreduce", "scan", "exscan"))
_SHORT = 1 << 31
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
def common_kind(words, call, collective, number):
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
def _forget(thing):
    """Give up an object that may not have been made; return 0."""
    if thing:
        drop(thing)
    return 0


@helper
def _pair_object(kind, data):
    pair, number, place = tuple_object(2), _number_object(kind, data), int_object(load(data + 8))
    if pair == 0 or number == 0 or place == 0:
        return _forget(pair) + _forget(number) + _forget(place)
    set_tuple_item(pair, 0, number)
    set_tuple_item(pair, 1, place)
    return pair


@linked("int64", "int64", "int64", "int64", "int64", "int64", "int64")
def reduce_numbers(words, call, collective, kind, number, root):
    """Return the result of a reduction of numbers or pairs; the list of them if it has no place in 64 bits."""
    rank = get(words, RANK)
    if (collective == _REDUCE and rank != root) or (collective == _EXSCAN and rank == 0):
        return ended(words, left(words, NOTHING))
    result = _reduced(words, collective, kind, number)
    if result == 0:
        return ended(words, read_all(words, call, 0))
    return ended(words, _pair_object(kind, result) if number >= MAXLOC else _number_object(kind, result))
