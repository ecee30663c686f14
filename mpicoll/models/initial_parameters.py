"""Initial parameters, drawn in blocks of which each has a key of its own, so that a rank draws only what it holds."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mpicoll.models.layers import Constant, Initial

_BLOCK = 1 << 16
"""Elements that are drawn from one key. A change gives other initial parameters."""


class InitialParameters(Protocol):
    """Source of a model's initial parameters, any part of the flat vector at a time."""

    def fill(self, start: int, into: np.ndarray) -> None:
        """Write the elements of the flat vector from number `start` on to the vector `into`."""


class DrawnParameters:
    """Initial parameters that are drawn when they are asked for; an :class:`InitialParameters`.

    Each array is drawn in blocks of 65536 elements. The key of a block is the seed, with the numbers of the array and
    of the block as spawn key of NumPy's SeedSequence, so that an element does not depend on what else is drawn.

    Parameters
    ----------
    bounds
        First element of each array in the flat vector, and the vector's length.
    initials
        Initial values of each array.
    seed
        Seed, from 0 on.
    """

    def __init__(self, bounds: Sequence[int], initials: Sequence[Initial], seed: int) -> None:
        self._bounds, self._initials, self._seed = bounds, initials, seed

    def fill(self, start: int, into: np.ndarray) -> None:
        """See :class:`InitialParameters`."""
        stop = start + len(into)
        if not 0 <= start <= stop <= self._bounds[-1]:
            raise ValueError(f"elements {start} to {stop - 1} are not within the {self._bounds[-1]} parameters")
        number = bisect.bisect_right(self._bounds, start) - 1
        while start < stop:
            end = min(stop, self._bounds[number + 1])
            place = end - stop + len(into)
            self._fill_array(number, start - self._bounds[number], into[place - (end - start) : place])
            start, number = end, number + 1

    def _fill_array(self, number: int, first: int, into: np.ndarray) -> None:
        """Write the elements of an array from number `first` on."""
        initial = self._initials[number]
        if isinstance(initial, Constant):
            into[...] = initial.value
            return
        done = 0
        while done < len(into):
            block, skipped = divmod(first + done, _BLOCK)
            count = min(_BLOCK - skipped, len(into) - done)
            random = np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=(number, block)))
            drawn = random.standard_normal(skipped + count)[skipped:]
            np.multiply(drawn, initial.deviation, out=into[done : done + count], casting="same_kind")
            done += count


class StoredParameters:
    """Initial parameters in memory; an :class:`InitialParameters`.

    Parameters
    ----------
    vector : (parameter_count,) array
    """

    def __init__(self, vector: np.ndarray) -> None:
        self.vector = vector

    def fill(self, start: int, into: np.ndarray) -> None:
        """See :class:`InitialParameters`."""
        into[:] = self.vector[start : start + len(into)]
