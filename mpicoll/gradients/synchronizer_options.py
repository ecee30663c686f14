"""Checks of the arguments of :class:`mpicoll.GradientSynchronizer` on each rank, and their comparison between ranks."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.comm import Intracomm
from mpicoll.compression import Compressor
from mpicoll.compression import error_feedback as feedback
from mpicoll.consensus import share
from mpicoll.errors import MismatchError, RemoteError, described, named_ranks

REFUSED = bytes(32)
"""The digest of a rank that refuses its arguments."""
_DTYPES = ("float32", "float64", "float16", "bfloat16")
_SHORT = _DTYPES[2:]


def differing_ranks(comm: MPI.Intracomm, digest: bytes) -> tuple[int, ...]:
    """Return the ranks whose `digest` is not the one that most ranks have; empty where all agree.

    Collective over `comm`: every rank must call it with 32 bytes, and all ranks get the same result. If two digests are
    equally common, that of the lower rank counts as right.
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


def check_options(bucket_bytes: Any, dense_bytes: Any, average: Any) -> None:
    """Raise TypeError or ValueError unless these are a positive number, one of at least 0, and a bool."""
    if _whole("bucket_bytes", bucket_bytes) < 1:
        raise ValueError(f"bucket_bytes: {bucket_bytes} is not a positive number of bytes")
    if _whole("dense_bytes", dense_bytes) < 0:
        raise ValueError(f"dense_bytes: {dense_bytes} is not a number of bytes of at least 0")
    if not isinstance(average, (bool, np.bool_)):
        raise TypeError(f"average: {average!r} is not True or False")


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: {value!r} is not a whole number of bytes") from None


def check_comm(comm: Any) -> None:
    """Raise TypeError unless `comm` is an intracommunicator."""
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm: {comm!r} is not an intracommunicator")


def check_short(dtype: np.dtype, average: bool, comm: MPI.Intracomm) -> None:
    """Raise ValueError or TypeError for gradients of 16 bits that cannot be added: weights and means need more."""
    if dtype.name not in _SHORT:
        return
    if average:
        raise ValueError(f"dtype: gradients of {dtype} are summed only; average=True needs float32 or float64")
    if not isinstance(comm, Intracomm):
        raise TypeError(f"comm: gradients of {dtype} need an mpicoll.Intracomm, not {comm!r}")


def check_weight(weight: float, average: bool, dtype: np.dtype, comm: MPI.Intracomm) -> None:
    """Raise TypeError or ValueError for a weight that gradients cannot be multiplied by, and tell the other ranks."""
    try:
        if not isinstance(weight, (int, float, np.number, np.bool_)):
            raise TypeError(f"weight: {weight!r} is not a number")
        if not average and weight != 1:
            raise ValueError(f"weight: {weight} has no meaning with average=False")
        limits = np.finfo(dtype) if average else None
        if limits is not None and not (weight == 0 or float(limits.tiny) <= weight <= float(limits.max)):
            raise ValueError(f"weight: {weight} is neither 0 nor a positive finite number in the range of {dtype}")
    except (TypeError, ValueError) as error:
        if isinstance(comm, Intracomm):
            comm.channel.refuse(error)
        raise


def checked_first(first: Any, count: int) -> int:
    """Return `first` as an int; raise TypeError or ValueError unless it is an integer in ``0..count``."""
    try:
        found = operator.index(first)
    except TypeError:
        raise TypeError(f"first: {first!r} is not a whole number") from None
    if not 0 <= found <= count:
        raise ValueError(f"first: {found} is not in 0..{count}")
    return found


def checked_compression(
    given: str | Compressor | None, error_feedback: bool | None, comm: MPI.Intracomm, dtype: np.dtype
) -> tuple[Compressor | None, bool]:
    """Return the compressor, and whether to use error feedback; raise TypeError or ValueError if they are wrong."""
    made, fed_back = feedback.chosen(given, error_feedback, dtype)
    if made is not None and not isinstance(comm, Intracomm):
        raise TypeError(f"comm: compression={given!r} needs an mpicoll.Intracomm, not {comm!r}")
    return made, fed_back


def checked_layout(parameters_or_shapes: Iterable[Any], dtype: Any) -> tuple[list[tuple[int, ...]], np.dtype]:
    """Return the shapes and their common dtype; raise TypeError or ValueError if they are wrong."""
    if _is_array(parameters_or_shapes):
        raise TypeError("parameters_or_shapes: a list of arrays or of shapes is needed, not one array")
    try:
        items = list(parameters_or_shapes)
    except TypeError:
        text = f"parameters_or_shapes: {parameters_or_shapes!r:.80} is no sequence of arrays or of shapes"
        raise TypeError(text) from None
    if dtype is not None:
        dtype = _given_dtype(dtype)
    arrays = [item for item in items if _is_array(item)]
    if arrays and len(arrays) < len(items):
        raise TypeError("parameters_or_shapes: give arrays or shapes, not both")
    dtypes = {_dtype_of(array) for array in arrays} or {np.dtype(dtype or np.float32)}
    if len(dtypes) > 1:
        raise ValueError(f"parameters: one dtype is needed, these have {', '.join(sorted(map(str, dtypes)))}")
    (found,) = dtypes
    if dtype is not None and found != np.dtype(dtype):
        raise ValueError(f"dtype: {np.dtype(dtype)} was asked for, the parameters are {found}")
    if found.name not in _DTYPES or not found.isnative:
        raise ValueError(_no_gradients_of(found))
    return [_shape(item) for item in items], found


def _given_dtype(dtype: Any) -> np.dtype:
    try:
        return np.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype: {dtype!r} is no element type") from None


def _is_array(item: Any) -> bool:
    """Return whether an item is an array or tensor of any library, and not a shape."""
    return hasattr(item, "shape") and hasattr(item, "dtype")


def _dtype_of(array: Any) -> np.dtype:
    """Return an array's dtype; other libraries' dtypes go by names like ``torch.float32``."""
    if isinstance(array.dtype, np.dtype):
        return array.dtype
    name = getattr(array.dtype, "name", str(array.dtype)).rpartition(".")[2]
    if name not in _DTYPES:
        raise ValueError(_no_gradients_of(array.dtype))
    return np.dtype(name)


def _no_gradients_of(dtype: Any) -> str:
    return f"dtype: gradients are {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]} in native byte order, not {dtype}"


def _shape(item: Any) -> tuple[int, ...]:
    try:
        shape = tuple(map(operator.index, item.shape if _is_array(item) else item))
    except TypeError:
        raise TypeError(f"parameters_or_shapes: {item!r:.80} is neither an array nor a shape") from None
    if any(extent < 0 for extent in shape):
        raise ValueError(f"shape: {shape} has a negative extent")
    return shape


def digest(*facts: Any) -> bytes:
    """Return a digest of the facts, 32 bytes."""
    return hashlib.sha256(repr(facts).encode()).digest()


_FACTS = "parameter shapes, dtype, bucket_bytes, dense_bytes, average, compression or error_feedback"


def agree(
    comm: MPI.Intracomm,
    digest: bytes,
    problem: Exception | None,
    *,
    who: str = "gradient synchronizer",
    facts: str = _FACTS,
) -> None:
    """Compare the ranks' digests, and raise on every rank if they differ or any rank has a `problem`; collective.

    Parameters
    ----------
    who, facts
        Subject of the messages, and the facts that the digest stands for.
    """
    digests = _gather_digests(comm, digest)
    refused = [rank for rank, other in enumerate(digests) if other == REFUSED]
    if problem is not None:
        share(comm, {"text": described(problem)[:500]} if comm.Get_rank() == refused[0] else None, refused[0])
        raise problem
    if refused:
        told = share(comm, None, refused[0])
        raise RemoteError(f"{who}: rank {refused[0]} refused its arguments: {told['text']}")
    if differing := _outvoted(digests):
        differ = "differs" if len(differing) == 1 else "differ"
        raise MismatchError(f"{who}: {named_ranks(differing)} {differ} from the others in {facts}")
