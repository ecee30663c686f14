"""Pieces, shares and stages of long operations on shared memory: ranges of elements, and their addresses.

A *piece* is a range of the vector, or of every rank's part, that passes through the stages at once; a *share* is the
range of a piece that one rank reduces or gives; `long.py` uses them.
"""

from .jit import helper
from .job import (
    ALLGATHER,
    ALLREDUCE,
    ARENA,
    ARENA_NBYTES,
    BCAST,
    COLLECTIVE,
    COUNT,
    INPUT_STAGES,
    ITEMSIZE,
    LANE,
    MAPPED,
    PIECE,
    RANK,
    RECORD_NBYTES,
    RECORD_RECV,
    RECORD_SEND,
    REDUCE,
    REDUCE_SCATTER,
    ROOT,
    SEQUENCE,
    SIZE,
    STAGE_NBYTES,
    STAGED,
    STAGES,
    STAGES_PER_LANE,
    WORKED,
    get,
    part_of,
    peer_word,
    published,
    put,
    vector_nbytes,
)

_TURNS, _MIN_TURN_NBYTES, _MAX_TURN_NBYTES = 8, 32 << 10, 256 << 10
"""Pieces of a bcast: enough of them for the root to fill one while the others empty another, and worth their flags."""


@helper
def in_arena(job, rank, address):
    """Say whether an address of a rank lies in its arena."""
    return 0 <= address - peer_word(job, rank, ARENA) < peer_word(job, rank, ARENA_NBYTES)


@helper
def nearby(job, rank, address):
    """Return where this process sees `address` of a rank's, 0 if it does not. No buffer crosses an arena's end."""
    if rank == get(job, RANK):
        return address
    inside = address - peer_word(job, rank, ARENA)
    return peer_word(job, rank, MAPPED) + inside if 0 <= inside < peer_word(job, rank, ARENA_NBYTES) else 0


@helper
def needs_more_than_arenas(job):
    """Say whether any buffer that others use is private; the answer is the same on all ranks."""
    what, root = get(job, COLLECTIVE), get(job, ROOT)
    if what == BCAST:
        return not in_arena(job, root, published(job, root, RECORD_SEND))
    if what == REDUCE and not in_arena(job, root, published(job, root, RECORD_RECV)):
        return True
    for rank in range(get(job, SIZE)):
        if not in_arena(job, rank, published(job, rank, RECORD_SEND)):
            return True
        if what == ALLREDUCE and not in_arena(job, rank, published(job, rank, RECORD_RECV)):
            return True
    return False


# Pieces and shares, as element ranges of the vector ------------------------------------------------------------------


@helper
def by_parts(job):
    """Say whether every rank owns a part of the vector."""
    what = get(job, COLLECTIVE)
    return what in (REDUCE_SCATTER, ALLGATHER)


@helper
def takes_turns(job):
    """Say whether nothing is reduced, so that both stages are for input: one is filled while the other is emptied."""
    what = get(job, COLLECTIVE)
    return what in (BCAST, ALLGATHER)


@helper
def piece_count(job):
    """Return how many elements a piece has: of the vector, or of each part."""
    if not get(job, STAGED):
        return max(1, get(job, COUNT))
    nbytes = get(job, STAGE_NBYTES)
    if get(job, COLLECTIVE) == REDUCE_SCATTER:
        nbytes //= get(job, SIZE)
    elif get(job, COLLECTIVE) == BCAST:
        nbytes = min(nbytes, _MAX_TURN_NBYTES, max(_MIN_TURN_NBYTES, vector_nbytes(job) // _TURNS))
    return max(1, nbytes // get(job, ITEMSIZE))


@helper
def piece_of(job):
    """Return the range of the present piece, for collectives that do not go by parts."""
    count = piece_count(job)
    start = get(job, PIECE) * count
    return start, min(start + count, get(job, COUNT))


@helper
def share_of(job, rank):
    """Return what a rank reduces of the present piece, or gives to an allgather; ranks share no cache lines."""
    if by_parts(job):
        start, stop = part_of(job, rank)
        count = piece_count(job)
        first = min(stop, start + get(job, PIECE) * count)
        return first, min(stop, first + count)
    start, stop = piece_of(job)
    unit = max(1, RECORD_NBYTES // get(job, ITEMSIZE))
    blocks = (stop - start + unit - 1) // unit
    size = get(job, SIZE)
    return min(stop, start + blocks * rank // size * unit), min(stop, start + blocks * (rank + 1) // size * unit)


@helper
def another_piece(job):
    """Go on to the next piece; return whether there is one."""
    if not _is_not_last(job):
        return False
    put(job, PIECE, get(job, PIECE) + 1)
    put(job, WORKED, 0)
    return True


@helper
def _is_not_last(job):
    if not get(job, STAGED):
        return False
    done = (get(job, PIECE) + 1) * piece_count(job)
    if not by_parts(job):
        return done < get(job, COUNT)
    longest = 0
    for rank in range(get(job, SIZE)):
        start, stop = part_of(job, rank)
        longest = max(longest, stop - start)
    return done < longest


@helper
def is_ahead(job):
    """Say whether the next piece may be begun before everybody is done with the present one.

    It goes to the other stage, and can be begun only when all have begun the present one, which they do after they
    have emptied that stage.
    """
    return takes_turns(job) and _is_not_last(job)


@helper
def stage_of(job, rank, result, owner, element):
    """Return where an element of `owner`'s share is in a rank's stage for input, or with `result` 1 for results."""
    which = INPUT_STAGES if result else (get(job, SEQUENCE) & 1 if takes_turns(job) else 0)
    at = peer_word(job, rank, STAGES) + (STAGES_PER_LANE * get(job, LANE) + which) * get(job, STAGE_NBYTES)
    what = get(job, COLLECTIVE)
    if what == REDUCE_SCATTER:
        at += owner * piece_count(job) * get(job, ITEMSIZE)
    first = share_of(job, owner)[0] if by_parts(job) else piece_of(job)[0]
    return at + (element - first) * get(job, ITEMSIZE)
