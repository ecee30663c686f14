"""Collectives of one Python object for each rank, scatter and alltoall, in one compiled call; see `object_calls`.

If an object of a rank has no room in its record, all records of that rank say so, and how many bytes each of its
objects takes up in the collective that follows.
"""

from .atomics import load, store
from .decorators import helper, linked
from .dispatch import make_call
from .dispatch_table import set_length
from .object_calls import begin, begins, copy_long, ended, exchanged, get_own, left, not_put, read_all
from .object_items import DICT, container_of, item_of, size_of
from .object_kernels import int_at, object_at, object_kernel
from .object_pickles import hold
from .object_records import description_of, is_known, put_object
from .object_words import (
    ALL,
    ALL_DATA,
    APART_ALREADY,
    ASIDE,
    COLLECTIVES,
    FLAGS_BIT,
    GATHERED_ROOM,
    LONG,
    LONG_SOMEWHERE,
    LONGS,
    NBYTES,
    NOTHING,
    OTHER,
    OWN,
    OWN_DATA,
    PENDING,
    RANK,
    RANKS,
    RECORD_COUNT,
    ROOM_BIT,
    SENT,
    SENT_DATA,
    SENT_LONGS,
    SENT_LONGS_ADDRESS,
    STAGE,
    TABLE,
    UNREAD,
    is_apart,
    nbytes_of,
    pack_word,
)
from .operation_words import ALLTOALL, SCATTER, get, put
from .python_interface import drop, forget_error, keep

_SCATTER, _ALLTOALL = COLLECTIVES.index("scatter"), COLLECTIVES.index("alltoall")


@helper
def _exponent_of(nbytes):
    """Return the least exponent of a power of 2 that is at least as large."""
    exponent = 0
    while 1 << exponent < nbytes:
        exponent += 1
    return exponent


@helper
def _written(words, count):
    """Leave the call to Python, with so many records, so that no object is pickled twice."""
    put(words, RECORD_COUNT, count)
    return APART_ALREADY


@linked("int64", "int64", "int64", "int64")
def _put_each(words, call, things):
    """Write a record for each rank from a list or tuple; return the bytes of the longest that follows, or a status."""
    size, memory, container, longest = get(words, RANKS), get(words, SENT_DATA), container_of(words, things), 0
    if container < 0 or container == DICT:
        return OTHER
    for rank in range(size):
        if size_of(container, things) != size:  # the pickler may have run code of the program
            return OTHER
        thing = item_of(container, things, rank)
        keep(thing)
        nbytes = put_object(words, memory, call, thing, rank)
        if nbytes > 0 and is_apart(description_of(memory, call), nbytes):
            longest = max(longest, nbytes)
            hold(words, thing)
        else:
            drop(thing)
        if nbytes == OTHER and rank > 0:
            return _written(words, rank)
        if nbytes < 0:
            return nbytes
        if size << _exponent_of(longest) > GATHERED_ROOM:
            return _written(words, rank + 1)
        memory += NBYTES
    return longest


@linked("int64", "int64", "int64", "int64")
def _put_all(words, call, things):
    """Write a record for each rank from a list or tuple of as many; return 0, or what `put_object` does."""
    longest = _put_each(words, call, things)
    if longest <= 0:
        return longest
    exponent, memory = _exponent_of(longest), get(words, SENT_DATA)
    for _rank in range(get(words, RANKS)):
        store(memory, load(memory) | LONG_SOMEWHERE << FLAGS_BIT)
        store(memory + 8, load(memory + 8) | exponent << ROOM_BIT)
        memory += NBYTES
    return 0


@helper
def _room_of(memory, call):
    """Return the bytes that each object of a rank takes up in what follows, 0 if nothing does, -1 if they differ."""
    if (load(memory) ^ call) >> FLAGS_BIT & LONG_SOMEWHERE == 0:
        return 0
    exponent = load(memory + 8) >> ROOM_BIT
    return 1 << exponent if 0 < exponent <= 16 else -1


@linked("int64", "int64", "int64", "int64")
def known_room(words, memory, call):
    """Return `_room_of` a record, -1 if the record is not known or its object has more bytes than that."""
    each = _room_of(memory, call)
    if each < 0 or is_known(words, memory, call, 0) == 0:
        return -1
    return -1 if is_apart(description_of(memory, call), nbytes_of(memory)) and nbytes_of(memory) > each else each


@helper
def _pack(words, call, each):
    """Copy what follows the records of this rank to where it is sent from."""
    memory, target = get(words, SENT_DATA), get(words, SENT_LONGS_ADDRESS)
    set_length(get(words, TABLE), get(words, SENT_LONGS), each * get(words, RANKS))
    for rank in range(get(words, RANKS)):
        nbytes = nbytes_of(memory)
        if is_apart(description_of(memory, call), nbytes):
            copy_long(words, target, nbytes, rank)
        memory, target = memory + NBYTES, target + each


@linked("int64", "int64", "int64", "int64", "int64")
def _scatter_payloads(words, call, each, root):
    """Begin to scatter what follows the records; return a status."""
    table, is_root = get(words, TABLE), root == get(words, RANK)
    put(words, STAGE, 1)
    set_length(table, get(words, LONG), each)
    if is_root:
        _pack(words, call, each)
    return make_call(table, SCATTER, get(words, SENT_LONGS if is_root else NOTHING), get(words, LONG), 0, root)


@linked("int64", "int64", "int64", "int64", "int64")
def _scatter(words, things, root, goes_on):
    call, is_root, memory = pack_word(_SCATTER, 0, root), root == get(words, RANK), get(words, OWN_DATA)
    if not goes_on:
        begin(words)
        nbytes = _put_all(words, call, things) if is_root else 0
        if nbytes < 0:
            return not_put(words, nbytes)
        sent = get(words, SENT if is_root else NOTHING)
        if not exchanged(words, make_call(get(words, TABLE), SCATTER, sent, get(words, OWN), 0, root)):
            return left(words, PENDING)
    each = known_room(words, memory, call)
    if each < 0:
        return left(words, UNREAD)
    if each and get(words, STAGE) == 0 and not exchanged(words, _scatter_payloads(words, call, each, root)):
        return left(words, PENDING)
    return ended(words, get_own(words, call))


@object_kernel
def scatter_objects(module, arguments, count):
    """Scatter the objects of the root; arguments: the words, the root's list or tuple, the root."""
    words, root = int_at(arguments, 0), int_at(arguments, 2)
    if not 0 <= root < get(words, RANKS) or not begins(words, count, 3):
        forget_error()
        return left(words, ASIDE)
    return _scatter(words, object_at(arguments, 1), root, count > 3)


@linked("int64", "int64", "int64")
def _room_of_all(words, call):
    """Return the bytes that each object takes up in what follows, 0 if nothing does, -1 if it is left to Python."""
    memory, largest = get(words, ALL_DATA), 0
    for _rank in range(get(words, RANKS)):
        each = known_room(words, memory, call)
        if each < 0:
            return -1
        largest = max(largest, each)
        memory += NBYTES
    return largest if largest * get(words, RANKS) <= GATHERED_ROOM else -1


@linked("int64", "int64", "int64", "int64")
def _swap_payloads(words, call, each):
    """Begin to exchange what follows the records; return a status."""
    put(words, STAGE, 1)
    _pack(words, call, each)
    set_length(get(words, TABLE), get(words, LONGS), each * get(words, RANKS))
    return make_call(get(words, TABLE), ALLTOALL, get(words, SENT_LONGS), get(words, LONGS), 0, 0)


@object_kernel
def swap_objects(module, arguments, count):
    """Give each rank its object from every rank's list or tuple; arguments: the words, the list or tuple."""
    words, call = int_at(arguments, 0), pack_word(_ALLTOALL, 0, 0)
    if not begins(words, count, 2):
        return left(words, ASIDE)
    if count == 2:
        begin(words)
        nbytes = _put_all(words, call, object_at(arguments, 1))
        if nbytes < 0:
            return not_put(words, nbytes)
        if not exchanged(words, make_call(get(words, TABLE), ALLTOALL, get(words, SENT), get(words, ALL), 0, 0)):
            return left(words, PENDING)
    each = _room_of_all(words, call)
    if each < 0:
        return left(words, UNREAD)
    if each and get(words, STAGE) == 0 and not exchanged(words, _swap_payloads(words, call, each)):
        return left(words, PENDING)
    return ended(words, read_all(words, call, each))
