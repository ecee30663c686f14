"""Long vectors on shared memory: who reads what from where, and what becomes of memory that only its owner sees.

Each rank reduces its share of the vector, and the question for every buffer is how the others get at it:

- It lies in its owner's arena: they read and write it where it is.
- METHOD is STAGE: the owner copies it, piece by piece, to a stage in its own arena and the others read it there; what
  goes to its recvbuf waits in the stages of those who made it. A piece fits in the caches, so that main memory sees
  each byte once; pieces follow each other with increasing sequence numbers.
- METHOD is TRANSFER: the system copies between the processes (`process_vm_readv`), a tile at a time.

Every rank sees where all buffers lie, so all take the same way.

A piece of an allreduce, reduce or bcast is a range of the vector, divided into shares; a piece of a reduce_scatter or
allgather is a range of every rank's part. Unless something is staged, the whole operation is one piece.
"""

from .atomics import call_reducer, copy, read_process, write_process
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
    METHOD,
    NOTHING,
    PID,
    PIECE,
    RANK,
    RECORD_NBYTES,
    RECORD_RECV,
    RECORD_SEND,
    RECV,
    REDUCE,
    REDUCE_SCATTER,
    REDUCER,
    ROOT,
    SCRATCH,
    SEND,
    SEQUENCE,
    SIZE,
    STAGE,
    STAGE_NBYTES,
    STAGED,
    STAGES,
    STAGES_PER_LANE,
    TILE_NBYTES,
    TRANSFER,
    WORKED,
    get,
    part_of,
    peer_word,
    published,
    put,
    vector_nbytes,
)

_NEAR_TILE_NBYTES = 16 << 10
"""A tile of every operand stays in the first cache."""
_TURNS, _MIN_TURN_NBYTES, _MAX_TURN_NBYTES = 8, 32 << 10, 256 << 10
"""Pieces of a bcast: enough of them for the root to fill one while the others empty another, and worth their flags."""
_WORK_NBYTES = 32 << 20
"""What a rank does before `advance` returns, so that signals and deadlines are seen."""

ALL_DONE, MORE, UNREACHED, RAISED = range(4)
"""What `work` returns: all done; more to do; memory of another rank was not reached; the reducer raised an exception.
"""


@helper
def in_arena(job, rank, address):
    """Say whether an address of a rank lies in its arena."""
    return 0 <= address - peer_word(job, rank, ARENA) < peer_word(job, rank, ARENA_NBYTES)


@helper
def _nearby(job, rank, address):
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
def _by_parts(job):
    what = get(job, COLLECTIVE)
    return what in (REDUCE_SCATTER, ALLGATHER)


@helper
def _takes_turns(job):
    """Say whether nothing is reduced, so that both stages are for input: one is filled while the other is emptied."""
    what = get(job, COLLECTIVE)
    return what in (BCAST, ALLGATHER)


@helper
def _piece_count(job):
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
def _piece(job):
    """Return the range of the present piece, for collectives that do not go by parts."""
    count = _piece_count(job)
    start = get(job, PIECE) * count
    return start, min(start + count, get(job, COUNT))


@helper
def _share(job, rank):
    """Return what a rank reduces of the present piece, or gives to an allgather; ranks share no cache lines."""
    if _by_parts(job):
        start, stop = part_of(job, rank)
        count = _piece_count(job)
        first = min(stop, start + get(job, PIECE) * count)
        return first, min(stop, first + count)
    start, stop = _piece(job)
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
    done = (get(job, PIECE) + 1) * _piece_count(job)
    if not _by_parts(job):
        return done < get(job, COUNT)
    longest = 0
    for rank in range(get(job, SIZE)):
        start, stop = part_of(job, rank)
        longest = max(longest, stop - start)
    return done < longest


# Stages ---------------------------------------------------------------------------------------------------------------


@helper
def is_ahead(job):
    """Say whether the next piece may be begun before everybody is done with the present one.

    It goes to the other stage, and can be begun only when all have begun the present one, which they do after they
    have emptied that stage.
    """
    return _takes_turns(job) and _is_not_last(job)


@helper
def _stage(job, rank, result, owner, element):
    """Return where an element of `owner`'s share is in a rank's stage for input, or with `result` 1 for results."""
    which = INPUT_STAGES if result else (get(job, SEQUENCE) & 1 if _takes_turns(job) else 0)
    at = peer_word(job, rank, STAGES) + (STAGES_PER_LANE * get(job, LANE) + which) * get(job, STAGE_NBYTES)
    what = get(job, COLLECTIVE)
    if what == REDUCE_SCATTER:
        at += owner * _piece_count(job) * get(job, ITEMSIZE)
    first = _share(job, owner)[0] if _by_parts(job) else _piece(job)[0]
    return at + (element - first) * get(job, ITEMSIZE)


@helper
def stage_input(job):
    """Copy what others need of this rank's private sendbuf to its stage; the own share is not among it."""
    what, rank, itemsize, send = get(job, COLLECTIVE), get(job, RANK), get(job, ITEMSIZE), get(job, SEND)
    if what == BCAST:
        start, stop = _piece(job)
        if rank == get(job, ROOT):
            copy(_stage(job, rank, 0, 0, start), send + start * itemsize, (stop - start) * itemsize)
    elif what == ALLGATHER:
        start, stop = _share(job, rank)
        skip = part_of(job, rank)[0]
        copy(_stage(job, rank, 0, rank, start), send + (start - skip) * itemsize, (stop - start) * itemsize)
    else:
        for owner in range(get(job, SIZE)):
            start, stop = _share(job, owner)
            if owner != rank:
                copy(_stage(job, rank, 0, owner, start), send + start * itemsize, (stop - start) * itemsize)


@helper
def collect_results(job):
    """Copy the others' results of the present piece from their stages to this rank's private recvbuf."""
    what, rank, itemsize, recv = get(job, COLLECTIVE), get(job, RANK), get(job, ITEMSIZE), get(job, RECV)
    if not get(job, STAGED) or in_arena(job, rank, recv):
        return
    if what == ALLREDUCE or (what == REDUCE and rank == get(job, ROOT)):
        for owner in range(get(job, SIZE)):
            start, stop = _share(job, owner)
            if owner != rank:
                copy(recv + start * itemsize, _stage(job, owner, 1, owner, start), (stop - start) * itemsize)


# Work -----------------------------------------------------------------------------------------------------------------


@helper
def _fetch(job, rank, owner, element, nbytes, room):
    """Return where `nbytes` of a rank's sendbuf can be read, having copied them to `room` if necessary; 0: failed."""
    skip = part_of(job, rank)[0] if get(job, COLLECTIVE) == ALLGATHER else 0
    address = published(job, rank, RECORD_SEND) + (element - skip) * get(job, ITEMSIZE)
    near = _nearby(job, rank, address)
    if near:
        return near
    if get(job, METHOD) == STAGE:
        return _stage(job, rank, 0, owner, element)
    vectors = get(job, SCRATCH) + 2 * TILE_NBYTES
    return room if read_process(vectors, peer_word(job, rank, PID), room, address, nbytes) else 0


@helper
def _deliver(job, rank, element, nbytes, source):
    """Bring a tile of the own result towards a rank's recvbuf."""
    address = published(job, rank, RECORD_RECV) + element * get(job, ITEMSIZE)
    near = _nearby(job, rank, address)
    if near == 0 and get(job, METHOD) == STAGE:
        own = get(job, RANK)
        near = _stage(job, own, 1, own, element)
    if near == 0:
        vectors = get(job, SCRATCH) + 2 * TILE_NBYTES
        return write_process(vectors, peer_word(job, rank, PID), source, address, nbytes)
    if near != source:
        copy(near, source, nbytes)
    return True


@helper
def _deliver_to_all(job, element, nbytes, source):
    """Bring a tile towards all other ranks' recvbufs; the stage serves all that need it."""
    rank, size = get(job, RANK), get(job, SIZE)
    staged = False
    for place in range(rank + 1, rank + size):
        other = place if place < size else place - size
        private = get(job, STAGED) and not in_arena(job, other, published(job, other, RECORD_RECV))
        if private and staged:
            continue
        staged = staged or private
        if not _deliver(job, other, element, nbytes, source):
            return False
    return True


@helper
def _reduce_tile(job, element, nbytes, out):
    """Reduce one tile of all sendbufs to `out`, which may be a sendbuf itself; partial results stay in cache.

    Return ALL_DONE, UNREACHED or RAISED.
    """
    itemsize, reducer, size, own = get(job, ITEMSIZE), get(job, REDUCER), get(job, SIZE), get(job, RANK)
    partial = get(job, SCRATCH)
    left = _fetch(job, 0, own, element, nbytes, partial)
    for rank in range(1, size):
        right = _fetch(job, rank, own, element, nbytes, partial + TILE_NBYTES)
        if left == 0 or right == 0:
            return UNREACHED
        result = out if rank == size - 1 else partial
        if call_reducer(reducer, result, left, right, nbytes // itemsize, itemsize):
            return RAISED
        left = result
    return ALL_DONE


@helper
def _target(job, element):
    """Return where the own share's result is made."""
    what, rank, root, itemsize = get(job, COLLECTIVE), get(job, RANK), get(job, ROOT), get(job, ITEMSIZE)
    if what == ALLREDUCE:
        return get(job, RECV) + element * itemsize
    if what == REDUCE_SCATTER:
        return get(job, RECV) + (element - part_of(job, rank)[0]) * itemsize
    near = _nearby(job, root, published(job, root, RECORD_RECV) + element * itemsize)
    if near == 0 and get(job, METHOD) == STAGE:
        near = _stage(job, rank, 1, rank, element)
    return near if near else get(job, SCRATCH)


@helper
def _reduce_share(job):
    """Go on reducing the own share."""
    what, root, itemsize = get(job, COLLECTIVE), get(job, ROOT), get(job, ITEMSIZE)
    start, stop = _share(job, get(job, RANK))
    fetched = get(job, METHOD) == TRANSFER and needs_more_than_arenas(job)
    tile = (TILE_NBYTES if fetched else _NEAR_TILE_NBYTES) // itemsize
    at = start + get(job, WORKED)
    until = min(stop, at + _WORK_NBYTES // itemsize)
    while at < until:
        count = min(tile, stop - at)
        out = _target(job, at)
        outcome = _reduce_tile(job, at, count * itemsize, out)
        if outcome != ALL_DONE:
            return outcome
        if what == ALLREDUCE and not _deliver_to_all(job, at, count * itemsize, out):
            return UNREACHED
        if what == REDUCE and out == get(job, SCRATCH) and not _deliver(job, root, at, count * itemsize, out):
            return UNREACHED
        at += count
    put(job, WORKED, at - start)
    return ALL_DONE if at >= stop else MORE


@helper
def _take(job, rank, owner, start, stop):
    """Copy elements of a rank's sendbuf to where they belong in the own recvbuf."""
    itemsize = get(job, ITEMSIZE)
    target, nbytes = get(job, RECV) + start * itemsize, (stop - start) * itemsize
    near = _fetch(job, rank, owner, start, nbytes, target)
    if near and near != target:
        copy(target, near, nbytes)
    return near != 0


@helper
def _collect(job):
    """Go on copying what this rank receives of the present piece."""
    rank, size, root = get(job, RANK), get(job, SIZE), get(job, ROOT)
    if get(job, COLLECTIVE) == BCAST:
        start, stop = _piece(job)
        return ALL_DONE if rank == root or _take(job, root, 0, start, stop) else UNREACHED
    done, nbytes = get(job, WORKED), 0
    while done < size and nbytes < _WORK_NBYTES:
        peer = (rank + done) % size
        start, stop = _share(job, peer)
        nbytes += (stop - start) * get(job, ITEMSIZE)
        if start < stop and not _take(job, peer, peer, start, stop):
            return UNREACHED
        done += 1
    put(job, WORKED, done)
    return ALL_DONE if done == size else MORE


@helper
def work(job):
    """Go on with this rank's part of the present piece; return ALL_DONE, MORE, UNREACHED or RAISED."""
    return _collect(job) if _takes_turns(job) else _reduce_share(job)


@helper
def begin_long(job):
    """Decide, before the record is written, whether this rank stages its input."""
    method = get(job, METHOD)
    put(job, STAGED, method == STAGE)
    if method == STAGE and not in_arena(job, get(job, RANK), get(job, SEND)):
        stage_input(job)


@helper
def choose_way(job):
    """Decide, when all records are there, how the operation is done; return False if it cannot be."""
    if not needs_more_than_arenas(job):
        put(job, STAGED, 0)
        return True
    return get(job, METHOD) != NOTHING
