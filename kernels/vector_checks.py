"""Checks of the arguments of Gatherv, Scatterv and Alltoallv that the MPI library executes."""

from .atomics import load
from .buffer_views import array_in
from .decorators import helper, short_kernel
from .dispatch import is_open, note
from .dispatch_table import (
    JOB,
    KNOWN_IN_HISTORY,
    NUMBER,
    READABLE,
    WRITABLE,
    count_of,
    dtype_of,
    is_plain,
    number_of_dtype,
)
from .object_kernels import takes_objects
from .operation_words import ALLTOALL, GATHER, RANK, SIZE, get, read_word
from .vector_specs import arrays_are_apart, read_fitting


@helper
def _code(table, array, known):
    number = number_of_dtype(table, array)
    return 2 * number + int(known) if number >= 0 else -1


@helper
def _fit(table, job, whole, part_count, other, written):
    """Return whether a root's blocks, or those received, fit this rank's part and lie apart from the other array."""
    counts = job + 8 * read_word(get(job, SIZE))
    array = read_fitting(table, whole, get(job, SIZE), counts, written)
    if array == 0 or dtype_of(table, array) != dtype_of(table, other):
        return False
    return load(counts + 8 * get(job, RANK)) == part_count and arrays_are_apart(table, array, other)


@helper
def _check_alltoall(table, job, send, recv):
    size = get(job, SIZE)
    counts = job + 8 * read_word(size)
    array = read_fitting(table, send, size, counts, False)
    if array == 0:
        return -1
    own, total = load(counts + 8 * get(job, RANK)), 0
    for rank in range(size):
        total += load(counts + 8 * rank)
    if not _fit(table, job, recv, own, array, True):
        return -1
    for rank in range(size):
        total += load(counts + 8 * rank)
    return _code(table, array, total != 0)


@takes_objects("int64", "int64", "object", "object", "int64")
def check_vectors(table, collective, send, recv, root):
    """Check arguments that the MPI library can be given as they are.

    Parameters
    ----------
    table : int
        Address of a table for plain calls.
    collective : int
        GATHER, SCATTER or ALLTOALL.
    send, recv : object
        The arguments.
    root : int

    Returns
    -------
    int
        Twice the number of the element type, plus 1 if this rank has elements; -1 if Python has to check them, or no
        calls may be made from here now.
    """
    job = get(table, JOB)
    if job == 0 or not is_open(table, job) or not 0 <= root < get(job, SIZE):
        return -1
    if collective == ALLTOALL:
        return _check_alltoall(table, job, send, recv)
    gathers = collective == GATHER
    part = array_in(table, send if gathers else recv, 0, 1, False)
    if not is_plain(table, part, READABLE if gathers else WRITABLE) or number_of_dtype(table, part) < 0:
        return -1
    count = count_of(table, part)
    if get(job, RANK) == root and not _fit(table, job, recv if gathers else send, count, part, gathers):
        return -1
    return _code(table, part, count != 0)


@short_kernel("int64", "int64")
def number_call(table, signature):
    """Number a call that the MPI library is to execute, and remember it by the number of its signature.

    Return the number of the call; 0 if none may be made from here now.
    """
    if not is_open(table, get(table, JOB)):
        return 0
    note(table, KNOWN_IN_HISTORY, signature)
    return get(table, NUMBER)
