"""Data movement: the instructions of plans that copy and reduce."""

from .atomics import call_reducer, copy, load, read_process, write_process
from .decorators import helper, inline_helper
from .instructions import (
    ALL,
    DELIVER,
    FROM,
    FROM_FIRST,
    FROM_INDEX,
    FROM_LAST,
    FROM_RANK,
    KIND,
    SLOT,
    TO,
    TO_INDEX,
    TO_RANK,
)
from .operands import in_arena, is_staged_output, place, range_of, remote_address
from .operation_words import (
    DONE,
    ITEMSIZE,
    LOST,
    METHOD,
    PID,
    RAISED,
    RANK,
    REDUCER,
    SCRATCH,
    TILE_NBYTES,
    TRANSFER,
    UNREADABLE,
    get,
    peer_word,
)


@inline_helper
def copy_range(job, row, what):
    """Execute a COPY or DELIVER; return the number of bytes, -1 if a process could not be accessed."""
    kind, index, source_index = load(row + 8 * KIND), load(row + 8 * TO_INDEX), load(row + 8 * FROM_INDEX)
    start, stop = range_of(job, kind, index)
    source_start = start if source_index == index else range_of(job, kind, source_index)[0]
    nbytes = (stop - start) * get(job, ITEMSIZE)
    if nbytes == 0 or (what == DELIVER and is_staged_output(job, load(row + 8 * TO_RANK))):
        return 0
    return nbytes if _copy_row(job, row, nbytes, start, source_start) else -1


@helper
def vectors(job):
    """Return the address of scratch memory for the arguments of system calls."""
    return get(job, SCRATCH) + 2 * TILE_NBYTES


@helper
def shown_address(job, word, users):
    """Return the address of a buffer of this rank to publish, UNREADABLE if `users` could not copy it.

    The system does not copy all memory between processes, that of devices for instance. A copy of one byte tests this
    before other ranks rely on it.

    Parameters
    ----------
    users
        Rank whose buffer others access, or ALL.
    """
    address, rank = get(job, word), get(job, RANK)
    if get(job, METHOD) != TRANSFER or users not in (ALL, rank) or address == 0 or in_arena(job, rank, address):
        return address
    works = read_process(vectors(job), peer_word(job, rank, PID), get(job, SCRATCH), address, 1)
    return address if works else UNREADABLE


@inline_helper
def _copy_row(job, row, nbytes, start, source_start):
    """Copy a range between two places; return False if a process could not be accessed."""
    to, to_rank = load(row + 8 * TO), load(row + 8 * TO_RANK)
    source, source_rank = load(row + 8 * FROM), load(row + 8 * FROM_RANK)
    target = place(job, to, to_rank, load(row + 8 * TO_INDEX), start)
    origin = place(job, source, source_rank, load(row + 8 * FROM_INDEX), source_start)
    if target == 0:
        address = remote_address(job, to, to_rank, start)
        return write_process(vectors(job), peer_word(job, to_rank, PID), origin, address, nbytes)
    if origin == 0:
        address = remote_address(job, source, source_rank, source_start)
        return read_process(vectors(job), peer_word(job, source_rank, PID), target, address, nbytes)
    if target != origin:
        copy(target, origin, nbytes)
    return True


@inline_helper
def _fetch(job, space, rank, index, start, nbytes, room):
    """Return an address at which a tile can be read, copied to `room` if necessary; 0 if that failed."""
    near = place(job, space, rank, index, start)
    if near:
        return near
    address = remote_address(job, space, rank, start)
    return room if read_process(vectors(job), peer_word(job, rank, PID), room, address, nbytes) else 0


@inline_helper
def reduce_range(job, row):
    """Reduce a range of several ranks' data, two operands at a time; return DONE, LOST or RAISED."""
    itemsize, reducer, scratch = get(job, ITEMSIZE), get(job, REDUCER), get(job, SCRATCH)
    index, space = load(row + 8 * TO_INDEX), load(row + 8 * FROM)
    first, last = load(row + 8 * FROM_FIRST), load(row + 8 * FROM_LAST)
    start, stop = range_of(job, load(row + 8 * KIND), index)
    if start >= stop:
        return DONE
    nbytes = (stop - start) * itemsize
    out = place(job, load(row + 8 * TO), load(row + 8 * TO_RANK), index, start)
    if out == 0:
        out = scratch
    # Slots may be longer than a tile. Elsewhere partial results stay in cache, and `out` may be an operand itself.
    partial = out if space == SLOT else scratch
    left = _fetch(job, space, first, index, start, nbytes, scratch)
    for rank in range(first + 1, last + 1):
        right = _fetch(job, space, rank, index, start, nbytes, scratch + TILE_NBYTES)
        if left == 0 or right == 0:
            return LOST
        result = out if rank == last else partial
        if call_reducer(reducer, result, left, right, stop - start, itemsize):
            return RAISED
        left = result
    return DONE
