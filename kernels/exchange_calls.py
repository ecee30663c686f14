"""Alltoallw and Alltoallv on a node in one compiled call: offer, exchange the records, take."""

from .atomics import load, release_interpreter, store, take_interpreter
from .block_exchange import take_blocks
from .block_offers import offer_blocks
from .decorators import helper, linked
from .dispatch import is_open, make_call
from .dispatch_table import ITEMSIZES, JOB, data_of, dtype_of, number_of_dtype
from .exchange_methods import choose_method, end_timed
from .exchange_words import (
    ALLTOALLV,
    ARRIVED_ARRAY,
    ASKED,
    ERROR,
    ERROR_ARRAY,
    IN_PLACE,
    IS_OPEN,
    MARK,
    MAXIMUM,
    MAY_DIRECT,
    OFFERS_ARRAY,
    RANK,
    RECV_BASE,
    RECVS,
    ROWS,
    SEND_BASE,
    SENDS,
    SIZE,
    TYPE,
    nbytes_of,
)
from .object_kernels import takes_objects
from .operation_words import ALLREDUCE, ALLTOALL, AT_ONCE_NBYTES, DONE, get, read_word
from .strided_copy import ADDRESS, DIMENSIONS, LAYOUT_WORDS, NBYTES, RUN
from .vector_specs import arrays_are_apart, read_fitting

NOT_READ = -1
"""Instead of a status: nothing has happened, since Python has to read the specifications."""
TAKEN = 32
"""Added to what `take` returns, -1 included; less than 31 is the status of an Alltoall that has not ended. By itself:
nothing is left to do."""
ENDING = -64
"""Less the status of the Allreduce at the end, if that has not ended or has brought an error."""


@linked("int64", "int64", "int64")
def make_exchange(words, table):
    """Exchange blocks; see `exchange`."""
    is_brief = nbytes_of(words, SENDS) <= AT_ONCE_NBYTES and nbytes_of(words, RECVS) <= AT_ONCE_NBYTES
    choose_method(words, table)
    store(words + 8 * IS_OPEN, 1)
    interpreter = 0 if is_brief else release_interpreter()
    offer_blocks(words)
    if not is_brief:
        take_interpreter(interpreter)
    status = make_call(table, ALLTOALL, load(words + 8 * OFFERS_ARRAY), load(words + 8 * ARRIVED_ARRAY), 0, 0)
    if status != DONE:
        return status
    if not is_brief:
        interpreter = release_interpreter()
    rounds = take_blocks(words)
    if not is_brief:
        take_interpreter(interpreter)
    return _end(words, table) if rounds == 1 else TAKEN + rounds


@helper
def _end(words, table):
    """Wait until all ranks have their blocks, and hear of errors; return TAKEN, or ENDING less a status."""
    error = load(words + 8 * ERROR)
    store(error, 0)
    place, array, maximum = load(words + 8 * IN_PLACE), load(words + 8 * ERROR_ARRAY), load(words + 8 * MAXIMUM)
    status = make_call(table, ALLREDUCE, place, array, maximum, 0)
    if status == DONE:
        store(words + 8 * IS_OPEN, 0)
    if status != DONE or load(error):
        return ENDING - status
    end_timed(words)
    return TAKEN


@takes_objects("int64", "int64")
def exchange(words, table):
    """Offer blocks, exchange the records by an Alltoall, take the blocks of the others, and wait until all have theirs.

    The interpreter lock is held meanwhile, where blocks are short.

    Parameters
    ----------
    words : int
        Address of the words of an exchange.
    table : int
        Address of the communicator's table for plain calls.

    Returns
    -------
    int
        TAKEN if all is done; TAKEN plus what `block_exchange.take` returns if rounds follow, or something is wrong; or
        the status of the Alltoall, as `dispatch.call` returns it, if that is not DONE: then the blocks have been
        offered and not been taken; or ENDING less the status of the Allreduce.
    """
    return make_exchange(words, table)


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
def _read_vectors(words, table, send, recv):
    """Write the words of an Alltoallv; return False, where Python has to read the specifications."""
    own, rows = 8 * LAYOUT_WORDS * load(words + 8 * RANK), load(words + 8 * ROWS)
    into = rows + 8 * LAYOUT_WORDS * load(words + 8 * SIZE)
    source, target = _read_layouts(table, words, send, False, rows), _read_layouts(table, words, recv, True, into)
    if source == 0 or target == 0 or dtype_of(table, source) != dtype_of(table, target):
        return False
    if load(rows + own + 8 * NBYTES) != load(into + own + 8 * NBYTES) or not arrays_are_apart(table, source, target):
        return False
    store(words + 8 * SENDS, rows)
    store(words + 8 * RECVS, into)
    store(words + 8 * SEND_BASE, data_of(table, source))
    store(words + 8 * RECV_BASE, data_of(table, target))
    store(words + 8 * MAY_DIRECT, 1)
    store(words + 8 * ASKED, 0)
    store(words + 8 * MARK, ALLTOALLV)
    store(words + 8 * TYPE, 1 + number_of_dtype(table, source))
    return True


@takes_objects("int64", "int64", "object", "object")
def exchange_vectors(words, table, send, recv):
    """Make an Alltoallv; return what `exchange` does, NOT_READ if nothing has happened.

    Parameters
    ----------
    words, table
        As `exchange` takes them; what the layouts, ROWS excepted, and the type of elements are is written here.
    send, recv : object
        The caller's specifications.
    """
    if not is_open(table, get(table, JOB)) or not _read_vectors(words, table, send, recv):
        return NOT_READ
    return make_exchange(words, table)
