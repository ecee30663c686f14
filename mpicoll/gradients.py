"""Averaging gradients over ranks: one flat buffer, cut into buckets, one Allreduce a bucket.

>>> sync = mpicoll.GradientSynchronizer([w.shape, b.shape], comm=comm)
>>> sync.gradients[0][...], sync.gradients[1][...] = gradient_of_w, gradient_of_b
>>> sync.synchronize()                      # every rank now holds the mean
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.comm import Intracomm
from mpicoll.compression import Compressor, ErrorFeedback, compressor
from mpicoll.errors import MismatchError, RemoteError

BUCKET_BYTES = 4 << 20
DENSE_BYTES = 4 << 10
"""Shorter parameters, such as biases, are not worth compressing."""
_REFUSED = bytes(32)
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
        How float32 gradients are compressed on their way, such as ``"int8"`` or ``"sign"``; None sends them as they
        are. The weights, and parameters shorter than `dense_bytes`, are never compressed.
    error_feedback
        Whether what compression loses comes with the next step, see :class:`~mpicoll.compression.ErrorFeedback`; None
        leaves it to the compressor (its `needs_feedback`). Not for unbiased compressors.
    bucket_bytes
        The most bytes that one Allreduce takes.
    dense_bytes
        With compression, the length from which a parameter is compressed.
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
    sent_nbytes : int
        Bytes that this rank has sent for them so far: of compressed buckets all messages; of others
        ``2 (size - 1) / size`` of their length, the least that an allreduce sends, even if through shared memory.
    seconds : float
        Wall time that this rank has spent in :meth:`synchronize`, waiting for slower ranks included.

    Raises
    ------
    ValueError, TypeError
        If an argument is wrong; where only other ranks' are, :class:`~mpicoll.errors.RemoteError` names those.
    MismatchError
        If ranks have different layouts; the message names the ranks.

    Notes
    -----
    With error feedback a residual is owed in the units of what is added up, gradient times weight. Weights should keep
    their scale from step to step, as numbers of samples do; so should the learning rate, or what was owed at a high
    rate is applied at a low one (which a slow decay makes no worse than a residual that is a few steps old).
    """

    def __init__(
        self,
        parameters_or_shapes: Sequence[Any],
        *,
        comm: MPI.Intracomm,
        compression: str | Compressor | None = None,
        error_feedback: bool | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        dense_bytes: int = DENSE_BYTES,
        average: bool = True,
        dtype: Any = None,
    ) -> None:
        self.comm = comm
        self.average = average
        self.calls, self.nbytes, self.sent_nbytes, self.seconds = 0, 0, 0, 0.0
        problem: Exception | None = None
        digest = _REFUSED
        try:
            _check_options(bucket_bytes, dense_bytes)
            shapes, self.dtype = _layout(parameters_or_shapes, dtype)
            self.compression, self.error_feedback = _compression(compression, error_feedback, comm, self.dtype)
            facts = (shapes, self.dtype.str, int(bucket_bytes), int(dense_bytes), bool(average))
            digest = _digest(*facts, self.compression, self.error_feedback)
        except (TypeError, ValueError) as error:
            problem = error
        _agree(comm, digest, problem)
        self._allocate(shapes, bucket_bytes, dense_bytes)

    def _allocate(self, shapes: list[tuple[int, ...]], bucket_bytes: int, dense_bytes: int) -> None:
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
        self.buckets = _cut(self._buffer, length)
        long, short = _runs([*sizes, int(self.average)], -(-dense_bytes // self.dtype.itemsize))
        if self.compression is None:
            return
        made = self.compression.shaped(shapes)
        ends_of_buckets = [
            (start, min(start + length, run.stop)) for run in long for start in range(run.start, run.stop, length)
        ]
        parts = [(self._buffer[start:stop], made.part(start, stop)) for start, stop in ends_of_buckets]
        self._compressed = [_Bucket(data, ErrorFeedback(part) if self.error_feedback else part) for data, part in parts]
        # Short parameters and the weight travel together, in memory of their own.
        self._short = [self._buffer[run] for run in short]
        self._together = zeros(sum(map(len, self._short)), self.dtype)

    def synchronize(self, weight: float = 1.0, *, compress: bool = True) -> None:
        """Replace the gradients with their mean (or sum) over all ranks, in place.

        Collective over the communicator. Afterwards every rank holds the same bits.

        Parameters
        ----------
        weight
            How much this rank's gradients count, for example its number of samples; zero leaves them out, whatever
            they hold. The mean is ``sum(weight * gradient) / sum(weight)``, zero where all weights are. With
            ``average=False`` gradients are added unweighted and `weight` must be 1.
        compress
            False sends this step's gradients as they are; what is owed from earlier steps stays owed. The same on all
            ranks.

        Raises
        ------
        ValueError
            If `weight` is negative, not finite, or cannot count.
        """
        start = time.perf_counter()
        self._weigh(weight)
        if self.compression is None or not compress:
            self._add_up(self.buckets)
        else:
            self._add_up_compressed()
        if self.average and (total := self._buffer[-1]) > 0:
            np.divide(self.flat, total, out=self.flat)
        self.calls += 1
        self.nbytes += self._buffer.nbytes
        self.seconds += time.perf_counter() - start

    def _add_up(self, buckets: Sequence[np.ndarray]) -> None:
        size = self.comm.Get_size()
        for bucket in buckets:
            self.comm.Allreduce(MPI.IN_PLACE, bucket, MPI.SUM)
            self.sent_nbytes += 2 * (size - 1) * bucket.nbytes // size

    def _add_up_compressed(self) -> None:
        comm = self.comm
        assert isinstance(comm, Intracomm)
        if self._together.size:
            np.concatenate(self._short, out=self._together)
            self._add_up([self._together])
            start = 0
            for data in self._short:
                data[:] = self._together[start : start + data.size]
                start += data.size
        before = comm.channel.messages_nbytes
        for data, compression in self._compressed:
            comm.Allreduce(MPI.IN_PLACE, data, MPI.SUM, compression=compression)
        self.sent_nbytes += comm.channel.messages_nbytes - before

    def state(self) -> dict[str, np.ndarray]:
        """Return copies of what this rank still owes, for its checkpoint; empty without error feedback."""
        return {
            f"{number}.{name}": array
            for number, bucket in enumerate(self._with_feedback())
            for name, array in bucket.feedback.state().items()
        }

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from what :meth:`state` returned.

        Raises
        ------
        ValueError
            If it is of another layout or compression. Nothing is changed then.
        """
        buckets = self._with_feedback()
        parts: list[dict[str, np.ndarray]] = [{} for _ in buckets]
        for key, array in state.items():
            number, _, name = key.partition(".")
            if not (number.isdecimal() and int(number) < len(buckets)):
                raise ValueError(f"state: {key!r} is none of these {len(buckets)} buckets")
            parts[int(number)][name] = array
        for bucket, part in zip(buckets, parts, strict=True):
            bucket.feedback.check_state(part, bucket.data.size)
        for bucket, part in zip(buckets, parts, strict=True):
            bucket.feedback.load(part)

    def _with_feedback(self) -> list[_Bucket]:
        return self._compressed if self.compression is not None and self.error_feedback else []

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


class _Bucket(NamedTuple):
    """Gradients that one compressed Allreduce takes."""

    data: np.ndarray
    compression: Compressor | ErrorFeedback

    @property
    def feedback(self) -> ErrorFeedback:
        """The compression, which is known to be one with feedback."""
        assert isinstance(self.compression, ErrorFeedback)
        return self.compression


def _cut(array: np.ndarray, length: int) -> list[np.ndarray]:
    return [array[start : start + length] for start in range(0, len(array), length)]


def _runs(sizes: Sequence[int], least: int) -> tuple[list[slice], list[slice]]:
    """Return where neighbours of at least `least` elements stand, and where shorter ones; the last is always short."""
    runs: tuple[list[slice], list[slice]] = [], []
    start = 0
    for place, size in enumerate(sizes):
        kind = runs[size < least or place == len(sizes) - 1]
        if kind and kind[-1].stop == start:
            kind[-1] = slice(kind[-1].start, start + size)
        elif size:
            kind.append(slice(start, start + size))
        start += size
    return runs


def _check_options(bucket_bytes: int, dense_bytes: int) -> None:
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes: {bucket_bytes} is not a positive number of bytes")
    if dense_bytes < 0:
        raise ValueError(f"dense_bytes: {dense_bytes} is not a number of bytes of at least 0")


def _compression(
    given: str | Compressor | None, error_feedback: bool | None, comm: MPI.Intracomm, dtype: np.dtype
) -> tuple[Compressor | None, bool]:
    if error_feedback not in (None, True, False):
        raise TypeError(f"error_feedback: {error_feedback!r} is not True, False or None")
    if given is None:
        if error_feedback:
            raise ValueError("error_feedback: True has no meaning without compression")
        return None, False
    made = compressor(given)
    if not isinstance(comm, Intracomm):
        raise TypeError(f"comm: compression={given!r} needs an mpicoll.Intracomm, not {comm!r}")
    if dtype != np.float32:
        raise ValueError(f"compression: {given!r} is for float32 gradients, not {dtype}")
    if error_feedback and made.unbiased:
        raise ValueError(f"error_feedback: {given!r} is unbiased, its errors average out and must not be fed back")
    return made, made.needs_feedback if error_feedback is None else bool(error_feedback)


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


def _digest(*facts: Any) -> bytes:
    return hashlib.sha256(repr(facts).encode()).digest()


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
            f"bucket_bytes, dense_bytes, average, compression or error_feedback"
        )


def _listed(ranks: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, ranks[:most]))
    return shown if len(ranks) <= most else f"{shown} and {len(ranks) - most} more"
