"""Buffer specifications as mpi4py takes them, taken apart, and the memory and the datatypes that they name."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI


class Foreign(Exception):
    """The specification is legal for mpi4py but not one that hand-written algorithms handle."""


class UnknownTypeCode(KeyError, TypeError):
    """A text that stands for no datatype; mpi4py raises KeyError."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would quote it


class Spec(NamedTuple):
    """A taken-apart buffer specification; None where the caller left something out."""

    data: Any
    counts: Any
    displs: Any
    datatype: MPI.Datatype | str | None


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


def in_place(sendbuf: Any) -> bool:
    """Return True for MPI.IN_PLACE, and for None, which is the same to mpi4py wherever IN_PLACE is allowed."""
    if isinstance(sendbuf, (list, tuple)):
        return len(sendbuf) > 0 and sendbuf[0] is MPI.IN_PLACE
    return sendbuf is None or sendbuf is MPI.IN_PLACE


def memory_of(data: Any, argument: str, writable: bool) -> np.ndarray:
    """Return any object with the buffer protocol as an array.

    Raises
    ------
    Foreign
        For what only shows its memory by DLPack or as a CUDA array, as that of a device does.
    TypeError, ValueError
        For what is no buffer, and for a read-only one that has to be written.
    """
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


def datatype_of(datatype: MPI.Datatype | str, argument: str) -> MPI.Datatype:
    """Return the datatype that is given, or that a type code stands for."""
    if isinstance(datatype, str):
        try:
            datatype = MPI.Datatype.fromcode(datatype)
        except ValueError:
            raise UnknownTypeCode(f"{argument}: {datatype!r} is not a type code") from None
    if datatype == MPI.DATATYPE_NULL:
        raise ValueError(f"{argument}: the datatype is MPI.DATATYPE_NULL")
    return datatype


def index(value: Any, argument: str, what: str) -> int:
    """Return a count or a displacement that is a whole number and not negative."""
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
