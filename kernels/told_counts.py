"""Gatherv and Scatterv on shared memory: a broadcast of the root's counts, and the collective, in one compiled call.

Ranks other than the root know only the count of their own part, but the executor needs the whole vector's length and
the offsets of all parts on every rank::

    rank 0 (root)  counts 2 0 3 1  ->  Bcast  ->  offsets 0 2 2 5 6  ->  Gather of uneven parts
    rank 1..3                          Bcast  ->  offsets 0 2 2 5 6  ->  Gather of uneven parts
"""

from .atomics import load, store
from .decorators import helper, kernel_for, short_kernel
from .dispatch import FOR_SHARED, UNEVEN, is_open, make_call
from .dispatch_arguments import array_in, number_of_dtype
from .dispatch_table import JOB, READABLE, WRITABLE, data_of, is_plain
from .operation_words import BCAST, DONE, GATHER, OTHER, RANK, SIZE, get, read_word, uneven_word
from .vector_specs import read_packed

TOLD = 32
"""Added to the status of a call whose counts have been broadcast."""
_FACTOR, _MASK = 0x2545F4914F6CDD1D, (1 << 62) - 1
_UNEVEN_BIT = 1 << 30


@helper
def _distinction(offsets, size, root):
    """Return a number for the lengths of parts and the root: the root itself if all parts are equally long."""
    mixed, equal = ((root + 1) * _FACTOR) & _MASK, True
    mixed ^= mixed >> 31
    for rank in range(size):
        count = load(offsets + 8 * rank + 8) - load(offsets + 8 * rank)
        equal = equal and count == load(offsets + 8) - load(offsets)
        mixed = ((mixed ^ count) * _FACTOR) & _MASK
        mixed ^= mixed >> 31
    return root if equal else (mixed & (_UNEVEN_BIT - 1)) | _UNEVEN_BIT


@kernel_for("int64", "int64", "int64")
def distinction(offsets, size, root):
    """Return a number that stands for the lengths of parts, and the root, in the comparison of calls; see `call`.

    Parameters
    ----------
    offsets : int
        Address of size + 1 offsets.

    Returns
    -------
    int
        The root if all parts are equally long, else a hash, which no root is: from 2**30 to 2**31 - 1.
    """
    return _distinction(offsets, size, root)


@helper
def lay_out_counts(counts, size, root, parts):
    """Write counts as the words that `call` takes for uneven parts."""
    offset = 0
    for rank in range(size):
        store(parts + 16 + 8 * rank, offset)
        offset += load(counts + 8 * rank)
    store(parts + 16 + 8 * size, offset)
    store(parts, root)
    store(parts + 8, _distinction(parts + 16, size, root))


@kernel_for("int64", "int64", "int64", "int64")
def lay_out(counts, size, root, parts):
    """Write `size` counts at an address as the words that `call` takes for uneven parts: size + 3 of them."""
    lay_out_counts(counts, size, root, parts)


@helper
def _read_whole(table, job, whole, told):
    """Write the root's counts and the number of the element type to `told`; return the array.

    For other specifications it is 0. Displacements are read to memory of the job.
    """
    size = get(job, SIZE)
    array = read_packed(table, whole, size, told, job + 8 * read_word(size))
    if array != 0:
        store(told + 8 * size, number_of_dtype(table, array))
    return array


@short_kernel(*["int64"] * 6)
def call_told(table, collective, send, recv, root, told):
    """Make a blocking Gatherv or Scatterv of ordinary arrays, or begin it; return a status.

    OTHER: nothing has happened. Others below TOLD are those of the broadcast of the counts, after which the lengths of
    parts have to be laid out. From TOLD on it is the status of the collective.

    Parameters
    ----------
    table, collective, send, recv, root : int
        As `call` takes them, without UNEVEN; the root's argument for all parts is a specification with counts.
    told : int
        What `id` says of an array of size + 1 words: the root's counts, and the number of their element type.
    """
    job = get(table, JOB)
    if not is_open(table, job):
        return OTHER
    gathers, at_root = collective == GATHER, get(job, RANK) == root
    part = array_in(table, send if gathers else recv)
    if not is_plain(table, part, READABLE if gathers else WRITABLE):
        return OTHER
    words, whole = data_of(table, told), recv if gathers else send
    if at_root:
        whole = _read_whole(table, job, whole, words)
        if whole == 0:
            return OTHER
    status = make_call(table + FOR_SHARED, BCAST, 0, told, 0, root)
    if status != DONE:
        return status
    size = get(job, SIZE)
    parts = job + 8 * uneven_word(size)
    lay_out_counts(words, size, root, parts)
    send, recv = (part, whole) if gathers else (whole, part)
    return TOLD + make_call(table, collective + UNEVEN, send, recv, 0, parts)
