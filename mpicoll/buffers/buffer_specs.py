"""Parsing of mpi4py's buffer specifications, and the memory and the datatypes that they name."""

from __future__ import annotations

import contextlib
import operator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.buffers import dlpack

BOTTOM = np.empty(0, np.uint8)
"""Stands for MPI.BOTTOM: displacements of the datatype are absolute addresses."""
_ON_DEVICE = "copy it to the host, or choose algorithm='native' if the MPI library can use such memory"
_UNBOUNDED_NBYTES = 1 << 46


class Foreign(Exception):
    """The elements are legal for MPI, but no kernel combines them."""


class UnknownType(KeyError, TypeError):
    """Elements without an MPI datatype, or a string that is no type code; a KeyError like mpi4py's, and a TypeError."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would quote it


class ReadOnlyBuffer(ValueError, BufferError):
    """Memory that has to be written is read-only; also of the class that mpi4py raises."""


class Spec(NamedTuple):
    """A parsed buffer specification; None where the caller left something out."""

    data: Any
    counts: Any
    displs: Any
    datatype: MPI.Datatype | str | None


def take_apart(spec: Any, argument: str, *, vector: bool = False) -> Spec:
    """Parse a specification as mpi4py does; in vector collectives only a tuple is a pair (counts, displs)."""
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


def in_place(sendbuf: Any) -> bool:
    """Return True for MPI.IN_PLACE, and for None, which is the same to mpi4py wherever IN_PLACE is allowed."""
    if isinstance(sendbuf, (list, tuple)):
        return len(sendbuf) > 0 and sendbuf[0] is MPI.IN_PLACE
    return sendbuf is None or sendbuf is MPI.IN_PLACE


class DeviceMemory(TypeError):
    """The memory belongs to a device, such as a GPU; only a device-aware MPI library can use it."""


def memory_of(data: Any, argument: str, writable: bool) -> np.ndarray:
    """Return the memory of an object as an array: the buffer protocol, else DLPack, else the array interface.

    A masked array is its data, as for mpi4py: readers of files give masked arrays in which nothing is masked.

    Raises
    ------
    DeviceMemory
        For memory of a device.
    TypeError, ValueError
        For an object that is no buffer, and for a read-only buffer that has to be written.
    """
    if data is MPI.IN_PLACE:
        raise TypeError(f"{argument}: MPI.IN_PLACE is not possible here")
    if isinstance(data, np.ndarray):
        return np.ndarray.view(data, np.ndarray) if isinstance(data, np.ma.MaskedArray) else data
    if data is None or (isinstance(data, (int, float, complex)) and not isinstance(data, np.generic)):
        raise TypeError(f"{argument}: {data!r} is not a buffer")
    try:
        view = memoryview(data)
    except TypeError:
        return _shown_otherwise(data, argument)
    if writable and view.readonly:
        raise ReadOnlyBuffer(f"{argument}: the buffer is read-only")
    return array_of_view(data, view)


_UNREAD = {"g": np.dtype(np.longdouble), "u": np.dtype("U1"), "P": np.dtype(np.uintp)}
"""Elements by letters of the buffer protocol that NumPy does not read in buffers of ctypes."""


def array_of_view(data: Any, view: memoryview) -> np.ndarray:
    """Return a buffer as an array; elements that NumPy does not read, of structures of ctypes, are of void.

    Such elements can be communicated with a datatype only.
    """
    is_structure = view.format.startswith("T") or (view.format == "B" and view.itemsize != 1)
    if not is_structure:
        with contextlib.suppress(TypeError, ValueError):
            return np.asarray(view)
    memory: Any = MPI.buffer.frombuffer(data, view.readonly)
    return np.frombuffer(memory, _UNREAD.get(view.format.lstrip("<>=@"), np.dtype((np.void, view.itemsize))))


def _shown_otherwise(data: Any, argument: str) -> np.ndarray:
    """Return the memory of an object without the buffer protocol."""
    kind = type(data).__name__
    if hasattr(data, "__dlpack__") and hasattr(data, "__dlpack_device__"):
        if data.__dlpack_device__()[0] not in dlpack.HOST_DEVICES:
            raise DeviceMemory(f"{argument}: the memory of this {kind} belongs to a device; {_ON_DEVICE}")
        try:
            return dlpack.array_of_tensor(data)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TypeError(f"{argument}: {kind} cannot be communicated: {error}") from error
    if hasattr(data, "__cuda_array_interface__"):
        shown = _Shown(data)
        if not shown.is_on_host():
            raise DeviceMemory(f"{argument}: the memory of this {kind} belongs to a CUDA device; {_ON_DEVICE}")
        return np.asarray(shown)
    if hasattr(data, "__array_interface__"):
        return np.asarray(data)
    raise TypeError(f"{argument}: {kind} is not a buffer (an array, or [array, datatype])")


class _Shown:
    """NumPy's array interface for an object with CUDA's."""

    def __init__(self, data: Any) -> None:
        self._data = data
        shown = data.__cuda_array_interface__
        self.__array_interface__ = {name: shown.get(name) for name in ("shape", "typestr", "data", "strides")}
        self.__array_interface__["version"] = 3

    def is_on_host(self) -> bool:
        """Return whether the CPU can read the memory, as it can CUDA's managed memory."""
        if 0 in self.__array_interface__["shape"]:
            return True
        try:
            with Path("/proc/self/mem").open("rb", 0) as memory:
                memory.seek(self.__array_interface__["data"][0])
                return len(memory.read(1)) == 1
        except OSError:
            return False


def unbounded(pointer: MPI.buffer) -> np.ndarray:
    """Return memory from the address of `pointer` on, of unknown length, and as writable as it says."""
    memory: Any = MPI.buffer.fromaddress(pointer.address, _UNBOUNDED_NBYTES, pointer.readonly)
    return np.frombuffer(memory, np.uint8)


def is_unbounded(array: np.ndarray) -> bool:
    """Return whether `array` was made by :func:`unbounded`."""
    return array.nbytes == _UNBOUNDED_NBYTES


def is_pointer(parts: Spec) -> bool:
    """Return whether a specification is a pointer: an ``MPI.buffer`` made from an address, and counts."""
    return parts.counts is not None and is_address(parts.data)


def is_address(data: Any) -> bool:
    """Return whether `data` is an ``MPI.buffer`` that stands for an address.

    Its length may be 0, or that of the elements without the gaps between them: mpi4py does not compare it with counts.
    """
    return isinstance(data, MPI.buffer) and data.address != 0 and (data.nbytes == 0 or data.obj is None)


def datatype_of(datatype: MPI.Datatype | str, argument: str) -> MPI.Datatype:
    """Return the datatype that is given, or that a type code stands for."""
    if isinstance(datatype, str):
        try:
            datatype = MPI.Datatype.fromcode(datatype)
        except ValueError:
            raise UnknownType(f"{argument}: {datatype!r} is not a type code") from None
    if not isinstance(datatype, MPI.Datatype):
        raise TypeError(f"{argument}: {datatype!r} is not a datatype")
    if datatype == MPI.DATATYPE_NULL:
        raise ValueError(f"{argument}: the datatype is MPI.DATATYPE_NULL")
    return datatype


def index(value: Any, argument: str, what: str) -> int:
    """Return a count or displacement as an int; TypeError or ValueError unless it is a whole number from 0 on."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{argument}: {what} {value!r} is not a whole number") from None
    if number < 0:
        raise ValueError(f"{argument}: {what} {number} is negative")
    return number


def is_whole_number(value: Any) -> bool:
    """Return whether `value` is one number that can be an index, not an array or a sequence of them."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, np.ndarray) or value.ndim == 0
