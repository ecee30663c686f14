"""Collectives of short Python objects, from the caller's object to the result in one compiled call.

Where something is left to Python, a kernel returns one of four objects instead of a result:

- ASIDE: nothing has happened. The caller takes the general way, which exchanges the same records.
- PICKLED: nothing has happened, but the object is pickled and has no place in a record, or the first of several are
  written. The caller takes the general way with those, and sets the word IN_USE to 0.
- PENDING: the exchange has begun, with the word STATUS. The caller completes it, and calls the kernel again with one
  argument more.
- UNREAD: the records have come, and one of them has to be read by Python, which then sets the word IN_USE to 0.

The words and the records are in use from the begin of a call to its end. Another thread, or a function that the pickler
calls, goes aside meanwhile. Collectives of one object a rank are here, the others in `object_parts`.
"""

from .atomics import copy, load
from .decorators import helper, linked
from .dispatch import make_call
from .dispatch_table import set_length
from .object_kernels import int_at, object_at, object_kernel
from .object_pickles import is_scalar
from .object_records import description_of, get_here, get_object, is_known, put_object
from .object_words import (
    ALIGNMENT,
    ALL,
    ALL_DATA,
    APART_ALREADY,
    ASIDE,
    COLLECTIVES,
    FAILED,
    GATHERED_ROOM,
    HELD,
    HELD_COUNT,
    IN_USE,
    LONG,
    LONG_ADDRESS,
    LONG_DATA,
    LONGS,
    LONGS_ADDRESS,
    NBYTES,
    NOTHING,
    OWN,
    OWN_DATA,
    PENDING,
    PICKLED,
    RANK,
    RANKS,
    SPACE_USED,
    STAGE,
    STATUS,
    TABLE,
    UNREAD,
    is_apart,
    nbytes_of,
    pack_word,
)
from .operation_words import ALLGATHER, BCAST, DONE, GATHER, get, put
from .python_interface import drop, forget_error, keep, list_object, set_item

_BCAST, _OUTCOME = COLLECTIVES.index("bcast"), COLLECTIVES.index("outcome")


@helper
def left(words, what):
    """Return an object that stands for what is left to Python."""
    thing = get(words, what)
    keep(thing)
    return thing


@helper
def begins(words, count, own_count):
    """Return whether a call begins, or goes on with one argument more, and may use the records."""
    return count == own_count + 1 or get(words, IN_USE) == 0


@helper
def begin(words):
    """Take the records for this call."""
    put(words, IN_USE, 1)
    put(words, STAGE, 0)
    put(words, SPACE_USED, 0)


@helper
def _release(words):
    """Leave the records to the next call."""
    for place in range(get(words, HELD_COUNT)):
        drop(load(get(words, HELD) + 8 * place))
    put(words, HELD_COUNT, 0)
    put(words, IN_USE, 0)


@helper
def ended(words, result):
    """Leave the records to the next call; return the result of this one."""
    _release(words)
    return result


@helper
def not_put(words, nbytes):
    """Return what a call returns whose object is in no record."""
    if nbytes == APART_ALREADY:
        return left(words, PICKLED)
    _release(words)
    return 0 if nbytes == FAILED else left(words, ASIDE)


@helper
def exchanged(words, status):
    """Note the status of an exchange; return whether it is complete."""
    put(words, STATUS, status)
    return status == DONE


@helper
def rounded(nbytes):
    """Return a length at least as large, of few different ones, as `mpicoll.objects.long_objects.rounded` does."""
    step = 1
    while 16 * step <= nbytes:
        step *= 2
    return nbytes + -nbytes % max(step, ALIGNMENT)


@linked("int64", "int64", "int64", "int64")
def longest_of(words, call, predictable):
    """Return the bytes that each object gets that follows its record, 0 if none does; -1 for unknown records."""
    memory, longest = get(words, ALL_DATA), 0
    for _rank in range(get(words, RANKS)):
        if is_known(words, memory, call, predictable) == 0:
            return -1
        nbytes = nbytes_of(memory)
        if is_apart(description_of(memory, call), nbytes):
            longest = max(longest, nbytes + -nbytes % ALIGNMENT)
        memory += NBYTES
    length = rounded(longest) if longest else 0
    return length if length * get(words, RANKS) <= GATHERED_ROOM else -1


@helper
def _get_from(words, memory, call, data):
    """Return the new object of a record, whose bytes are at `data` if they are not in it; see `get_object`."""
    description = description_of(memory, call)
    if is_apart(description, nbytes_of(memory)):
        return get_object(words, memory, description, data)
    return get_here(words, memory, call)


@helper
def get_own(words, call):
    """Return the new object of the record that has come for this rank."""
    return _get_from(words, get(words, OWN_DATA), call, get(words, LONG_ADDRESS))


@linked("int64", "int64", "int64", "int64")
def read_all(words, call, length):
    """Return a list of the objects of all records, which are known; 0 with an exception set if that fails.

    Those that follow their records have `length` bytes each, at LONGS_ADDRESS.
    """
    size, memory = get(words, RANKS), get(words, ALL_DATA)
    found = list_object(size)
    for rank in range(size if found else 0):
        item = _get_from(words, memory, call, get(words, LONGS_ADDRESS) + rank * length)
        if item == 0:
            drop(found)
            return 0
        set_item(found, rank, item)
        memory += NBYTES
    return found


@helper
def copy_long(words, target, nbytes, slot):
    """Copy the bytes that have no room in a record of this rank."""
    copy(target, load(get(words, LONG_DATA) + 8 * slot), nbytes)


@helper
def _bcast_payload(words, root, nbytes):
    """Begin to broadcast the bytes of an object that follows its record; return whether that is complete."""
    table, array = get(words, TABLE), get(words, LONG)
    put(words, STAGE, 1)
    set_length(table, array, rounded(nbytes))
    if root == get(words, RANK):
        copy_long(words, get(words, LONG_ADDRESS), nbytes, 0)
    return exchanged(words, make_call(table, BCAST, 0, array, 0, root))


@linked("int64", "int64", "int64", "int64", "int64", "int64")
def _bcast(words, thing, collective, root, goes_on):
    call, memory, is_root = pack_word(collective, 0, root), get(words, OWN_DATA), root == get(words, RANK)
    if not goes_on:
        begin(words)
        nbytes = put_object(words, memory, call, thing, 0) if is_root else 0
        if nbytes < 0:
            return not_put(words, nbytes)
        if not exchanged(words, make_call(get(words, TABLE), BCAST, 0, get(words, OWN), 0, root)):
            return left(words, PENDING)
    if is_known(words, memory, call, 0) == 0:
        return left(words, UNREAD)
    nbytes = nbytes_of(memory)
    follows = is_apart(description_of(memory, call), nbytes)
    if follows and get(words, STAGE) == 0 and not _bcast_payload(words, root, nbytes):
        return left(words, PENDING)
    if is_root and is_scalar(words, thing):
        keep(thing)
        return ended(words, thing)
    return ended(words, get_own(words, call))


@object_kernel
def bcast_object(module, arguments, count):
    """Broadcast an object; arguments: the words, the object, the root."""
    words, root = int_at(arguments, 0), int_at(arguments, 2)
    if not 0 <= root < get(words, RANKS) or not begins(words, count, 3):
        forget_error()
        return left(words, ASIDE)
    return _bcast(words, object_at(arguments, 1), _BCAST, root, count > 3)


@object_kernel
def bcast_result(module, arguments, count):
    """Broadcast the result of a reduction that one rank has made; arguments: the words, the object, the root."""
    words, root = int_at(arguments, 0), int_at(arguments, 2)
    if not begins(words, count, 3):
        return left(words, ASIDE)
    return _bcast(words, object_at(arguments, 1), _OUTCOME, root, count > 3)


@helper
def gather_records(words, nbytes):
    """Exchange records between all ranks, after this rank's has been put.

    Returns 1, 0 with an exception set, or an object for what is left to Python.
    """
    if nbytes < 0:
        return not_put(words, nbytes)
    if not exchanged(words, make_call(get(words, TABLE), ALLGATHER, get(words, OWN), get(words, ALL), 0, 0)):
        return left(words, PENDING)
    return 1


@linked("int64", "int64", "int64", "int64", "int64")
def _gather_payloads(words, call, length, root):
    """Begin to gather the bytes of objects that follow their records, on all ranks if `root` is -1; return a status."""
    table, memory = get(words, TABLE), get(words, OWN_DATA)
    put(words, STAGE, 1)
    set_length(table, get(words, LONG), length)
    set_length(table, get(words, LONGS), length * get(words, RANKS))
    if is_apart(description_of(memory, call), nbytes_of(memory)):
        copy_long(words, get(words, LONG_ADDRESS), nbytes_of(memory), 0)
    if root < 0:
        return make_call(table, ALLGATHER, get(words, LONG), get(words, LONGS), 0, 0)
    into = get(words, LONGS if root == get(words, RANK) else NOTHING)
    return make_call(table, GATHER, get(words, LONG), into, 0, root)


@linked("int64", "int64", "int64", "int64", "int64")
def gather_rest(words, call, length, root):
    """Gather what follows the records of all ranks, which have come; return the list, or what stands for it."""
    if length < 0:
        return left(words, UNREAD)
    if length and get(words, STAGE) == 0 and not exchanged(words, _gather_payloads(words, call, length, root)):
        return left(words, PENDING)
    if root >= 0 and root != get(words, RANK):
        return ended(words, left(words, NOTHING))
    return ended(words, read_all(words, call, length))


@object_kernel
def gather_objects(module, arguments, count):
    """Gather the objects of all ranks.

    Arguments: the words, the object, the bits of the call, and the rank that gets the list; -1 for all.
    """
    words, call, root = int_at(arguments, 0), int_at(arguments, 2), int_at(arguments, 3)
    if not begins(words, count, 4):
        return left(words, ASIDE)
    if count == 4:
        begin(words)
        nbytes = put_object(words, get(words, OWN_DATA), call, object_at(arguments, 1), 0)
        gathered = gather_records(words, nbytes)
        if gathered != 1:
            return gathered
    return gather_rest(words, call, longest_of(words, call, 0), root)
