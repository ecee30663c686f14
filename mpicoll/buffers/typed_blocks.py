"""Arguments of Alltoallw and Alltoallv: one block a rank, as layouts that compiled code copies."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.buffer_specs import (
    BOTTOM,
    UnknownType,
    datatype_of,
    index,
    is_address,
    is_unbounded,
    memory_of,
    unbounded,
)
from mpicoll.buffers.datatypes import Entries
from mpicoll.buffers.flat import check_flat
from mpicoll.buffers.flat_buffer import Buffer, address_of
from mpicoll.buffers.packed_entries import bounds_of
from mpicoll.buffers.plain_specs import PlainBlocks, blocks_in, key_of
from mpicoll.buffers.strided import Strided, joined
from mpicoll.buffers.typemap import EMPTY, Typemap, typemap_of
from mpicoll.buffers.vector_blocks import resolve_blocks
from mpicoll.kernels import strided_copy as words

_MAX_KNOWN = 64


class TypedBlocks(NamedTuple):
    """Blocks of an argument of Alltoallw or Alltoallv.

    Attributes
    ----------
    array, address
        The memory, and where displacements begin.
    description
        Where the blocks are from there.
    buffer
        Memory that stands in for the argument, to be given back; None for the argument itself.
    """

    array: np.ndarray
    address: int
    description: Description
    buffer: Buffer | None = None

    def entries(self, rank: int, packed: np.ndarray) -> Entries:
        """Return a rank's block as what can be packed into `packed`, and unpacked from it."""
        counts, displs, typemaps, *_ = self.description
        return Entries(typemaps[rank], self.address + displs[rank], [counts[rank]], [0], packed)


class Description(NamedTuple):
    """Counts, displacements and datatypes of blocks, without the memory.

    Attributes
    ----------
    counts, displs, typemaps
        Of each rank's block: entries, bytes from where displacements begin, and one entry's typemap.
    nbytes
        Bytes of each block, without holes.
    layouts
        The same in the words of :mod:`mpicoll.kernels.strided_copy`.
    overlaps
        Whether blocks of elements overlap.
    """

    counts: tuple[int, ...]
    displs: tuple[int, ...]
    typemaps: tuple[Typemap, ...]
    nbytes: tuple[int, ...]
    layouts: Layouts
    overlaps: bool = False


class Layouts(NamedTuple):
    """Blocks as layouts.

    Attributes
    ----------
    rows, address
        A layout for each rank, relative to where displacements begin; and where they are.
    low, high
        The first byte of all blocks, and the one behind the last.
    irregular
        Ranks whose blocks no layout describes; their rows say only how long they are.
    """

    rows: np.ndarray
    address: int
    low: int
    high: int
    irregular: tuple[int, ...]


class Descriptions:
    """Descriptions of blocks for `size` ranks; those used before are found quickly."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: dict[tuple[Any, ...], Description] = {}
        self._elements: dict[Any, Description] = {}
        """Of blocks of elements, by their specification."""
        self._last: dict[str, tuple[Any, Any, Sequence[MPI.Datatype], Description]] = {}
        """Of each argument the counts, displacements and datatypes that were given last, and what they led to."""

    def blocks(self, spec: Any, argument: str, *, writable: bool) -> TypedBlocks:
        """Read an argument as mpi4py takes it: with counts, and displacements in bytes, or with datatypes only.

        Parameters
        ----------
        spec
            ``[data, datatypes]``, ``[data, (counts, displs), datatypes]`` or ``[data, counts, displs, datatypes]``.

        Raises
        ------
        TypeError, ValueError
            Naming argument and value.
        """
        if not isinstance(spec, (list, tuple)) or not 2 <= len(spec) <= 4:
            kind = ValueError if isinstance(spec, (list, tuple)) else TypeError
            raise kind(f"{argument}: it must be [data, (counts, displs), datatypes] or [data, datatypes]")
        data, *where, datatypes = spec
        if len(where) == 1 and (not isinstance(where[0], (list, tuple)) or len(where[0]) != 2):
            kind = ValueError if isinstance(where[0], (list, tuple)) else TypeError
            raise kind(f"{argument}: {where[0]!r} is not a pair of counts and displacements")
        if not hasattr(datatypes, "__len__"):
            raise TypeError(f"{argument}: {datatypes!r} is not a sequence of datatypes")
        counts, displs = where[0] if len(where) == 1 else where or (None, None)
        if counts is None and displs is None:
            counts, displs = (1,) * self._size, (0,) * self._size
        last = self._last.get(argument)
        if last is not None and _is_same(last, counts, displs, datatypes):
            description = last[3]
        else:
            description = self._description(counts, displs, datatypes, argument)
            self._last[argument] = _copied(counts), _copied(displs), tuple(datatypes), description
        array = _memory(data, argument, writable)
        blocks = TypedBlocks(array, address_of(array) if array.size else 0, description)
        low, high = description.layouts.low, description.layouts.high
        if low < 0 or high > array.nbytes:
            _check_inside(blocks, low, high, argument)
        return blocks

    def blocks_of_elements(self, spec: Any, argument: str, *, writable: bool) -> TypedBlocks:
        """Read an argument of Alltoallv; its array has the type of the elements.

        Raises
        ------
        TypeError, ValueError
            Naming argument and value.
        """
        plain = self._plain_elements(spec, writable)
        if plain is not None:
            return plain
        blocks = resolve_blocks(spec, argument, self._size, writable=writable)
        buffer = blocks.buffer
        description = self._of_entries(blocks.counts, blocks.displs, _element(buffer.dtype), buffer.dtype.itemsize)
        return TypedBlocks(np.empty(0, buffer.dtype), buffer.address, description, buffer)

    def _plain_elements(self, spec: Any, writable: bool) -> TypedBlocks | None:
        """Read blocks in an array that need no other memory; return None for others."""
        array, key = key_of(spec)
        found = None if key is None else self._elements.get(key)
        if found is None:
            blocks = blocks_in(spec, self._size)
            if blocks is None:
                return None
            if blocks.of_entries:
                return self._entries(blocks, writable)
            array = blocks.array
            found = self._of_entries(blocks.counts, blocks.displs, _element(array.dtype), array.itemsize)
            if key is not None and len(self._elements) < _MAX_KNOWN:
                self._elements[key] = found
        if not _fits(array, found, writable):
            return None
        return TypedBlocks(array, address_of(array) if array.size else 0, found)

    def _entries(self, blocks: PlainBlocks, writable: bool) -> TypedBlocks | None:
        """Describe blocks along the first axis of a view; None if they cannot be written to and have to."""
        view = blocks.array
        runs = joined(0, view.shape[-1] * view.itemsize, view.shape[1:-1], view.strides[1:-1])
        if runs is None:
            return None
        found = self._of_entries(blocks.counts, blocks.displs, runs, view.strides[0])
        if writable and (found.overlaps or not view.flags.writeable):
            return None
        return TypedBlocks(view, view.ctypes.data, found)

    def _of_entries(self, counts: Sequence[int], displs: Sequence[int], runs: Strided, extent: int) -> Description:
        """Describe blocks whose displacements are in entries of equal runs."""
        counts, displs = tuple(counts), tuple(displs)
        key = counts, displs, runs, extent
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            typemaps = (Typemap(runs, frozenset(), extent),) * self._size
            nbytes = tuple(runs.packed_nbytes * count for count in counts)
            begins = tuple(extent * displ for displ in displs)
            ends = sorted((displ, displ + count) for displ, count in zip(displs, counts, strict=True) if count)
            overlaps = any(first[1] > second[0] for first, second in pairwise(ends))
            layouts = _layouts(counts, begins, typemaps)
            found = self._known[key] = Description(counts, begins, typemaps, nbytes, layouts, overlaps)
        return found

    def _description(self, counts: Any, displs: Any, datatypes: Any, argument: str) -> Description:
        """Return what is known of counts, displacements and datatypes, or find it out."""
        if counts is None or displs is None:
            raise ValueError(f"{argument}: counts {counts!r} and displacements {displs!r} must both be given")
        counts = _numbers(counts, argument, "counts", self._size)
        displs = _numbers(displs, argument, "displacements", self._size)
        datatypes = tuple(datatypes)
        if len(datatypes) != self._size:
            raise ValueError(f"{argument}: {len(datatypes)} datatypes, but {self._size} ranks")
        typemaps = tuple(
            EMPTY if not count and each == MPI.DATATYPE_NULL else typemap_of(datatype_of(each, argument))
            for count, each in zip(counts, datatypes, strict=True)
        )
        key = counts, displs, tuple(map(id, typemaps))  # which the description keeps alive
        found = self._known.get(key)
        if found is None:
            for count in counts:
                index(count, argument, "count")
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            nbytes = tuple(count * typemap.nbytes for count, typemap in zip(counts, typemaps, strict=True))
            layouts = _layouts(counts, displs, typemaps)
            found = self._known[key] = Description(counts, displs, typemaps, nbytes, layouts)
        return found


def _element(dtype: np.dtype) -> Strided:
    return Strided(0, dtype.itemsize, (), ())


def _fits(array: np.ndarray, description: Description, writable: bool) -> bool:
    """Return whether blocks lie in an array, and may be written to if that is asked for."""
    if writable and (description.overlaps or not array.flags.writeable):
        return False
    return description.layouts.high <= array.nbytes


def _copied(numbers: Any) -> Any:
    """Return a copy that is equal to the same list or tuple, None for anything else."""
    return type(numbers)(numbers) if type(numbers) in (list, tuple) else None


def _is_same(
    last: tuple[Any, Any, Sequence[MPI.Datatype], Description], counts: Any, displs: Any, datatypes: Any
) -> bool:
    """Return whether an argument is like the one before; the caller may have changed the lists meanwhile."""
    before = last[2]
    if last[0] is None or last[1] is None:
        return False
    if type(counts) is not type(last[0]) or type(displs) is not type(last[1]) or len(datatypes) != len(before):
        return False
    if counts != last[0] or displs != last[1]:
        return False
    return all(map(operator.is_, datatypes, before)) and all(before)  # a freed datatype is false


def _numbers(values: Any, argument: str, name: str, size: int) -> tuple[int, ...]:
    try:
        numbers = tuple(map(operator.index, values))
    except TypeError:
        raise TypeError(f"{argument}: {name} {values!r} are not whole numbers, one a rank") from None
    if len(numbers) != size:
        raise ValueError(f"{argument}: {len(numbers)} {name}, but {size} ranks")
    return numbers


def _memory(data: Any, argument: str, writable: bool) -> np.ndarray:
    if data is MPI.BOTTOM:
        return BOTTOM
    if is_address(data):
        pointer = unbounded(data)
        check_flat(pointer, argument, writable)
        return pointer
    if data is None:
        return np.empty(0, np.uint8)
    array = memory_of(data, argument, writable)
    if array.dtype.hasobject:
        raise UnknownType(f"{argument}: elements of dtype {array.dtype} cannot be communicated")
    check_flat(array, argument, writable)
    return array


def _layouts(counts: Sequence[int], displs: Sequence[int], typemaps: Sequence[Typemap]) -> Layouts:
    """Describe blocks, if possible, as runs of bytes at regular distances."""
    rows: list[list[int]] = []
    irregular, ends = [], []
    for rank, (count, displ, typemap) in enumerate(zip(counts, displs, typemaps, strict=True)):
        nbytes, layout = count * typemap.nbytes, None
        if nbytes:
            first, last = typemap.reach
            others = displ + (count - 1) * typemap.extent
            ends += [displ + first, others + first, displ + last, others + last]
            layout = _layout(typemap, count, displ)
            if layout is None:
                irregular.append(rank)
        rows.append(_row(nbytes, layout))
    table = np.array(rows, np.int64)
    return Layouts(table, table.ctypes.data, min(ends, default=0), max(ends, default=0), tuple(irregular))


def _layout(typemap: Typemap, count: int, displ: int) -> Strided | None:
    """Return `count` entries as equal runs at regular distances; None if they are none."""
    if typemap.strided is None:
        return None
    layout = typemap.strided.repeated((count, typemap.extent))
    if layout is None or len(layout.shape) > words.MAX_DIMENSIONS:
        return None
    return layout.moved(displ)


def _row(nbytes: int, layout: Strided | None) -> list[int]:
    """Return a layout as words; without one, only the length."""
    row = [0] * words.LAYOUT_WORDS
    row[words.NBYTES], row[words.RUN] = nbytes, 1
    if layout is not None:
        dimensions = len(layout.shape)
        row[words.ADDRESS], row[words.RUN], row[words.DIMENSIONS] = layout.offset, layout.nbytes, dimensions
        row[words.SHAPE : words.SHAPE + dimensions] = layout.shape
        row[words.STRIDES : words.STRIDES + dimensions] = layout.strides
    return row


def _check_inside(blocks: TypedBlocks, low: int, high: int, argument: str) -> None:
    """Refuse blocks that reach beyond the memory that the array is a part of."""
    array = blocks.array
    if low >= high or array is BOTTOM or is_unbounded(array):
        return
    first, behind = bounds_of(array)
    if not (first <= blocks.address + low and blocks.address + high <= behind):
        raise ValueError(f"{argument}: blocks reach from byte {low} to byte {high}, the array has {array.nbytes}")
