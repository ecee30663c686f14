"""Arguments of :class:`mpicoll.GradientSynchronizer`: checked on each rank, and compared between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.comm import Intracomm
from mpicoll.compression import Compressor, feedback
from mpicoll.errors import MismatchError, RemoteError

REFUSED = bytes(32)
"""The digest of a rank that refuses its arguments."""
_DTYPES = ("float32", "float64")


def differing_ranks(comm: MPI.Intracomm, digest: bytes) -> tuple[int, ...]:
    """Return the ranks whose `digest` is not the one that most ranks have; empty where all agree.

    Collective over `comm`: every rank must call it with 32 bytes, and every rank gets the same answer. Where two
    digests are equally common, that of the lower rank counts as right.
    """
    return _outvoted(_gather_digests(comm, digest))


def _gather_digests(comm: MPI.Intracomm, digest: bytes) -> list[bytes]:
    own = np.frombuffer(digest, dtype=np.uint8, count=32)
    table = np.empty((comm.Get_size(), 32), dtype=np.uint8)
    comm.Allgather(own.copy(), table)
    return [row.tobytes() for row in table]


def _outvoted(digests: list[bytes]) -> tuple[int, ...]:
    winner = max(digests, key=digests.count) if len(set(digests)) > 1 else digests[0]
    return tuple(rank for rank, digest in enumerate(digests) if digest != winner)


def check_options(bucket_bytes: int, dense_bytes: int) -> None:
    """Raise ValueError unless both are lengths."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes: {bucket_bytes} is not a positive number of bytes")
    if dense_bytes < 0:
        raise ValueError(f"dense_bytes: {dense_bytes} is not a number of bytes of at least 0")


def checked_compression(
    given: str | Compressor | None, error_feedback: bool | None, comm: MPI.Intracomm, dtype: np.dtype
) -> tuple[Compressor | None, bool]:
    """Return the compressor, and whether with error feedback; raise TypeError or ValueError if that cannot be."""
    made, fed_back = feedback.chosen(given, error_feedback, dtype)
    if made is not None and not isinstance(comm, Intracomm):
        raise TypeError(f"comm: compression={given!r} needs an mpicoll.Intracomm, not {comm!r}")
    return made, fed_back


def checked_layout(parameters_or_shapes: Sequence[Any], dtype: Any) -> tuple[list[tuple[int, ...]], np.dtype]:
    """Return shapes and their one dtype; raise TypeError or ValueError if that cannot be."""
    arrays = [item for item in parameters_or_shapes if isinstance(item, np.ndarray)]
    if arrays and len(arrays) < len(parameters_or_shapes):
        raise TypeError("parameters_or_shapes: give arrays or shapes, not both")
    dtypes = {array.dtype for array in arrays} or {np.dtype(dtype or np.float32)}
    if len(dtypes) > 1:
        raise ValueError(f"parameters: one dtype is needed, these have {', '.join(sorted(map(str, dtypes)))}")
    (found,) = dtypes
    if dtype is not None and found != np.dtype(dtype):
        raise ValueError(f"dtype: {np.dtype(dtype)} was asked for, the parameters are {found}")
    if found.name not in _DTYPES or not found.isnative:
        raise ValueError(f"dtype: gradients are {' or '.join(_DTYPES)} in native byte order, not {found}")
    return [_shape(item) for item in parameters_or_shapes], found


def _shape(item: Any) -> tuple[int, ...]:
    shape = item.shape if isinstance(item, np.ndarray) else item
    shape = tuple(int(extent) for extent in shape)
    if any(extent < 0 for extent in shape):
        raise ValueError(f"shape: {shape} has a negative extent")
    return shape


def digest(*facts: Any) -> bytes:
    """Return 32 bytes that differ where any of the facts do."""
    return hashlib.sha256(repr(facts).encode()).digest()


def agree(comm: MPI.Intracomm, digest: bytes, problem: Exception | None) -> None:
    """Compare digests; raise `problem` where there is one, and on every rank if any has one or they differ."""
    digests = _gather_digests(comm, digest)
    if problem is not None:
        raise problem
    refused = [rank for rank, other in enumerate(digests) if other == REFUSED]
    if refused:
        raise RemoteError(f"gradient synchronizer: rank {_listed(refused)} refused its arguments")
    if differing := _outvoted(digests):
        raise MismatchError(
            f"gradient synchronizer: rank {_listed(differing)} differs from the others in parameter shapes, dtype, "
            f"bucket_bytes, dense_bytes, average, compression or error_feedback"
        )


def _listed(ranks: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, ranks[:most]))
    return shown if len(ranks) <= most else f"{shown} and {len(ranks) - most} more"
