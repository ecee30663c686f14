"""Buffer arguments as flat memory: addresses, counts and element types, checked once.

mpi4py's buffer specifications are understood: an array or any object with the buffer protocol, ``[data, datatype]``,
``[data, count, datatype]``, ``[data, (count, displ), datatype]``, and with counts and displacements for the vector
forms. What does not lie in one piece (strided arrays, derived datatypes) is stood in for by a contiguous copy. What has
no element type of ours is reported by :class:`~mpicoll.runtime.specs.Foreign`; such calls go to the MPI library as they
are. Which these are is decided by the type signature, which MPI requires to be equal on all ranks, wherever that can be
known; see :func:`mpicoll.collectives.call.native` for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes  # noqa: F401  (makes np.dtype("bfloat16") known)
import numpy as np
from mpi4py import MPI
from mpi4py.util import dtlib

from mpicoll.runtime.datatypes import Entries, element_type, is_derived, reach
from mpicoll.runtime.specs import Foreign, Spec, datatype_of, index, memory_of, take_apart

_KINDS = frozenset("biufc")
_REFUSED = frozenset("OSUVMm")
_BFLOAT16 = np.dtype("bfloat16")
_BOTTOM = np.empty(0, np.uint8)
"""Stands for all memory: the datatype has absolute addresses."""


class Buffer:
    """One argument as flat memory.

    Attributes
    ----------
    address, count, dtype
        Where the elements are, how many, and their type in native byte order.
    nbytes
        ``count * dtype.itemsize``.
    owner
        Keeps the memory alive.
    destination
        None, or the caller's array if the elements stand in for it in a contiguous copy; see :meth:`give_back`.
    """

    __slots__ = ("address", "count", "destination", "dtype", "nbytes", "order", "owner")

    def __init__(
        self,
        owner: Any,
        address: int,
        count: int,
        dtype: np.dtype[Any],
        *,
        destination: np.ndarray | None = None,
        order: str = "",
    ) -> None:
        self.owner = owner
        self.address = address
        self.count = count
        self.dtype = dtype
        self.nbytes = count * dtype.itemsize
        self.destination = destination
        self.order = order
        """"C" or "F" for arrays whose memory order matters, "" for flat memory."""

    def give_back(self) -> None:
        """Copy the result into the caller's array, if the elements stand in for it."""
        if self.destination is not None:
            self.destination[...] = self.owner

    def take_in(self) -> None:
        """Copy the caller's present data into the stand-in; persistent operations do so at each start."""
        if self.destination is not None:
            self.owner[...] = self.destination

    def reorder(self) -> bool:
        """Let the stand-in lie in memory in the other order; return whether there is one."""
        if self.destination is None:
            return False
        self.owner = np.array(self.destination, dtype=self.dtype, order="F" if self.order == "C" else "C")
        self.address, self.order = self.owner.ctypes.data, _order(self.owner)
        return True

    def view(self, dtype: np.dtype[Any]) -> np.ndarray:
        """Return the memory as a flat array of `dtype`, which has the elements' item size."""
        return view_at(self.address, self.count, dtype)


class PackedBuffer(Buffer):
    """Stands in, packed, for the elements of a derived datatype in the caller's memory.

    Parameters
    ----------
    memory
        Keeps the caller's memory alive.
    entries
        Where the `count` elements of type `dtype` are.
    """

    __slots__ = ("_entries", "_memory")

    def __init__(self, memory: Any, entries: Entries, count: int, dtype: np.dtype[Any]) -> None:
        packed = np.empty(count, dtype)
        super().__init__(packed, packed.ctypes.data, count, dtype, destination=packed)
        self._memory, self._entries = memory, entries
        self.take_in()

    def give_back(self) -> None:
        """Copy the elements to where the datatype says, and nothing to where it has holes."""
        self._entries.unpack(self.owner)

    def take_in(self) -> None:
        """Copy the caller's present elements."""
        self._entries.pack(self.owner)


def view_at(address: int, count: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Return `count` elements at `address` as an array that does not own them."""
    if count == 0:
        return np.empty(0, dtype)
    memory: Any = MPI.buffer.fromaddress(address, count * dtype.itemsize)
    return np.frombuffer(memory, dtype)


def _element_dtype(dtype: np.dtype[Any], argument: str) -> np.dtype[Any]:
    if dtype == _BFLOAT16:
        return _BFLOAT16
    if dtype.kind in _REFUSED:
        raise TypeError(f"{argument}: elements of dtype {dtype} cannot be communicated")
    if dtype.kind not in _KINDS or dtype.itemsize > 16 or dtype.char in "gG":
        raise Foreign
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def from_array(array: np.ndarray, argument: str, writable: bool) -> Buffer:
    """Describe an array; one that is not contiguous, misaligned or byte-swapped is stood in for by a copy."""
    dtype = _element_dtype(array.dtype, argument)
    flags = array.flags
    if writable and not flags.writeable:
        raise ValueError(f"{argument}: the array is read-only")
    if (flags.c_contiguous or flags.f_contiguous) and flags.aligned and array.dtype.isnative:
        return Buffer(array, _address(array), array.size, dtype, order=_order(array))
    if writable and 0 in array.strides and array.size > 1:
        raise ValueError(f"{argument}: the array is a broadcast view, whose elements share memory")
    copy = np.array(array, dtype=dtype, order="K")
    if not (copy.flags.c_contiguous or copy.flags.f_contiguous):
        copy = np.array(array, dtype=dtype, order="C")
    return Buffer(copy, copy.ctypes.data, copy.size, dtype, destination=array, order=_order(copy))


def _order(array: np.ndarray) -> str:
    """Return "C" or "F" for a contiguous array, "" if both are the same or if it is not contiguous."""
    flags = array.flags
    return "" if flags.c_contiguous == flags.f_contiguous else "C" if flags.c_contiguous else "F"


def _address(array: np.ndarray) -> int:
    """Return where contiguous memory begins; much quicker than ``array.ctypes.data``."""
    return MPI.buffer.frombuffer(array if array.flags.c_contiguous else array.T, readonly=True).address


def _known(dtype: np.dtype[Any], argument: str) -> np.dtype[Any]:
    """Return the element type of a datatype; what NumPy cannot name is foreign."""
    if dtype.kind == "S":
        return np.dtype(np.int8)
    if dtype.kind not in _KINDS:
        raise Foreign
    return _element_dtype(dtype, argument)


def resolve(spec: Any, argument: str, *, writable: bool, blocks: int = 1) -> Buffer:
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
        How many blocks of the given count there are: as in mpi4py, a count in a buffer of one block a rank is that of
        a single block.

    Raises
    ------
    Foreign
        If only the MPI library can handle it.
    TypeError, ValueError
        Naming argument and value.
    """
    if type(spec) is np.ndarray:
        return from_array(spec, argument, writable)
    parts = take_apart(spec, argument)
    if isinstance(parts.counts, (list, tuple)) or np.ndim(parts.counts):
        raise TypeError(f"{argument}: counts {parts.counts!r} make sense in vector collectives only")
    array = array_of(parts, argument, writable)
    if parts.counts is None and parts.datatype is None:
        return from_array(array, argument, writable)
    check_flat(array, argument, writable)
    if parts.datatype is not None and not array.dtype.hasobject:
        datatype = datatype_of(parts.datatype, argument)
        if is_derived(datatype):
            return _derived(array, parts._replace(datatype=datatype), argument, blocks)
        dtype = _known(dtlib.to_numpy_dtype(datatype), argument)
    elif array.dtype.isnative:
        dtype = _element_dtype(array.dtype, argument)
    else:
        raise TypeError(f"{argument}: a byte-swapped array ({array.dtype.str}) with a count needs a datatype as well")
    return _part(array, dtype, parts, argument, blocks)


def array_of(parts: Spec, argument: str, writable: bool) -> np.ndarray:
    """Return the memory of a specification; that of MPI.BOTTOM and of no elements at all is empty."""
    if parts.data is MPI.BOTTOM:
        if parts.datatype is None:
            raise TypeError(f"{argument}: MPI.BOTTOM needs a datatype")
        return _BOTTOM
    if parts.data is None and (parts.datatype is not None or parts.counts == 0):
        return np.empty(0)
    return memory_of(parts.data, argument, writable)


def check_flat(array: np.ndarray, argument: str, writable: bool) -> None:
    """Refuse an array that is not contiguous, or that has to be written and cannot be."""
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise TypeError(f"{argument}: an array with an explicit count or datatype must be contiguous")
    if writable and not array.flags.writeable:
        raise ValueError(f"{argument}: the array is read-only")


def _part(array: np.ndarray, dtype: np.dtype[Any], parts: Spec, argument: str, blocks: int) -> Buffer:
    """Describe `blocks` times `count` elements of contiguous memory from element `displ` on."""
    if array is _BOTTOM and parts.counts:
        raise Foreign  # memory at the address 0
    displ = index(parts.displs, argument, "displacement") if parts.displs is not None else 0
    available = array.nbytes // dtype.itemsize - displ
    if parts.counts is None and array.nbytes % dtype.itemsize:
        raise ValueError(f"{argument}: {array.nbytes} bytes are no whole number of {dtype}")
    count = available if parts.counts is None else index(parts.counts, argument, "count") * blocks
    if not 0 <= count <= available:
        raise ValueError(
            f"{argument}: {max(count, 0)} elements of {dtype} from {displ} on do not fit in {array.nbytes} bytes"
        )
    address = _address(array) + displ * dtype.itemsize
    if address % dtype.alignment and count:
        flat = (array if array.flags.c_contiguous else array.T).reshape(-1).view(np.uint8)
        part = flat[displ * dtype.itemsize :][: count * dtype.itemsize].view(dtype)
        copy = part.copy()
        return Buffer(copy, copy.ctypes.data, count, dtype, destination=part)
    return Buffer(array, address, count, dtype)


def _derived(array: np.ndarray, parts: Spec, argument: str, blocks: int) -> PackedBuffer:
    """Describe `blocks` times `count` entries of a derived datatype from entry `displ` on."""
    displ = index(parts.displs, argument, "displacement") if parts.displs is not None else 0
    assert isinstance(parts.datatype, MPI.Datatype)
    if parts.counts is not None:
        count = index(parts.counts, argument, "count") * blocks
    else:
        count = whole_entries(array, parts.datatype, argument) - displ
        if count % blocks:
            raise ValueError(f"{argument}: {count} entries of the datatype cannot be divided among {blocks} ranks")
    return pack_entries(array, parts.datatype, [count], [displ], argument)


def whole_entries(array: np.ndarray, datatype: MPI.Datatype, argument: str) -> int:
    """Return how many entries make up an array, as mpi4py counts them: by extent."""
    extent = datatype.Get_extent()[1]
    if array.nbytes and (extent <= 0 or array.nbytes % extent):
        raise ValueError(f"{argument}: {array.nbytes} bytes are no whole number of entries of {extent}; give a count")
    return array.nbytes // extent if array.nbytes else 0


def pack_entries(
    array: np.ndarray, datatype: MPI.Datatype, counts: Sequence[int], displs: Sequence[int], argument: str
) -> PackedBuffer:
    """Describe blocks of entries; `counts` and `displs` are in entries.

    Raises
    ------
    Foreign
        If the elements are of several types, or of one that is not ours.
    ValueError
        If the entries reach beyond the memory that the array is a part of.
    """
    dtype = element_type(datatype)
    if dtype is None:
        raise Foreign
    dtype = _known(dtype, argument)
    address = _address(array) if array is not _BOTTOM and array.size else 0
    if array is not _BOTTOM:
        first, last = reach(datatype, counts, displs)
        low, high = _bounds(array)
        if first < last and not (low <= address + first and address + last <= high):
            what = f"{sum(counts)} entries of the datatype reach from byte {first} to byte {last}"
            raise ValueError(f"{argument}: {what}, the array has {array.nbytes}")
    count = sum(counts) * (datatype.Get_size() // dtype.itemsize)
    return PackedBuffer(array, Entries(datatype, address, counts, displs), count, dtype)


def _bounds(array: np.ndarray) -> tuple[int, int]:
    """Return the addresses of the first byte, and of the first behind the last, of what `array` is a view of.

    An entry may begin in the middle of an array and go backwards.
    """
    while isinstance(array.base, np.ndarray):
        array = array.base
    if not array.size:
        return 0, 0
    spans = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    address = array.ctypes.data
    return address + sum(span for span in spans if span < 0), address + sum(s for s in spans if s > 0) + array.itemsize


def check_alike(send: Buffer, recv: Buffer) -> None:
    """Refuse a pair of buffers of different type, or of different memory order."""
    if send.dtype != recv.dtype:
        raise ValueError(f"sendbuf has elements of {send.dtype}, but recvbuf of {recv.dtype}")
    if send.order and recv.order and send.order != recv.order and not (send.reorder() or recv.reorder()):
        raise TypeError("sendbuf and recvbuf lie in memory in different order (C and Fortran)")


def check_apart(send: Buffer, recv: Buffer) -> None:
    """Refuse buffers that overlap; the very same memory has been taken for IN_PLACE before."""
    if send.destination is not None or recv.destination is not None:
        return  # one of them is a copy
    if send.address < recv.address + recv.nbytes and recv.address < send.address + send.nbytes:
        raise ValueError("sendbuf and recvbuf overlap in memory")
