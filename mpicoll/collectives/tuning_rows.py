"""Measurements of one collective by message size, and the rules that follow from them.

Sizes a factor of 4 apart are measured first, and the size halfway (geometrically) between two neighbours with different
best algorithms, if one costs much at the other's size::

    measured first    8 K       32 K       128 K      512 K
    best              shared    shared     ring       ring
    measured next                    64 K: shared
    rules             below 128 K: shared, else ring

All sizes are powers of two, since compiled dispatch knows one algorithm for all vectors of ``2**k`` to
``2**(k + 1) - 1`` bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping

from mpicoll.collectives.select import NATIVE, Rule

FACTOR = 4
WORTHWHILE = 1.05


class Row:
    """Measurements of one message size: seconds by algorithm, the same on all ranks.

    Parameters
    ----------
    nbytes
        Length of the whole vector.
    shipped
        The algorithm that ``"auto"`` takes without a table.
    seconds
        Seconds of a call by algorithm.
    library
        Whether the best algorithm may be the MPI library's own collective.
    """

    def __init__(self, nbytes: int, shipped: str, seconds: Mapping[str, float], library: bool) -> None:
        self.nbytes, self.shipped, self.seconds = nbytes, shipped, seconds
        best = min((name for name in seconds if library or name != NATIVE), key=seconds.__getitem__)
        self.best = best if seconds[best] * WORTHWHILE < seconds[shipped] else shipped
        self.gain = seconds[shipped] / seconds[self.best]
        self.loses = seconds[NATIVE] * WORTHWHILE < seconds[self.best]

    def loss(self, name: str) -> float:
        """Return the time of an algorithm relative to the best one's; infinite if it is not possible."""
        return self.seconds.get(name, math.inf) / self.seconds[self.best]


def sizes(first: int, most: int) -> list[int]:
    """Return the message sizes to measure first, powers of two from `first`, which is one, to at most `most` bytes."""
    found, last = [first], max(first, 1 << most.bit_length() >> 1)
    while found[-1] * FACTOR <= last:
        found.append(found[-1] * FACTOR)
    return [*found, last] if found[-1] < last else found


def measured(
    measure: Callable[[int], Row], lengths: Iterable[int], shown: Callable[[Iterable[int]], Iterable[int]] = iter
) -> list[Row]:
    """Return the rows of `lengths`, which increase, and of sizes between those where the best algorithm changes.

    Parameters
    ----------
    measure
        Returns the row of a message size.
    lengths
        The sizes to measure first, see :func:`sizes`.
    shown
        Returns the sizes that it is given, and shows a progress bar meanwhile.
    """
    rows: list[Row] = []
    missing = list(lengths)
    while missing:
        rows = sorted([*rows, *(measure(nbytes) for nbytes in shown(missing))], key=lambda row: row.nbytes)
        missing = [size for low, high in itertools.pairwise(rows) if (size := _between(low, high))]
    return rows


def _between(low: Row, high: Row) -> int:
    """Return the size to measure between two rows; 0 if none is needed."""
    if low.best == high.best or high.nbytes <= 2 * low.nbytes:
        return 0
    costly = max(low.loss(high.best), high.loss(low.best)) > WORTHWHILE
    return 2 * low.nbytes if costly else 0


def rules_of(rows: list[Row]) -> tuple[Rule, ...]:
    """Return a rule for each range of message sizes with one best algorithm; the last has no upper bound."""
    changes = [row for row, following in itertools.pairwise(rows) if row.best != following.best]
    return (*(Rule(2 * row.nbytes, row.best) for row in changes), Rule(1 << 62, rows[-1].best))
