"""Datatypes: the elements of their type signatures, and the packing of entries that are not contiguous.

MPI requires equal type signatures (sequences of basic types) on all ranks, but not equal layouts. A call is therefore
described by its type signature only. If all its basic types are one that kernels know, an entry counts as elements of
that type. Otherwise (long double, structures of several types) it counts as bytes, which collectives can move but not
reduce. Entries that are not contiguous are packed into an ordinary array before the collective, and unpacked after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (makes np.dtype("bfloat16") known)
import numpy as np
from mpi4py import MPI

from mpicoll.buffers.buffer_specs import Foreign, UnknownType
from mpicoll.buffers.typemap import Typemap, named

BYTE = np.dtype(np.uint8)
_KINDS = frozenset("biufc")
_REFUSED = frozenset("OSUVMm")
_BFLOAT16 = np.dtype("bfloat16")


class Entry(NamedTuple):
    """One entry of a datatype as it is communicated: `elements` elements of type `dtype`."""

    dtype: np.dtype
    elements: int

    @property
    def nbytes(self) -> int:
        """Bytes of an entry, without gaps."""
        return self.dtype.itemsize * self.elements


def entry_of_array(dtype: np.dtype, argument: str, *, moved: bool) -> Entry:
    """Describe one element of an array.

    Parameters
    ----------
    moved
        Whether the collective only moves data; then elements of a type that no kernel knows count as bytes.

    Raises
    ------
    Foreign
        For elements to be reduced that only the MPI library can reduce.
    UnknownType
        For elements that have no MPI datatype.
    """
    is_text = dtype.kind in "SU" and dtype.itemsize == np.dtype(f"{dtype.kind}1").itemsize
    if dtype.kind in _REFUSED and dtype != _BFLOAT16 and not is_text:
        raise UnknownType(f"{argument}: elements of dtype {dtype} cannot be communicated")
    return _entry(frozenset([dtype]), dtype.itemsize, moved)


def entry_of(typemap: Typemap, *, moved: bool) -> Entry:
    """Describe one entry of a datatype; see :func:`entry_of_array`."""
    made: Entry | None = typemap.entries.get(moved)
    if made is None:
        made = typemap.entries[moved] = _entry(typemap.types, typemap.nbytes, moved)
    return made


def _entry(found: frozenset[np.dtype], nbytes: int, moved: bool) -> Entry:
    known = _in_kernels(*found) if len(found) == 1 else None
    if known is not None:
        return Entry(known, nbytes // known.itemsize)
    if not moved:
        raise Foreign
    return Entry(BYTE, nbytes)


def _in_kernels(dtype: np.dtype) -> np.dtype | None:
    """Return the type in which kernels see elements of a basic type; None if they do not know it."""
    if dtype == _BFLOAT16:
        return _BFLOAT16
    if dtype.kind == "S":
        return np.dtype(np.int8)  # MPI_CHAR
    if dtype.kind not in _KINDS or dtype.itemsize > 16 or dtype.char in "gG":
        return None
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def is_derived(datatype: MPI.Datatype) -> bool:
    """Return whether entries have to be packed: true of derived datatypes and of predefined pairs."""
    return not datatype.is_predefined or named(datatype).fields is not None


def reach(typemap: Typemap, counts: Sequence[int], displs: Sequence[int]) -> tuple[int, int]:
    """Return the offsets of the first byte of all blocks and of the first byte after them; displacement 0 is at 0."""
    first, last = typemap.reach
    ends = [typemap.extent * each for count, displ in zip(counts, displs, strict=True) if count
            for each in (displ, displ + count - 1)]  # fmt: skip
    return (min(ends) + first, max(ends) + last) if ends and first < last else (0, 0)


class _Copy(NamedTuple):
    """Words of packed memory, and the same in the caller's: at `places`, or all of them."""

    packed: np.ndarray
    memory: np.ndarray
    places: np.ndarray | None


class Entries:
    """Blocks of entries of a datatype in memory, and their packing.

    Parameters
    ----------
    address
        The address of displacement 0; 0 for MPI.BOTTOM.
    counts, displs
        The length of each block and its distance from `address`, in entries.
    packed
        Contiguous memory for the elements.
    """

    __slots__ = ("_copies", "_first", "_memory", "_packed", "_typemap", "_unit")

    def __init__(
        self, typemap: Typemap, address: int, counts: Sequence[int], displs: Sequence[int], packed: np.ndarray
    ) -> None:
        self._typemap, self._packed = typemap, packed
        self._first, last = reach(typemap, counts, displs)
        self._memory: Any = MPI.buffer.fromaddress(address + self._first, last - self._first)
        self._unit = math.gcd(8, typemap.alignment(), typemap.extent, address)
        self._copies: list[_Copy] = []
        done = 0
        for count, displ in zip(counts, displs, strict=True):
            if count and typemap.nbytes:
                self._copies += self._copies_of(count, displ * typemap.extent - self._first, done)
                done += count * typemap.nbytes

    def _copies_of(self, count: int, begin: int, done: int) -> list[_Copy]:
        """Return the copies of a block, which begins so many bytes into the memory, and into the packed memory."""
        pieces = self._typemap.pieces
        if pieces is None:
            return [self._irregular(count, begin, done)]
        made, extent, nbytes, unit = [], self._typemap.extent, self._typemap.nbytes, self._unit
        for piece in pieces:
            shape = (count, *piece.shape, piece.nbytes // unit)
            strides = [unit * math.prod(shape[place + 1 :]) for place in range(1, len(shape))]
            packed = self._words(self._packed, done, shape, (nbytes, *strides))
            made.append(
                _Copy(
                    packed, self._words(self._memory, begin + piece.offset, shape, (extent, *piece.strides, unit)), None
                )
            )
            done += piece.packed_nbytes
        return made

    def _irregular(self, count: int, begin: int, done: int) -> _Copy:
        typemap, unit = self._typemap, self._unit
        words = typemap.lengths // unit
        within = np.repeat(typemap.offsets // unit - (np.cumsum(words) - words), words) + np.arange(words.sum())
        index = (begin // unit + typemap.extent // unit * np.arange(count)[:, None] + within).ravel()
        packed = self._words(self._packed, done, index.shape, (unit,))
        return _Copy(packed, np.frombuffer(self._memory, packed.dtype), index)

    def _words(self, memory: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
        return np.ndarray(shape, f"u{self._unit}", memory, offset, strides)

    def pack(self) -> None:
        """Copy the elements to the packed memory."""
        for copy in self._copies:
            copy.packed[...] = copy.memory if copy.places is None else copy.memory[copy.places]

    def unpack(self) -> None:
        """Copy the packed elements to their places; gaps between them are not written."""
        for copy in self._copies:
            copy.memory[... if copy.places is None else copy.places] = copy.packed
