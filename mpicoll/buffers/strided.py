"""Runs of bytes at regular distances: the form of most datatypes, of which no run is listed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

Longs = np.ndarray[Any, np.dtype[np.int64]]

MOST_DIMENSIONS = 12


class Strided(NamedTuple):
    """Runs of `nbytes` bytes, the first one at `offset`.

    Attributes
    ----------
    shape, strides
        Number of runs in each dimension and their distance in bytes, outermost dimension first. No number is below 2,
        and no two dimensions can be joined, if :func:`joined` made it.
    """

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def packed_nbytes(self) -> int:
        """Bytes of all runs."""
        return self.nbytes * math.prod(self.shape)

    @property
    def reach(self) -> tuple[int, int]:
        """Offsets of the first byte and of the first byte after the last."""
        spans = [(number - 1) * stride for number, stride in zip(self.shape, self.strides, strict=True)]
        below, above = sum(span for span in spans if span < 0), sum(span for span in spans if span > 0)
        return self.offset + below, self.offset + above + self.nbytes

    def moved(self, nbytes: int) -> Strided:
        """Return the same runs so many bytes further."""
        return self._replace(offset=self.offset + nbytes)

    def repeated(self, *dimensions: tuple[int, int]) -> Strided | None:
        """Return copies: for each dimension, outermost first, their number and distance; None if they are none."""
        shape, strides = [number for number, _ in dimensions], [stride for _, stride in dimensions]
        return joined(self.offset, self.nbytes, [*shape, *self.shape], [*strides, *self.strides])

    def runs(self) -> tuple[Longs, Longs]:
        """Return offset and length of each run."""
        offsets = np.array([self.offset], np.int64)
        for number, stride in zip(self.shape, self.strides, strict=True):
            offsets = (offsets[:, None] + stride * np.arange(number)).ravel()
        return offsets, np.full(offsets.size, self.nbytes, np.int64)


def joined(offset: int, nbytes: int, shape: Sequence[int], strides: Sequence[int]) -> Strided | None:
    """Return runs in as few dimensions as possible, in the same order; None if there are none."""
    numbers, steps = list[int](), list[int]()
    for number, stride in zip(reversed(shape), reversed(strides), strict=True):
        if number == 1:
            continue
        if not numbers and stride == nbytes:
            nbytes *= number
        elif numbers and stride == numbers[-1] * steps[-1]:
            numbers[-1] *= number
        else:
            numbers.append(number)
            steps.append(stride)
    if nbytes == 0 or 0 in numbers:
        return None
    return Strided(offset, nbytes, tuple(reversed(numbers)), tuple(reversed(steps)))


def strided(offsets: Longs, lengths: Longs) -> Strided | None:
    """Return listed runs as one piece; None if they have different lengths, or no regular distances."""
    if not offsets.size or (lengths != lengths[0]).any():
        return None
    shape: list[int] = []
    strides: list[int] = []
    places = offsets
    while places.size > 1:
        steps = np.diff(places)
        breaks = np.flatnonzero(steps != steps[0])
        count = int(breaks[0]) + 1 if breaks.size else places.size
        if places.size % count or len(shape) == MOST_DIMENSIONS:
            return None
        rows = places.reshape(-1, count)
        if (rows != rows[:, :1] + steps[0] * np.arange(count)).any():
            return None
        shape.insert(0, count)
        strides.insert(0, int(steps[0]))
        places = rows[:, 0]
    return Strided(int(offsets[0]), int(lengths[0]), tuple(shape), tuple(strides))


def subarray(
    inner: Strided, extent: int, sizes: Iterable[int], subsizes: Iterable[int], starts: Iterable[int], *, c_order: bool
) -> Strided | None:
    """Return the part of an array that a subarray datatype chooses; None if it is empty.

    Parameters
    ----------
    inner, extent
        One element of the array, and the bytes from one to the next.
    """
    given = list(zip(sizes, subsizes, starts, strict=True))
    dimensions: list[tuple[int, int]] = []
    offset = inner.offset
    for size, number, start in reversed(given) if c_order else given:
        dimensions.insert(0, (number, extent))
        offset += start * extent
        extent *= size
    return inner._replace(offset=offset).repeated(*dimensions)
