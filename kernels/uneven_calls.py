"""Allgatherv and Reduce_scatter on shared memory, from the caller's specifications to the result in one call."""

from .decorators import helper, linked
from .dispatch import UNEVEN, is_open, make_call
from .dispatch_table import IN_PLACE, JOB, NONE, count_of
from .nonblocking_calls import make_call_in
from .object_kernels import int_at, object_at, object_kernel
from .operation_words import ALLGATHER, OTHER, SIZE, get, read_word, uneven_word
from .packed_blocks import packed_blocks
from .packed_views import begin_packed, end_packed, packed_in
from .python_interface import int_object
from .uneven_parts import lay_out_counts
from .vector_specs import are_packed, read_fitting, read_numbers


@helper
def _read(table, job, recv, counts):
    """Write the lengths of parts to a job; return the array to receive into, 0 for other specifications."""
    size, parts = get(job, SIZE), job + 8 * uneven_word(get(job, SIZE))
    numbers = job + 8 * read_word(size)
    array, displs = recv, 0
    if counts == 0:
        array = read_fitting(table, recv, size, numbers, True)
        if array != 0 and not are_packed(numbers, size, count_of(table, array)):
            displs = numbers + 8 * size
    elif not read_numbers(table, counts, size, numbers):
        return 0
    if array != 0:
        lay_out_counts(numbers, size, 0, parts, displs)
    return array


@helper
def _given(table, counts):
    """Return the address of counts that are an argument of their own; 0 for None."""
    return 0 if counts == get(table, NONE) else counts


@linked(*["int64"] * 7)
def _make(table, collective, send, recv, op, counts):
    job = get(table, JOB)
    if not is_open(table, job):
        return OTHER
    array = _read(table, job, recv, counts)
    if array == 0:
        return OTHER
    return make_call(table, collective + UNEVEN, send, array, op, job + 8 * uneven_word(get(job, SIZE)))


@linked(*["int64"] * 4)
def _make_packed_allgatherv(table, send, recv):
    """Make an Allgatherv whose arguments may be entries of derived datatypes."""
    job, size = get(table, JOB), get(get(table, JOB), SIZE)
    if not is_open(table, job) or not begin_packed(table):
        return OTHER
    numbers, parts = job + 8 * read_word(size), job + 8 * uneven_word(size)
    array, status = packed_blocks(table, recv, 1, size, numbers, send == get(table, IN_PLACE)), OTHER
    if array != 0:
        lay_out_counts(numbers, size, 0, parts, 0)
    else:
        array = _read(table, job, recv, 0)
    if array != 0:
        send = packed_in(table, send, 0, 1, 0, True)
        status = make_call(table, ALLGATHER + UNEVEN, send, array, 0, parts)
    return end_packed(table, status)


@object_kernel
def call_uneven(module, arguments, count):
    """Make a blocking call whose counts every rank gives, or begin it; return a status as `dispatch.call` does.

    Parameters
    ----------
    table, collective : int
    send, recv, op : object
        As `dispatch.call` takes them, without UNEVEN; `recv` is a specification with counts.
    counts : object
        The counts where the collective has them as an argument of their own, then `recv` is an array; else None.
    """
    if count != 6:
        return 0
    table, counts = int_at(arguments, 0), object_at(arguments, 5)
    send, recv, op = object_at(arguments, 2), object_at(arguments, 3), object_at(arguments, 4)
    status = _make(table, int_at(arguments, 1), send, recv, op, _given(table, counts))
    if status == OTHER and int_at(arguments, 1) == ALLGATHER:
        status = _make_packed_allgatherv(table, send, recv)
    return int_object(status)


@linked(*["int64"] * 8)
def _make_in(table, job, collective, send, recv, op, counts):
    if not is_open(table, job):
        return OTHER
    array = _read(table, job, recv, counts)
    if array == 0:
        return OTHER
    return make_call_in(table, job, collective + UNEVEN, send, array, op, job + 8 * uneven_word(get(job, SIZE)))


@object_kernel
def call_uneven_in(module, arguments, count):
    """Begin a nonblocking call in a job of its own, as `nonblocking_calls.call_in` does; see `call_uneven`."""
    if count != 7:
        return 0
    table, job, collective = int_at(arguments, 0), int_at(arguments, 1), int_at(arguments, 2)
    send, recv, op = object_at(arguments, 3), object_at(arguments, 4), object_at(arguments, 5)
    return int_object(_make_in(table, job, collective, send, recv, op, _given(table, object_at(arguments, 6))))
