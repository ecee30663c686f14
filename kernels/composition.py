"""Plans of plans: collectives that consist of other collectives, such as those over several nodes.

A row starts a *part*, a plan with a job of its own, or waits until one has ended. Parts are plans on shared memory and
plans of messages alike. On a node of several, an allreduce in two segments is::

    START_PART   reduce segment 0 on shared memory          FINISH_PART
    START_PART   allreduce of segment 0 by messages
    START_PART   reduce segment 1 on shared memory          FINISH_PART, while segment 0 progresses
    FINISH_PART  segment 0 by messages
    START_PART   allreduce of segment 1 by messages
    START_PART   gather segment 0 on shared memory          FINISH_PART, while segment 1 progresses
    ...

A part on shared memory may use the job of the part before it: START_PART writes the words of its operation there. A
plan of plans is not itself a part of another one.
"""

from .atomics import load, pause, yield_core
from .decorators import helper, kernel_for, linked
from .executor import end, leave, progress, start
from .instructions import (
    BOUND_ASIDE,
    BOUND_JOB,
    BOUND_WORDS,
    END,
    FINISH_PART,
    ROW_NBYTES,
    START_PART,
)
from .messages import execute_bound
from .operation_words import (
    BY_MESSAGES,
    COMPOSED,
    DONE,
    FALLBACK,
    IDLE,
    METHOD,
    OPERATION_WORDS,
    PLACE,
    ROW,
    SPINS,
    STATE,
    WAITING,
    YIELDS,
    get,
    put,
)

_FIRST, _LAST = OPERATION_WORDS[0], OPERATION_WORDS[-1]
PART_WORDS = len(OPERATION_WORDS) + 1
"""Words of a part on shared memory: METHOD, then those of OPERATION_WORDS."""


@helper
def _start_part(row):
    """Start a part; its words, if there are any, are written to its job first."""
    part, words = load(row + 8 * BOUND_JOB), load(row + 8 * BOUND_WORDS)
    if words:
        put(part, METHOD, load(words))
        for word in range(_FIRST, _LAST + 1):
            put(part, word, load(words + 8 * (word - _FIRST + 1)))
    start(part)


@helper
def _progress_for(part, spins, yields):
    """Let a part progress, with so many polls at each wait; FALLBACK if Python has to do so."""
    if get(part, STATE) == BY_MESSAGES:
        return FALLBACK
    put(part, SPINS, spins)
    put(part, YIELDS, yields)
    return progress(part, 0)


@helper
def _finish_part(job, row):
    """Wait a little until a part has ended, and return a status; PLACE is 1 if it is that of the part beside it."""
    part, aside = load(row + 8 * BOUND_JOB), load(row + 8 * BOUND_ASIDE)
    spins, yields = get(job, SPINS), get(job, YIELDS)
    put(job, PLACE, 0)
    if get(part, STATE) == IDLE:
        return DONE
    if aside == 0:
        return _progress_for(part, spins, yields)
    for turn in range(spins + yields):
        if get(aside, STATE) != IDLE:  # first, so that its messages leave before this rank is at work
            status = _progress_for(aside, 1, 0)
            if status not in (DONE, WAITING):
                put(job, PLACE, 1)
                return status
        status = _progress_for(part, 1, 0)
        if status != WAITING:
            return status
        if turn < spins:
            pause()
        else:
            yield_core()
    return WAITING


@linked("int64", "int64")
def progress_parts(job):
    """Execute a plan of plans until it ends or has to wait long; return a status, also of a part that failed."""
    row = get(job, ROW)
    while True:
        what, status = load(row), DONE
        if what == START_PART:
            _start_part(row)
        elif what == FINISH_PART:
            status = _finish_part(job, row)
        elif what == END:
            return end(job, DONE)
        else:
            status = execute_bound(job, row, what)
        if status != DONE:
            return leave(job, row, status)
        row += ROW_NBYTES


@helper
def progress_bound(job):
    """Execute a plan that is bound to memory, or a plan of such plans; return a status."""
    return progress_parts(job) if get(job, COMPOSED) else progress(job, 0)


@kernel_for("int64")
def advance(job):
    """Resume a plan that is bound to memory, or a plan of such plans; return a status. See `executor.advance`."""
    return progress_bound(job)
