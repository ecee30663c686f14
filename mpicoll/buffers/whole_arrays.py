"""Buffer specifications that name a whole array and its own element type, such as ``[array, MPI.DOUBLE]``.

They describe the same buffer as the array alone, which compiled code recognises; so do arrays of a subclass, and
NumPy's scalars to send.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from mpi4py import MPI
from mpi4py.util.dtlib import to_numpy_dtype

_DATATYPES = (
    *("SIGNED_CHAR", "SHORT", "INT", "LONG", "LONG_LONG"),
    *("UNSIGNED_CHAR", "UNSIGNED_SHORT", "UNSIGNED", "UNSIGNED_LONG", "UNSIGNED_LONG_LONG"),
    *("INT8_T", "INT16_T", "INT32_T", "INT64_T", "UINT8_T", "UINT16_T", "UINT32_T", "UINT64_T"),
    *("FLOAT", "DOUBLE", "C_BOOL", "C_FLOAT_COMPLEX", "C_DOUBLE_COMPLEX", "COMPLEX", "DOUBLE_COMPLEX"),
)
"""C's types of one element. MPI.BYTE is none of them: it cannot be added."""
_ONE_VECTOR = ("allreduce", "reduce", "bcast", "scan", "exscan")
"""Collectives in which a count is that of the whole buffer, not of a block."""


def whole_arrays(collective: str, sendbuf: Any, recvbuf: Any) -> tuple[Any, Any] | None:
    """Return both buffers with plain arrays in place of specifications, of subclasses, and of scalars to send.

    Returns
    -------
    None if there is nothing to replace, or if a specification says something else than its array.
    """
    counted = collective in _ONE_VECTOR
    send, recv = _whole(sendbuf, counted, True), _whole(recvbuf, counted, False)
    if send is Ellipsis or recv is Ellipsis or (send is sendbuf and recv is recvbuf):
        return None
    return send, recv


def _whole(spec: Any, counted: bool, sent: bool) -> Any:
    """Return the array of a specification; Ellipsis if the specification is not that of the whole array."""
    if not isinstance(spec, (list, tuple)):
        return _plain(spec, sent)
    counts = spec[1:-1] if counted else ()
    if len(spec) != 2 + len(counts) or len(counts) > 1:
        return Ellipsis
    array, datatype = _plain(spec[0], sent), spec[-1]
    if type(array) is not np.ndarray or not isinstance(datatype, MPI.Datatype):
        return Ellipsis
    if _dtypes().get(datatype.handle) != array.dtype:
        return Ellipsis
    return array if all(type(count) is int and count == array.size for count in counts) else Ellipsis


def _plain(data: Any, sent: bool) -> Any:
    """Return the memory of an array of a subclass, or of one of NumPy's scalars to send, as an array; else `data`."""
    if isinstance(data, np.ndarray):
        is_plain = type(data) is np.ndarray or isinstance(data, np.ma.MaskedArray)  # a masked one is refused later
        return data if is_plain else np.ndarray.view(data, np.ndarray)
    return np.asarray(data) if sent and isinstance(data, np.generic) else data


@lru_cache(maxsize=1)
def _dtypes() -> dict[int, np.dtype]:
    """Return the element type of each datatype, by its handle."""
    found = [getattr(MPI, name) for name in _DATATYPES]
    return {datatype.handle: to_numpy_dtype(datatype) for datatype in found if datatype != MPI.DATATYPE_NULL}
