"""The k largest |x| of a float32 vector, exactly, in a little more than one pass over it.

The bits of a float32 without its sign, read as a whole number (its *pattern*), are in the order of |x|; inf is larger
than every number and NaN larger than inf. So the k-th largest is found digit by digit: a histogram of the highest 11
bits says in which bin it lies, one of the next 10 bits of that bin's elements where in it, one of the last 10 which
it is. A histogram costs several times what reading does. Therefore a long vector is sampled first: a pattern that is
almost surely below the k-th largest, but not by much, leaves few candidates, which one quick pass collects; the
histograms are then of these. If it was not below, or the candidates are too many (vectors with many equal elements),
the histograms are of the whole vector. The sample decides how long it takes, never what comes out.

Elements of equal |x| are taken from the lowest index up. (Radix selection: Alabi et al., "Fast k-selection algorithms
for graphics processing units", JEA 2012; floor from a sample: Floyd and Rivest, CACM 1975.)
"""

import numpy as np

from ..bits import pointer, prefetch
from ..decorators import helper, kernel
from .counter_random import mix
from .sparse_vectors import select_entries
from .threshold_masks import ABSOLUTE, LANES, enter, mask_of

BINS = (2048, 1024, 1024)
"""Number of bins for each digit, from the highest."""
NONE = ABSOLUTE
"""Threshold that nothing is larger than."""
_SHORTEST_SAMPLED = 1 << 14


@helper
def _shift(digit):
    """Return the place of the lowest bit of a digit."""
    return 20 - 10 * digit


@helper
def _count_highest(patterns, bins):
    # Four tables: increments of one bin that follow each other closely would wait for each other.
    size, shift, mask = bins.size, np.uint32(20), np.uint32(2047)
    room = np.zeros(4 * size, np.uint32)
    whole = patterns.size // 4
    for step in range(whole):
        four = patterns[4 * step : 4 * step + 4]
        room[(four[0] >> shift) & mask] += np.uint32(1)
        room[size + ((four[1] >> shift) & mask)] += np.uint32(1)
        room[2 * size + ((four[2] >> shift) & mask)] += np.uint32(1)
        room[3 * size + ((four[3] >> shift) & mask)] += np.uint32(1)
    for i in range(4 * whole, patterns.size):
        room[(patterns[i] >> shift) & mask] += np.uint32(1)
    for bin_ in range(size):
        bins[bin_] += np.int64(room[bin_]) + room[size + bin_] + room[2 * size + bin_] + room[3 * size + bin_]


@helper
def _bin(pattern, shift, base, size):
    return min(np.uint32((np.uint32(pattern & np.uint32(ABSOLUTE)) >> shift) - base), size)


@helper
def _count_lower(patterns, prefix, digit, bins):
    # Those with another prefix go to a bin of their own, which costs less than a branch that cannot be foreseen:
    # less the lowest pattern with the prefix, they are `size` or more, those below it by wrapping round.
    size, stride = np.uint32(bins.size), bins.size + 1
    shift, base = np.uint32(_shift(digit)), np.uint32(prefix * bins.size)
    room = np.zeros(4 * stride, np.uint32)
    whole = patterns.size // 4
    for step in range(whole):
        four = patterns[4 * step : 4 * step + 4]
        room[_bin(four[0], shift, base, size)] += np.uint32(1)
        room[stride + _bin(four[1], shift, base, size)] += np.uint32(1)
        room[2 * stride + _bin(four[2], shift, base, size)] += np.uint32(1)
        room[3 * stride + _bin(four[3], shift, base, size)] += np.uint32(1)
    for i in range(4 * whole, patterns.size):
        room[_bin(patterns[i], shift, base, size)] += np.uint32(1)
    for bin_ in range(bins.size):
        total = np.int64(room[bin_]) + room[stride + bin_] + room[2 * stride + bin_] + room[3 * stride + bin_]
        bins[bin_] += total


@helper
def add_histogram(patterns, prefix, digit, bins):
    """See `histogram`."""
    if digit == 0:
        _count_highest(patterns, bins)
    else:
        _count_lower(patterns, prefix, digit, bins)


@helper
def bin_of(bins, k):
    """See `pick`."""
    left = k
    for bin_ in range(bins.size - 1, 0, -1):
        if bins[bin_] >= left:
            return bin_, left
        left -= bins[bin_]
    return 0, left


@kernel
def histogram(patterns, prefix, digit, bins):
    """Add to int64 `bins` how many patterns have each value of a digit.

    Parameters
    ----------
    patterns : uint32 array of shape (count,)
        float32 numbers as bits; signs do not matter.
    prefix : int
        Counted are those whose higher digits make this number; 0 for the highest digit, afterwards
        ``prefix * BINS[digit] + bin`` with the bin that `pick` found.
    digit : int
        0, 1 or 2, from the highest.
    bins : int64 array of shape (BINS[digit],)
        Histograms of several ranks may be added. After the last digit the prefix is the threshold.
    """
    add_histogram(patterns, prefix, digit, bins)


@kernel
def pick(bins, k):
    """Return the bin of the k-th largest, and which of that bin it is, from 1; 1 <= k <= the sum of `bins`."""
    return bin_of(bins, k)


@helper
def _search(patterns, k):
    """Return the k-th largest pattern and how many are larger, 1 <= k <= count, by three histograms."""
    prefix, left = np.int64(0), k
    for digit in range(3):
        bins = np.zeros(2048 if digit == 0 else 1024, np.int64)
        add_histogram(patterns, prefix, digit, bins)
        bin_, left = bin_of(bins, left)
        prefix = prefix * bins.size + bin_
    return np.uint32(prefix), k - left


@helper
def _with_slack(expected):
    """Return a number that a random count of this mean does not reach but once in 30000 times."""
    return np.int64(expected + 4 * np.sqrt(expected) + 4)


@helper
def _floor(patterns, k):
    """Return a pattern that is probably below the k-th largest, and room enough for those not below it; or 0, 0."""
    count = patterns.size
    if count < _SHORTEST_SAMPLED or k > count // 8:
        return np.uint32(0), 0
    size = min(max(count >> 7, 1 << 10), 1 << 15)
    stride = count // size
    sample = np.empty(size, np.uint32)
    for i in range(size):
        # One of each run, at a place that no period of the vector can follow.
        sample[i] = patterns[i * stride + np.int64((np.uint64(mix(np.uint32(i))) * np.uint64(stride)) >> np.uint64(32))]
    rank = _with_slack(k * size / count)
    return _search(sample, rank)[0], _with_slack(rank) * (stride + 1)


@helper
def _candidates(patterns, floor, indices, found):
    """Write indices and patterns of all that are not below `floor`; return their number, or -1 if it is too large."""
    number = 0
    for begin in range(0, patterns.size, LANES):
        prefetch(pointer(patterns, begin), LANES)
        number = enter(mask_of(patterns, begin, floor), begin, number, indices)
        if number > indices.size:
            return -1
    for i in range(number):
        found[i] = np.uint32(patterns[indices[i]] & np.uint32(ABSOLUTE))
    return number


@helper
def _reduce(patterns, k):
    """Return indices and patterns of candidates for the k largest, in order; none if all have to be read."""
    floor, room = _floor(patterns, k)
    indices, found = np.empty(room + LANES, np.uint32), np.empty(room + LANES, np.uint32)
    number = _candidates(patterns, floor, indices, found) if floor > 0 else -1
    number = number if number >= k else 0
    return indices[:number], found[:number]


@helper
def _take(x, chosen, found, limit, ties, indices, values):
    """Do so with candidates instead of the vector, as `select_entries` does."""
    number, left = 0, ties
    for i in range(found.size):
        if found[i] >= limit:
            if found[i] == limit:
                left -= 1
            if left >= 0 or found[i] > limit:
                indices[number], values[number] = chosen[i], x[chosen[i]]
                number += 1


@helper
def find_threshold(x, k):
    """Return the pattern of the k-th largest |x| of float32 `x` of shape (count,), and how many are larger.

    0 <= k <= count. With k = 0 it is NONE. The k largest are those that are larger, and the first
    ``k - larger`` of those that have the pattern itself.
    """
    if k == 0:
        return np.uint32(NONE), 0
    patterns = x.view(np.uint32)
    _, found = _reduce(patterns, k)
    return _search(found if found.size > 0 else patterns, k)


@kernel
def threshold(x, k):
    """See `find_threshold`."""
    return find_threshold(x, k)


@helper
def select_largest(x, k, indices, values):
    """Write indices, increasing, and values of the k largest |x|; 0 <= k <= count.

    Parameters
    ----------
    x : float32 array of shape (count,)
        count < 2^32. NaN counts as larger than inf.
    indices : uint32 array of shape (k,)
    values : float32 array of shape (k,)
    """
    if k == 0:
        return
    patterns = x.view(np.uint32)
    chosen, found = _reduce(patterns, k)
    if found.size > 0:
        limit, larger = _search(found, k)
        _take(x, chosen, found, limit, k - larger, indices, values)
    else:
        limit, larger = _search(patterns, k)
        select_entries(x, limit, k - larger, indices, values)


@kernel
def largest(x, k, indices, values):
    """See `select_largest`."""
    select_largest(x, k, indices, values)
