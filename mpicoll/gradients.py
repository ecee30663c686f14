"""Averaging gradients over ranks: one flat buffer, cut into buckets, one Allreduce a bucket.

>>> sync = mpicoll.GradientSynchronizer([w.shape, b.shape], comm=comm)
>>> sync.gradients[0][...], sync.gradients[1][...] = gradient_of_w, gradient_of_b
>>> sync.synchronize()                      # every rank now holds the mean
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.comm import Intracomm
from mpicoll.errors import MismatchError, RemoteError

BUCKET_BYTES = 4 << 20
_REFUSED = bytes(32)
_DTYPES = ("float32", "float64")
_COMPRESSIONS: tuple[str, ...] = ()


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


class GradientSynchronizer:
    """Own the gradients of all parameters as one flat buffer and average them over the ranks of `comm`.

    Collective over `comm`: every rank must construct it, with the same shapes, dtype and options; each rank then calls
    :meth:`synchronize` equally often. A difference between ranks is refused here, on all ranks.

    Parameters
    ----------
    parameters_or_shapes
        The parameters, arrays of one dtype, float32 or float64; or their shapes, tuples of integers.
    comm
        A communicator; with an ``mpicoll.Intracomm`` our algorithms do the work, any other works too.
    compression
        None; no compression is available yet.
    bucket_bytes
        The most bytes that one Allreduce takes.
    average
        Leave the mean in the buffer. Otherwise the sum.
    dtype
        The gradients' dtype where shapes are given; by default float32.

    Attributes
    ----------
    flat : (count,) of dtype
        All gradients, in the order of the parameters.
    gradients : list of arrays
        Views into `flat`, one a parameter, in its shape.
    calls : int
        How often :meth:`synchronize` has run.
    nbytes : int
        Bytes of gradients that this rank has put into Allreduce so far; not what the algorithm sent for it.
    seconds : float
        Wall time that this rank has spent in :meth:`synchronize`, waiting for slower ranks included.

    Raises
    ------
    ValueError, TypeError
        If an argument is wrong; where only other ranks' are, :class:`~mpicoll.errors.RemoteError` names those.
    MismatchError
        If ranks have different layouts; the message names the ranks.
    """

    def __init__(
        self,
        parameters_or_shapes: Sequence[Any],
        *,
        comm: MPI.Intracomm,
        compression: str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        average: bool = True,
        dtype: Any = None,
    ) -> None:
        self.comm = comm
        self.average = average
        self.calls, self.nbytes, self.seconds = 0, 0, 0.0
        problem: Exception | None = None
        digest = _REFUSED
        try:
            _check_options(compression, bucket_bytes)
            shapes, self.dtype = _layout(parameters_or_shapes, dtype)
            digest = _digest(shapes, self.dtype, bucket_bytes, average)
        except (TypeError, ValueError) as error:
            problem = error
        _agree(comm, digest, problem)
        self._allocate(shapes, bucket_bytes)

    def _allocate(self, shapes: list[tuple[int, ...]], bucket_bytes: int) -> None:
        sizes = [math.prod(shape) for shape in shapes]
        count = sum(sizes)
        # One element more: it carries the weights, whose sum thus costs no message of its own.
        zeros = self.comm.zeros if isinstance(self.comm, Intracomm) else np.zeros
        self._buffer = zeros(count + self.average, self.dtype)
        self.flat = self._buffer[:count]
        ends = np.cumsum([0, *sizes], dtype=np.int64)
        self.gradients = [
            self.flat[start : start + size].reshape(shape)
            for start, size, shape in zip(ends, sizes, shapes, strict=False)
        ]
        length = max(1, bucket_bytes // self.dtype.itemsize)
        self.buckets = [self._buffer[start : start + length] for start in range(0, len(self._buffer), length)]

    def synchronize(self, weight: float = 1.0) -> None:
        """Replace the gradients with their mean (or sum) over all ranks, in place.

        Collective over the communicator. Afterwards every rank holds the same bits.

        Parameters
        ----------
        weight
            How much this rank's gradients count, for example its number of samples; zero leaves them out, whatever
            they hold. The mean is ``sum(weight * gradient) / sum(weight)``, zero where all weights are. With
            ``average=False`` gradients are added unweighted and `weight` must be 1.

        Raises
        ------
        ValueError
            If `weight` is negative, not finite, or cannot count.
        """
        start = time.perf_counter()
        self._weigh(weight)
        for bucket in self.buckets:
            self.comm.Allreduce(MPI.IN_PLACE, bucket, MPI.SUM)
        if self.average and (total := self._buffer[-1]) > 0:
            np.divide(self.flat, total, out=self.flat)
        self.calls += 1
        self.nbytes += self._buffer.nbytes
        self.seconds += time.perf_counter() - start

    def _weigh(self, weight: float) -> None:
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight: {weight} is not a finite number of at least 0")
        if not self.average:
            if weight != 1:
                raise ValueError(f"weight: {weight} has no meaning with average=False")
            return
        self._buffer[-1] = weight
        if weight == 0:
            self.flat[:] = 0
        elif weight != 1:
            np.multiply(self.flat, self.dtype.type(weight), out=self.flat)


def _check_options(compression: str | None, bucket_bytes: int) -> None:
    if compression is not None:
        available = ", ".join(_COMPRESSIONS) or "None only, as yet"
        raise ValueError(f"compression: {compression!r} is not available; there is {available}")
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes: {bucket_bytes} is not a positive number of bytes")


def _layout(parameters_or_shapes: Sequence[Any], dtype: Any) -> tuple[list[tuple[int, ...]], np.dtype]:
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


def _digest(shapes: list[tuple[int, ...]], dtype: np.dtype, bucket_bytes: int, average: bool) -> bytes:
    facts = repr((shapes, dtype.str, int(bucket_bytes), bool(average)))
    return hashlib.sha256(facts.encode()).digest()


def _agree(comm: MPI.Intracomm, digest: bytes, problem: Exception | None) -> None:
    digests = _gather_digests(comm, digest)
    if problem is not None:
        raise problem
    refused = [rank for rank, other in enumerate(digests) if other == _REFUSED]
    if refused:
        raise RemoteError(f"gradient synchronizer: rank {_listed(refused)} refused its arguments")
    if differing := _outvoted(digests):
        raise MismatchError(
            f"gradient synchronizer: rank {_listed(differing)} differs from the others in parameter shapes, dtype, "
            f"bucket_bytes or average"
        )


def _listed(ranks: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, ranks[:most]))
    return shown if len(ranks) <= most else f"{shown} and {len(ranks) - most} more"
