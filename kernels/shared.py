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
               and writing the result to all recvbufs. Publish "done".
    LEAVING    wait until everybody is done: then the result is complete, and nobody reads from here any more.

On 4 ranks a long allreduce is one step, rank r reducing share r of all vectors a, b, c, d::

    rank 0  reads a0 b0 c0 d0  writes the sum to share 0 of all four recvbufs
    rank 1  reads a1 b1 c1 d1  writes share 1       ...

Memory is within reach if it lies in its owner's *arena*, which everybody has mapped, or if the system lets processes
copy from each other (`process_vm_readv`). Otherwise `advance` returns FALLBACK on all ranks before anything is moved.

The flag of a record is ``4 * sequence number + 0 for begun, 1 for done``; it only grows. Two records are enough: who
writes a record for number k has seen everybody begin k - 1, so nobody reads what it held for k - 2. (Reuse of slots
in shared-memory collectives: Jain et al., "Framework for scalable intra-node collective operations using shared
memory", SC18; shares reduced by their owners: Rabenseifner's algorithm with loads and stores for messages.)

Words are int64. A *job* is a rank's private memory for one lane of operations, given by its address.
"""

from .atomics import (
    call_reducer,
    copy,
    load,
    load_acquire,
    pause,
    read_process,
    store,
    store_release,
    write_process,
    yield_core,
)
from .jit import helper, kernel, short_kernel

BARRIER, ALLREDUCE, REDUCE, BCAST, REDUCE_SCATTER, ALLGATHER = range(6)
COLLECTIVES = ("barrier", "allreduce", "reduce", "bcast", "reduce_scatter", "allgather")

DONE, WAITING, MISMATCH, FALLBACK, LOST, OTHER = range(6)
"""What `advance` returns: ended; not yet; the ranks' calls differ; not reachable; a process is gone. OTHER: `calls`."""

IDLE, ENTERING, GATHERING, WORKING, LEAVING = range(5)

JOB_WORDS = 32
(
    RECORDS,  # address of the ranks' records
    SIZE,
    RANK,
    PEERS,  # address of PEER_WORDS words a rank
    SLOTS,  # address of the ranks' slots
    SLOT_NBYTES,  # the longest vector that is short
    SCRATCH,  # address of two tiles and four words of private memory
    REACH,  # 1 if processes may copy from each other
    SPINS,  # how often to look before the core is given away,
    YIELDS,  # and how often it is before `advance` returns
    SEQUENCE,
    SEEN,  # everybody has begun this operation
    STATE,
    WORKED,  # elements of the own share, or bytes, that are done
    PLACE,  # the rank waited for
    WRONG,  # the rank whose call differs
    COLLECTIVE,
    CALL,  # what all ranks must have in common, besides COUNT
    COUNT,  # elements of the whole vector
    ITEMSIZE,
    REDUCER,  # address, see atomics.call_reducer
    ROOT,
    SEND,  # addresses
    RECV,
    BOUNDS,  # address of size + 1 element offsets, for collectives in which ranks own parts
) = range(25)

RECORD_NBYTES = 128
WITHDRAWN = -1
"""In place of the call of a rank that gave up."""
FLAG, RECORD_CALL, RECORD_COUNT, RECORD_SEND, RECORD_RECV = range(5)
_INLINE = 24
"""Where in its record a very short vector lies, instead of the addresses: in the cache line that is read anyway."""
INLINE_NBYTES = RECORD_NBYTES - _INLINE

PEER_WORDS = 4
PID, ARENA, MAPPED, ARENA_NBYTES = range(PEER_WORDS)

TILE_NBYTES = 128 << 10
"""What is fetched from another process at once: amortises the system call and stays in the core's own cache."""
NEAR_TILE_NBYTES = 16 << 10
SCRATCH_NBYTES = 2 * TILE_NBYTES + 64
WORK_NBYTES = 32 << 20
"""What a rank does before `advance` returns, so that signals and deadlines are seen."""


@helper
def get(job, word):
    """Return a word of a job."""
    return load(job + 8 * word)


@helper
def put(job, word, value):
    """Write a word of a job."""
    store(job + 8 * word, value)


@helper
def _record(job, rank, sequence):
    return get(job, RECORDS) + RECORD_NBYTES * (2 * rank + (sequence & 1))


@helper
def _nbytes(job):
    return get(job, COUNT) * get(job, ITEMSIZE)


@helper
def _slot(job, rank):
    """Return where a rank's short vector is."""
    sequence = get(job, SEQUENCE)
    if _nbytes(job) <= INLINE_NBYTES:
        return _record(job, rank, sequence) + _INLINE
    return get(job, SLOTS) + ((sequence & 1) * get(job, SIZE) + rank) * get(job, SLOT_NBYTES)


@helper
def _has_come(job, rank, sequence, stage):
    """Wait a little until `rank` has reached a stage of an operation; return whether it has."""
    flag, wanted = _record(job, rank, sequence), 4 * sequence + stage
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
def _call_differs(job, rank):
    record = _record(job, rank, get(job, SEQUENCE))
    if load(record + 8 * RECORD_CALL) == get(job, CALL) and load(record + 8 * RECORD_COUNT) == get(job, COUNT):
        return False
    put(job, WRONG, rank)
    return True


@helper
def start(job):
    """Begin the operation whose words have been written."""
    put(job, SEQUENCE, get(job, SEQUENCE) + 1)
    put(job, STATE, ENTERING)
    put(job, PLACE, 0)
    put(job, WORKED, 0)


@helper
def _part(job, rank):
    """Return the element range that a rank owns."""
    bounds = get(job, BOUNDS) + 8 * rank
    return load(bounds), load(bounds + 8)


@helper
def _publish(job):
    """Write the record, and a short vector, of this rank."""
    rank, sequence = get(job, RANK), get(job, SEQUENCE)
    record = _record(job, rank, sequence)
    store(record + 8 * RECORD_CALL, get(job, CALL))
    store(record + 8 * RECORD_COUNT, get(job, COUNT))
    if _nbytes(job) > get(job, SLOT_NBYTES):
        store(record + 8 * RECORD_SEND, get(job, SEND))
        store(record + 8 * RECORD_RECV, get(job, RECV))
    else:
        what = get(job, COLLECTIVE)
        if what == ALLGATHER:
            start, stop = _part(job, rank)
            copy(_slot(job, rank), get(job, SEND), (stop - start) * get(job, ITEMSIZE))
        elif what != BCAST or rank == get(job, ROOT):
            copy(_slot(job, rank), get(job, SEND), _nbytes(job))
    store_release(record, 4 * sequence)


@helper
def _gather(job):
    """Wait for the records that this rank needs."""
    what, rank, root, sequence = get(job, COLLECTIVE), get(job, RANK), get(job, ROOT), get(job, SEQUENCE)
    if what == BCAST:
        if rank == root:
            return DONE
        if not _has_come(job, root, sequence, 0):
            return WAITING
        return MISMATCH if _call_differs(job, root) else DONE
    if what == REDUCE and rank != root and _nbytes(job) <= get(job, SLOT_NBYTES):
        return DONE
    if not _all_have_come(job, sequence, 0):
        return WAITING
    put(job, SEEN, sequence)
    for peer in range(get(job, SIZE)):
        if _call_differs(job, peer):
            return MISMATCH
    return DONE


@helper
def _reduce_slots(job, start, count):
    """Reduce `count` elements of all slots into recvbuf."""
    itemsize, reducer, out = get(job, ITEMSIZE), get(job, REDUCER), get(job, RECV)
    skip = start * itemsize
    call_reducer(reducer, out, _slot(job, 0) + skip, _slot(job, 1) + skip, count, itemsize)
    for rank in range(2, get(job, SIZE)):
        call_reducer(reducer, out, out, _slot(job, rank) + skip, count, itemsize)


@helper
def _end_short(job):
    """Make the result of short vectors."""
    what, rank, root = get(job, COLLECTIVE), get(job, RANK), get(job, ROOT)
    if what == ALLREDUCE or (what == REDUCE and rank == root):
        _reduce_slots(job, 0, get(job, COUNT))
    elif what == REDUCE_SCATTER:
        start, stop = _part(job, rank)
        _reduce_slots(job, start, stop - start)
    elif what == BCAST and rank != root:
        copy(get(job, RECV), _slot(job, root), _nbytes(job))
    elif what == ALLGATHER:
        itemsize = get(job, ITEMSIZE)
        for peer in range(get(job, SIZE)):
            start, stop = _part(job, peer)
            copy(get(job, RECV) + start * itemsize, _slot(job, peer), (stop - start) * itemsize)


# Long vectors ---------------------------------------------------------------------------------------------------------


@helper
def _peer(job, rank, word):
    return load(get(job, PEERS) + 8 * (PEER_WORDS * rank + word))


@helper
def _address(job, rank, word):
    """Return an address that a rank published, in that rank's own terms."""
    return load(_record(job, rank, get(job, SEQUENCE)) + 8 * word)


@helper
def _nearby(job, rank, address):
    """Return where this process sees `address` of a rank's, 0 if it does not; buffers lie inside an arena or outside."""
    if rank == get(job, RANK):
        return address
    inside = address - _peer(job, rank, ARENA)
    if 0 <= inside < _peer(job, rank, ARENA_NBYTES):
        return _peer(job, rank, MAPPED) + inside
    return 0


@helper
def _in_arena(job, rank, word):
    return 0 <= _address(job, rank, word) - _peer(job, rank, ARENA) < _peer(job, rank, ARENA_NBYTES)


@helper
def _within_reach(job):
    """Say whether all memory that this operation needs can be reached; the answer is the same on all ranks."""
    if get(job, REACH):
        return True
    what, root = get(job, COLLECTIVE), get(job, ROOT)
    if what == BCAST:
        return _in_arena(job, root, RECORD_SEND)
    for rank in range(get(job, SIZE)):
        if not _in_arena(job, rank, RECORD_SEND) or (what == ALLREDUCE and not _in_arena(job, rank, RECORD_RECV)):
            return False
    return what != REDUCE or _in_arena(job, root, RECORD_RECV)


@helper
def _fetch(job, rank, skip, nbytes, room):
    """Return where `nbytes` of a rank's sendbuf can be read, having copied them to `room` if necessary; 0: failed."""
    address = _address(job, rank, RECORD_SEND) + skip
    near = _nearby(job, rank, address)
    if near:
        return near
    vectors = get(job, SCRATCH) + 2 * TILE_NBYTES
    return room if read_process(vectors, _peer(job, rank, PID), room, address, nbytes) else 0


@helper
def _deliver(job, rank, skip, nbytes, source):
    """Write a piece of the result to a rank's recvbuf."""
    address = _address(job, rank, RECORD_RECV) + skip
    near = _nearby(job, rank, address)
    if near:
        if near != source:
            copy(near, source, nbytes)
        return True
    vectors = get(job, SCRATCH) + 2 * TILE_NBYTES
    return write_process(vectors, _peer(job, rank, PID), source, address, nbytes)


@helper
def _reduce_tile(job, skip, nbytes, out):
    """Reduce one tile of all sendbufs to `out`; partial results stay in cache. `out` may be a sendbuf itself."""
    itemsize, reducer, size = get(job, ITEMSIZE), get(job, REDUCER), get(job, SIZE)
    partial = get(job, SCRATCH)
    left = _fetch(job, 0, skip, nbytes, partial)
    for rank in range(1, size):
        right = _fetch(job, rank, skip, nbytes, partial + TILE_NBYTES)
        if left == 0 or right == 0:
            return False
        result = out if rank == size - 1 else partial
        call_reducer(reducer, result, left, right, nbytes // itemsize, itemsize)
        left = result
    return True


@helper
def _own_share(job):
    """Return the element range that this rank reduces: cache lines are not shared between ranks."""
    what, rank, size, count = get(job, COLLECTIVE), get(job, RANK), get(job, SIZE), get(job, COUNT)
    if what == REDUCE_SCATTER:
        return _part(job, rank)
    unit = max(1, RECORD_NBYTES // get(job, ITEMSIZE))
    blocks = (count + unit - 1) // unit
    return min(count, blocks * rank // size * unit), min(count, blocks * (rank + 1) // size * unit)


@helper
def _tile_nbytes(job):
    """Return how much to reduce at once: more if it takes a system call for each operand."""
    for rank in range(get(job, SIZE)):
        if not _in_arena(job, rank, RECORD_SEND):
            return TILE_NBYTES
    return NEAR_TILE_NBYTES


@helper
def _reduce_share(job):
    """Go on reducing the own share; return DONE, WAITING if there is more to do, or LOST."""
    what, rank, root, size = get(job, COLLECTIVE), get(job, RANK), get(job, ROOT), get(job, SIZE)
    itemsize = get(job, ITEMSIZE)
    start, stop = _own_share(job)
    begin, end = start * itemsize, stop * itemsize
    tile = _tile_nbytes(job)
    at = begin + get(job, WORKED)
    until = min(end, at + WORK_NBYTES)
    while at < until:
        nbytes = min(tile, end - at)
        if what == ALLREDUCE:
            out = get(job, RECV) + at
        elif what == REDUCE_SCATTER:
            out = get(job, RECV) + at - begin
        else:
            out = _nearby(job, root, _address(job, root, RECORD_RECV) + at)
        if out == 0:
            out = get(job, SCRATCH)
        if not _reduce_tile(job, at, nbytes, out):
            return LOST
        if what == ALLREDUCE:
            for other in range(rank + 1, rank + size):
                if not _deliver(job, other if other < size else other - size, at, nbytes, out):
                    return LOST
        elif what == REDUCE and not _deliver(job, root, at, nbytes, out):
            return LOST
        at += nbytes
    put(job, WORKED, at - begin)
    return DONE if at >= end else WAITING


@helper
def _take(job, rank, target, nbytes):
    """Copy a rank's whole sendbuf."""
    near = _fetch(job, rank, 0, nbytes, target)
    if near and near != target:
        copy(target, near, nbytes)
    return near != 0


@helper
def _collect(job):
    """Copy what this rank receives; return DONE, WAITING if there is more to do, or LOST."""
    what, rank, size = get(job, COLLECTIVE), get(job, RANK), get(job, SIZE)
    if what == BCAST:
        root = get(job, ROOT)
        return DONE if rank == root or _take(job, root, get(job, RECV), _nbytes(job)) else LOST
    done, nbytes = get(job, WORKED), 0
    while done < size and nbytes < WORK_NBYTES:
        peer = (rank + done) % size
        start, stop = _part(job, peer)
        nbytes += (stop - start) * get(job, ITEMSIZE)
        if not _take(job, peer, get(job, RECV) + start * get(job, ITEMSIZE), (stop - start) * get(job, ITEMSIZE)):
            return LOST
        done += 1
    put(job, WORKED, done)
    return DONE if done == size else WAITING


@helper
def _work(job):
    what = get(job, COLLECTIVE)
    if what == BCAST or what == ALLGATHER:
        return _collect(job)
    return _reduce_share(job)


@helper
def _enter(job):
    """Take this rank's record and write it."""
    sequence = get(job, SEQUENCE)
    if get(job, STATE) == ENTERING and get(job, SEEN) < sequence - 1:
        if not _all_have_come(job, sequence - 1, 0):
            return WAITING
        put(job, SEEN, sequence - 1)
    if get(job, STATE) == ENTERING:
        _publish(job)
        put(job, STATE, GATHERING)
    return WAITING


@helper
def progress(job):
    """Advance a job; see `advance`."""
    sequence = get(job, SEQUENCE)
    _enter(job)
    if get(job, STATE) == ENTERING:
        return WAITING
    if get(job, STATE) == GATHERING:
        status = _gather(job)
        if status != DONE:
            return status
        if _nbytes(job) <= get(job, SLOT_NBYTES):
            _end_short(job)
            put(job, STATE, IDLE)
            return DONE
        if not _within_reach(job):
            put(job, STATE, IDLE)
            return FALLBACK
        put(job, STATE, WORKING)
    if get(job, STATE) == WORKING:
        status = _work(job)
        if status != DONE:
            return status
        store_release(_record(job, get(job, RANK), sequence), 4 * sequence + 1)
        put(job, STATE, LEAVING)
    if get(job, STATE) == LEAVING:
        if not _may_leave(job):
            return WAITING
        put(job, STATE, IDLE)
    return DONE


@helper
def _may_leave(job):
    """Say whether nobody needs this rank's buffers any more."""
    if get(job, COLLECTIVE) == BCAST and get(job, RANK) != get(job, ROOT):
        return True
    return _all_have_come(job, get(job, SEQUENCE), 1)


@short_kernel
def begin(job, spins):
    """Begin an operation; end it too if it is short and the others come while this rank looks `spins` times.

    Return a status; OTHER if the last operation of the job has not ended.
    """
    if get(job, STATE) != IDLE:
        return OTHER
    start(job)
    patience, yields = get(job, SPINS), get(job, YIELDS)
    put(job, SPINS, spins)
    put(job, YIELDS, 0)
    status = progress(job) if _nbytes(job) <= get(job, SLOT_NBYTES) else _enter(job)
    put(job, SPINS, patience)
    put(job, YIELDS, yields)
    return status


@short_kernel
def advance_short(job):
    """Do what `advance` does, where it takes no longer than letting go of the interpreter would."""
    return progress(job)


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
    """Give up an operation; return whether others may still use this rank's buffers.

    A rank that has not seen this one's record yet will find that the calls differ.
    """
    state, sequence = get(job, STATE), get(job, SEQUENCE)
    if state == GATHERING:
        store_release(_record(job, get(job, RANK), sequence) + 8 * RECORD_CALL, WITHDRAWN)
    return state == WORKING or state == LEAVING


@kernel
def recorded(job, rank, out):
    """Write flag, call and count of a rank's record for the current operation to `out`."""
    record = _record(job, rank, get(job, SEQUENCE))
    out[0] = load_acquire(record)
    out[1] = load(record + 8 * RECORD_CALL)
    out[2] = load(record + 8 * RECORD_COUNT)
