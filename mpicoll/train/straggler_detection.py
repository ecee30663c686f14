"""Straggler detection: the rank that takes longest to compute its part, for which the others wait in every step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_WINDOW = 64
"""Number of latest steps over which `StragglerDetector.lagging` compares the ranks."""
_LAGGING = 0.5


class Slowest(NamedTuple):
    """Rank that was slowest in most steps.

    Attributes
    ----------
    rank
        Its number.
    share
        Fraction of the steps in which it was the slowest, 0 to 1.
    behind
        Its total seconds of computation over the median of the other ranks', less 1: 0.12 for 12 % longer.
    """

    rank: int
    share: float
    behind: float


class StragglerDetector:
    """Statistics of the seconds that each rank computes in each step, reading data included, communication not.

    The first step does not count: it loads libraries and kernels.

    Attributes
    ----------
    seconds : (size,) of float64
        Sum over the steps, by rank.
    steps : int
        Number of these steps.
    """

    def __init__(self, size: int) -> None:
        self.seconds, self.steps = np.zeros(size), 0
        self._slowest, self._begun = np.zeros(size, np.int64), False
        self._window = np.zeros((_WINDOW, size))

    def add(self, rows: np.ndarray) -> None:
        """Add the seconds of some steps, a (steps, size) array."""
        rows, self._begun = (rows if self._begun else rows[1:]), True
        self._slowest += np.bincount(rows.argmax(axis=1), minlength=self.seconds.size)
        self.seconds += rows.sum(axis=0)
        for row in rows:
            self._window[self.steps % _WINDOW] = row
            self.steps += 1

    def slowest(self) -> Slowest | None:
        """Return the slowest rank; None with one rank, or before a step counts."""
        if self.seconds.size == 1 or self.steps == 0:
            return None
        rank = int(self._slowest.argmax())
        return Slowest(rank, float(self._slowest[rank] / self.steps), _behind(self.seconds, rank))

    def lagging(self) -> int | None:
        """Return the rank that computed more than 1.5 times as long as the others' median in the last 64 steps."""
        if self.seconds.size == 1 or self.steps < _WINDOW:
            return None
        lately = self._window.sum(axis=0)
        rank = int(lately.argmax())
        return rank if _behind(lately, rank) > _LAGGING else None


def _behind(seconds: np.ndarray, rank: int) -> float:
    others = float(np.median(np.delete(seconds, rank)))
    return float(seconds[rank]) / others - 1 if others > 0 else 0.0
