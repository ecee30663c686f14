"""Allgatherv and Reduce_scatter on shared memory, from the caller's specifications to the result in one call."""

from .decorators import helper, short_kernel
from .dispatch import UNEVEN, is_open, make_call, make_call_in
from .dispatch_table import JOB
from .operation_words import OTHER, SIZE, get, read_word, uneven_word
from .told_counts import lay_out_counts
from .vector_specs import read_numbers, read_packed


@helper
def _read(table, job, recv, counts):
    """Write the lengths of parts to a job; return the array to receive into, 0 for other specifications."""
    size, parts = get(job, SIZE), job + 8 * uneven_word(get(job, SIZE))
    numbers = job + 8 * read_word(size)
    array = recv
    if counts == 0:
        array = read_packed(table, recv, size, numbers, numbers + 8 * size)
    elif not read_numbers(table, counts, size, numbers):
        return 0
    if array != 0:
        lay_out_counts(numbers, size, 0, parts)
    return array


@short_kernel(*["int64"] * 6)
def call_uneven(table, collective, send, recv, op, counts):
    """Make a blocking call whose counts every rank gives, or begin it; return a status as `dispatch.call` does.

    Parameters
    ----------
    table, collective, send, recv, op : int
        As `dispatch.call` takes them, without UNEVEN; `recv` is a specification with counts.
    counts : int
        What `id` says of the counts where the collective has them as an argument of their own; then `recv` is an array.
    """
    job = get(table, JOB)
    if not is_open(table, job):
        return OTHER
    array = _read(table, job, recv, counts)
    if array == 0:
        return OTHER
    return make_call(table, collective + UNEVEN, send, array, op, job + 8 * uneven_word(get(job, SIZE)))


@short_kernel(*["int64"] * 7)
def call_uneven_in(table, job, collective, send, recv, op, counts):
    """Begin a nonblocking call in a job of its own, as `dispatch.call_in` does; see `call_uneven`."""
    if not is_open(table, job):
        return OTHER
    array = _read(table, job, recv, counts)
    if array == 0:
        return OTHER
    return make_call_in(table, job, collective + UNEVEN, send, array, op, job + 8 * uneven_word(get(job, SIZE)))
