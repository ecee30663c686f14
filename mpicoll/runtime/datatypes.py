"""Derived datatypes: the one type of element in their type signature, and where the elements lie in memory.

MPI lets each rank lay out its data as it likes if the sequences of basic types are equal. Where they are all of one
type, the data are packed into an ordinary array, and the collective need not know; MPI's own Pack and Unpack do that.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI
from mpi4py.util import dtlib


def is_derived(datatype: MPI.Datatype) -> bool:
    """Return whether an entry has to be taken apart: a datatype made by the program, or a predefined pair."""
    return not datatype.is_predefined or dtlib.to_numpy_dtype(datatype).fields is not None


def element_type(datatype: MPI.Datatype) -> np.dtype | None:
    """Return the type of all elements of a datatype; None if they are of several, or if there is none."""
    found = _element_types(datatype)
    return found.pop() if len(found) == 1 else None


def _element_types(datatype: MPI.Datatype) -> set[np.dtype]:
    if datatype.is_predefined:
        dtype = dtlib.to_numpy_dtype(datatype)
        return {dtype} if dtype.fields is None else {field[0] for field in dtype.fields.values()}
    integers, _, counts, inner = datatype.Get_contents()
    lengths = [1] * len(inner)
    if datatype.combiner == MPI.COMBINER_STRUCT:
        lengths = (integers or counts)[1 : len(inner) + 1]  # large counts stand apart
    found: set[np.dtype] = set()
    for length, each in zip(lengths, inner, strict=True):
        if length:
            found |= _element_types(each)
        if not each.is_predefined:
            each.Free()  # MPI hands out a handle of its own
    return found


class Entries:
    """Entries of a datatype in memory, which can be packed and unpacked.

    Parameters
    ----------
    datatype
        May be freed while this lives.
    address
        Where displacements begin; 0 for those of MPI.BOTTOM.
    counts, displs
        Blocks of so many entries each, at so many entries from `address`.
    """

    __slots__ = ("__weakref__", "_anchor", "_datatype")

    def __init__(self, datatype: MPI.Datatype, address: int, counts: Sequence[int], displs: Sequence[int]) -> None:
        # Pack finds the number of entries by the length of the memory. All entries as one, with the extent of a byte,
        # are one entry of any byte, whatever extent and bounds the caller's datatype has.
        own = np.empty(1, np.uint8)
        base = address or own.ctypes.data
        extent = datatype.Get_extent()[1]
        blocks = datatype.Create_hindexed(counts, [address - base + extent * displ for displ in displs])
        self._datatype = blocks.Create_resized(0, 1).Commit()
        blocks.Free()
        self._anchor = MPI.buffer.fromaddress(address, 1) if address else own
        weakref.finalize(self, _free, self._datatype)

    def pack(self, packed: np.ndarray) -> None:
        """Copy the elements to a contiguous array."""
        self._datatype.Pack(self._anchor, packed.view(np.uint8), 0, MPI.COMM_SELF)

    def unpack(self, packed: np.ndarray) -> None:
        """Copy a contiguous array to where the elements are; nothing between them is written."""
        self._datatype.Unpack(packed.view(np.uint8), 0, self._anchor, MPI.COMM_SELF)


def _free(datatype: MPI.Datatype) -> None:
    if not MPI.Is_finalized():
        datatype.Free()


def reach(datatype: MPI.Datatype, counts: Sequence[int], displs: Sequence[int]) -> tuple[int, int]:
    """Return the first byte of all blocks, and the first byte behind them, counted from where displacements begin."""
    extent, (first, length) = datatype.Get_extent()[1], datatype.Get_true_extent()
    ends = [extent * each for count, displ in zip(counts, displs, strict=True) if count
            for each in (displ, displ + count - 1)]  # fmt: skip
    return (min(ends) + first, max(ends) + first + length) if ends else (0, 0)
