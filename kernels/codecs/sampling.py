"""Random choices of elements: one of each run of a vector, or each with a probability of its own.

*Positions*: a vector of n elements is cut into k runs of nearly equal lengths, and one element of each is drawn. That
gives k different positions, in order, in O(k), and each element with a probability of one over its run's length.

*Probabilities* (Wangni et al., "Gradient sparsification for communication-efficient distributed optimization", NeurIPS
2018): element i is kept with p_i = min(rate |x_i|, 1) and sent as x_i / p_i. Among all p of the same sum these leave
the least variance, and among all p of the same variance they have the least sum.
"""

import numpy as np

from ..decorators import helper, kernel
from .counter_random import block_key, word
from .threshold_masks import ABSOLUTE

_INF = 0x7F800000
_LANES = 16
_BLOCK = 64
_CERTAIN = 1 << 32
_MOST_STEPS = 30
_MOST_NEWTON_STEPS = 100


@helper
def _cut(run, count, runs):
    """Return where a run begins: ``run * count // runs``, without a product that overflows."""
    whole, rest = count // runs, count % runs
    return run * whole + np.int64(np.uint64(run) * np.uint64(rest) // np.uint64(runs))


@helper
def draw_positions(count, keys, first, indices):
    """Draw one position of each of ``indices.size`` runs of ``range(count)`` into uint32 `indices`; they increase.

    1 <= indices.size <= count < 2^32. `keys` and `first`: see `counter_random.py`.
    """
    runs = indices.size
    high, low = block_key(keys, first), block_key(keys, first + count)
    for run in range(runs):
        begin = _cut(run, count, runs)
        length = np.uint64(_cut(run + 1, count, runs) - begin)
        # 64 random bits times the length, of which the highest are wanted.
        carry = (np.uint64(word(low, run)) * length) >> np.uint64(32)
        place = (np.uint64(word(high, run)) * length + carry) >> np.uint64(32)
        indices[run] = np.uint32(np.uint64(begin) + place)


@kernel
def positions(count, keys, first, indices):
    """See `draw_positions`."""
    draw_positions(count, keys, first, indices)


@kernel
def amplify(count, values):
    """Multiply float32 `values` at what `positions` drew by the lengths of their runs: right on average."""
    for run in range(values.size):
        values[run] *= np.float32(_cut(run + 1, count, values.size) - _cut(run, count, values.size))


@helper
def _below(patterns, x, rate, sums, numbers):
    """Add sum and number of the finite |x| with ``rate |x| < 1`` to lanes; the length is that of the lanes."""
    for lane in range(x.size):
        absolute = np.float64(np.abs(x[lane]))
        counts = (np.uint32(patterns[lane] & np.uint32(ABSOLUTE)) < np.uint32(_INF)) & (rate * absolute < 1.0)
        sums[lane] += absolute if counts else 0.0
        numbers[lane] += np.int64(counts)


@helper
def _sum_below(x, rate):
    """Return sum and number of the finite |x| with ``rate |x| < 1``."""
    patterns = x.view(np.uint32)
    sums, numbers = np.zeros(_LANES, np.float64), np.zeros(_LANES, np.int64)
    for begin in range(0, x.size, _LANES):
        _below(patterns[begin : begin + _LANES], x[begin : begin + _LANES], rate, sums, numbers)
    return sums.sum(), numbers.sum()


@helper
def rate_for_count(x, wanted):
    """Return the rate with which about `wanted` elements of float32 `x` are kept, never more on average.

    NaN and inf are always kept and count. The rate is 0 if nothing is left for the others, or all of them are zero.
    (Wangni et al., section 3.2, the greedy algorithm: those that are certain are left out and the rest amplified.)
    """
    total, finite = _sum_below(x, 0.0)
    left = wanted - (x.size - finite)
    if left <= 0 or total <= 0:
        return 0.0
    rate = left / total
    for _ in range(_MOST_STEPS):
        below, number = _sum_below(x, rate)
        if below <= 0:
            break
        factor = (left - (finite - number)) / (rate * below)
        if factor <= 1.001:
            break
        rate *= factor
    return rate


@kernel
def best_rate(x, wanted):
    """See `rate_for_count`."""
    return rate_for_count(x, wanted)


@helper
def _squares_below(patterns, x, rate, sums, squares, numbers):
    """Add sum, sum of squares and number of the finite |x| with ``rate |x| < 1`` to lanes."""
    for lane in range(x.size):
        absolute = np.float64(np.abs(x[lane]))
        counts = (np.uint32(patterns[lane] & np.uint32(ABSOLUTE)) < np.uint32(_INF)) & (rate * absolute < 1.0)
        sums[lane] += absolute if counts else 0.0
        squares[lane] += absolute * absolute if counts else 0.0
        numbers[lane] += np.int64(counts)


@helper
def _moments_below(x, rate):
    """Return sum, sum of squares and number of the finite |x| with ``rate |x| < 1``."""
    patterns = x.view(np.uint32)
    sums, squares, numbers = np.zeros(_LANES, np.float64), np.zeros(_LANES, np.float64), np.zeros(_LANES, np.int64)
    for begin in range(0, x.size, _LANES):
        end = begin + _LANES
        _squares_below(patterns[begin:end], x[begin:end], rate, sums, squares, numbers)
    return sums.sum(), squares.sum(), numbers.sum()


@helper
def rate_for_variance(x, variance, wanted):
    """Return the least rate with which the second moment of what is sent is at most `variance` times that of `x`.

    Elements of float32 `x` with ``rate |x| >= 1`` are certain; for a set T of certain elements the rate is the sum of
    the other |x| over ``variance * |x|^2`` less the squares of T (Wangni et al., algorithm 2). T is found without
    sorting: with u = 1 / rate the second moment is a convex, piecewise linear function of u, for which Newton's method
    from the side of the larger u ends at the solution, when T no longer changes.

    NaN and inf, which are always kept, are left out of both moments; if there are any, at most `wanted` elements are
    kept on average. The rate is 0 if all others are zero. `variance` is above 1.
    """
    total, square, finite = _moments_below(x, 0.0)
    if total <= 0:
        return 0.0
    limit = variance * square
    rate, others = total / limit, finite
    for _ in range(_MOST_NEWTON_STEPS):
        below, square_below, number = _moments_below(x, rate)
        if number == others or below <= 0:
            break
        others = number
        rate = below / (limit - (square - square_below))
    if finite < x.size:
        rate = min(rate, rate_for_count(x, wanted))
    return rate


@kernel
def rate_of_variance(x, variance, wanted):
    """See `rate_for_variance`."""
    return rate_for_variance(x, variance, wanted)


@helper
def _chances(patterns, x, scaled, chances):
    """Write the probability of each element, in units of 2^-32."""
    for j in range(x.size):
        finite = np.uint32(patterns[j] & np.uint32(ABSOLUTE)) < np.uint32(_INF)
        chance = np.ceil(np.float64(np.abs(x[j])) * scaled)
        chances[j] = min(chance, np.float64(_CERTAIN)) if finite else np.float64(_CERTAIN)


@helper
def _drawn(chances, key, drawn):
    """Say for each element whether it is kept; return whether any is."""
    some = np.uint8(0)
    for j in range(chances.size):
        drawn[j] = np.uint8(np.float64(word(key, j)) < chances[j])
        some |= drawn[j]
    return some > 0


@helper
def draw_kept(x, rate, keys, first, indices, values):
    """Draw which elements of float32 `x` of shape (count,) are kept and write them, amplified.

    Probabilities are rounded up to multiples of 2^-32, and what is kept is divided by those, which makes it right
    on average to the last bit of a float32. NaN and inf are kept as they are.

    Returns
    -------
    int
        How many there are. If they are more than ``indices.size``, only the first have been written.
    """
    patterns, scaled, number = x.view(np.uint32), rate * np.float64(_CERTAIN), 0
    chances, drawn = np.empty(_BLOCK, np.float64), np.empty(_BLOCK, np.uint8)
    for begin in range(0, x.size, _BLOCK):
        end = min(x.size, begin + _BLOCK)
        some = chances[: end - begin]
        _chances(patterns[begin:end], x[begin:end], scaled, some)
        if _drawn(some, block_key(keys, first + begin), drawn[: end - begin]):
            for j in range(end - begin):
                if drawn[j]:
                    if number < indices.size:
                        factor = np.float64(_CERTAIN) / some[j]
                        indices[number] = np.uint32(begin + j)
                        values[number] = np.float32(np.float64(x[begin + j]) * factor)
                    number += 1
    return number


@kernel
def keep(x, rate, keys, first, indices, values):
    """See `draw_kept`."""
    return draw_kept(x, rate, keys, first, indices, values)
