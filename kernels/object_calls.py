"""Collectives of short Python objects, from the caller's object to the result in one compiled call.

Where something is left to Python, a kernel returns one of three objects instead of a result:

- ASIDE: nothing has happened. The caller takes the general way, which exchanges the same records.
- PENDING: the exchange has begun, with the word STATUS. The caller completes it, and calls the kernel again with one
  argument more.
- UNREAD: the records have come, and one of them has to be read by Python, which then sets the word IN_USE to 0.

The words and the records are in use from the begin of a call to its end. Another thread, or a function that the pickler
calls, goes aside meanwhile.
"""

from .atomics import copy, load
from .decorators import helper, linked
from .dispatch import make_call
from .dispatch_table import set_length
from .object_kernels import int_at, object_at, object_kernel
from .object_records import (
    ALIGNMENT,
    ALL,
    ALL_DATA,
    ASIDE,
    COLLECTIVES,
    FAILED,
    GATHERED_ROOM,
    HEAD_NBYTES,
    IN_USE,
    LIST_TYPE,
    LONG,
    LONG_ADDRESS,
    LONG_DATA,
    LONG_ROOM,
    LONGS,
    LONGS_ADDRESS,
    NBYTES,
    NOTHING,
    OTHER,
    OWN,
    OWN_DATA,
    PENDING,
    PICKLED,
    RANK,
    RANKS,
    ROOM,
    SENT,
    SENT_DATA,
    STAGE,
    STATUS,
    TABLE,
    TUPLE_TYPE,
    UNREAD,
    get_object,
    is_known,
    is_long,
    is_scalar,
    item_of,
    pack_word,
    put_object,
    size_of,
    type_of,
)
from .operation_words import ALLGATHER, ALLTOALL, BCAST, DONE, GATHER, SCATTER, get, put
from .python_interface import drop, forget_error, keep, list_object, set_item

_BCAST, _SCATTER, _ALLTOALL = (COLLECTIVES.index(name) for name in ("bcast", "scatter", "alltoall"))


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
def _begin(words):
    put(words, IN_USE, 1)
    put(words, STAGE, 0)


@helper
def ended(words, result):
    """Leave the records to the next call; return the result of this one."""
    pickled = get(words, PICKLED)
    if pickled:
        put(words, PICKLED, 0)
        drop(pickled)
    put(words, IN_USE, 0)
    return result


@helper
def _not_put(words, nbytes):
    """Return what a call returns whose object is in no record."""
    put(words, IN_USE, 0)
    return 0 if nbytes == FAILED else left(words, ASIDE)


@helper
def _exchanged(words, status):
    """Note the status of an exchange; return whether it is complete."""
    put(words, STATUS, status)
    return status == DONE


@helper
def _read_own(words, call):
    """Return the object of the record that has come."""
    memory = get(words, OWN_DATA)
    description, nbytes = load(memory) ^ call, load(memory + 8)
    if not is_known(description, nbytes, False):
        return left(words, UNREAD)
    return ended(words, get_object(words, memory + HEAD_NBYTES, nbytes, description))


@helper
def rounded(nbytes):
    """Return a length at least as large, of few different ones, as `mpicoll.objects.exchange.rounded` does."""
    step = 1
    while 16 * step <= nbytes:
        step *= 2
    return nbytes + -nbytes % max(step, ALIGNMENT)


@helper
def longest_of(words, call, predictable):
    """Return the bytes that each object gets that follows its record, 0 if none does; -1 for unknown records."""
    memory, longest = get(words, ALL_DATA), 0
    for _rank in range(get(words, RANKS)):
        description, nbytes = load(memory) ^ call, load(memory + 8)
        if is_long(description, nbytes) and not predictable:
            longest = max(longest, nbytes + -nbytes % ALIGNMENT)
        elif not is_known(description, nbytes, predictable):
            return -1
        memory += NBYTES
    length = rounded(longest) if longest else 0
    return length if length * get(words, RANKS) <= GATHERED_ROOM else -1


@linked("int64", "int64", "int64", "int64")
def read_all(words, call, length):
    """Return a list of the objects of all records, which are known; 0 with an exception set if that fails.

    Those that follow their records have `length` bytes each, at LONGS_ADDRESS.
    """
    size, memory = get(words, RANKS), get(words, ALL_DATA)
    found = list_object(size)
    for rank in range(size if found else 0):
        nbytes = load(memory + 8)
        data = memory + HEAD_NBYTES if nbytes <= ROOM else get(words, LONGS_ADDRESS) + rank * length
        item = get_object(words, data, nbytes, load(memory) ^ call)
        if item == 0:
            drop(found)
            return 0
        set_item(found, rank, item)
        memory += NBYTES
    return found


@linked("int64", "int64", "int64", "int64")
def put_all(words, call, things):
    """Write a record for each rank from a list or tuple of as many; return 0, or `OTHER` or `FAILED`."""
    size, memory, kind = get(words, RANKS), get(words, SENT_DATA), type_of(words, things)
    if kind != get(words, LIST_TYPE) and kind != get(words, TUPLE_TYPE):
        return OTHER
    for rank in range(size):
        if size_of(words, things) != size:  # the pickler may have run code of the program
            return OTHER
        thing = item_of(words, things, rank)
        keep(thing)
        nbytes = put_object(words, memory, call, thing, ROOM)
        drop(thing)
        if nbytes < 0:
            return nbytes
        memory += NBYTES
    return 0


@helper
def _bcast_payload(words, root, nbytes):
    """Begin to broadcast the bytes of an object that follows its record; return whether that is complete."""
    table, array, address = get(words, TABLE), get(words, LONG), get(words, LONG_ADDRESS)
    put(words, STAGE, 1)
    set_length(table, array, rounded(nbytes))
    if root == get(words, RANK):
        copy(address, get(words, LONG_DATA), nbytes)
    return _exchanged(words, make_call(table, BCAST, 0, array, 0, root))


@linked("int64", "int64", "int64", "int64", "int64")
def _bcast(words, thing, root, goes_on):
    call, memory, is_root = pack_word(_BCAST, 0, root), get(words, OWN_DATA), root == get(words, RANK)
    if not goes_on:
        _begin(words)
        nbytes = put_object(words, memory, call, thing, LONG_ROOM) if is_root else 0
        if nbytes < 0:
            return _not_put(words, nbytes)
        if not _exchanged(words, make_call(get(words, TABLE), BCAST, 0, get(words, OWN), 0, root)):
            return left(words, PENDING)
    description, nbytes = load(memory) ^ call, load(memory + 8)
    follows = is_long(description, nbytes)
    if follows and get(words, STAGE) == 0 and not _bcast_payload(words, root, nbytes):
        return left(words, PENDING)
    if is_root and is_scalar(words, thing):
        keep(thing)
        return ended(words, thing)
    if follows:
        return ended(words, get_object(words, get(words, LONG_ADDRESS), nbytes, description))
    return _read_own(words, call)


@object_kernel
def bcast_object(module, arguments, count):
    """Broadcast an object; arguments: the words, the object, the root."""
    words, root = int_at(arguments, 0), int_at(arguments, 2)
    if not 0 <= root < get(words, RANKS) or not begins(words, count, 3):
        forget_error()
        return left(words, ASIDE)
    return _bcast(words, object_at(arguments, 1), root, count > 3)


@linked("int64", "int64", "int64", "int64", "int64", "int64")
def gather_records(words, thing, call, room, goes_on):
    """Exchange records between all ranks; return 1, 0 with an exception set, or an object for what is left."""
    if goes_on:
        return 1
    _begin(words)
    nbytes = put_object(words, get(words, OWN_DATA), call, thing, room)
    if nbytes < 0:
        return _not_put(words, nbytes)
    if not _exchanged(words, make_call(get(words, TABLE), ALLGATHER, get(words, OWN), get(words, ALL), 0, 0)):
        return left(words, PENDING)
    return 1


@linked("int64", "int64", "int64", "int64")
def _gather_payloads(words, length, root):
    """Begin to gather the bytes of objects that follow their records, on all ranks if `root` is -1; return a status."""
    table, memory = get(words, TABLE), get(words, OWN_DATA)
    put(words, STAGE, 1)
    set_length(table, get(words, LONG), length)
    set_length(table, get(words, LONGS), length * get(words, RANKS))
    if load(memory + 8) > ROOM:
        copy(get(words, LONG_ADDRESS), get(words, LONG_DATA), load(memory + 8))
    if root < 0:
        return make_call(table, ALLGATHER, get(words, LONG), get(words, LONGS), 0, 0)
    return make_call(
        table, GATHER, get(words, LONG), get(words, LONGS if root == get(words, RANK) else NOTHING), 0, root
    )


@linked("int64", "int64", "int64", "int64", "int64")
def _gathered(words, call, predictable, root):
    """Return the result of a gather whose records have come."""
    length = longest_of(words, call, predictable != 0)
    if length < 0:
        return left(words, UNREAD)
    if length and get(words, STAGE) == 0 and not _exchanged(words, _gather_payloads(words, length, root)):
        return left(words, PENDING)
    if root >= 0 and root != get(words, RANK):
        return ended(words, left(words, NOTHING))
    return ended(words, read_all(words, call, length))


@object_kernel
def gather_objects(module, arguments, count):
    """Gather the objects of all ranks.

    Arguments: the words, the object, the bits of the call, 1 if only objects are read that run no code of the program,
    and the rank that gets the list; -1 for all.
    """
    words, call = int_at(arguments, 0), int_at(arguments, 2)
    predictable, root = int_at(arguments, 3), int_at(arguments, 4)
    if not begins(words, count, 5):
        return left(words, ASIDE)
    room = ROOM if predictable else LONG_ROOM
    gathered = gather_records(words, object_at(arguments, 1), call, room, count > 5)
    return gathered if gathered != 1 else _gathered(words, call, predictable, root)


@linked("int64", "int64", "int64", "int64", "int64")
def _scatter(words, things, root, goes_on):
    call, is_root = pack_word(_SCATTER, 0, root), root == get(words, RANK)
    if not goes_on:
        _begin(words)
        nbytes = put_all(words, call, things) if is_root else 0
        if nbytes < 0:
            return _not_put(words, nbytes)
        sent = get(words, SENT if is_root else NOTHING)
        if not _exchanged(words, make_call(get(words, TABLE), SCATTER, sent, get(words, OWN), 0, root)):
            return left(words, PENDING)
    return _read_own(words, call)


@object_kernel
def scatter_objects(module, arguments, count):
    """Scatter the objects of the root; arguments: the words, the root's list or tuple, the root."""
    words, root = int_at(arguments, 0), int_at(arguments, 2)
    if not 0 <= root < get(words, RANKS) or not begins(words, count, 3):
        forget_error()
        return left(words, ASIDE)
    return _scatter(words, object_at(arguments, 1), root, count > 3)


@object_kernel
def swap_objects(module, arguments, count):
    """Give each rank its object from every rank's list or tuple; arguments: the words, the list or tuple."""
    words, call = int_at(arguments, 0), pack_word(_ALLTOALL, 0, 0)
    if not begins(words, count, 2):
        return left(words, ASIDE)
    if count == 2:
        _begin(words)
        nbytes = put_all(words, call, object_at(arguments, 1))
        if nbytes < 0:
            return _not_put(words, nbytes)
        if not _exchanged(words, make_call(get(words, TABLE), ALLTOALL, get(words, SENT), get(words, ALL), 0, 0)):
            return left(words, PENDING)
    if longest_of(words, call, False) != 0:
        return left(words, UNREAD)
    return ended(words, read_all(words, call, 0))
