"""Execution of plans on shared memory: one interpreter for all collectives, which goes on wherever it had to wait.

Every rank owns two *records* in memory that all ranks see, one for operations with even and one for odd sequence
numbers. A record says how far its rank is in which call, and where its buffers are; only its owner writes it. The
instructions (see `plan`) that concern records, in the order in which a plan has them::

    ENTER      wait until every rank has started the operation before this one: then all have ended the one that used
               this record and its slot last. Write the call, and the addresses if the vector is long.
    STARTED    publish "started", after the rank's data were copied to where others read them.
    MEET       wait for the records that are needed, and see that all ranks make the same call.
    AT_WORK    publish "at work", and see that nobody has given up meanwhile.
    DONE       publish "done".
    WAIT_DONE  wait until others are done: then the result is complete, and nobody reads from here any more.

On 4 ranks a long allreduce is one step between MEET and DONE, rank r reducing chunk r of all vectors a, b, c, d::

    rank 0  reads a0 b0 c0 d0  writes the sum to chunk 0 of all four recvbufs
    rank 1  reads a1 b1 c1 d1  writes chunk 1       ...

The flag of a record is ``4 * sequence number + 0 for started, 1 for done``; it only grows. Two records are enough: who
writes a record for number k has seen everybody start k - 1, so nobody reads what it held for k - 2. (Reuse of slots
in shared-memory collectives: Jain et al., "Framework for scalable intra-node collective operations using shared
memory", SC18; chunks reduced by their owners: Rabenseifner's algorithm with loads and stores for messages.)

How a rank gives up is in `withdrawal.py`. `tests/kernels/test_every_interleaving.py` runs this module, and the plans,
on simulated memory, and proves them free of races.
"""

from .atomics import call_reducer, copy, fence, load, load_acquire, read_process, store, store_release, write_process
from .jit import helper, inline_helper, kernel, short_kernel
from .job import (
    AT_SEGMENT,
    CALL,
    CAREFUL,
    COUNT,
    ENTERING,
    GATHERING,
    IDLE,
    ITEMSIZE,
    LEAVING,
    METHOD,
    PID,
    PLACE,
    PLAN,
    RANK,
    RECORD_AT_WORK,
    RECORD_CALL,
    RECORD_COUNT,
    RECORD_RECV,
    RECORD_SEND,
    RECV,
    REDUCER,
    ROW,
    SCRATCH,
    SEEN,
    SEND,
    SEQUENCE,
    SIZE,
    SPINS,
    STAGE,
    STAGED,
    START_SPINS,
    START_YIELDS,
    STATE,
    TILE_NBYTES,
    TILE_START,
    TILE_STOP,
    WORKED,
    WORKING,
    YIELDS,
    get,
    is_short,
    peer_word,
    put,
    record_of,
)
from .job import OTHERS_STAGED as OTHERS_STAGED_WORD
from .operands import (
    find_own_buffers,
    header,
    in_arena,
    is_last_segment,
    is_remote_output,
    is_staged_output,
    next_tile,
    place,
    range_of,
    remote_address,
    resolve,
)
from .plan import (
    AGAIN,
    ALL,
    AT_WORK,
    CONDITION_RANK,
    COPY,
    DELIVER,
    END,
    ENTER,
    FIRST,
    FROM,
    FROM_FIRST,
    FROM_INDEX,
    FROM_LAST,
    FROM_RANK,
    IF,
    INPUT_IS_STAGED,
    KIND,
    MEET,
    OTHERS_ARE_STAGED,
    OUTPUT_IS_REMOTE,
    OUTPUT_IS_STAGED,
    REDUCE,
    RESOLVE,
    ROW_NBYTES,
    ROWS,
    SLOT,
    STARTED,
    TILES,
    TO,
    TO_INDEX,
    TO_RANK,
    TURNS,
    WAIT_DONE,
)
from .plan import DONE as DONE_ROW
from .records import all_have_come, call_differs, calls_differed, has_come

DONE, WAITING, MISMATCH, FALLBACK, LOST, OTHER, RAISED = range(7)
"""Statuses: ended; not yet; the ranks' calls differ or one has given up; not reachable; a process is gone; see `begin`
and `calls.call`; the reducer raised an exception. After MISMATCH, LOST and RAISED the operation has not ended."""

_WORK_NBYTES = 32 << 20
"""After so many bytes `advance` returns, so that signals and deadlines are seen."""


@helper
def start(job):
    """Start the operation whose words have been written."""
    put(job, SEQUENCE, get(job, SEQUENCE) + 1)
    put(job, STATE, ENTERING)
    put(job, PLACE, 0)
    put(job, WORKED, 0)
    put(job, AT_SEGMENT, 0)
    put(job, STAGED, 0)
    put(job, ROW, get(job, PLAN) + ROW_NBYTES)


# Records --------------------------------------------------------------------------------------------------------------


@inline_helper
def _enter(job, is_long):
    """Take this rank's record and write it; DONE, WAITING, or MISMATCH for the operation before."""
    rank, sequence = get(job, RANK), get(job, SEQUENCE)
    if get(job, SEEN) < sequence - 1:
        if not all_have_come(job, sequence - 1, 0):
            return WAITING
        if calls_differed(job, sequence - 1):
            return MISMATCH
        put(job, SEEN, sequence - 1)
    find_own_buffers(job)
    record = record_of(job, rank, sequence)
    store(record + 8 * RECORD_CALL, get(job, CALL))
    store(record + 8 * RECORD_COUNT, get(job, COUNT))
    if is_long:
        store(record + 8 * RECORD_SEND, get(job, SEND))
        store(record + 8 * RECORD_RECV, get(job, RECV))
        store_release(record + 8 * RECORD_AT_WORK, 0)
        put(job, STAGED, get(job, METHOD) == STAGE)
    return DONE


@helper
def _publish(job, stage, state):
    sequence = get(job, SEQUENCE)
    store_release(record_of(job, get(job, RANK), sequence), 4 * sequence + stage)
    put(job, STATE, state)


@inline_helper
def _meet(job, who):
    """Wait until `who` has started, and compare the calls."""
    sequence = get(job, SEQUENCE)
    if who != ALL and not get(job, CAREFUL):
        if who == get(job, RANK):
            return DONE
        if not has_come(job, who, sequence, 0):
            return WAITING
        return MISMATCH if call_differs(job, who) else DONE
    if not all_have_come(job, sequence, 0):
        return WAITING
    put(job, SEEN, sequence)
    for peer in range(get(job, SIZE)):
        if call_differs(job, peer):
            return MISMATCH
    return DONE


@helper
def _wait_done(job, who):
    sequence = get(job, SEQUENCE)
    return all_have_come(job, sequence, 1) if who == ALL else has_come(job, who, sequence, 1)


@helper
def _go_to_work(job, who):
    """Announce that this rank uses others' buffers from now on; return False if one of them has given up."""
    sequence = get(job, SEQUENCE)
    at_work = record_of(job, get(job, RANK), sequence) + 8 * RECORD_AT_WORK
    store_release(at_work, sequence)
    fence()
    for peer in range(get(job, SIZE)):
        if who in (ALL, peer) and load_acquire(record_of(job, peer, sequence) + 8 * RECORD_CALL) < 0:
            store_release(at_work, 0)
            return False
    put(job, STATE, WORKING)
    return True


# Data -----------------------------------------------------------------------------------------------------------------


@helper
def _vectors(job):
    """Return room for what system calls are told."""
    return get(job, SCRATCH) + 2 * TILE_NBYTES


@inline_helper
def _copy_row(job, row, nbytes, start, source_start):
    """Copy a range between two places; return whether both were reached."""
    to, to_rank = load(row + 8 * TO), load(row + 8 * TO_RANK)
    source, source_rank = load(row + 8 * FROM), load(row + 8 * FROM_RANK)
    target = place(job, to, to_rank, load(row + 8 * TO_INDEX), start)
    origin = place(job, source, source_rank, load(row + 8 * FROM_INDEX), source_start)
    if target == 0:
        address = remote_address(job, to, to_rank, start)
        return write_process(_vectors(job), peer_word(job, to_rank, PID), origin, address, nbytes)
    if origin == 0:
        address = remote_address(job, source, source_rank, source_start)
        return read_process(_vectors(job), peer_word(job, source_rank, PID), target, address, nbytes)
    if target != origin:
        copy(target, origin, nbytes)
    return True


@inline_helper
def _fetch(job, space, rank, index, start, nbytes, room):
    """Return where a tile can be read, having copied it to `room` if necessary; 0: failed."""
    near = place(job, space, rank, index, start)
    if near:
        return near
    address = remote_address(job, space, rank, start)
    return room if read_process(_vectors(job), peer_word(job, rank, PID), room, address, nbytes) else 0


@inline_helper
def _reduce_row(job, row):
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


# Control --------------------------------------------------------------------------------------------------------------


@helper
def _holds(job, condition, rank):
    """Return whether a condition holds."""
    if condition == INPUT_IS_STAGED:
        return get(job, STAGED) == 1 and not in_arena(job, get(job, RANK), get(job, SEND))
    if condition == OUTPUT_IS_STAGED:
        return get(job, STAGED) == 1 and not in_arena(job, get(job, RANK), get(job, RECV))
    if condition == OTHERS_ARE_STAGED:
        return get(job, OTHERS_STAGED_WORD) == 1
    if condition == OUTPUT_IS_REMOTE:
        return is_remote_output(job, rank)
    return not header(job, TURNS) or is_last_segment(job)


@helper
def _next_segment(job):
    """Go on to the next segment; return False if this was the last."""
    if is_last_segment(job):
        return False
    put(job, AT_SEGMENT, get(job, AT_SEGMENT) + 1)
    put(job, SEQUENCE, get(job, SEQUENCE) + 1)
    put(job, STATE, ENTERING)
    return True


@helper
def _end(job, status):
    put(job, STATE, IDLE)
    put(job, CAREFUL, 0)
    return status


@inline_helper
def _copy_range(job, row, what):
    """Do a COPY or DELIVER; return how many bytes, -1 if they were not reached."""
    kind, index, source_index = load(row + 8 * KIND), load(row + 8 * TO_INDEX), load(row + 8 * FROM_INDEX)
    start, stop = range_of(job, kind, index)
    source_start = start if source_index == index else range_of(job, kind, source_index)[0]
    nbytes = (stop - start) * get(job, ITEMSIZE)
    if nbytes == 0 or (what == DELIVER and is_staged_output(job, load(row + 8 * TO_RANK))):
        return 0
    return nbytes if _copy_row(job, row, nbytes, start, source_start) else -1


@helper
def _leave(job, row, status):
    """Keep the row at which to go on."""
    put(job, ROW, row)
    return status


@helper
def progress(job, only_start):
    """Execute the plan as far as the other ranks have come; return a status. See `advance`.

    With `only_start` return before others are waited for that may not have started.
    """
    row, worked = get(job, ROW), 0
    while True:
        what, who = load(row), load(row + 8 * FIRST)
        status = DONE
        if what in (COPY, DELIVER):
            nbytes = _copy_range(job, row, what)
            if nbytes < 0:
                status = LOST
            worked += nbytes
        elif what == ENTER:
            status = _enter(job, who)
        elif what == STARTED:
            _publish(job, 0, GATHERING)
        elif what == MEET:
            status = WAITING if only_start else _meet(job, who)
        elif what == REDUCE:
            status = _reduce_row(job, row)
        elif what == END:
            return _end(job, DONE)
        elif what == TILES:
            if not next_tile(job, load(row + 8 * KIND), load(row + 8 * TO_INDEX)):
                put(job, WORKED, 0)
                row += ROW_NBYTES * load(row + 8 * ROWS)
        elif what == AGAIN:
            tile = get(job, TILE_STOP) - get(job, TILE_START)
            worked += tile * get(job, ITEMSIZE)
            put(job, WORKED, get(job, WORKED) + tile)
            row -= ROW_NBYTES * load(row + 8 * ROWS)
        elif what == IF:
            if not _holds(job, who, load(row + 8 * CONDITION_RANK)):
                row += ROW_NBYTES * load(row + 8 * ROWS)
        elif what == RESOLVE:
            if not resolve(job):
                return _end(job, FALLBACK)
        elif what == AT_WORK:
            status = DONE if _go_to_work(job, who) else MISMATCH
        elif what == DONE_ROW:
            _publish(job, 1, LEAVING)
        elif what == WAIT_DONE:
            status = DONE if _wait_done(job, who) else WAITING
        elif _next_segment(job):
            row = get(job, PLAN)
        else:
            return _end(job, DONE)
        if status != DONE:
            return _leave(job, row, status)
        row += ROW_NBYTES
        if worked >= _WORK_NBYTES:
            return _leave(job, row, WAITING)


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
    status = progress(job, not is_short(job))
    put(job, SPINS, spins)
    put(job, YIELDS, yields)
    return status


@kernel
def advance(job):
    """Go on with an operation as far as the other ranks have come, waiting a little; return a status.

    Parameters
    ----------
    job : int
        Address of the operation's words. Those from COLLECTIVE on describe it; plan, counts, addresses and the
        element size must be right, nothing is checked here.
    """
    return progress(job, False)
