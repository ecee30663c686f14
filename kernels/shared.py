"""Collectives of processes that share memory: one call, no messages.

Every rank owns two *records* in memory that all ranks see, one for operations with even and one for odd sequence
numbers. A record says how far its rank is in which call, and where its buffers are; only its owner writes it. An
operation goes through these states, `advance` from one to the next as far as the other ranks have come::

    ENTERING   wait until every rank has begun the operation before this one: then all have ended the one that used
               this record and its slot last. Write the call, the addresses, and if the vector is short the data.
               Publish "begun".
    GATHERING  wait for the records that are needed, and see that all ranks make the same call.
               Short vectors: every rank reduces all slots by itself, in rank order; that is the end.
    WORKING    long vectors: publish "at work", and see that nobody has given up meanwhile. Each rank reduces its share
               of the vector, reading the others' sendbufs where they are and writing the result to all recvbufs (see
               `long.py`). Publish "done".
    LEAVING    wait until everybody is done: then the result is complete, and nobody reads from here any more.

On 4 ranks a long allreduce is one step, rank r reducing share r of all vectors a, b, c, d::

    rank 0  reads a0 b0 c0 d0  writes the sum to share 0 of all four recvbufs
    rank 1  reads a1 b1 c1 d1  writes share 1       ...

The flag of a record is ``4 * sequence number + 0 for begun, 1 for done``; it only grows. Two records are enough: who
writes a record for number k has seen everybody begin k - 1, so nobody reads what it held for k - 2. (Reuse of slots
in shared-memory collectives: Jain et al., "Framework for scalable intra-node collective operations using shared
memory", SC18; shares reduced by their owners: Rabenseifner's algorithm with loads and stores for messages.)

How a rank gives up is in `withdrawal.py`. `tests/kernels/test_protocol.py` runs these functions in random
interleavings and reports every race.
"""

from .atomics import call_reducer, copy, fence, load_acquire, store, store_release
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
    RECORD_AT_WORK,
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
    WORKED,
    WORKING,
    YIELDS,
    get,
    is_short,
    part_of,
    put,
    record_of,
    slot_of,
    vector_nbytes,
)
from .long import (
    ALL_DONE,
    UNREACHED,
    begin_long,
    choose_way,
    collect_results,
    work,
)
from .long import RAISED as WORK_RAISED
from .pieces import another_piece, is_ahead
from .records import all_have_come, call_differs, calls_differed, has_come

DONE, WAITING, MISMATCH, FALLBACK, LOST, OTHER, RAISED = range(7)
"""Statuses: ended; not yet; the ranks' calls differ or one has given up; not reachable; a process is gone; see `begin`
and `calls.call`; the reducer raised an exception. After MISMATCH, LOST and RAISED the operation has not ended."""

_PIECES_AT_ONCE = 32
"""After so many pieces `advance` returns, so that signals and deadlines are seen."""


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
        store_release(record + 8 * RECORD_AT_WORK, 0)
        begin_long(job)
    store_release(record, 4 * sequence)


@helper
def _enter(job):
    """Take this rank's record and write it, if that is what comes next; DONE, WAITING, or MISMATCH for the last one."""
    sequence = get(job, SEQUENCE)
    if get(job, STATE) != ENTERING:
        return DONE
    if get(job, SEEN) < sequence - 1:
        if not all_have_come(job, sequence - 1, 0):
            return WAITING
        if calls_differed(job, sequence - 1):
            return MISMATCH
        put(job, SEEN, sequence - 1)
    _publish(job)
    put(job, STATE, GATHERING)
    return DONE


@helper
def _gather(job):
    """Wait for the records that this rank needs."""
    what, rank, root, sequence = get(job, COLLECTIVE), get(job, RANK), get(job, ROOT), get(job, SEQUENCE)
    careful = get(job, CAREFUL)
    if what == BCAST and not careful:
        if rank == root:
            return DONE
        if not has_come(job, root, sequence, 0):
            return WAITING
        return MISMATCH if call_differs(job, root) else DONE
    if what == REDUCE and rank != root and is_short(job) and not careful:
        return DONE
    if not all_have_come(job, sequence, 0):
        return WAITING
    put(job, SEEN, sequence)
    for peer in range(get(job, SIZE)):
        if call_differs(job, peer):
            return MISMATCH
    return DONE


@helper
def _reduce_slots(job, first, count):
    """Reduce `count` elements of all slots into recvbuf; return DONE or RAISED."""
    itemsize, reducer, out = get(job, ITEMSIZE), get(job, REDUCER), get(job, RECV)
    skip = first * itemsize
    raised = call_reducer(reducer, out, slot_of(job, 0) + skip, slot_of(job, 1) + skip, count, itemsize)
    for rank in range(2, get(job, SIZE)):
        raised |= call_reducer(reducer, out, out, slot_of(job, rank) + skip, count, itemsize)
    return RAISED if raised else DONE


@helper
def _end_short(job):
    """Make the result of short vectors; return DONE or RAISED."""
    what, rank, root = get(job, COLLECTIVE), get(job, RANK), get(job, ROOT)
    if what == ALLREDUCE or (what == REDUCE and rank == root):
        return _reduce_slots(job, 0, get(job, COUNT))
    if what == REDUCE_SCATTER:
        begin, end = part_of(job, rank)
        return _reduce_slots(job, begin, end - begin)
    if what == BCAST and rank != root:
        copy(get(job, RECV), slot_of(job, root), vector_nbytes(job))
    elif what == ALLGATHER:
        itemsize = get(job, ITEMSIZE)
        for peer in range(get(job, SIZE)):
            begin, end = part_of(job, peer)
            copy(get(job, RECV) + begin * itemsize, slot_of(job, peer), (end - begin) * itemsize)
    return DONE


@helper
def _end(job, status):
    put(job, STATE, IDLE)
    put(job, CAREFUL, 0)
    return status


@helper
def _start_work(job):
    """Announce that this rank touches others' buffers from now on; return False if one of them has given up."""
    what, rank, root, sequence = get(job, COLLECTIVE), get(job, RANK), get(job, ROOT), get(job, SEQUENCE)
    if what == BCAST and rank == root:
        return True
    at_work = record_of(job, rank, sequence) + 8 * RECORD_AT_WORK
    store_release(at_work, sequence)
    fence()
    for peer in range(get(job, SIZE)):
        touched = what != BCAST or peer == root
        if touched and load_acquire(record_of(job, peer, sequence) + 8 * RECORD_CALL) < 0:
            store_release(at_work, 0)
            return False
    return True


@helper
def _work(job):
    """Do this rank's part of a piece and say so; return DONE, WAITING if there is more to do, LOST or RAISED."""
    outcome = work(job)
    if outcome == ALL_DONE:
        sequence = get(job, SEQUENCE)
        store_release(record_of(job, get(job, RANK), sequence), 4 * sequence + 1)
        put(job, STATE, LEAVING)
        return DONE
    if outcome == WORK_RAISED:
        return RAISED
    return LOST if outcome == UNREACHED else WAITING


@helper
def _may_leave(job):
    """Say whether nobody needs this rank's buffers any more."""
    if get(job, COLLECTIVE) == BCAST and get(job, RANK) != get(job, ROOT):
        return True
    if is_ahead(job):
        return True
    return all_have_come(job, get(job, SEQUENCE), 1)


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
                status = _end_short(job)
                return _end(job, DONE) if status == DONE else status
            if not choose_way(job):
                return _end(job, FALLBACK)
            if not _start_work(job):
                return MISMATCH
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
