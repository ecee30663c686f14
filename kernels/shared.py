"""Collectives of processes that share memory: one call, no messages.

Every rank owns two *records* in memory that all ranks see, one for operations with even and one for odd sequence
numbers. A record says how far its rank is in which call, and where its buffers are; only its owner writes it. An
operation goes through these states, `advance` from one to the next as far as the other ranks have come::

    ENTERING   wait until every rank has begun the operation before this one: then all have ended the one that used
               this record and its slot last. Write the call, the addresses, and if the vector is short the data.
               Publish "begun".
    GATHERING  wait for the records that are needed, and see that all ranks make the same call.
               Short vectors: every rank reduces all slots by itself, in rank order; that is the end.
    WORKING    long vectors: each rank reduces its share of the vector, reading the others' sendbufs where they are
               and writing the result to all recvbufs (see `long.py`). Publish "done".
    LEAVING    wait until everybody is done: then the result is complete, and nobody reads from here any more.

On 4 ranks a long allreduce is one step, rank r reducing share r of all vectors a, b, c, d::

    rank 0  reads a0 b0 c0 d0  writes the sum to share 0 of all four recvbufs
    rank 1  reads a1 b1 c1 d1  writes share 1       ...

The flag of a record is ``4 * sequence number + 0 for begun, 1 for done``; it only grows. Two records are enough: who
writes a record for number k has seen everybody begin k - 1, so nobody reads what it held for k - 2. (Reuse of slots
in shared-memory collectives: Jain et al., "Framework for scalable intra-node collective operations using shared
memory", SC18; shares reduced by their owners: Rabenseifner's algorithm with loads and stores for messages.)
"""

from .atomics import call_reducer, copy, load, load_acquire, pause, store, store_release, yield_core
from .jit import helper, kernel, short_kernel
from .job import (
    ALLGATHER,
    ALLREDUCE,
    BCAST,
    CALL,
    CAREFUL,
    COLLECTIVE,
    COUNT,
    ENTERING,
    GATHERING,
    IDLE,
    ITEMSIZE,
    LEAVING,
    PIECE,
    PLACE,
    RANK,
    RECORD_CALL,
    RECORD_COUNT,
    RECORD_RECV,
    RECORD_SEND,
    RECV,
    REDUCE,
    REDUCE_SCATTER,
    REDUCER,
    ROOT,
    SEEN,
    SEND,
    SEQUENCE,
    SIZE,
    SPINS,
    START_SPINS,
    START_YIELDS,
    STATE,
    WITHDRAWN,
    WORKED,
    WORKING,
    YIELDS,
    get,
    is_short,
    part_of,
    published,
    put,
    record_of,
    slot_of,
    vector_nbytes,
)
from .long import ALL_DONE, FAILED, another_piece, begin_long, choose_way, collect_results, is_ahead, work

DONE, WAITING, MISMATCH, FALLBACK, LOST, OTHER = range(6)
"""Statuses: ended; not yet; the ranks' calls differ; not reachable; a process is gone; see `begin` and `calls.call`."""

_PIECES_AT_ONCE = 32
"""After so many pieces `advance` returns, so that signals and deadlines are seen."""


@helper
def _has_come(job, rank, sequence, stage):
    """Wait a little until `rank` has reached a stage of an operation; return whether it has."""
    flag, wanted = record_of(job, rank, sequence), 4 * sequence + stage
    for _ in range(get(job, SPINS)):
        if load_acquire(flag) >= wanted:
            return True
        pause()
    for _ in range(get(job, YIELDS)):
        if load_acquire(flag) >= wanted:
            return True
        yield_core()
    return load_acquire(flag) >= wanted


@helper
def _all_have_come(job, sequence, stage):
    """Do so for all ranks, going on where the last call ended."""
    size, rank = get(job, SIZE), get(job, RANK)
    for place in range(get(job, PLACE), size - 1):
        peer = rank + 1 + place
        if not _has_come(job, peer if peer < size else peer - size, sequence, stage):
            put(job, PLACE, place)
            return False
    put(job, PLACE, 0)
    return True


@helper
def start(job):
    """Begin the operation whose words have been written."""
    put(job, SEQUENCE, get(job, SEQUENCE) + 1)
    put(job, STATE, ENTERING)
    put(job, PLACE, 0)
    put(job, WORKED, 0)
    put(job, PIECE, 0)


@helper
def _fill_slot(job):
    """Copy a short vector, or what this rank gives to it, to where the others read it."""
    what, rank = get(job, COLLECTIVE), get(job, RANK)
    if what == ALLGATHER:
        begin, end = part_of(job, rank)
        copy(slot_of(job, rank), get(job, SEND), (end - begin) * get(job, ITEMSIZE))
    elif what != BCAST or rank == get(job, ROOT):
        copy(slot_of(job, rank), get(job, SEND), vector_nbytes(job))


@helper
def _publish(job):
    """Write the record, and the data if others read it from memory of ours."""
    rank, sequence = get(job, RANK), get(job, SEQUENCE)
    record = record_of(job, rank, sequence)
    store(record + 8 * RECORD_CALL, get(job, CALL))
    store(record + 8 * RECORD_COUNT, get(job, COUNT))
    if is_short(job):
        _fill_slot(job)
    else:
        store(record + 8 * RECORD_SEND, get(job, SEND))
        store(record + 8 * RECORD_RECV, get(job, RECV))
        begin_long(job)
    store_release(record, 4 * sequence)


@helper
def _enter(job):
    """Take this rank's record and write it, if that is what comes next; DONE, WAITING, or MISMATCH for the last one."""
    sequence = get(job, SEQUENCE)
    if get(job, STATE) != ENTERING:
        return DONE
    if get(job, SEEN) < sequence - 1:
        if not _all_have_come(job, sequence - 1, 0):
            return WAITING
        if _calls_differed(job, sequence - 1):
            return MISMATCH
        put(job, SEEN, sequence - 1)
    _publish(job)
    put(job, STATE, GATHERING)
    return DONE


@helper
def _calls_differed(job, sequence):
    """Say whether the ranks made different calls in an operation that this rank ended without having seen all."""
    own = record_of(job, get(job, RANK), sequence)
    for rank in range(get(job, SIZE)):
        record = record_of(job, rank, sequence)
        for word in (RECORD_CALL, RECORD_COUNT):
            if load(record + 8 * word) != load(own + 8 * word):
                return True
    return False


@helper
def _call_differs(job, rank):
    if published(job, rank, RECORD_CALL) != get(job, CALL):
        return True
    return published(job, rank, RECORD_COUNT) != get(job, COUNT)


@helper
def _gather(job):
    """Wait for the records that this rank needs."""
    what, rank, root, sequence = get(job, COLLECTIVE), get(job, RANK), get(job, ROOT), get(job, SEQUENCE)
    careful = get(job, CAREFUL)
    if what == BCAST and not careful:
        if rank == root:
            return DONE
        if not _has_come(job, root, sequence, 0):
            return WAITING
        return MISMATCH if _call_differs(job, root) else DONE
    if what == REDUCE and rank != root and is_short(job) and not careful:
        return DONE
    if not _all_have_come(job, sequence, 0):
        return WAITING
    put(job, SEEN, sequence)
    for peer in range(get(job, SIZE)):
        if _call_differs(job, peer):
            return MISMATCH
    return DONE


@helper
def _reduce_slots(job, first, count):
    """Reduce `count` elements of all slots into recvbuf."""
    itemsize, reducer, out = get(job, ITEMSIZE), get(job, REDUCER), get(job, RECV)
    skip = first * itemsize
    call_reducer(reducer, out, slot_of(job, 0) + skip, slot_of(job, 1) + skip, count, itemsize)
    for rank in range(2, get(job, SIZE)):
        call_reducer(reducer, out, out, slot_of(job, rank) + skip, count, itemsize)


@helper
def _end_short(job):
    """Make the result of short vectors."""
    what, rank, root = get(job, COLLECTIVE), get(job, RANK), get(job, ROOT)
    if what == ALLREDUCE or (what == REDUCE and rank == root):
        _reduce_slots(job, 0, get(job, COUNT))
    elif what == REDUCE_SCATTER:
        begin, end = part_of(job, rank)
        _reduce_slots(job, begin, end - begin)
    elif what == BCAST and rank != root:
        copy(get(job, RECV), slot_of(job, root), vector_nbytes(job))
    elif what == ALLGATHER:
        itemsize = get(job, ITEMSIZE)
        for peer in range(get(job, SIZE)):
            begin, end = part_of(job, peer)
            copy(get(job, RECV) + begin * itemsize, slot_of(job, peer), (end - begin) * itemsize)


@helper
def _end(job, status):
    put(job, STATE, IDLE)
    put(job, CAREFUL, 0)
    return status


@helper
def _work(job):
    """Do this rank's part of a piece and say so; return DONE, WAITING if there is more to do, or LOST."""
    outcome = work(job)
    if outcome == ALL_DONE:
        sequence = get(job, SEQUENCE)
        store_release(record_of(job, get(job, RANK), sequence), 4 * sequence + 1)
        put(job, STATE, LEAVING)
        return DONE
    return LOST if outcome == FAILED else WAITING


@helper
def _may_leave(job):
    """Say whether nobody needs this rank's buffers any more."""
    if get(job, COLLECTIVE) == BCAST and get(job, RANK) != get(job, ROOT):
        return True
    if is_ahead(job):
        return True
    return _all_have_come(job, get(job, SEQUENCE), 1)


@helper
def progress(job):
    """Advance a job; see `advance`."""
    for _ in range(_PIECES_AT_ONCE):
        status = _enter(job)
        if status != DONE:
            return status
        if get(job, STATE) == GATHERING:
            status = _gather(job)
            if status != DONE:
                return status
            if is_short(job):
                _end_short(job)
                return _end(job, DONE)
            if not choose_way(job):
                return _end(job, FALLBACK)
            put(job, STATE, WORKING)
        if get(job, STATE) == WORKING:
            status = _work(job)
            if status != DONE:
                return status
        if not _may_leave(job):
            return WAITING
        collect_results(job)
        if not another_piece(job):
            return _end(job, DONE)
        put(job, SEQUENCE, get(job, SEQUENCE) + 1)
        put(job, STATE, ENTERING)
    return WAITING


@short_kernel
def begin(job):
    """Begin an operation; end it too if it is short and the others begin it at the same time.

    Return a status; OTHER if the last operation of the job has not ended, and for address 0.
    """
    if job == 0 or get(job, STATE) != IDLE:
        return OTHER
    start(job)
    spins, yields = get(job, SPINS), get(job, YIELDS)
    put(job, SPINS, get(job, START_SPINS))
    put(job, YIELDS, get(job, START_YIELDS))
    status = WAITING
    if is_short(job):
        status = progress(job)
    else:
        _enter(job)
    put(job, SPINS, spins)
    put(job, YIELDS, yields)
    return status


@kernel
def advance(job):
    """Go on with an operation as far as the other ranks have come, waiting a little; return a status.

    Parameters
    ----------
    job : int
        Address of `JOB_WORDS` words. The words from COLLECTIVE on describe the operation; counts, addresses and the
        element size must be right, nothing is checked here.
    """
    return progress(job)


@kernel
def withdraw(job):
    """Give up an operation; return whether others may still use this rank's buffers."""
    state, sequence = get(job, STATE), get(job, SEQUENCE)
    if state == GATHERING:
        store_release(record_of(job, get(job, RANK), sequence) + 8 * RECORD_CALL, get(job, CALL) | WITHDRAWN)
    return state in (WORKING, LEAVING)


@kernel
def recorded(job, rank, out):
    """Write how far a rank is in the current operation, its call and its count to `out`; before that in the last one.

    How far: negative if it has not begun, 0 if it has, 1 if its part is done.
    """
    sequence = get(job, SEQUENCE) - (get(job, STATE) == ENTERING)
    record = record_of(job, rank, sequence)
    out[0] = load_acquire(record) - 4 * sequence
    out[1] = load(record + 8 * RECORD_CALL)
    out[2] = load(record + 8 * RECORD_COUNT)
