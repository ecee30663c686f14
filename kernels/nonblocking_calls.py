"""Nonblocking collectives of NumPy arrays, and the start of plans of messages; see `dispatch`."""

from .atomics import release_interpreter, take_interpreter
from .composition import progress_bound
from .decorators import linked, short_kernel
from .dispatch import begin_plan, recognize
from .dispatch_arguments import packed_arguments
from .dispatch_table import PACKING
from .executor import progress, start
from .object_kernels import int_at, object_at, object_kernel
from .operation_words import (
    IDLE,
    LONGEST,
    OTHER,
    RANK,
    ROOM,
    SIZE,
    SPINS,
    STATE,
    TOO_LONG,
    YIELDS,
    get,
    is_brief,
    put,
    vector_nbytes,
)
from .packed_views import begin_packed, end_packed
from .python_interface import forget_error, int_object


@linked(*["int64"] * 8)
def make_call_in(table, job, collective, send, recv, op, root):
    """Begin a nonblocking call; see `call_in`."""
    chosen = recognize(table, False, job, collective, send, recv, op, root)
    if chosen > 0 and get(job, LONGEST) and vector_nbytes(job) > get(job, LONGEST):
        return TOO_LONG
    if chosen <= 0 or not begin_plan(table - (table & 7), job):
        return OTHER
    return progress(job, int(not is_brief(job)))


@linked(*["int64"] * 8)
def _make_packed_call_in(table, job, collective, send, recv, op, root):
    """Begin a nonblocking call whose arguments may be entries of derived datatypes; see `call_in`."""
    own, blocking = table - (table & 7), get(table - (table & 7), PACKING)
    put(own, PACKING, get(job, ROOM))  # the copies are there until the operation has ended
    status = OTHER
    if begin_packed(own):
        send, recv = packed_arguments(own, get(job, SIZE), collective, send, recv, get(job, RANK) == root)
        status = end_packed(own, make_call_in(table, job, collective, send, recv, op, root))
    put(own, PACKING, blocking)
    return status


@object_kernel
def call_in(module, arguments, count):
    """Begin a nonblocking call in a job of its own; end it too if it is short and the others make it at the same time.

    Return a status, and take arguments, as `dispatch.call` does; the address of the job is the second. Entries of
    derived datatypes are packed if the job has ROOM; then PACKED may be added to the status.
    """
    if count != 7:
        return 0
    root = int_at(arguments, 6)
    if root < 0:
        forget_error()
        return int_object(OTHER)
    table, job, collective = int_at(arguments, 0), int_at(arguments, 1), int_at(arguments, 2)
    send, recv, op = object_at(arguments, 3), object_at(arguments, 4), object_at(arguments, 5)
    status = make_call_in(table, job, collective, send, recv, op, root)
    if status == OTHER and get(job, ROOM) != 0:
        status = _make_packed_call_in(table, job, collective, send, recv, op, root)
    return int_object(status)


@short_kernel("int64")
def begin_messages(job):
    """Begin a plan of messages; return a status, OTHER if its last run has not ended, and for address 0."""
    if job == 0 or get(job, STATE) != IDLE:
        return OTHER
    start(job)
    put(job, SPINS, 1)
    put(job, YIELDS, 0)
    # The MPI library may hold a lock in another thread that waits for the interpreter, to call a Python function.
    state = release_interpreter()
    status = progress_bound(job)
    take_interpreter(state)
    return status
