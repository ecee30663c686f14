"""Parts of a short Scatterv, which the root attaches to its counts: every rank finds both in the root's slot.

::

    slot of the root    counts of all ranks, element type | part of rank 0 | part of rank 1 | ...

All ranks agree on the length of the counts only. A rank reads its part when its plan has ended. That is in time: the
root writes this slot again for the operation after the next one, and before that all ranks have started the next one.
"""

from .atomics import copy, load, store
from .decorators import helper, kernel_for
from .operation_words import (
    BOUNDS,
    INLINE_NBYTES,
    RANK,
    SCRATCH,
    SEND,
    SIZE,
    SLOT_NBYTES,
    get,
    put,
    slot_of,
    uneven_word,
)

ATTACHED = 1 << 8
"""Added to the number of the element type where parts are attached."""
MOST_NBYTES = 64 << 10
"""Bytes of parts that are attached at most: they are copied once more, which at length takes longer than a round."""
_LEAST_WORDS = INLINE_NBYTES // 8 + 1
"""Shorter vectors have no slot."""


@helper
def scatter_words(size):
    """Return how many words the root of a Scatterv tells: counts and element type, and zeros where these are few."""
    return max(size + 1, _LEAST_WORDS)


@helper
def has_room(job, nbytes):
    """Return whether parts with so many bytes in all can be attached."""
    rounded = (nbytes + 7) // 8 * 8
    return rounded <= MOST_NBYTES and 8 * scatter_words(get(job, SIZE)) + rounded <= get(job, SLOT_NBYTES)


@helper
def attach(job, words, data, nbytes):
    """Let the root's plan copy counts, and parts behind them, to its slot; they are put together in scratch memory."""
    scratch, words_nbytes = get(job, SCRATCH), 8 * scatter_words(get(job, SIZE))
    copy(scratch, words, words_nbytes)
    copy(scratch + words_nbytes, data, nbytes)
    put(job, SEND, scratch)
    bound_told(job, words_nbytes + nbytes)


@helper
def bound_told(job, nbytes):
    """Set how many bytes of sendbuf the plan of a root that tells counts copies to its slot, in whole words."""
    bounds = job + 8 * uneven_word(get(job, SIZE))
    store(bounds, 0)
    store(bounds + 8, (nbytes + 7) // 8)
    put(job, BOUNDS, bounds)


@helper
def attached_part(job, words, root, itemsize):
    """Return where this rank's part is in the root's slot; 0 if the counts are not those of attached parts."""
    size, own = get(job, SIZE), get(job, RANK)
    begin = 8 * scatter_words(size)
    most, offset, total = (get(job, SLOT_NBYTES) - begin) // itemsize, 0, 0
    for rank in range(size):
        count = load(words + 8 * rank)
        if not 0 <= count <= most:
            return 0
        if rank == own:
            offset = total
        total += count
    return slot_of(job, root) + begin + offset * itemsize if total <= most else 0


@helper
def copy_part(job, words, root, itemsize, target):
    """Copy this rank's part to its place; return False if the counts are not those of attached parts."""
    part = attached_part(job, words, root, itemsize)
    if part == 0:
        return False
    copy(target, part, load(words + 8 * get(job, RANK)) * itemsize)
    return True


@kernel_for("int64", "int64", "int64", "int64", "int64")
def take_part(job, words, root, itemsize, target):
    """Copy this rank's part, after the counts have come, and before the job's next operation; return False as above.

    Parameters
    ----------
    job, words, target : int
        Addresses of the job, of the words that the root has told, and of memory for as many elements as they say.
    root, itemsize : int
        The root; bytes of an element.
    """
    return copy_part(job, words, root, itemsize, target)
