"""Arguments of vector collectives: one block a rank, anywhere in a buffer."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from mpicoll.buffers.buffer_specs import Spec, datatype_of, index, is_pointer, is_whole_number, take_apart
from mpicoll.buffers.datatypes import BYTE, entry_of, is_derived
from mpicoll.buffers.flat import array_of, check_flat, resolve
from mpicoll.buffers.flat_buffer import Buffer
from mpicoll.buffers.packed_entries import pack_entries, whole_entries
from mpicoll.buffers.plain_specs import divided
from mpicoll.buffers.typemap import typemap_of


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
    """Packed copy of blocks that are not adjacent in the caller's memory."""

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
        """Copy the blocks to their places in the caller's memory."""
        self._blocks.buffer.take_in()  # what is between the blocks may have changed since
        for packed, scattered in self._pairs():
            scattered[...] = packed
        self._blocks.buffer.give_back()

    def take_in(self) -> None:
        """Pack the caller's present blocks."""
        self._blocks.buffer.take_in()
        for packed, scattered in self._pairs():
            packed[...] = scattered


def resolve_blocks(spec: Any, argument: str, size: int, *, writable: bool = True) -> Blocks:
    """Describe a buffer of a vector collective; blocks that are only read may overlap.

    As in mpi4py, a single count is that of every block, and a single displacement is the distance between blocks;
    without counts the buffer is divided evenly, and the first blocks are longer by one element if need be. Vector
    collectives only move data, so that elements of a type that no kernel knows count as bytes.

    Raises
    ------
    TypeError, ValueError
        As :func:`resolve`; also for counts that do not fit the buffer and blocks that overlap.
    """
    parts = take_apart(spec, argument, vector=True)
    if parts.datatype is not None and is_derived(datatype_of(parts.datatype, argument)):
        blocks = _derived_blocks(parts, argument, size, writable)
    else:
        blocks = _plain_blocks(parts, argument, size, writable)
    if any(blocks.counts):
        return blocks
    buffer = blocks.buffer
    return Blocks(Buffer(buffer.owner, buffer.address, 0, BYTE), blocks.counts, [0] * size)


def _plain_blocks(parts: Spec, argument: str, size: int, writable: bool) -> Blocks:
    """Describe blocks of elements of a basic type."""
    given = is_pointer(parts) or _has_a_rest(parts, argument, writable)
    buffer = _whole(parts, argument, size, writable, given)
    counts, displs = _placed(parts, argument, size, buffer.count // buffer.unit)
    is_view = isinstance(getattr(parts.data, "base", None), np.ndarray)
    if is_view and parts.counts is not None and _end(counts, displs) > buffer.count // buffer.unit:
        buffer = _whole(parts, argument, size, writable, True)  # counts may reach behind a view
    counts, displs = [buffer.unit * count for count in counts], [buffer.unit * displ for displ in displs]
    _check_blocks(buffer.count, counts, displs, argument, writable)
    return Blocks(buffer, counts, displs)


def _whole(parts: Spec, argument: str, size: int, writable: bool, as_given: bool) -> Buffer:
    """Describe the memory with all blocks: what they need, if they say so themselves, else the whole array."""
    whole = [parts.data, _end(*_placed(parts, argument, size, 0))] if as_given else [parts.data]
    whole += [] if parts.datatype is None else [parts.datatype]
    return resolve(whole if len(whole) > 1 else parts.data, argument, writable=writable, moved=True)


def _end(counts: Sequence[int], displs: Sequence[int]) -> int:
    """Return the element behind the last block that has elements."""
    return max((count + displ for count, displ in zip(counts, displs, strict=True) if count), default=0)


def _has_a_rest(parts: Spec, argument: str, writable: bool) -> bool:
    """Return whether the memory is no whole number of elements, of which counts say how many there are."""
    if parts.counts is None or parts.datatype is None:
        return False
    entry_nbytes = datatype_of(parts.datatype, argument).Get_size()
    return bool(entry_nbytes and array_of(parts, argument, writable=writable).nbytes % entry_nbytes)


def _derived_blocks(parts: Spec, argument: str, size: int, writable: bool) -> Blocks:
    """Describe blocks of entries of a derived datatype by what they are packed into."""
    assert parts.datatype is not None
    datatype, array = datatype_of(parts.datatype, argument), array_of(parts, argument, writable=writable)
    check_flat(array, argument, writable=writable)
    typemap = typemap_of(datatype)
    available = whole_entries(array, typemap, argument) if parts.counts is None else 0
    counts, displs = _placed(parts, argument, size, available)
    entry = entry_of(typemap, moved=True)
    buffer = pack_entries(array, typemap, entry, counts, displs, argument)
    elements = [count * entry.elements for count in counts]
    return Blocks(buffer, elements, [0, *accumulate(elements)][:-1])


def _placed(parts: Spec, argument: str, size: int, available: int) -> tuple[list[int], list[int]]:
    """Return counts and displacements, those left out as mpi4py makes them for so many available elements."""
    if parts.counts is None:
        counts = divided(available, size)
    elif is_whole_number(parts.counts):
        counts = [index(parts.counts, argument, "count")] * size
    else:
        counts = _indices(parts.counts, argument, "counts", size)
    if parts.displs is None:
        displs = [0, *accumulate(counts)][:-1]
    elif is_whole_number(parts.displs):
        displs = [rank * index(parts.displs, argument, "displacement") for rank in range(size)]
    else:
        # The place of a block without elements may be any number: programs write -1.
        displs = _indices(parts.displs, argument, "displs", size, [count == 0 for count in counts])
    return counts, displs


def _indices(values: Any, argument: str, what: str, size: int, any_number: Sequence[bool] = ()) -> list[int]:
    try:
        numbers = list(map(operator.index, values))
    except TypeError:
        raise TypeError(f"{argument}: {what} {values!r} are not whole numbers") from None
    if len(numbers) != size:
        raise ValueError(f"{argument}: {len(numbers)} {what} were given for {size} ranks")
    return [
        0 if any_number and any_number[rank] else index(number, argument, what) for rank, number in enumerate(numbers)
    ]


def _check_blocks(available: int, counts: Sequence[int], displs: Sequence[int], argument: str, writable: bool) -> None:
    end = 0
    for displ, count in sorted((displ, count) for displ, count in zip(displs, counts, strict=True) if count):
        if displ < end and writable:
            raise ValueError(f"{argument}: blocks overlap at element {displ}")
        end = max(end, displ + count)
    if end > available:
        raise ValueError(f"{argument}: the blocks end at element {end}, but the buffer has {available} elements")


def resolve_counts(recvcounts: Any, size: int) -> list[int]:
    """Return the `recvcounts` of Reduce_scatter as ints; TypeError or ValueError if they are wrong."""
    return _indices(recvcounts, "recvcounts", "recvcounts", size)
