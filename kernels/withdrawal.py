"""Withdrawal from an operation on shared memory, and the stage of each rank in one.

A rank that withdraws must know when no other rank uses its caller's buffers any more. It marks its call as withdrawn,
then reads which ranks are at work. A rank that starts to work writes "at work", then reads which calls are withdrawn
(see `executor`). With a fence between the two steps on both sides, at least one of two ranks sees the other's write
(Dekker's algorithm).
"""

from .atomics import fence, load, load_acquire, store_release
from .decorators import helper, kernel_for
from .operation_words import (
    AT_SEGMENT,
    AWAITED,
    CALL,
    COUNT,
    ENTERING,
    IDLE,
    RANK,
    RECORD_AT_WORK,
    RECORD_CALL,
    RECORD_COUNT,
    SEQUENCE,
    SIZE,
    STATE,
    WITHDRAWN,
    get,
    has_counted_parts,
    is_short,
    record_of,
)


@helper
def _may_be_used(job):
    """Return whether others may access buffers of this rank, and records say who is at work."""
    return not is_short(job) or has_counted_parts(job)


@helper
def _segments_started(job):
    """Return first and end of the sequence numbers of the last two segments that this rank has started.

    Other ranks can be at work on these only: on the segment before the last where nothing is reduced.
    """
    sequence, state = get(job, SEQUENCE), get(job, STATE)
    if state == IDLE:
        return 0, 0
    end = sequence if state == ENTERING else sequence + 1
    return max(sequence - get(job, AT_SEGMENT), end - 2), end


@kernel_for("int64")
def withdraw(job):
    """Withdraw from an operation: this rank no longer accesses other ranks' buffers, and no rank starts to access its.

    `at_work` returns ranks that still access them.
    """
    first, end = _segments_started(job)
    for sequence in range(first, end):
        record = record_of(job, get(job, RANK), sequence)
        if _may_be_used(job):
            store_release(record + 8 * RECORD_AT_WORK, 0)
        store_release(record + 8 * RECORD_CALL, get(job, CALL) | WITHDRAWN)
    fence()


@helper
def _makes_this_call(job, record):
    return load(record + 8 * RECORD_CALL) == get(job, CALL) and load(record + 8 * RECORD_COUNT) == get(job, COUNT)


@kernel_for("int64")
def at_work(job):
    """Return a rank that may still access buffers of this rank, which has withdrawn; -1 if there is none."""
    first, end = _segments_started(job)
    if _may_be_used(job):
        for sequence in range(first, end):
            for rank in range(get(job, SIZE)):
                record = record_of(job, rank, sequence)
                begun = load_acquire(record) == 4 * sequence
                # In another call the word may be data of a very short vector.
                if begun and _makes_this_call(job, record) and load_acquire(record + 8 * RECORD_AT_WORK) == sequence:
                    return rank
    return -1


@kernel_for("int64", "int64", "int64[1C]")
def recorded(job, rank, out):
    """Write a rank's stage, call and count in the operation that is waited for to `out`, (3,) of int64.

    The stage is negative if the rank has not started, 0 if it has, and 1 if its part is done. Before this rank's
    operation has started, the values are those of an operation before.
    """
    sequence = get(job, AWAITED)
    record = record_of(job, rank, sequence)
    out[0] = load_acquire(record) - 4 * sequence
    out[1] = load(record + 8 * RECORD_CALL)
    out[2] = load(record + 8 * RECORD_COUNT)
