"""Derived datatypes drawn at random: elements of one type, laid out in memory in any way that MPI knows.

A layout says by itself where its elements are, so that a test need not ask the MPI library.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from mpi4py.util import dtlib

_CANARY = 0x5B
_MOST_INNER = 64
"""Longer entries are of one level, so that drawing them takes no time."""


class Layout(NamedTuple):
    """A datatype, and where the elements of one entry lie, in bytes from its beginning, in their order."""

    datatype: MPI.Datatype
    offsets: np.ndarray
    itemsize: int

    @property
    def extent(self) -> int:
        return self.datatype.Get_extent()[1]

    @property
    def span(self) -> int:
        """Bytes from the first to behind the last element."""
        return int(self.offsets.max() - self.offsets.min()) + self.itemsize

    def of(self, make: Callable[[MPI.Datatype], MPI.Datatype], starts: Sequence[int] | np.ndarray) -> Layout:
        """Return the layout of a datatype made of entries of this one, which begin at so many bytes."""
        made = make(self.datatype)
        if not self.datatype.is_predefined:
            self.datatype.Free()
        return Layout(made, (np.asarray(starts)[:, None] + self.offsets).ravel(), self.itemsize)


def basic(dtype: np.dtype) -> Layout:
    """Return the layout of one element."""
    return Layout(dtlib.from_numpy_dtype(dtype), np.zeros(1, int), dtype.itemsize)


def _contiguous(inner: Layout, count: int, numbers: random.Random) -> Layout:
    return inner.of(lambda t: t.Create_contiguous(count), inner.extent * np.arange(count))


def _vector(inner: Layout, count: int, numbers: random.Random) -> Layout:
    step = numbers.choice((2, 3, -2, -1))
    return inner.of(lambda t: t.Create_vector(count, 1, step), step * inner.extent * np.arange(count))


def _blocks(inner: Layout, count: int, numbers: random.Random) -> Layout:
    if count % 2:
        return _hvector(inner, count, numbers)
    starts = inner.extent * (3 * np.arange(count // 2)[:, None] + np.arange(2)).ravel()
    return inner.of(lambda t: t.Create_vector(count // 2, 2, 3), starts)


def _hvector(inner: Layout, count: int, numbers: random.Random) -> Layout:
    step = (inner.extent + 1 + numbers.randrange(5)) * numbers.choice((1, -1))
    return inner.of(lambda t: t.Create_hvector(count, 1, step), step * np.arange(count))


def _places(count: int, numbers: random.Random) -> list[int]:
    """Return where entries begin, in any order, with holes."""
    step = np.array([numbers.randrange(1, 4) for _ in range(count)]).cumsum() - 1
    places = step.tolist()
    if numbers.random() < 0.5:
        numbers.shuffle(places)
    return places


def _indexed(inner: Layout, count: int, numbers: random.Random) -> Layout:
    places = _places(count, numbers)
    lengths = [1] * count + [0]
    return inner.of(lambda t: t.Create_indexed(lengths, [*places, 77]), inner.extent * np.array(places))


def _hindexed(inner: Layout, count: int, numbers: random.Random) -> Layout:
    starts = [inner.extent * place + place % 2 * (count == 1) - 16 for place in _places(count, numbers)]
    return inner.of(lambda t: t.Create_hindexed([1] * count, starts), starts)


def _indexed_block(inner: Layout, count: int, numbers: random.Random) -> Layout:
    places = _places(count, numbers)
    return inner.of(lambda t: t.Create_indexed_block(1, places), inner.extent * np.array(places))


def _struct(inner: Layout, count: int, numbers: random.Random) -> Layout:
    """Two parts of the same type, and of two others none."""
    first, gap = numbers.randrange(count + 1), numbers.randrange(24)
    starts = inner.extent * np.arange(count) + gap * (np.arange(count) >= first)

    def make(datatype: MPI.Datatype) -> MPI.Datatype:
        nothing = MPI.FLOAT.Create_contiguous(0)
        second = inner.extent * first + gap
        types = [datatype, MPI.INT, nothing, datatype]
        made = MPI.Datatype.Create_struct([first, 0, 5, count - first], [0, 8, 8, second], types)
        nothing.Free()
        return made

    return inner.of(make, starts)


def _subarray(inner: Layout, count: int, numbers: random.Random) -> Layout:
    width, at, order = numbers.randrange(1, 4), numbers.randrange(3), numbers.choice((MPI.ORDER_C, MPI.ORDER_F))
    sizes, part, starts = [count + 1, width + 2], [count, 1], [1, at % (width + 2)]
    step = sizes[1] if order == MPI.ORDER_C else 1
    begin = starts[0] * step + starts[1] * (1 if order == MPI.ORDER_C else sizes[0])
    return inner.of(
        lambda t: t.Create_subarray(sizes, part, starts, order), inner.extent * (begin + step * np.arange(count))
    )


def _darray(inner: Layout, count: int, numbers: random.Random) -> Layout:
    rank = numbers.randrange(2)
    return inner.of(
        lambda t: t.Create_darray(2, rank, [2 * count], [MPI.DISTRIBUTE_CYCLIC], [MPI.DISTRIBUTE_DFLT_DARG], [2]),
        inner.extent * (rank + 2 * np.arange(count)),
    )


def _dup(inner: Layout, count: int, numbers: random.Random) -> Layout:
    return _contiguous(inner.of(lambda t: t.Dup(), [0]), count, numbers)


KINDS = (
    _contiguous,
    _vector,
    _blocks,
    _hvector,
    _indexed,
    _hindexed,
    _indexed_block,
    _struct,
    _subarray,
    _darray,
    _dup,
)


def _resized(inner: Layout, numbers: random.Random) -> Layout:
    """Let entries follow each other without overlapping, from any lower bound."""
    extent = inner.span + numbers.choice((0, 0, 3, 8, 40))
    lower = numbers.choice((0, -24, 16, int(inner.offsets.min())))
    return inner.of(lambda t: t.Create_resized(lower, extent), [0])


def draw(numbers: random.Random, dtype: np.dtype, count: int) -> Layout:
    """Draw a layout of `count` elements an entry; to be committed and freed by the caller."""
    made = basic(dtype)
    inner = numbers.choice([n for n in (1, 2, 3, 4) if count % n == 0]) if count <= _MOST_INNER else 1
    for part in (inner, count // inner):
        made = _resized(numbers.choice(KINDS)(made, part, numbers), numbers)
    made.datatype.Commit()
    return made


class Scattered:
    """`count` elements in entries of a layout, in memory of their own; what lies between them must not change."""

    def __init__(self, layout: Layout, count: int, dtype: np.dtype, make: Callable[..., np.ndarray] = np.empty) -> None:
        self.layout, self.dtype, self.count = layout, dtype, count
        self.each = layout.offsets.size
        starts = layout.extent * np.arange(count // self.each)
        places = (starts[:, None] + layout.offsets).ravel()
        self._begin = max(0, -int(places.min(initial=0)))
        end = self._begin + int(places.max(initial=0)) + dtype.itemsize
        self._around = make(end + 16, np.uint8)
        self._around[:] = _CANARY
        self._bytes = (self._begin + places)[:, None] + np.arange(dtype.itemsize)

    def spec(self, blocks: int = 1) -> list[Any]:
        """Return the specification of a buffer of so many blocks."""
        return [self._around[self._begin :], self.count // self.each // blocks, self.layout.datatype]

    def spec_of_parts(self, counts: Sequence[int]) -> list[Any]:
        """Return the specification of blocks of so many elements, one after the other."""
        return [self._around[self._begin :], [count // self.each for count in counts], self.layout.datatype]

    @property
    def values(self) -> np.ndarray:
        """The elements, in a copy."""
        return self._around[self._bytes].reshape(-1).view(self.dtype)

    @values.setter
    def values(self, values: Any) -> None:
        whole = np.empty(self.count, self.dtype)
        whole[...] = values
        self._around[self._bytes] = whole.view(np.uint8).reshape(self._bytes.shape)

    def is_intact(self) -> bool:
        """Say whether nothing was written but the elements."""
        between = np.ones(self._around.size, bool)
        between[self._bytes] = False
        return bool((self._around[between] == _CANARY).all())
