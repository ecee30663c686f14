"""What the caller passed, as flat memory: addresses, counts and element types, checked once.

mpi4py's buffer specifications are understood: an array or any object with the buffer protocol, ``[data, datatype]``,
``[data, count, datatype]``, ``[data, (count, displ), datatype]``, and with counts and displacements for the vector
forms. What has no element type of ours (derived datatypes, long double, memory on other devices) is reported by
:class:`Foreign`; such calls go to the MPI library as they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (makes np.dtype("bfloat16") known)
import numpy as np
from mpi4py import MPI
from mpi4py.util import dtlib

_KINDS = frozenset("biufc")
_REFUSED = frozenset("OSUVMm")
_BFLOAT16 = np.dtype("bfloat16")


class Foreign(Exception):
    """The specification is legal for mpi4py but not one that hand-written algorithms handle."""


class Spec(NamedTuple):
    """A taken-apart buffer specification; None where the caller left something out."""

    data: Any
    counts: Any
    displs: Any
    datatype: MPI.Datatype | str | None


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


def take_apart(spec: Any, argument: str, *, vector: bool = False) -> Spec:
    """Split a specification as mpi4py does; in vector collectives only a tuple is a pair (counts, displs)."""
    if not isinstance(spec, (list, tuple)):
        return Spec(spec, None, None, None)
    parts = list(spec)
    if not 2 <= len(parts) <= 4:
        raise ValueError(f"{argument}: a buffer specification has 2 to 4 items, not {len(parts)}")
    datatype: Any = None
    if len(parts) > 2 or isinstance(parts[1], (MPI.Datatype, str)):
        datatype = parts.pop()
    data, counts, displs = (*parts, None, None)[:3]
    pair = tuple if vector else (tuple, list)
    if displs is None and isinstance(counts, pair) and len(counts) == 2:
        counts, displs = counts
    if datatype is not None and not isinstance(datatype, (MPI.Datatype, str)):
        raise TypeError(f"{argument}: {datatype!r} is not a datatype")
    return Spec(data, counts, displs, datatype)


def _datatype_dtype(datatype: MPI.Datatype | str, argument: str) -> np.dtype[Any]:
    if isinstance(datatype, str):
        try:
            datatype = MPI.Datatype.fromcode(datatype)
        except ValueError:
            raise TypeError(f"{argument}: {datatype!r} is not a type code") from None
    if datatype == MPI.DATATYPE_NULL:
        raise TypeError(f"{argument}: the datatype is MPI.DATATYPE_NULL")
    if not datatype.is_predefined:
        raise Foreign
    dtype = dtlib.to_numpy_dtype(datatype)
    if dtype.kind == "S":
        return np.dtype(np.int8)
    if dtype.kind not in _KINDS:
        raise Foreign
    return _element_dtype(dtype, argument)


def _memory(data: Any, argument: str, writable: bool) -> np.ndarray:
    """Return any object with the buffer protocol as an array."""
    if isinstance(data, np.ma.MaskedArray):
        raise TypeError(f"{argument}: a masked array cannot be communicated; pass its data")
    if isinstance(data, np.ndarray):
        return data
    if data is None or (isinstance(data, (int, float, complex)) and not isinstance(data, np.generic)):
        raise TypeError(f"{argument}: {data!r} is not a buffer")
    if hasattr(data, "__cuda_array_interface__"):
        raise Foreign
    try:
        view = memoryview(data)
    except TypeError:
        if hasattr(data, "__dlpack__"):
            raise Foreign from None
        raise TypeError(f"{argument}: {type(data).__name__} is not a buffer (an array, or [array, datatype])") from None
    if writable and view.readonly:
        raise ValueError(f"{argument}: the buffer is read-only")
    return np.asarray(view)


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
    if parts.data is MPI.BOTTOM:
        raise Foreign
    nothing = parts.data is None and (parts.datatype is not None or parts.counts == 0)
    array = np.empty(0) if nothing else _memory(parts.data, argument, writable)
    if parts.counts is None and parts.datatype is None:
        return from_array(array, argument, writable)
    if isinstance(parts.counts, (list, tuple, np.ndarray)):
        raise TypeError(f"{argument}: counts {parts.counts!r} make sense in vector collectives only")
    return _part(array, parts, argument, writable, blocks)


def _part(array: np.ndarray, parts: Spec, argument: str, writable: bool, blocks: int) -> Buffer:
    """Describe `blocks` times `count` elements of contiguous memory from element `displ` on, as the given datatype."""
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise TypeError(f"{argument}: an array with an explicit count or datatype must be contiguous")
    if writable and not array.flags.writeable:
        raise ValueError(f"{argument}: the array is read-only")
    if parts.datatype is not None and not array.dtype.hasobject:
        dtype = _datatype_dtype(parts.datatype, argument)
    elif array.dtype.isnative:
        dtype = _element_dtype(array.dtype, argument)
    else:
        raise TypeError(f"{argument}: a byte-swapped array ({array.dtype.str}) with a count needs a datatype as well")
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


def index(value: Any, argument: str, what: str) -> int:
    """Return a count or a displacement that is a whole number and not negative."""
    try:
        number = int(value.__index__())
    except (AttributeError, TypeError):
        raise TypeError(f"{argument}: {what} {value!r} is not a whole number") from None
    if number < 0:
        raise ValueError(f"{argument}: {what} {number} is negative")
    return number


def check_alike(send: Buffer, recv: Buffer) -> None:
    """Refuse a pair of buffers of different type, or of different memory order."""
    if send.dtype != recv.dtype:
        raise TypeError(f"sendbuf has elements of {send.dtype}, but recvbuf of {recv.dtype}")
    if send.order and recv.order and send.order != recv.order and not (send.reorder() or recv.reorder()):
        raise TypeError("sendbuf and recvbuf lie in memory in different order (C and Fortran)")


def check_apart(send: Buffer, recv: Buffer) -> None:
    """Refuse buffers that overlap; the very same memory has been taken for IN_PLACE before."""
    if send.destination is not None or recv.destination is not None:
        return  # one of them is a copy
    if send.address < recv.address + recv.nbytes and recv.address < send.address + send.nbytes:
        raise ValueError("sendbuf and recvbuf overlap in memory")
