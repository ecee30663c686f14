"""Executor of plans: one interpreter for all collectives, which returns at waits and resumes there.

On shared memory every rank owns 2 A *records* that all ranks see, used in turn by operations with consecutive sequence
numbers; A is the word AHEAD. A record holds its rank's current call, its progress in the call (started, at work, done)
and the addresses of its buffers. Only its owner writes it, except for TAKEN (`part_offers`). The instructions (see
`instructions`) that concern records, in the order in which a plan has them::

    ENTER      wait until every rank has started an operation before this one: then all have ended those that used this
               record and its slot last. Write the call, and the addresses if the vector is long.
    STARTED    publish "started", after the rank's data were copied to where others read them.
    MEET       wait for the records that are needed, and check that all ranks make the same call.
    AT_WORK    publish "at work", and check that no rank has withdrawn meanwhile.
    DONE       publish "done".
    WAIT_DONE  wait until other ranks are done: then the result is complete, and no rank reads from here any more.

On 4 ranks a long allreduce is one step between MEET and DONE, rank r reducing chunk r of all vectors a, b, c, d::

    rank 0  reads a0 b0 c0 d0  writes the sum to chunk 0 of all four recvbufs
    rank 1  reads a1 b1 c1 d1  writes chunk 1       ...

The flag of a record is ``4 * sequence number + 0 for started, 1 for done``; it only grows. A rank may be A operations
ahead of others where it waits for none of them, as the root of short broadcasts. Before it writes a record for number k
it has seen all ranks start k - A, and has compared their calls up to there. A rank that has started k - A has compared
all calls up to k - 2 A, so that nobody reads the record for k - 2 A, which is overwritten. With A = 2::

    number k of the root    4  5  6  7  8  9  ...
    its record              0  1  2  3  0  1  ...    written for 8 when all ranks have started 6

Pieces of slots, of which each slot has A, are used in the same way. Of whole slots and of stages for input every rank
has two: it uses one for number k when all ranks have started k - 1, so that all have ended k - 2. A rank whose own
buffers nobody uses ends without waiting for those that still read its slot or stage. (Reuse of slots in
shared-memory collectives: Jain et al., "Framework for scalable intra-node collective operations using shared memory",
SC18; chunks reduced by their owners: Rabenseifner's algorithm with loads and stores for messages.)

Plans of messages, which have no records, are executed here too; their instructions are in `messages`. Plans that
consist of such plans are executed by `composition`. Withdrawal from an operation is in `withdrawal`.
`tests/kernels/test_every_interleaving.py` proves this module, with the plans of shared memory, free of races.
"""

from .atomics import call_row, load
from .call_records import enter, go_to_work, meet, publish, wait_done
from .decorators import helper, inline_helper, kernel_for, linked, short_kernel
from .instructions import (
    AGAIN,
    AT_WORK,
    BOUND_COUNT,
    BOUND_FUNCTION,
    BOUND_ITEMSIZE,
    CONDITION_RANK,
    COPY,
    DELIVER,
    END,
    ENTER,
    FIRST,
    IF,
    INPUT_IS_STAGED,
    IS_DIVIDED,
    IS_PULLED,
    IS_PUSHED,
    IS_UNDIVIDED,
    KIND,
    MAY_DIVIDE,
    MEET,
    OFFER_PARTS,
    OTHERS_ARE_STAGED,
    OUTPUT_IS_REMOTE,
    OUTPUT_IS_STAGED,
    REDUCE,
    RESOLVE,
    ROW_NBYTES,
    ROWS,
    SEGMENTS,
    STARTED,
    TILES,
    TO_INDEX,
    TURNS,
    WAIT_DONE,
)
from .instructions import DONE as DONE_ROW
from .messages import execute_bound
from .method_trials import begin_timing, end_timing
from .movement import copy_range, reduce_range
from .operands import (
    find_own_buffers,
    header,
    in_arena,
    is_last_segment,
    is_pushed,
    is_remote_output,
    may_divide,
    next_tile,
    resolve,
    uses_private_memory,
)
from .operation_words import (
    AT_SEGMENT,
    CAREFUL,
    DONE,
    ENTERING,
    FALLBACK,
    GATHERING,
    IDLE,
    ITEMSIZE,
    LEAVING,
    LONG_CALLS,
    LOST,
    MAY_SLEEP,
    MISMATCH,
    OTHER,
    PLACE,
    PLAN,
    RANK,
    RECV,
    ROW,
    SEND,
    SEQUENCE,
    SLEEP_LIMIT,
    SPINS,
    STAGED,
    START_SPINS,
    START_YIELDS,
    STATE,
    TILE_START,
    TILE_STOP,
    TIME_NEXT,
    TIMED,
    WAITING,
    WORKED,
    YIELDS,
    get,
    is_brief,
    is_short,
    put,
)
from .operation_words import OTHERS_STAGED as OTHERS_STAGED_WORD

_YIELDS_BEFORE_SLEEP = 10
"""Yields after which a rank sleeps, which takes as long as some of them."""
_LEAVING_PATIENCE = 4
"""Polls of a rank that has done its share when it starts an operation, relative to those for ranks that are late."""
_WORK_NBYTES = 32 << 20
"""Bytes after which `advance` returns, so that signals and deadlines are noticed."""


@helper
def start(job):
    """Start the operation that the job's words describe: set its state to the begin of its plan."""
    put(job, SEQUENCE, get(job, SEQUENCE) + 1)
    if not is_short(job):
        put(job, LONG_CALLS, get(job, LONG_CALLS) + 1)
    put(job, STATE, ENTERING)
    put(job, PLACE, 0)
    put(job, WORKED, 0)
    put(job, AT_SEGMENT, 0)
    put(job, STAGED, 0)
    put(job, ROW, get(job, PLAN) + ROW_NBYTES)


@inline_helper
def _input_is_staged(job):
    return get(job, STAGED) == 1 and not in_arena(job, get(job, RANK), get(job, SEND))


@helper
def _holds(job, condition, rank):
    """Return True if a condition of an IF holds."""
    if condition == INPUT_IS_STAGED:
        return _input_is_staged(job)
    if condition == OUTPUT_IS_STAGED:
        return get(job, STAGED) == 1 and not in_arena(job, get(job, RANK), get(job, RECV))
    if condition == OTHERS_ARE_STAGED:
        return get(job, OTHERS_STAGED_WORD) == 1
    if condition == OUTPUT_IS_REMOTE:
        return is_remote_output(job, rank)
    if condition == IS_PUSHED:
        return is_pushed(job, rank)
    if condition == IS_PULLED:
        return not is_pushed(job, rank)
    if condition == MAY_DIVIDE:
        return may_divide(job)
    if condition in (IS_DIVIDED, IS_UNDIVIDED):
        return (condition == IS_DIVIDED) == (may_divide(job) and is_pushed(job, rank))
    if not header(job, TURNS):
        return True
    return is_last_segment(job) and not _input_is_staged(job)


@helper
def _next_segment(job):
    """Advance to the next segment; return False if this was the last."""
    if is_last_segment(job):
        return False
    put(job, AT_SEGMENT, get(job, AT_SEGMENT) + 1)
    put(job, SEQUENCE, get(job, SEQUENCE) + 1)
    put(job, STATE, ENTERING)
    return True


@helper
def end(job, status):
    """End the operation, and return `status`."""
    if get(job, TIMED):
        end_timing(job, status)
    put(job, STATE, IDLE)
    put(job, CAREFUL, 0)
    return status


@helper
def leave(job, row, status):
    """Store the row at which execution resumes, and return `status`."""
    put(job, ROW, row)
    return status


@linked("int64", "int64", "int64")
def progress(job, only_start):
    """Execute the plan until it ends or has to wait long; return a status. See `advance`.

    If `only_start` is not 0, return WAITING before the first wait for ranks that may not have started.
    """
    row, worked = get(job, ROW), 0
    while True:
        what, who = load(row), load(row + 8 * FIRST)
        status = DONE
        if what in (COPY, DELIVER):
            nbytes = copy_range(job, row, what)
            if nbytes < 0:
                status = LOST
            worked += nbytes
        elif what == ENTER:
            status = enter(job, who)
            find_own_buffers(job)
        elif what == STARTED:
            publish(job, 0, GATHERING)
        elif what == MEET:
            status = WAITING if only_start else meet(job, who)
        elif what == REDUCE:
            status = reduce_range(job, row)
        elif what == END:
            return end(job, DONE)
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
            if not resolve(job, who):
                return end(job, leave(job, row, FALLBACK))
        elif what == AT_WORK:
            status = DONE if go_to_work(job, who) else MISMATCH
        elif what == DONE_ROW:
            publish(job, 1, LEAVING)
        elif what == WAIT_DONE:
            status = DONE if wait_done(job, who) else WAITING
        elif what == SEGMENTS:
            if not _next_segment(job):
                return end(job, DONE)
            row = get(job, PLAN)
        elif what >= OFFER_PARTS:
            status = call_row(load(row + 8 * BOUND_FUNCTION), job, what)
        else:
            status = execute_bound(job, row, what)
            worked += load(row + 8 * BOUND_COUNT) * load(row + 8 * BOUND_ITEMSIZE)
        if status != DONE:
            return leave(job, row, status)
        row += ROW_NBYTES
        if worked >= _WORK_NBYTES:
            return leave(job, row, WAITING)


@short_kernel("int64")
def begin(job):
    """Start an operation, and complete it if it is brief and the other ranks start it at the same time.

    Returns a status; OTHER if the job's last operation has not ended, or `job` is 0.
    """
    if job == 0 or get(job, STATE) != IDLE:
        return OTHER
    if get(job, TIME_NEXT) and not uses_private_memory(job):  # both methods take as long
        put(job, TIME_NEXT, 0)
    begin_timing(job)
    start(job)
    spins, yields = get(job, SPINS), get(job, YIELDS)
    put(job, SPINS, get(job, START_SPINS))
    put(job, YIELDS, get(job, START_YIELDS))
    status = progress(job, int(not is_brief(job)))
    if status == WAITING and get(job, STATE) == LEAVING:
        # The others are at work on it, and end sooner than the caller could take up the operation again.
        put(job, SPINS, _LEAVING_PATIENCE * get(job, START_SPINS))
        status = progress(job, 0)
    put(job, SPINS, spins)
    put(job, YIELDS, yields)
    return status


@helper
def _resume(job):
    """Resume an operation; its last status if it has ended, which a signal may have kept from its caller."""
    if get(job, STATE) != IDLE:
        return progress(job, 0)
    return FALLBACK if load(get(job, ROW)) == RESOLVE else DONE


@kernel_for("int64")
def advance(job):
    """Resume an operation until it ends or has to wait longer than its spins and yields; return a status."""
    return _resume(job)


@kernel_for("int64")
def await_others(job):
    """Resume an operation as `advance` does, but sleep a little before it returns from a wait, where ranks share cores.

    For a process in which no operation that began before it is in flight.
    """
    if get(job, SLEEP_LIMIT) == 0:
        return _resume(job)
    yields = get(job, YIELDS)
    put(job, YIELDS, _YIELDS_BEFORE_SLEEP)
    put(job, MAY_SLEEP, 1)
    status = _resume(job)
    put(job, MAY_SLEEP, 0)
    put(job, YIELDS, yields)
    return status


@helper
def look_once(job):
    """Resume an operation as far as possible without waiting; return a status. See `advance`."""
    spins, yields = get(job, SPINS), get(job, YIELDS)
    put(job, SPINS, 1)
    put(job, YIELDS, 0)
    status = _resume(job)
    put(job, SPINS, spins)
    put(job, YIELDS, yields)
    return status


@kernel_for("int64")
def look(job):
    """Resume an operation as far as possible without waiting; return a status. See `advance`."""
    return look_once(job)
