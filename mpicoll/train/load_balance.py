"""Load balance: shares of each batch by the measured pace of the replicas.

Four replicas, of which number 1 takes five times as long for a sample; batch of 32 samples::

    equal shares      8  8  8  8     all wait for replica 1: 20 % of the pace of the fast ones
    by their pace    10  2 10 10     all take equally long: 100 % of what the four can do

The gradient is a sum over the samples of the batch, so that shares do not change it but for rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicoll.data.sampler import part

_LEAST_STEPS = 4
"""Steps with the same shares before they are changed."""
_TOLERANCE = 0.03
"""Shares are kept while no replica takes longer than the mean of all by more than this fraction."""
_LARGEST_CHANGE = 4.0
"""Largest factor by which one change makes a share larger or smaller: what was measured may be an accident."""


class LoadBalance:
    """Division of batches among the replicas; equal on all ranks, since all see the same seconds.

    Each time the shares are changed, they become proportional to the samples a second that the replicas have taken
    since the last time. Where a step takes some time whatever its number of samples, that has to be repeated, until
    all replicas compute equally long.

    Parameters
    ----------
    replicas, places
        Number of replicas, and of ranks of a replica; rank ``replica * places + place`` belongs to `replica`.
    batch
        Samples of a step.

    Attributes
    ----------
    shares : (replicas,) of float64
        Fractions of a batch, positive, with sum 1.
    """

    def __init__(self, replicas: int, places: int, batch: int) -> None:
        self.shares = np.full(replicas, 1 / replicas)
        self._places, self._least = places, 1 / max(batch, replicas)
        self._rows: list[np.ndarray] = []
        self._begun = False

    def part(self, count: int, replica: int) -> tuple[int, int]:
        """Return start and stop of a replica's part of `count` samples; no part is empty if there are enough."""
        counts = self.counts(count)
        start = int(counts[:replica].sum())
        return start, start + int(counts[replica])

    def counts(self, count: int) -> np.ndarray:
        """Return the number of samples of each replica, ``(replicas,)`` of int64, for `count` in all."""
        replicas = self.shares.size
        if count < replicas:
            return np.array([np.ptp(part(count, replicas, replica)) for replica in range(replicas)], np.int64)
        wanted = self.shares * (count - replicas)
        counts = np.floor(wanted)
        # Largest remainders; equal ones in the order of the replicas.
        last = np.argsort(counts - wanted, kind="stable")[: count - replicas - int(counts.sum())]
        counts[last] += 1
        return counts.astype(np.int64) + 1

    def add(self, rows: np.ndarray) -> None:
        """Add the seconds that each rank computed in some steps, ``(steps, ranks)``; perhaps change the shares.

        The first step does not count: it loads libraries and kernels.
        """
        rows, self._begun = (rows if self._begun else rows[1:]), True
        self._rows.extend(rows.reshape(len(rows), self.shares.size, self._places).max(axis=2))
        if len(self._rows) >= _LEAST_STEPS:
            self._change(np.median(self._rows, axis=0))
            self._rows.clear()

    def _change(self, seconds: np.ndarray) -> None:
        seconds = np.maximum(seconds, 1e-9)
        if seconds.max() <= (1 + _TOLERANCE) * seconds.mean():
            return
        pace = self.shares / seconds
        factors = np.clip(pace / pace.sum() / self.shares, 1 / _LARGEST_CHANGE, _LARGEST_CHANGE)
        shares = np.maximum(self.shares * factors, self._least)
        self.shares = shares / shares.sum()

    def state(self) -> list[float]:
        """Return the shares for a checkpoint."""
        return [float(share) for share in self.shares]

    def load(self, found: Any) -> None:
        """Take the shares of a checkpoint, if they are of as many replicas."""
        if not isinstance(found, list) or len(found) != self.shares.size:
            return
        if all(isinstance(share, float) and 0 < share <= 1 for share in found):
            self.shares = np.array(found) / sum(found)
