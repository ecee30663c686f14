"""Sparse vectors: increasing uint32 indices and float32 values, taken out of float32 vectors and put back.

Thresholds are patterns: the bits of a float32 without its sign; see `topk.py`. Nothing here may see indices that come
from elsewhere: what is received goes through `sparse_encoding.py`.
"""

import numpy as np

from ..bits import pointer, prefetch
from ..decorators import helper, kernel
from .threshold_masks import ABSOLUTE, LANES, enter, lowest, mask_of


@helper
def _without_late_ties(patterns, first, mask, threshold, ties):
    """Clear the bits of elements that equal the threshold after the first `ties`; return how many may still come."""
    rest = mask
    while rest:
        lane = lowest(rest)
        rest &= rest - np.uint64(1)
        if np.uint32(patterns[first + lane] & np.uint32(ABSOLUTE)) == threshold:
            if ties > 0:
                ties -= 1
            else:
                mask &= ~(np.uint64(1) << np.uint64(lane))
    return mask, ties


@helper
def select_entries(x, threshold, ties, indices, values):
    """See `select`."""
    patterns, number, above = x.view(np.uint32), 0, np.uint32(threshold + np.uint32(1))
    for begin in range(0, x.size, LANES):
        prefetch(pointer(patterns, begin), LANES)
        # Once enough are equal to the threshold, they are no longer looked at.
        mask = mask_of(patterns, begin, threshold if ties > 0 else above)
        if ties > 0:
            mask, ties = _without_late_ties(patterns, begin, mask, threshold, ties)
        number = enter(mask, begin, number, indices)
    for i in range(min(number, indices.size)):
        values[i] = x[indices[i]]
    return number


@kernel
def select(x, threshold, ties, indices, values):
    """Write indices and values of every |x| above a threshold and of the first `ties` that are equal to it.

    Parameters
    ----------
    x : float32 array of shape (count,), count < 2^32
    threshold : uint32
        A pattern.
    ties : int
        0 for none.
    indices, values : uint32 and float32 arrays of shape (room,)

    Returns
    -------
    int
        How many there are. If they are more than `room`, only the first have been written: the caller has to look.
    """
    return select_entries(x, np.uint32(threshold), ties, indices, values)


@kernel
def scatter(indices, values, out):
    """Write ``out[indices] = values``; the other elements keep what they are."""
    for i in range(indices.size):
        out[indices[i]] = values[i]


@kernel
def gather(x, indices, out):
    """Write ``out = x[indices]``."""
    for i in range(indices.size):
        out[i] = x[indices[i]]


@helper
def clear_entries(x, indices):
    """Write ``x[indices] = 0``."""
    for i in range(indices.size):
        x[indices[i]] = np.float32(0)


@kernel
def take_out(x, indices):
    """See `clear_entries`."""
    clear_entries(x, indices)
