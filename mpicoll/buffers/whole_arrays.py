"""Buffer specifications that name a whole array and its own element type, such as ``[array, MPI.DOUBLE]``.

They describe the same buffer as the array alone, which compiled code recognises.
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
    """Return both buffers as arrays, or as they are where they are no specifications.

    Returns
    -------
    None if neither is a specification, or if one of them says something else than its array.
    """
    if type(sendbuf) not in (list, tuple) and type(recvbuf) not in (list, tuple):
        return None
    counted = collective in _ONE_VECTOR
    send, recv = _whole(sendbuf, counted), _whole(recvbuf, counted)
    return None if send is Ellipsis or recv is Ellipsis else (send, recv)


def _whole(spec: Any, counted: bool) -> Any:
    """Return the array of a specification; Ellipsis if the specification is not that of the whole array."""
    if type(spec) not in (list, tuple):
        return spec
    counts = spec[1:-1] if counted else ()
    if len(spec) != 2 + len(counts) or len(counts) > 1 or type(spec[0]) is not np.ndarray:
        return Ellipsis
    array, datatype = spec[0], spec[-1]
    if not isinstance(datatype, MPI.Datatype) or _dtypes().get(datatype.handle) != array.dtype:
        return Ellipsis
    return array if all(type(count) is int and count == array.size for count in counts) else Ellipsis


@lru_cache(maxsize=1)
def _dtypes() -> dict[int, np.dtype]:
    """Return the element type of each datatype, by its handle."""
    found = [getattr(MPI, name) for name in _DATATYPES]
    return {datatype.handle: to_numpy_dtype(datatype) for datatype in found if datatype != MPI.DATATYPE_NULL}
