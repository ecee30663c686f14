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
    BCAST,
    COLLECTIVE,
    ITEMSIZE,
    METHOD,
    NOTHING,
    PID,
    RANK,
    RECORD_RECV,
    RECORD_SEND,
    RECV,
    REDUCE,
    REDUCE_SCATTER,
    REDUCER,
    ROOT,
    SCRATCH,
    SEND,
    SIZE,
    STAGE,
    STAGED,
    TILE_NBYTES,
    TRANSFER,
    WORKED,
    get,
    part_of,
    peer_word,
    published,
    put,
)
from .pieces import in_arena, nearby, needs_more_than_arenas, piece_of, share_of, stage_of, takes_turns

_NEAR_TILE_NBYTES = 16 << 10
"""A tile of every operand stays in the first cache."""
_WORK_NBYTES = 32 << 20
"""What a rank does before `advance` returns, so that signals and deadlines are seen."""

ALL_DONE, MORE, UNREACHED, RAISED = range(4)
"""What `work` returns: all done; more to do; memory of another rank was not reached; the reducer raised an exception.
"""


@helper
def stage_input(job):
    """Copy what others need of this rank's private sendbuf to its stage; the own share is not among it."""
    what, rank, itemsize, send = get(job, COLLECTIVE), get(job, RANK), get(job, ITEMSIZE), get(job, SEND)
    if what == BCAST:
        start, stop = piece_of(job)
        if rank == get(job, ROOT):
            copy(stage_of(job, rank, 0, 0, start), send + start * itemsize, (stop - start) * itemsize)
    elif what == ALLGATHER:
        start, stop = share_of(job, rank)
        skip = part_of(job, rank)[0]
        copy(stage_of(job, rank, 0, rank, start), send + (start - skip) * itemsize, (stop - start) * itemsize)
    else:
        for owner in range(get(job, SIZE)):
            start, stop = share_of(job, owner)
            if owner != rank:
                copy(stage_of(job, rank, 0, owner, start), send + start * itemsize, (stop - start) * itemsize)


@helper
def collect_results(job):
    """Copy the others' results of the present piece from their stages to this rank's private recvbuf."""
    what, rank, itemsize, recv = get(job, COLLECTIVE), get(job, RANK), get(job, ITEMSIZE), get(job, RECV)
    if not get(job, STAGED) or in_arena(job, rank, recv):
        return
    if what == ALLREDUCE or (what == REDUCE and rank == get(job, ROOT)):
        for owner in range(get(job, SIZE)):
            start, stop = share_of(job, owner)
            if owner != rank:
                copy(recv + start * itemsize, stage_of(job, owner, 1, owner, start), (stop - start) * itemsize)


# Work -----------------------------------------------------------------------------------------------------------------


@helper
def _fetch(job, rank, owner, element, nbytes, room):
    """Return where `nbytes` of a rank's sendbuf can be read, having copied them to `room` if necessary; 0: failed."""
    skip = part_of(job, rank)[0] if get(job, COLLECTIVE) == ALLGATHER else 0
    address = published(job, rank, RECORD_SEND) + (element - skip) * get(job, ITEMSIZE)
    near = nearby(job, rank, address)
    if near:
        return near
    if get(job, METHOD) == STAGE:
        return stage_of(job, rank, 0, owner, element)
    vectors = get(job, SCRATCH) + 2 * TILE_NBYTES
    return room if read_process(vectors, peer_word(job, rank, PID), room, address, nbytes) else 0


@helper
def _deliver(job, rank, element, nbytes, source):
    """Bring a tile of the own result towards a rank's recvbuf."""
    address = published(job, rank, RECORD_RECV) + element * get(job, ITEMSIZE)
    near = nearby(job, rank, address)
    if near == 0 and get(job, METHOD) == STAGE:
        own = get(job, RANK)
        near = stage_of(job, own, 1, own, element)
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
    near = nearby(job, root, published(job, root, RECORD_RECV) + element * itemsize)
    if near == 0 and get(job, METHOD) == STAGE:
        near = stage_of(job, rank, 1, rank, element)
    return near if near else get(job, SCRATCH)


@helper
def _reduce_share(job):
    """Go on reducing the own share."""
    what, root, itemsize = get(job, COLLECTIVE), get(job, ROOT), get(job, ITEMSIZE)
    start, stop = share_of(job, get(job, RANK))
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
        start, stop = piece_of(job)
        return ALL_DONE if rank == root or _take(job, root, 0, start, stop) else UNREACHED
    done, nbytes = get(job, WORKED), 0
    while done < size and nbytes < _WORK_NBYTES:
        peer = (rank + done) % size
        start, stop = share_of(job, peer)
        nbytes += (stop - start) * get(job, ITEMSIZE)
        if start < stop and not _take(job, peer, peer, start, stop):
            return UNREACHED
        done += 1
    put(job, WORKED, done)
    return ALL_DONE if done == size else MORE


@helper
def work(job):
    """Go on with this rank's part of the present piece; return ALL_DONE, MORE, UNREACHED or RAISED."""
    return _collect(job) if takes_turns(job) else _reduce_share(job)


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
