"""Specifications of Alltoallw that were seen before, such as ``[array, (counts, displs), types]``.

Python reads a specification, which takes microseconds, and leaves an entry: the objects that it consists of, by
address, and what they mean. Compiled code looks whether a call has the same objects, apart from the array. Lists may
have other items by now, and datatypes may have been freed: their items and handles are compared, too.
"""

from .atomics import load, load_int32, store
from .builtin_objects import items_of
from .decorators import helper
from .dispatch import is_open
from .dispatch_table import JOB, READABLE, WRITABLE, data_of, is_plain, number_of_dtype
from .exchange_calls import NOT_READ, make_exchange
from .exchange_words import (
    ALLTOALLW,
    ASKED,
    MARK,
    MAY_DIRECT,
    RANK,
    RECV_BASE,
    RECVS,
    SEND_BASE,
    SENDS,
    SIZE,
    TYPE,
)
from .object_kernels import takes_objects
from .operation_words import get
from .strided_copy import LAYOUT_WORDS, NBYTES
from .vector_specs import nbytes_of

ENTRIES = 8
HANDLE_NBYTES, HEADER_WORDS = 0, 1
"""A table of entries begins with the bytes of a datatype's handle, 4 or 8."""
(
    ITEMS,  # of the specification, the array included; 0: the entry is empty
    SECOND_ITEM,  # addresses of those behind the array, two or three
    _THIRD_ITEM,
    _FOURTH_ITEM,
    LAYOUTS,  # address of a layout a rank, relative to the array
    LOW,  # first byte of all blocks, and the one behind the last
    HIGH,
    CONTAINERS,  # number of lists and tuples: each with its address, its number of items, and their addresses
    ENTRY_HEAD,  # then a pair for each rank: where the handle of its datatype is, and the handle
) = range(9)


@helper
def entry_words(size):
    """Return the words of an entry: a pair of counts and displacements, these, datatypes, and handles."""
    return ENTRY_HEAD + 4 * 2 + 2 + 3 * size + 2 * size


def table_words(size: int) -> int:
    """Return the words of a table of entries."""
    return HEADER_WORDS + ENTRIES * entry_words(size)


@helper
def _are_items(table, place):
    """Return where the next container's words are if this one has the items that its words name, else 0."""
    wanted = load(place + 8)
    number, items = items_of(table, load(place))
    if number != wanted:
        return 0
    for i in range(wanted):
        if load(items + 8 * i) != load(place + 16 + 8 * i):
            return 0
    return place + 16 + 8 * wanted


@helper
def _is_entry(table, specs, entry, number, items, size):
    """Return whether a specification of `number` items at `items` is that of an entry."""
    if number != load(entry + 8 * ITEMS):
        return False
    for i in range(1, number):
        if load(items + 8 * i) != load(entry + 8 * (SECOND_ITEM + i - 1)):
            return False
    place = entry + 8 * ENTRY_HEAD
    for _ in range(load(entry + 8 * CONTAINERS)):
        place = _are_items(table, place)
        if place == 0:
            return False
    whole = load(specs + 8 * HANDLE_NBYTES) == 8
    for rank in range(size):
        handle, kept = load(place + 16 * rank), load(place + 16 * rank + 8)
        if (load(handle) if whole else load_int32(handle)) != kept:
            return False
    return True


@helper
def _find(table, specs, spec, size, written):
    """Return the array of a specification and its entry; 0 for one that is not known, or does not fit."""
    number, items = items_of(table, spec)
    if not 3 <= number <= 4:
        return 0, 0
    entry = specs + 8 * HEADER_WORDS
    for _ in range(ENTRIES):
        if _is_entry(table, specs, entry, number, items, size):
            array = load(items)
            if not is_plain(table, array, WRITABLE if written else READABLE) or number_of_dtype(table, array) < 0:
                return 0, 0
            return (array, entry) if load(entry + 8 * HIGH) <= nbytes_of(table, array) else (0, 0)
        entry += 8 * entry_words(size)
    return 0, 0


@helper
def _read(words, table, send, recv, specs):
    """Write the words of an Alltoallw; return False, where Python has to read the specifications."""
    size, own = load(words + 8 * SIZE), load(words + 8 * RANK)
    source, sent = _find(table, specs, send, size, False)
    target, got = _find(table, specs, recv, size, True)
    if source == 0 or target == 0:
        return False
    sends, recvs = load(sent + 8 * LAYOUTS), load(got + 8 * LAYOUTS)
    place = 8 * (LAYOUT_WORDS * own + NBYTES)
    if load(sends + place) != load(recvs + place):
        return False
    base, into = data_of(table, source), data_of(table, target)
    if base == into:  # which may stand for IN_PLACE
        return False
    first = max(base + load(sent + 8 * LOW), into + load(got + 8 * LOW))
    behind = min(base + load(sent + 8 * HIGH), into + load(got + 8 * HIGH))
    store(words + 8 * SENDS, sends)
    store(words + 8 * RECVS, recvs)
    store(words + 8 * SEND_BASE, base)
    store(words + 8 * RECV_BASE, into)
    store(words + 8 * MAY_DIRECT, 0 if first < behind else 1)
    store(words + 8 * ASKED, 0)
    store(words + 8 * MARK, ALLTOALLW)
    store(words + 8 * TYPE, 0)
    return True


@takes_objects("int64", "int64", "object", "object", "int64")
def exchange_typed(words, table, send, recv, specs):
    """Make an Alltoallw with specifications that are known.

    Parameters
    ----------
    words, table
        As `exchange_calls.exchange` takes them; what the layouts and the type of elements are is written here.
    send, recv : object
        The caller's specifications.
    specs : int
        Address of a table of entries.

    Returns
    -------
    int
        What `exchange_calls.exchange` does; NOT_READ if nothing has happened.
    """
    if not is_open(table, get(table, JOB)) or not _read(words, table, send, recv, specs):
        return NOT_READ
    return make_exchange(words, table)
