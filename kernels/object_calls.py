"""Collectives of short Python objects, from the caller's object to the result in one compiled call.

Where something is left to Python, a kernel returns one of three objects instead of a result:

- ASIDE: nothing has happened. The caller takes the general way, which exchanges the same records.
- PENDING: the exchange has begun, with the word STATUS. The caller completes it, and calls the kernel again with one
  argument more.
- UNREAD: the records have come, and one of them has to be read by Python, which then sets the word IN_USE to 0.

The words and the records are in use from the begin of a call to its end. Another thread, or a function that the pickler
calls, goes aside meanwhile.
"""

from .atomics import load
from .decorators import helper, linked
from .dispatch import make_call
from .object_kernels import int_at, object_at, object_kernel
from .object_records import (
    ALL,
    ALL_DATA,
    ASIDE,
    COLLECTIVES,
    FAILED,
    IN_USE,
    LIST_TYPE,
    NBYTES,
    NOTHING,
    OTHER,
    OWN,
    OWN_DATA,
    PENDING,
    RANK,
    RANKS,
    SENT,
    SENT_DATA,
    STATUS,
    TABLE,
    TUPLE_TYPE,
    UNREAD,
    get_object,
    is_known,
    is_scalar,
    item_of,
    pack_word,
    put_object,
    size_of,
    type_of,
)
from .operation_words import ALLGATHER, ALLTOALL, BCAST, DONE, SCATTER, get, put
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
def ended(words, result):
    """Leave the records to the next call; return the result of this one."""
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
    description = load(memory) ^ call
    if not is_known(description, load(memory + 8), False):
        return left(words, UNREAD)
    return ended(words, get_object(words, memory, description))


@helper
def all_known(words, call, predictable):
    """Return whether `read_all` can read all records; see `is_known`."""
    memory = get(words, ALL_DATA)
    for _rank in range(get(words, RANKS)):
        if not is_known(load(memory) ^ call, load(memory + 8), predictable):
            return False
        memory += NBYTES
    return True


@linked("int64", "int64", "int64")
def read_all(words, call):
    """Return a list of the objects of all records, which are known; 0 with an exception set if that fails."""
    size, memory = get(words, RANKS), get(words, ALL_DATA)
    found = list_object(size)
    for rank in range(size if found else 0):
        item = get_object(words, memory, load(memory) ^ call)
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
        nbytes = put_object(words, memory, call, thing)
        drop(thing)
        if nbytes < 0:
            return nbytes
        memory += NBYTES
    return 0


@linked("int64", "int64", "int64", "int64", "int64")
def _bcast(words, thing, root, goes_on):
    call, is_root = pack_word(_BCAST, 0, root), root == get(words, RANK)
    if not goes_on:
        put(words, IN_USE, 1)
        nbytes = put_object(words, get(words, OWN_DATA), call, thing) if is_root else 0
        if nbytes < 0:
            return _not_put(words, nbytes)
        if not _exchanged(words, make_call(get(words, TABLE), BCAST, 0, get(words, OWN), 0, root)):
            return left(words, PENDING)
    if is_root and is_scalar(words, thing):
        keep(thing)
        return ended(words, thing)
    return _read_own(words, call)


@object_kernel
def bcast_object(module, arguments, count):
    """Broadcast an object; arguments: the words, the object, the root."""
    words, root = int_at(arguments, 0), int_at(arguments, 2)
    if not 0 <= root < get(words, RANKS) or not begins(words, count, 3):
        forget_error()
        return left(words, ASIDE)
    return _bcast(words, object_at(arguments, 1), root, count > 3)


@linked("int64", "int64", "int64", "int64", "int64")
def gather_records(words, thing, call, goes_on):
    """Exchange records between all ranks; return 1, 0 with an exception set, or an object for what is left."""
    if goes_on:
        return 1
    put(words, IN_USE, 1)
    nbytes = put_object(words, get(words, OWN_DATA), call, thing)
    if nbytes < 0:
        return _not_put(words, nbytes)
    if not _exchanged(words, make_call(get(words, TABLE), ALLGATHER, get(words, OWN), get(words, ALL), 0, 0)):
        return left(words, PENDING)
    return 1


@object_kernel
def gather_objects(module, arguments, count):
    """Gather the objects of all ranks.

    Arguments: the words, the object, the bits of the call, 1 if only objects are read that run no code of the program,
    and the rank that gets the list; None for all.
    """
    words, call, predictable = int_at(arguments, 0), int_at(arguments, 2), int_at(arguments, 3)
    if not begins(words, count, 5):
        return left(words, ASIDE)
    gathered = gather_records(words, object_at(arguments, 1), call, count > 5)
    if gathered != 1:
        return gathered
    if not all_known(words, call, predictable != 0):
        return left(words, UNREAD)
    if object_at(arguments, 4) != get(words, NOTHING) and int_at(arguments, 4) != get(words, RANK):
        return ended(words, left(words, NOTHING))
    return ended(words, read_all(words, call))


@linked("int64", "int64", "int64", "int64", "int64")
def _scatter(words, things, root, goes_on):
    call, is_root = pack_word(_SCATTER, 0, root), root == get(words, RANK)
    if not goes_on:
        put(words, IN_USE, 1)
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
        put(words, IN_USE, 1)
        nbytes = put_all(words, call, object_at(arguments, 1))
        if nbytes < 0:
            return _not_put(words, nbytes)
        if not _exchanged(words, make_call(get(words, TABLE), ALLTOALL, get(words, SENT), get(words, ALL), 0, 0)):
            return left(words, PENDING)
    if not all_known(words, call, False):
        return left(words, UNREAD)
    return ended(words, read_all(words, call))
