"""Known calls: plain calls by messages that were made before, with the plan that was found for them then.

The long way enters a call here when it has made it; from then on one compiled function makes it.
"""

from .atomics import copy, load
from .decorators import helper
from .dispatch_table import (
    KNOWN,
    KNOWN_CALL,
    KNOWN_COUNT,
    KNOWN_INBOX,
    KNOWN_INBOX_NBYTES,
    KNOWN_JOB,
    KNOWN_NUMBER,
    KNOWN_OUTBOX,
    KNOWN_OUTBOX_NBYTES,
    KNOWN_RECV,
    KNOWN_SEND,
    KNOWN_SENT_NBYTES,
    KNOWN_WORDS,
    NUMBER,
    RUNNING,
    SENT_NBYTES,
    STAGED_NBYTES,
    known_entry,
)
from .operation_words import (
    CALL,
    COUNT,
    IDLE,
    PLACE,
    RECV,
    SEEN,
    SEND,
    START_YIELDS,
    STATE,
    WORKING,
    YIELDS,
    get,
    put,
    vector_nbytes,
)


@helper
def find_known(table, job):
    """Return the address of the entry of the call that stands in a job; 0: it is not known."""
    call, count, send, recv = get(job, CALL), get(job, COUNT), get(job, SEND), get(job, RECV)
    if vector_nbytes(job) <= STAGED_NBYTES:
        send = recv = 0
    known = get(table, KNOWN) + 8 * KNOWN_WORDS * known_entry(call, count, send, recv)
    for _ in range(2):
        same_buffers = load(known + 8 * KNOWN_SEND) == send and load(known + 8 * KNOWN_RECV) == recv
        if same_buffers and load(known + 8 * KNOWN_CALL) == call and load(known + 8 * KNOWN_COUNT) == count:
            return known
        known += 8 * KNOWN_WORDS
    return 0


@helper
def begin_known(table, job, known):
    """Copy the input to where the plan wants it; return the plan's job."""
    nbytes = load(known + 8 * KNOWN_INBOX_NBYTES)
    if nbytes:
        copy(load(known + 8 * KNOWN_INBOX), get(job, SEND), nbytes)
    put(table, RUNNING, load(known + 8 * KNOWN_NUMBER))
    put(table, SENT_NBYTES, get(table, SENT_NBYTES) + load(known + 8 * KNOWN_SENT_NBYTES))
    put(job, STATE, WORKING)
    bound = load(known + 8 * KNOWN_JOB)
    put(bound, SEEN, get(table, NUMBER))
    put(bound, YIELDS, get(bound, START_YIELDS))
    put(bound, PLACE, 0)
    return bound


@helper
def end_known(table, job, known):
    """Copy the result to where the caller wants it."""
    nbytes = load(known + 8 * KNOWN_OUTBOX_NBYTES)
    if nbytes:
        copy(get(job, RECV), load(known + 8 * KNOWN_OUTBOX), nbytes)
    put(table, RUNNING, 0)
    put(job, STATE, IDLE)
