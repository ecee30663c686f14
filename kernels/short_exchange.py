"""Alltoallw and Alltoallv of short blocks on a node in one compiled call: offer, exchange the records, take."""

from .atomics import load, store
from .block_exchange import (
    ALLTOALLV,
    MARK,
    MAY_DIRECT,
    RANK,
    RECV_BASE,
    RECVS,
    ROWS,
    SEND_BASE,
    SENDS,
    SIZE,
    TYPE,
    offer_blocks,
    take_blocks,
)
from .decorators import helper, linked
from .dispatch import is_open, make_call
from .dispatch_arguments import number_of_dtype
from .dispatch_table import ITEMSIZES, JOB, data_of, dtype_of
from .object_kernels import takes_objects
from .operation_words import ALLTOALL, AT_ONCE_NBYTES, DONE, get, read_word
from .strided_copy import ADDRESS, DIMENSIONS, LAYOUT_WORDS, NBYTES, RUN
from .vector_specs import arrays_are_apart, read_fitting

NOT_READ = -1
"""Instead of a status: nothing has happened, since Python has to read the specifications."""
TAKEN = 32
"""Added to what `take` returns, -1 included; less than 31 is the status of an Alltoall that has not ended."""


@linked(*["int64"] * 5)
def make_exchange(words, table, offers, arrived):
    """Exchange blocks; see `exchange`."""
    offer_blocks(words)
    status = make_call(table, ALLTOALL, offers, arrived, 0, 0)
    return TAKEN + take_blocks(words) if status == DONE else status


@takes_objects("int64", "int64", "object", "object")
def exchange(words, table, offers, arrived):
    """Offer blocks, exchange the records by an Alltoall, and take the blocks of the others.

    The interpreter lock is held meanwhile, which is for blocks that are short.

    Parameters
    ----------
    words : int
        Address of the words of an exchange.
    table : int
        Address of the communicator's table for plain calls.
    offers, arrived : object
        The arrays whose addresses are OFFERS and ARRIVED.

    Returns
    -------
    int
        TAKEN plus what `block_exchange.take` returns; or the status of the Alltoall, as `dispatch.call` returns it, if
        that is not DONE: then the blocks have been offered and not been taken.
    """
    return make_exchange(words, table, offers, arrived)


@helper
def _read_layouts(table, words, spec, written, layouts):
    """Write the layouts of blocks of elements; return the array, 0 for specifications that are left to Python."""
    size = load(words + 8 * SIZE)
    counts = get(table, JOB) + 8 * read_word(size)
    array = read_fitting(table, spec, size, counts, written)
    if array == 0:
        return 0
    itemsize = get(table, ITEMSIZES + number_of_dtype(table, array))
    for rank in range(size):
        count, displ = load(counts + 8 * rank), load(counts + 8 * (size + rank))
        layout = layouts + 8 * LAYOUT_WORDS * rank
        store(layout + 8 * ADDRESS, displ * itemsize if count else 0)
        store(layout + 8 * NBYTES, count * itemsize)
        store(layout + 8 * RUN, max(count * itemsize, 1))
        store(layout + 8 * DIMENSIONS, 0)
    return array


@helper
def _sum_of_nbytes(words, layouts):
    total = 0
    for rank in range(load(words + 8 * SIZE)):
        total += load(layouts + 8 * (LAYOUT_WORDS * rank + NBYTES))
    return total


@helper
def _read_vectors(words, table, send, recv):
    """Write the words of an Alltoallv; return False, where Python has to read the specifications."""
    own, rows = 8 * LAYOUT_WORDS * load(words + 8 * RANK), load(words + 8 * ROWS)
    into = rows + 8 * LAYOUT_WORDS * load(words + 8 * SIZE)
    source, target = _read_layouts(table, words, send, False, rows), _read_layouts(table, words, recv, True, into)
    if source == 0 or target == 0 or dtype_of(table, source) != dtype_of(table, target):
        return False
    if load(rows + own + 8 * NBYTES) != load(into + own + 8 * NBYTES) or not arrays_are_apart(table, source, target):
        return False
    if _sum_of_nbytes(words, rows) > AT_ONCE_NBYTES:
        return False
    store(words + 8 * SENDS, rows)
    store(words + 8 * RECVS, into)
    store(words + 8 * SEND_BASE, data_of(table, source))
    store(words + 8 * RECV_BASE, data_of(table, target))
    store(words + 8 * MAY_DIRECT, 1)
    store(words + 8 * MARK, ALLTOALLV)
    store(words + 8 * TYPE, 1 + number_of_dtype(table, source))
    return True


@takes_objects("int64", "int64", *["object"] * 4)
def exchange_vectors(words, table, send, recv, offers, arrived):
    """Make an Alltoallv of short blocks; return what `exchange` does, NOT_READ if nothing has happened.

    Parameters
    ----------
    words, table, offers, arrived
        As `exchange` takes them; what the layouts, ROWS excepted, and the type of elements are is written here.
    send, recv : object
        The caller's specifications.
    """
    if not is_open(table, get(table, JOB)) or not _read_vectors(words, table, send, recv):
        return NOT_READ
    return make_exchange(words, table, offers, arrived)
