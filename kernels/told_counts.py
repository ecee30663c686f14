"""Gatherv and Scatterv on shared memory: a broadcast of the root's counts, and the collective, in one compiled call.

Ranks other than the root know only the count of their own part, but the executor needs the whole vector's length and
the offsets of all parts on every rank::

    rank 0 (root)  counts 2 0 3 1  ->  Bcast  ->  offsets 0 2 2 5 6  ->  Gather of uneven parts
    rank 1..3                          Bcast  ->  offsets 0 2 2 5 6  ->  Gather of uneven parts

The broadcast has a packed call of its own: that of a Bcast, with the number of the collective for the operation.

A short Scatterv that the ranks have compared before needs no second round: the root attaches the parts to its counts
(`attached_parts`). It alone decides so, and the word of the element type says it.
"""

import numpy as np

from .atomics import load, store
from .attached_parts import ATTACHED, attach, bound_told, copy_part, has_room, scatter_words
from .compared_calls import was_compared
from .decorators import helper, kernel_for, linked
from .dispatch import UNEVEN, begin, chosen_for, is_open, make_call
from .dispatch_arguments import BYTE, array_in, number_of_dtype
from .dispatch_table import (
    CHECKED,
    DTYPES,
    ITEMSIZES,
    JOB,
    METHOD,
    READABLE,
    TELL,
    TOLD_BEFORE,
    TOLD_DTYPE,
    WRITABLE,
    count_of,
    data_of,
    is_plain,
    pack_call,
    plan_entry,
)
from .executor import progress
from .object_kernels import takes_objects
from .operation_words import (
    BCAST,
    CALL,
    COLLECTIVE,
    COUNT,
    DONE,
    GATHER,
    ITEMSIZE,
    OTHER,
    RANK,
    RECV,
    REDUCER,
    ROOT,
    SCATTER,
    SEND,
    SIZE,
    SLOT_NBYTES,
    TIME_NEXT,
    get,
    put,
    read_word,
    uneven_word,
)
from .operation_words import METHOD as JOB_METHOD
from .reduce import DTYPES as ELEMENT_TYPES
from .vector_specs import arrays_are_apart, read_packed

TOLD = 32
"""Added to the status of a call whose counts have been broadcast."""
_INT64 = ELEMENT_TYPES.index(np.dtype(np.int64))
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


@helper
def _read_whole(table, job, whole, told):
    """Write the root's counts and the number of the element type to `told`; return the array.

    For other specifications it is 0. Displacements are read to memory of the job.
    """
    size = get(job, SIZE)
    array = read_packed(table, whole, size, told, job + 8 * read_word(size))
    if array != 0:
        store(told + 8 * size, number_of_dtype(table, array) if count_of(table, array) else BYTE)
    return array


@helper
def told_words(collective, size):
    """Return how many words the root of a Gatherv or Scatterv tells; the one after the counts is the element type."""
    return scatter_words(size) if collective == SCATTER else size + 1


@helper
def told_call(collective, root):
    """Return the packed call of the broadcast of the counts of a Gatherv or Scatterv."""
    return pack_call(BCAST, 0, _INT64, collective, root)


@helper
def _fits(table, job, part, words):
    """Return whether an array has this rank's count, and the told element type if it has elements."""
    own, size = load(words + 8 * get(job, RANK)), get(job, SIZE)
    dtype = load(words + 8 * size) & (ATTACHED - 1)
    return count_of(table, part) == own and (own == 0 or number_of_dtype(table, part) == dtype)


@helper
def _is_one_round(table, job, part, whole, words):
    """Return whether the root attaches the parts of a Scatterv: all ranks would make the second round here, too."""
    nbytes = count_of(table, whole) * get(table, ITEMSIZES + load(words + 8 * get(job, SIZE)))
    if not has_room(job, nbytes) or chosen_for(table, SCATTER, nbytes) != get(table, METHOD) + 1:
        return False
    if not _fits(table, job, part, words) or not arrays_are_apart(table, part, whole):
        return False
    return not get(table, CHECKED) or get(table, TOLD_BEFORE) == 1


@helper
def _tell(table, job, collective, words, root):
    """Write the broadcast of the counts to the job; return the address of its plan."""
    size = get(job, SIZE)
    put(job, COLLECTIVE, BCAST)
    put(job, CALL, told_call(collective, root))
    put(job, COUNT, told_words(collective, size))
    put(job, ITEMSIZE, 8)
    put(job, REDUCER, 0)
    put(job, JOB_METHOD, get(table, METHOD))
    put(job, TIME_NEXT, 0)
    put(job, ROOT, root)
    put(job, SEND, words)
    put(job, RECV, words)
    if get(job, RANK) != root:
        return get(table, plan_entry(BCAST, 0, root, size))
    bound_told(job, 8 * told_words(collective, size))
    return get(table, TELL)


@helper
def _end_told(table, job, collective, part, whole, words, root):
    """Make the collective, whose counts have come; see `end_told`."""
    size = get(job, SIZE)
    code = load(words + 8 * size)
    if code >= ATTACHED:
        itemsize = get(table, ITEMSIZES + code - ATTACHED) if code - ATTACHED < get(table, DTYPES) else 1
        taken = _fits(table, job, part, words) and copy_part(job, words, root, itemsize, data_of(table, part))
        return TOLD + (DONE if taken else OTHER)
    put(table, TOLD_DTYPE, code)
    parts = job + 8 * uneven_word(size)
    lay_out_counts(words, size, root, parts)
    send, recv = (part, whole) if collective == GATHER else (whole, part)
    return TOLD + make_call(table, collective + UNEVEN, send, recv, 0, parts)


@linked(*["int64"] * 7)
def make_told_call(table, collective, part, whole, words, root):
    """Tell the counts, and make the collective; see `call_read`."""
    job = get(table, JOB)
    size = get(job, SIZE)
    told, attached = told_words(collective, size), False
    if 8 * told > get(job, SLOT_NBYTES):
        return OTHER
    put(table, TOLD_BEFORE, int(was_compared(table, told_call(collective, root), told)))
    if get(job, RANK) == root:
        store(words + 8 * size, load(words + 8 * size) & (ATTACHED - 1))  # words of an earlier call may come again
        attached = collective == SCATTER and _is_one_round(table, job, part, whole, words)
    plan = _tell(table, job, collective, words, root)
    if attached:
        nbytes = count_of(table, whole) * get(table, ITEMSIZES + load(words + 8 * size))
        store(words + 8 * size, load(words + 8 * size) + ATTACHED)
        attach(job, words, data_of(table, whole), nbytes)
    if not begin(table, job, plan, False):
        return OTHER
    status = progress(job, 0)
    return status if status != DONE else _end_told(table, job, collective, part, whole, words, root)


@takes_objects("int64", "int64", "object", "object", "int64", "object")
def call_told(table, collective, send, recv, root, told):
    """Make a blocking Gatherv or Scatterv of ordinary arrays, or begin it; return a status.

    OTHER: nothing has happened. Others below TOLD are those of the broadcast of the counts, after which `end_told` has
    to be called. From TOLD on it is the status of the collective; with parts attached, TOLD + OTHER if this rank's
    array does not fit them.

    Parameters
    ----------
    table, collective, send, recv
        As `call` takes them, without UNEVEN; the root's argument for all parts is a specification with counts.
    root : int
    told : object
        An array of `told_words` words: the root's counts, the number of their element type, and zeros.
    """
    job = get(table, JOB)
    if not is_open(table, job):
        return OTHER
    gathers = collective == GATHER
    part = array_in(table, send if gathers else recv)
    if not is_plain(table, part, READABLE if gathers else WRITABLE) or number_of_dtype(table, part) < 0:
        return OTHER
    words, whole = data_of(table, told), recv if gathers else send
    if get(job, RANK) == root:
        whole = _read_whole(table, job, whole, words)
        if whole == 0:
            return OTHER
    return make_told_call(table, collective, part, whole, words, root)


@takes_objects("int64", "int64", "object", "object", "int64", "object")
def call_read(table, collective, part, whole, root, told):
    """Make a blocking Gatherv or Scatterv whose specifications Python has read; return a status as `call_told` does.

    Parameters
    ----------
    part, whole : object
        The arrays of this rank's part and, at the root, of all parts.
    told : object
        As `call_told` takes it; at the root with counts and element type.
    """
    job = get(table, JOB)
    if not is_open(table, job) or not is_plain(table, part, READABLE if collective == GATHER else WRITABLE):
        return OTHER
    return make_told_call(table, collective, part, whole, data_of(table, told), root)


@takes_objects("int64", "int64", "object", "object", "int64", "object")
def end_told(table, collective, part, whole, root, told):
    """Make the collective after the counts have come, or begin it; return a status as `call_told` does from TOLD on."""
    return _end_told(table, get(table, JOB), collective, part, whole, data_of(table, told), root)
