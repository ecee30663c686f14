"""Buffers in all kinds of memory, with neighbours that nobody may touch."""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll import Intracomm
from tests import layouts

KINDS = {"own": 41, "segment": 32, "segment slice": 10, "own slice": 5, "strided": 3, "misaligned": 2, "datatype": 7}
_GUARD = 8
_LONGEST_ENTRY = 1000
MOST_SCATTERED = 20_000
"""Longer vectors are not laid out by datatypes, since drawing and checking them takes too long."""
_CANARY = 0x5B


class Memory:
    """A buffer of `count` elements, `data`, and what surrounds it."""

    def __init__(self, comm: Intracomm, kind: str, count: int, dtype: np.dtype) -> None:
        self.kind = kind
        make = comm.empty if kind.startswith("segment") else np.empty
        if kind in ("own", "segment"):
            self._around, self.data = None, make(count, dtype)
            return
        step = 2 if kind == "strided" else 1
        shift = 1 if kind == "misaligned" else 0
        begin, nbytes = _GUARD * dtype.itemsize + shift, step * count * dtype.itemsize
        self._around = make((step * count + 2 * _GUARD) * dtype.itemsize, np.uint8)
        self._around[:] = _CANARY
        self.data = self._around[begin : begin + nbytes].view(dtype)[::step]
        self._inside = (begin, begin + nbytes, step * dtype.itemsize, dtype.itemsize)

    def spec(self, blocks: int = 1) -> Any:
        """Return what a call gets for a buffer of so many blocks."""
        return self.data

    def spec_of_parts(self, counts: Sequence[int]) -> Any:
        """Return what a call gets for a buffer of parts of so many elements."""
        return [self.data, list(counts)]

    def spec_of_typed_parts(self, counts: Sequence[int]) -> Any:
        """Return what Alltoallw gets for a buffer of parts of so many elements."""
        itemsize, memory, begin = self.data.itemsize, self.data, 0
        step = self.data.strides[0] if self.data.size > 1 else itemsize
        if self._around is not None:
            memory, begin = self._around, self._inside[0]
        displs = [begin + step * place for place in running_sum(counts)]
        return [memory, (list(counts), displs), [element(itemsize, step)] * len(counts)]

    @property
    def unit(self) -> int:
        """Elements of an entry of the datatype."""
        return 1

    def read(self) -> np.ndarray:
        """Return the elements."""
        return self.data

    def write(self, values: Any, place: slice = slice(None)) -> None:
        """Write elements."""
        self.data[place] = values

    def free(self) -> None:
        """Free what NumPy does not."""

    def is_intact(self) -> bool:
        """Say whether nothing was written but the elements."""
        if self._around is None:
            return True
        begin, end, stride, itemsize = self._inside
        outside = (self._around[:begin] == _CANARY).all() and (self._around[end:] == _CANARY).all()
        between = self._around[begin:end].reshape(-1, stride)[:, itemsize:]
        return bool(outside and (between == _CANARY).all())


_kept: dict[tuple[np.dtype, int], layouts.Layout] = {}
"""Layouts that are used more than once, by element type and number of elements."""
_MOST_KEPT = 24
_users: Counter[int] = Counter()
"""How often a layout is in use, by its id; once for being kept."""


def _layout(own: random.Random, dtype: np.dtype, unit: int) -> layouts.Layout:
    """Return a layout, mostly one that was used before, whose datatype compiled code may know by its handle."""
    key = dtype, unit
    if key in _kept and own.random() < 0.7:
        made = _kept[key]
    else:
        made = layouts.draw(own, dtype, unit)
        if key not in _kept and own.random() < 0.5:
            _keep(own, key, made)
    _users[id(made)] += 1
    return made


def _keep(own: random.Random, key: tuple[np.dtype, int], layout: layouts.Layout) -> None:
    if len(_kept) == _MOST_KEPT:
        _let_go(_kept.pop(own.choice(list(_kept))))
    _kept[key] = layout
    _users[id(layout)] += 1


def _let_go(layout: layouts.Layout) -> None:
    """Free a datatype that is in use nowhere else."""
    _users[id(layout)] -= 1
    if not _users[id(layout)]:
        del _users[id(layout)]
        layout.datatype.Free()


class DatatypeMemory(Memory):
    """A buffer laid out by a derived datatype, which this rank draws for itself.

    Parameters
    ----------
    parts
        Elements of the parts that calls give in numbers of entries.
    """

    def __init__(self, own: random.Random, count: int, dtype: np.dtype, parts: Sequence[int]) -> None:
        self.kind, self._around = "datatype", None
        most = math.gcd(count, *parts)
        unit = own.choice([n for n in (1, 2, 3, most) if n <= _LONGEST_ENTRY and n and most % n == 0])
        layout = _layout(own, dtype, unit)
        self._scattered = layouts.Scattered(layout, count, dtype)
        self.spec, self.spec_of_parts = self._scattered.spec, self._scattered.spec_of_parts  # type: ignore[method-assign]

    def spec_of_typed_parts(self, counts: Sequence[int]) -> Any:
        """Return what Alltoallw gets for a buffer of parts of so many elements."""
        memory, entries, datatype = self._scattered.spec_of_parts(counts)
        extent = datatype.Get_extent()[1]
        return [memory, (entries, [extent * place for place in running_sum(entries)]), [datatype] * len(entries)]

    @property
    def unit(self) -> int:
        """Elements of an entry of the datatype."""
        return self._scattered.each

    def read(self) -> np.ndarray:
        """Return the elements."""
        return self._scattered.values

    def write(self, values: Any, place: slice = slice(None)) -> None:
        """Write elements."""
        whole = self.read()
        whole[place] = values
        self._scattered.values = whole

    def free(self) -> None:
        """Free the datatype, unless it is kept; calls on their way do not need it."""
        _let_go(self._scattered.layout)

    def is_intact(self) -> bool:
        """Say whether nothing was written but the elements."""
        return self._scattered.is_intact()


def running_sum(counts: Sequence[int]) -> list[int]:
    """Return the sums of the counts before each."""
    return [0, *accumulate(counts)][:-1]


@functools.cache
def element(itemsize: int, step: int) -> MPI.Datatype:
    """Return a datatype of elements of so many bytes at such a distance; never freed."""
    inner = MPI.BYTE.Create_contiguous(itemsize)
    made = inner.Create_resized(0, step).Commit()
    inner.Free()
    return made


def draw_kind(numbers: random.Random) -> str:
    """Draw a kind of memory; each rank for itself."""
    (kind,) = numbers.choices(tuple(KINDS), tuple(KINDS.values()))
    return kind
