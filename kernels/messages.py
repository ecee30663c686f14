"""Instructions of plans that are bound to memory: persistent messages, and what is done with what they bring.

`MPI_Startall` and `MPI_Testall` are called by their addresses, as the MPI library of this process has them. A plan of
messages and a plan on shared memory differ only in their rows; `executor` runs both.
"""

from .atomics import call_reducer, copy, load, load_int32, pause, yield_core
from .decorators import helper, primitive
from .instructions import (
    BOUND_COUNT,
    BOUND_FLAG,
    BOUND_FUNCTION,
    BOUND_ITEMSIZE,
    BOUND_LEFT,
    BOUND_OUT,
    BOUND_REQUESTS,
    BOUND_RIGHT,
    BOUND_STATUSES,
    COPY_BOUND,
    REDUCE_BOUND,
    STARTALL,
    TESTALL,
)
from .operation_words import CALLBACK, DONE, FAILED, PLACE, RAISED, SPINS, WAITING, YIELDS, get, put


@primitive
def startall(function, count, requests):
    """Call MPI_Startall by its address; return its error code."""


@primitive
def testall(function, count, requests, flag, statuses):
    """Call MPI_Testall by its address; return its error code."""


@helper
def _fail(job, code):
    put(job, PLACE, code)
    return FAILED


@helper
def _operand(row, word):
    return load(row + 8 * word)


@helper
def _test(job, row):
    """Wait a little until all messages of a row are complete; less when this wait goes on.

    Where cores are shared, spinning again each time would keep the one from running who is waited for.
    """
    function, count, flag = _operand(row, BOUND_FUNCTION), _operand(row, BOUND_COUNT), _operand(row, BOUND_FLAG)
    requests, statuses = _operand(row, BOUND_REQUESTS), _operand(row, BOUND_STATUSES)
    spins = 1 if get(job, PLACE) else get(job, SPINS)
    for turn in range(spins + get(job, YIELDS)):
        code = testall(function, count, requests, flag, statuses)
        if code != 0:
            return _fail(job, code)
        if load_int32(flag) != 0:
            put(job, PLACE, 0)
            return DONE
        if turn < spins:
            pause()
        else:
            yield_core()
    put(job, PLACE, 1)
    return WAITING


@helper
def execute_bound(job, row, what):
    """Execute a row of a plan that is bound to memory; return a status.

    FAILED: an MPI function returned an error, whose code stands in PLACE. CALLBACK: the caller has to do what the row
    stands for, and to go on at the next row.
    """
    if what == STARTALL:
        code = startall(_operand(row, BOUND_FUNCTION), _operand(row, BOUND_COUNT), _operand(row, BOUND_REQUESTS))
        return _fail(job, code) if code != 0 else DONE
    if what == TESTALL:
        return _test(job, row)
    if what == REDUCE_BOUND:
        out, left, right = _operand(row, BOUND_OUT), _operand(row, BOUND_LEFT), _operand(row, BOUND_RIGHT)
        count, itemsize = _operand(row, BOUND_COUNT), _operand(row, BOUND_ITEMSIZE)
        return RAISED if call_reducer(_operand(row, BOUND_FUNCTION), out, left, right, count, itemsize) else DONE
    if what == COPY_BOUND:
        count, itemsize = _operand(row, BOUND_COUNT), _operand(row, BOUND_ITEMSIZE)
        copy(_operand(row, BOUND_OUT), _operand(row, BOUND_LEFT), count * itemsize)
        return DONE
    return CALLBACK
