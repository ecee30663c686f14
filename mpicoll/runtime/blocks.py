"""Arguments of vector collectives: one block a rank, anywhere in a buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpicoll.runtime.buffers import Buffer, array_of, check_flat, pack_entries, resolve, whole_entries
from mpicoll.runtime.datatypes import is_derived
from mpicoll.runtime.specs import Spec, datatype_of, index, is_whole_number, take_apart


class Blocks(NamedTuple):
    """A buffer of a vector collective: one block a rank."""

    buffer: Buffer
    counts: list[int]
    displs: list[int]

    @property
    def is_packed(self) -> bool:
        """True if the blocks follow each other without gaps."""
        expected = 0
        for count, displ in zip(self.counts, self.displs, strict=True):
            if count and displ != expected:
                return False
            expected += count
        return True


class ScatteredBlocks(Buffer):
    """Stands in, packed, for blocks that lie apart in the caller's memory."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Blocks) -> None:
        packed = np.empty(sum(blocks.counts), blocks.buffer.dtype)
        super().__init__(packed, packed.ctypes.data, packed.size, packed.dtype, destination=packed)
        self._blocks = blocks
        self.take_in()

    def _pairs(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield each block here and in the caller's memory."""
        whole, begin = self._blocks.buffer.view(self.dtype), 0
        for count, displ in zip(self._blocks.counts, self._blocks.displs, strict=True):
            yield self.owner[begin : begin + count], whole[displ : displ + count]
            begin += count

    def give_back(self) -> None:
        """Copy the blocks to where the caller wants them."""
        for packed, scattered in self._pairs():
            scattered[...] = packed
        self._blocks.buffer.give_back()

    def take_in(self) -> None:
        """Copy the caller's present blocks."""
        for packed, scattered in self._pairs():
            packed[...] = scattered


def resolve_blocks(spec: Any, argument: str, size: int, *, writable: bool = True) -> Blocks:
    """Describe a buffer of a vector collective; blocks that are only read may overlap.

    As in mpi4py, one number for all counts is that of every block, one for all displacements the distance between
    blocks; without counts the buffer is cut evenly, the first blocks being longer by one.

    Raises
    ------
    Foreign, TypeError, ValueError
        As :func:`resolve`; also for counts that do not fit the buffer and blocks that overlap.
    """
    parts = take_apart(spec, argument, vector=True)
    if parts.datatype is not None and is_derived(datatype_of(parts.datatype, argument)):
        return _derived_blocks(parts, argument, size, writable)
    plain = [parts.data, parts.datatype] if parts.datatype is not None else parts.data
    buffer = resolve(plain, argument, writable=writable)
    counts, displs = _placed(parts, argument, size, buffer.count)
    _check_blocks(buffer.count, counts, displs, argument, writable)
    return Blocks(buffer, counts, displs)


def _derived_blocks(parts: Spec, argument: str, size: int, writable: bool) -> Blocks:
    """Describe blocks of entries of a derived datatype by what they are packed into."""
    assert parts.datatype is not None
    datatype, array = datatype_of(parts.datatype, argument), array_of(parts, argument, writable=writable)
    check_flat(array, argument, writable=writable)
    available = whole_entries(array, datatype, argument) if parts.counts is None else 0
    counts, displs = _placed(parts, argument, size, available)
    buffer = pack_entries(array, datatype, counts, displs, argument)
    elements = [count * (datatype.Get_size() // buffer.dtype.itemsize) for count in counts]
    return Blocks(buffer, elements, _running_sum(elements))


def _placed(parts: Spec, argument: str, size: int, available: int) -> tuple[list[int], list[int]]:
    """Return counts and displacements, those left out as mpi4py makes them for so many available elements."""
    if parts.counts is None:
        counts = [available // size + (rank < available % size) for rank in range(size)]
    elif is_whole_number(parts.counts):
        counts = [index(parts.counts, argument, "count")] * size
    else:
        counts = _indices(parts.counts, argument, "counts", size)
    if parts.displs is None:
        displs = _running_sum(counts)
    elif is_whole_number(parts.displs):
        displs = [rank * index(parts.displs, argument, "displacement") for rank in range(size)]
    else:
        displs = _indices(parts.displs, argument, "displs", size)
    return counts, displs


def _indices(values: Any, argument: str, what: str, size: int) -> list[int]:
    try:
        numbers = [index(value, argument, what) for value in values]
    except TypeError:
        raise TypeError(f"{argument}: {what} {values!r} are not whole numbers") from None
    if len(numbers) != size:
        raise ValueError(f"{argument}: {len(numbers)} {what} were given for {size} ranks")
    return numbers


def _running_sum(counts: Sequence[int]) -> list[int]:
    displs, total = [], 0
    for count in counts:
        displs.append(total)
        total += count
    return displs


def _check_blocks(available: int, counts: Sequence[int], displs: Sequence[int], argument: str, writable: bool) -> None:
    end = 0
    for displ, count in sorted((displ, count) for displ, count in zip(displs, counts, strict=True) if count):
        if displ < end and writable:
            raise ValueError(f"{argument}: blocks overlap at element {displ}")
        end = max(end, displ + count)
    if end > available:
        raise ValueError(f"{argument}: the blocks end at element {end}, the buffer at {available}")


def resolve_counts(recvcounts: Any, size: int) -> list[int]:
    """Check the `recvcounts` of Reduce_scatter."""
    return _indices(recvcounts, "recvcounts", "recvcounts", size)
