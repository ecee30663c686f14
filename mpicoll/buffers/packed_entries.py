"""Flat buffers for derived datatypes: packed copies of their entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.buffer_specs import BOTTOM, Spec, index, is_unbounded
from mpicoll.buffers.datatypes import Entries, Entry, entry_of, reach
from mpicoll.buffers.flat_buffer import Buffer, address_of
from mpicoll.buffers.typemap import Typemap, typemap_of


class PackedBuffer(Buffer):
    """Packed copy of entries of a derived datatype in the caller's memory.

    Parameters
    ----------
    memory
        Object that keeps the caller's memory alive.
    typemap, entry
        Of one entry of the datatype.
    address, counts, displs
        Of the entries, see :class:`~mpicoll.buffers.datatypes.Entries`.
    """

    __slots__ = ("_entries", "_memory")

    def __init__(
        self, memory: Any, typemap: Typemap, entry: Entry, address: int, counts: Sequence[int], displs: Sequence[int]
    ) -> None:
        packed = np.empty(sum(counts) * entry.elements, entry.dtype)
        super().__init__(packed, packed.ctypes.data, packed.size, entry.dtype, destination=packed, unit=entry.elements)
        self._memory, self._entries = memory, Entries(typemap, address, counts, displs, packed.view(np.uint8))
        self.take_in()

    def give_back(self) -> None:
        """Copy the elements to their places in the caller's memory; gaps are not written."""
        self._entries.unpack()

    def take_in(self) -> None:
        """Pack the caller's present elements."""
        self._entries.pack()


def pack_some(array: np.ndarray, parts: Spec, argument: str, blocks: int, moved: bool) -> PackedBuffer:
    """Describe `blocks` times `count` entries of a derived datatype from entry `displ` on."""
    displ = index(parts.displs, argument, "displacement") if parts.displs is not None else 0
    assert isinstance(parts.datatype, MPI.Datatype)
    typemap = typemap_of(parts.datatype)
    entry = entry_of(typemap, moved=moved)
    if parts.counts is not None:
        count = index(parts.counts, argument, "count") * blocks
    else:
        count = whole_entries(array, typemap, argument) - displ
        if count % blocks:
            raise ValueError(f"{argument}: {count} entries of the datatype cannot be divided among {blocks} ranks")
    return pack_entries(array, typemap, entry, [count], [displ], argument)


def whole_entries(array: np.ndarray, typemap: Typemap, argument: str) -> int:
    """Return the number of entries in an array, by extent, as mpi4py counts them.

    Raises
    ------
    ValueError
        If the array is no whole number of entries.
    """
    extent = typemap.extent
    if array.nbytes and (extent <= 0 or array.nbytes % extent):
        raise ValueError(f"{argument}: {array.nbytes} bytes are no whole number of entries of {extent}; give a count")
    return array.nbytes // extent if array.nbytes else 0


def pack_entries(
    array: np.ndarray,
    typemap: Typemap,
    entry: Entry,
    counts: Sequence[int],
    displs: Sequence[int],
    argument: str,
) -> PackedBuffer:
    """Describe blocks of entries; `counts` and `displs` are in entries.

    Raises
    ------
    ValueError
        If the entries reach beyond the memory that the array is a part of.
    """
    address = address_of(array) if array.size else 0
    if array is not BOTTOM and not is_unbounded(array):
        first, last = reach(typemap, counts, displs)
        low, high = bounds_of(array)
        if first < last and not (low <= address + first and address + last <= high):
            what = f"{sum(counts)} entries of the datatype reach from byte {first} to byte {last}"
            raise ValueError(f"{argument}: {what}, but the array has {array.nbytes} bytes")
    return PackedBuffer(array, typemap, entry, address, counts, displs)


def _base_of(array: np.ndarray) -> Any:
    """Return the object that `array` is a view of; of a memoryview, what that is a view of."""
    base: Any = array.base
    return base.obj if isinstance(base, memoryview) else base


def bounds_of(array: np.ndarray) -> tuple[int, int]:
    """Return the addresses of the first byte, and of the first behind the last, of what `array` is a view of.

    An entry may begin in the middle of an array and go backwards.
    """
    while isinstance(base := _base_of(array), np.ndarray):
        array = base
    if not array.size:
        return 0, 0
    spans = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    address = array.ctypes.data
    return address + sum(span for span in spans if span < 0), address + sum(s for s in spans if s > 0) + array.itemsize
