"""Buffer arguments as flat memory: addresses, counts and element types, checked once.

mpi4py's buffer specifications are accepted: an array or any object that exposes its memory, ``[data, datatype]``,
``[data, count, datatype]``, ``[data, (count, displ), datatype]``, and with counts and displacements for the vector
forms. Memory that is not contiguous (strided arrays, derived datatypes) is replaced with a contiguous copy.

A description contains the type signature, which MPI requires to be equal on all ranks, and not the layout: elements of
the only type in the signature, or bytes if there are several types, or one that no kernel knows. Bytes can only be
moved. If such elements are to be reduced, :class:`~mpicoll.buffers.buffer_specs.Foreign` is raised, and the call goes
to the MPI library; all ranks give the same datatype to a reduction, so all of them do so. Buffers of zero elements
match any type.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.buffer_specs import (
    BOTTOM,
    ReadOnlyBuffer,
    Spec,
    datatype_of,
    index,
    is_pointer,
    memory_of,
    take_apart,
    unbounded,
)
from mpicoll.buffers.datatypes import BYTE, Entry, entry_of, entry_of_array, is_derived
from mpicoll.buffers.flat_buffer import Buffer, address_of, order_of, view_at
from mpicoll.buffers.packed_entries import bounds_of, pack_some
from mpicoll.buffers.typemap import typemap_of


def from_array(array: np.ndarray, argument: str, writable: bool, *, moved: bool = False) -> Buffer:
    """Describe an array; one that is not contiguous, not aligned or byte-swapped is replaced with a copy."""
    entry = entry_of_array(array.dtype, argument, moved=moved)
    flags = array.flags
    if writable and not flags.writeable:
        raise ReadOnlyBuffer(f"{argument}: the array is read-only")
    count, unit = array.size * entry.elements, entry.elements
    is_recast = unit != 1 or entry.dtype.kind != array.dtype.kind
    if (flags.c_contiguous or flags.f_contiguous) and flags.aligned and array.dtype.isnative:
        order = order_of(array)
        return Buffer(array, address_of(array), count, entry.dtype, order=order, unit=unit, is_recast=is_recast)
    if writable and 0 in array.strides and array.size > 1:
        raise ValueError(f"{argument}: the array is a broadcast view, whose elements share memory")
    dtype = array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")
    copy = np.array(array, dtype=dtype, order="K")
    if not (copy.flags.c_contiguous or copy.flags.f_contiguous):
        copy = np.array(array, dtype=dtype, order="C")
    order, address = order_of(copy), copy.ctypes.data
    return Buffer(copy, address, count, entry.dtype, destination=array, order=order, unit=unit, is_recast=is_recast)


def resolve(spec: Any, argument: str, *, writable: bool, blocks: int = 1, moved: bool = False) -> Buffer:
    """Describe one argument of a collective.

    Parameters
    ----------
    spec
        An array or a specification as mpi4py takes it.
    argument
        Its name, for error messages.
    writable
        Whether the collective writes to it.
    blocks
        The number of blocks of the given count: as in mpi4py, a count in a buffer of one block a rank is that of a
        single block.
    moved
        Whether the collective only moves data. Then elements of a type that no kernel knows count as bytes, and so
        does a buffer of zero elements.

    Raises
    ------
    Foreign
        For elements to be reduced that only the MPI library can reduce.
    TypeError, ValueError
        If the specification is wrong; the message names argument and value.
    """
    buffer = _resolve(spec, argument, writable, blocks, moved)
    if moved and buffer.count == 0:
        return Buffer(buffer.owner, buffer.address, 0, BYTE, is_recast=True)
    return buffer


def _resolve(spec: Any, argument: str, writable: bool, blocks: int, moved: bool) -> Buffer:
    if type(spec) is np.ndarray:
        return from_array(spec, argument, writable, moved=moved)
    parts = take_apart(spec, argument)
    if isinstance(parts.counts, (list, tuple)) or np.ndim(parts.counts):
        raise TypeError(f"{argument}: counts {parts.counts!r} are for vector collectives only; give one count")
    array = array_of(parts, argument, writable)
    if parts.counts is None and parts.displs is None and parts.datatype is None:
        return from_array(array, argument, writable, moved=moved)
    check_flat(array, argument, writable)
    if parts.datatype is not None and not array.dtype.hasobject:
        datatype = datatype_of(parts.datatype, argument)
        if is_derived(datatype):
            return pack_some(array, parts._replace(datatype=datatype), argument, blocks, moved)
        entry = entry_of(typemap_of(datatype), moved=moved)
    elif array.dtype.isnative:
        entry = entry_of_array(array.dtype, argument, moved=moved)
    else:
        raise TypeError(f"{argument}: a byte-swapped array ({array.dtype.str}) with a count needs a datatype as well")
    return _part(array, entry, parts, argument, blocks)


def array_of(parts: Spec, argument: str, writable: bool) -> np.ndarray:
    """Return the memory of a specification; an empty array for MPI.BOTTOM and for zero elements."""
    if parts.data is MPI.BOTTOM:
        if parts.datatype is None:
            raise TypeError(f"{argument}: MPI.BOTTOM needs a datatype")
        return BOTTOM
    if parts.data is None and (parts.datatype is not None or parts.counts == 0):
        return np.empty(0)
    return unbounded(parts.data) if is_pointer(parts) else memory_of(parts.data, argument, writable)


def check_flat(array: np.ndarray, argument: str, writable: bool) -> None:
    """Raise TypeError if an array is not contiguous, ValueError if it has to be written and is read-only."""
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise TypeError(f"{argument}: an array with an explicit count or datatype must be contiguous")
    if writable and not array.flags.writeable:
        raise ReadOnlyBuffer(f"{argument}: the array is read-only")


def _part(array: np.ndarray, entry: Entry, parts: Spec, argument: str, blocks: int) -> Buffer:
    """Describe `blocks` times `count` elements of contiguous memory from element `displ` on.

    A count may reach behind an array that is a view, to the end of the memory that it is a view of: ``A[1]`` with a
    count of two rows is what ``&A[1][0]`` is in C.
    """
    displ = index(parts.displs, argument, "displacement") if parts.displs is not None else 0
    available = array.nbytes // entry.nbytes - displ
    if parts.counts is None and array.nbytes % entry.nbytes:
        raise ValueError(f"{argument}: {array.nbytes} bytes are no whole number of elements of {entry.nbytes} bytes")
    count = available if parts.counts is None else index(parts.counts, argument, "count") * blocks
    if count > available and array is not BOTTOM and isinstance(array.base, np.ndarray):
        available = (bounds_of(array)[1] - address_of(array)) // entry.nbytes - displ
    if not 0 <= count <= available:
        if array is BOTTOM:
            raise ValueError(f"{argument}: MPI.BOTTOM needs a datatype of absolute addresses")
        what = f"{max(count, 0)} elements of {entry.dtype if entry.elements == 1 else f'{entry.nbytes} bytes'}"
        raise ValueError(f"{argument}: {what} from {displ} on do not fit in {array.nbytes} bytes")
    address = address_of(array) + displ * entry.nbytes
    if address % entry.dtype.alignment and count:
        part = view_at(address, count * entry.nbytes, BYTE).view(entry.dtype)
        copy = part.copy()
        return Buffer(copy, copy.ctypes.data, count * entry.elements, entry.dtype, destination=part)
    return Buffer(array, address, count * entry.elements, entry.dtype, unit=entry.elements)
