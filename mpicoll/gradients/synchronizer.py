"""Averaging of gradients over ranks: one flat buffer, divided into buckets, one Allreduce for each.

>>> sync = mpicoll.GradientSynchronizer([w.shape, b.shape], comm=comm)
>>> sync.gradients[0][...], sync.gradients[1][...] = gradient_of_w, gradient_of_b
>>> sync.synchronize()                      # every rank now holds the mean
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll import tracing
from mpicoll.comm import Intracomm
from mpicoll.compression import Compressor, ErrorFeedback
from mpicoll.gradients import synchronizer_options
from mpicoll.gradients.bucket_sums import Sum, Sums, cut, put_back, runs

BUCKET_BYTES = 4 << 20
DENSE_BYTES = 4 << 10
"""Parameters of fewer bytes, such as biases, are not compressed by default."""


class GradientSynchronizer:
    """One flat buffer for the gradients of all parameters, and its averaging over the ranks of `comm`.

    The constructor is collective over `comm`, with the same shapes, dtype and options on all ranks; it compares them.
    All ranks then call :meth:`synchronize`, or :meth:`start` and :meth:`wait`, equally often.

    Parameters
    ----------
    parameters_or_shapes
        The parameters, as arrays or tensors of any library, all of one type: float32 or float64, or float16 or
        bfloat16 with ``average=False``; or their shapes, tuples of integers.
    comm
        A communicator of mpi4py. That of compressed gradients must be an :class:`mpicoll.Intracomm`.
    compression
        Compressor of float32 gradients, such as ``"int8"`` or ``"sign"``; None sends them uncompressed. The weights,
        and parameters shorter than `dense_bytes`, are never compressed.
    error_feedback
        Whether the error of compression is added to the next step, see :class:`~mpicoll.ErrorFeedback`; None uses it
        if the compressor's `needs_feedback` is true. It must not be True for unbiased compressors.
    bucket_bytes
        Largest number of bytes of one Allreduce.
    dense_bytes
        With compression, the number of bytes from which a parameter is compressed.
    average
        True for the mean of the ranks' gradients, False for their sum.
    dtype
        The gradients' dtype if shapes are given; float32 by default.

    Attributes
    ----------
    flat : (count,) of dtype
        All gradients, in the order of the parameters.
    gradients : list of arrays
        Views into `flat`, one a parameter, in its shape.
    calls : int
        Number of completed steps.
    nbytes : int
        Bytes of the buffers that this rank has passed to Allreduce so far, the weights included.
    sent_nbytes : int
        Bytes that this rank has sent for them so far. With compression these are the bytes of all messages. Without,
        ``2 (size - 1) / size`` of the buffers' bytes, the least that an allreduce sends, is counted, also on shared
        memory.
    seconds : float
        Wall time that this rank has spent in :meth:`synchronize`, :meth:`start` and :meth:`wait`, waiting for slower
        ranks included.
    under_way_seconds : float
        Wall time from the first of these calls in a step to the end of the last. Its excess over `seconds` is time in
        which communication overlapped with computation.

    Raises
    ------
    ValueError, TypeError
        If an argument of this rank is wrong; the message names it.
    RemoteError
        If only arguments of other ranks are wrong; the message names the ranks.
    MismatchError
        If ranks have different layouts; the message names the ranks.

    Notes
    -----
    With error feedback a residual has the units of what is added up, gradient times weight. Weights should therefore
    keep their scale from step to step, as numbers of samples do. So should the learning rate, since the residual of a
    step at a high rate is applied at a later, lower one; a slow decay does no harm.

    With error feedback, apply momentum before the sum: keep a velocity on each rank and put that into the buffer. If
    momentum is applied after the sum, it repeats residuals of many steps that arrive at once, and training with
    ``"sign"`` diverges; see :class:`~mpicoll.optim.local_momentum.LocalMomentum`.
    """

    def __init__(
        self,
        parameters_or_shapes: Iterable[Any],
        *,
        comm: MPI.Intracomm,
        compression: str | Compressor | None = None,
        error_feedback: bool | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        dense_bytes: int = DENSE_BYTES,
        average: bool = True,
        dtype: Any = None,
    ) -> None:
        synchronizer_options.check_comm(comm)
        self.comm, self.average = comm, average
        self.calls, self.nbytes, self.sent_nbytes = 0, 0, 0
        self.seconds, self.under_way_seconds = 0.0, 0.0
        problem: Exception | None = None
        digest = synchronizer_options.REFUSED
        try:
            synchronizer_options.check_options(bucket_bytes, dense_bytes, average)
            shapes, self.dtype = synchronizer_options.checked_layout(parameters_or_shapes, dtype)
            self.compression, self.error_feedback = synchronizer_options.checked_compression(
                compression, error_feedback, comm, self.dtype
            )
            synchronizer_options.check_short(self.dtype, average, comm)
            facts = (shapes, self.dtype.str, int(bucket_bytes), int(dense_bytes), bool(average))
            digest = synchronizer_options.digest(*facts, self.compression, self.error_feedback)
        except (TypeError, ValueError) as error:
            problem = error
        synchronizer_options.agree(comm, digest, problem)
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
        self._dense = cut(self._buffer, slice(0, len(self._buffer)), length)
        self._packed, self._together = self._dense, self._buffer[:0]
        self._short: list[np.ndarray] = []
        self._under_way: Sums | None = None
        self._sums: dict[bool, Sums] = {}
        if self.compression is not None:
            self._pack(self.compression.shaped(shapes), sizes, length, -(-dense_bytes // self.dtype.itemsize), zeros)

    def _pack(self, made: Compressor, sizes: list[int], length: int, least: int, zeros: Any) -> None:
        """Choose what is compressed: neighbours of at least `least` elements, `length` together at most."""
        long, short = runs([*sizes, int(self.average)], least)
        buckets = [bucket for run in long for bucket in cut(self._buffer, run, length)]
        parts = [made.part(bucket.start, bucket.start + bucket.data.size) for bucket in buckets]
        self._packed = [
            bucket._replace(compression=ErrorFeedback(part) if self.error_feedback else part)
            for bucket, part in zip(buckets, parts, strict=True)
        ]
        # Short parameters and the weight travel together, in memory of their own.
        self._short = [self._buffer[run] for run in short]
        self._together = zeros(sum(map(len, self._short)), self.dtype)
        if self._together.size:
            self._packed.append(Sum(0, self._together))

    def synchronize(self, weight: float = 1.0, *, compress: bool = True) -> None:
        """Replace the gradients with their mean (or sum) over all ranks, in place.

        Collective over the communicator. Afterwards every rank holds the same bits.

        Parameters
        ----------
        weight
            Weight of this rank's gradients, for example its number of samples; zero ignores them. The mean is
            ``sum(weight * gradient) / sum(weight)``; if all weights are zero, it is zero, and residuals are kept. With
            ``average=False`` gradients are added unweighted and `weight` must be 1.
        compress
            False sends this step's gradients uncompressed; the residual of earlier steps is kept. It must be equal on
            all ranks.

        Raises
        ------
        ValueError
            If `weight` is negative or not finite, or is not 1 with ``average=False``; the other ranks get RemoteError.
        RuntimeError
            Between :meth:`start` and :meth:`wait`.
        """
        start = time.perf_counter()
        self._ensure_idle("synchronize")
        self._weigh(weight)
        self._gather_short(compress)
        for number, bucket in enumerate(self._packed if compress else self._dense):
            before = self._messages_nbytes()
            with tracing.span("bucket", number):
                if bucket.compression is None:
                    self.comm.Allreduce(MPI.IN_PLACE, bucket.data, MPI.SUM)
                else:
                    assert isinstance(self.comm, Intracomm)
                    self.comm.Allreduce(MPI.IN_PLACE, bucket.data, MPI.SUM, compression=bucket.compression)
            self._count_sent([bucket], before)
        self._end(compress)
        passed = time.perf_counter() - start
        self.seconds += passed
        self.under_way_seconds += passed

    def start(self, first: int = 0, *, compress: bool = True) -> None:
        """Mark the gradients from element `first` of `flat` on as ready, and start the buckets that are complete.

        Call it during the backward pass with decreasing `first`, equal on all ranks, and at last with 0; then call
        :meth:`wait`. Gradients that are ready must not be accessed before :meth:`wait` returns. All ranks have
        weight 1. Buckets in flight progress in each call.

        Parameters
        ----------
        first
            Index of an element of `flat`.
        compress
            As for :meth:`synchronize`; equal in all calls of a step.

        Raises
        ------
        TypeError, ValueError
            If `first` is not an integer in ``0..flat.size``, or `compress` has changed within the step.
        """
        start = time.perf_counter()
        first = synchronizer_options.checked_first(first, self.flat.size)
        compress = compress and self.compression is not None
        if self._under_way is not None and self._under_way is not self._sums.get(compress):
            raise ValueError(f"compress: {compress} differs from the other calls of this step")
        if self._under_way is None:
            self._under_way, self._began = self._sums_for(compress), start
            self._sent_before = self._messages_nbytes()
            self._weigh(1.0)
        if first == 0 and not self._under_way.all_begun:
            self._gather_short(compress)
        self._under_way.start(first)
        self.seconds += time.perf_counter() - start

    def wait(self) -> None:
        """Wait for all buckets of a step; the buffer is then as after :meth:`synchronize`.

        Raises
        ------
        RuntimeError
            If :meth:`start` has not been called for element 0.
        """
        start, sums = time.perf_counter(), self._under_way
        if sums is None or not sums.all_begun:
            raise RuntimeError("gradient synchronizer: wait() before start(0)")
        sums.wait()
        self._under_way = None
        compress = sums is self._sums.get(True)
        self._count_sent(self._packed if compress else self._dense, self._sent_before)
        self._end(compress)
        end = time.perf_counter()
        self.seconds += end - start
        self.under_way_seconds += end - self._began

    def _ensure_idle(self, what: str) -> None:
        if self._under_way is not None:
            raise RuntimeError(f"gradient synchronizer: {what}() between start() and wait()")

    def _sums_for(self, compress: bool) -> Sums:
        if compress not in self._sums:
            buckets = self._packed if compress else self._dense
            self._sums[compress] = Sums(self.comm, sorted(buckets, key=lambda each: each.start, reverse=True))
        return self._sums[compress]

    def _gather_short(self, compress: bool) -> None:
        if compress and self._together.size:
            np.concatenate(self._short, out=self._together)

    def _end(self, compress: bool) -> None:
        start = 0
        for data in self._short if compress else ():
            data[:] = self._together[start : start + data.size]
            start += data.size
        if self.average and (total := self._buffer[-1]) > 0:
            np.divide(self.flat, total, out=self.flat)
        elif self.average:  # the sums are of residuals alone
            put_back(self._packed if compress else (), self.comm.Get_size())
            self.flat[:] = 0
        self.calls += 1
        self.nbytes += self._buffer.nbytes

    def _messages_nbytes(self) -> int:
        return self.comm.channel.messages_nbytes if isinstance(self.comm, Intracomm) else 0

    def _count_sent(self, buckets: Sequence[Sum], before: int) -> None:
        """Count what was sent for some buckets since messages had `before` bytes."""
        if any(bucket.compression is not None for bucket in buckets):
            self.sent_nbytes += self._messages_nbytes() - before
        else:
            size = self.comm.Get_size()
            self.sent_nbytes += sum(2 * (size - 1) * bucket.data.nbytes // size for bucket in buckets)

    def state(self) -> dict[str, np.ndarray]:
        """Return copies of this rank's residuals for a checkpoint, by name; an empty dict without error feedback.

        Raises
        ------
        RuntimeError
            Between :meth:`start` and :meth:`wait`, when the residuals may contain half of a step.
        """
        self._ensure_idle("state")
        return {
            f"{number}.{name}": array
            for number, (_, feedback) in enumerate(self._feedback())
            for name, array in feedback.state().items()
        }

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the residuals that :meth:`state` returned.

        Raises
        ------
        ValueError
            If `state` is for another layout or compression. Nothing is changed then.
        RuntimeError
            Between :meth:`start` and :meth:`wait`.
        """
        self._ensure_idle("load")
        residuals = self._feedback()
        parts: list[dict[str, np.ndarray]] = [{} for _ in residuals]
        for key, array in state.items():
            number, _, name = key.partition(".")
            if not (number.isdecimal() and int(number) < len(residuals)):
                raise ValueError(f"state: {key!r} is not the name of an array of these {len(residuals)} buckets")
            parts[int(number)][name] = array
        for (count, feedback), part in zip(residuals, parts, strict=True):
            feedback.check_state(part, count)
        for (_, feedback), part in zip(residuals, parts, strict=True):
            feedback.load(part)

    def _feedback(self) -> list[tuple[int, ErrorFeedback]]:
        """Return the count and the feedback of each bucket that has one."""
        buckets = [(bucket.data.size, bucket.compression) for bucket in self._packed]
        return [(count, each) for count, each in buckets if isinstance(each, ErrorFeedback)]

    def _weigh(self, weight: float) -> None:
        synchronizer_options.check_weight(weight, self.average, self.dtype, self.comm)
        if not self.average:
            return
        self._buffer[-1] = weight
        if weight == 0:
            self.flat[:] = 0
        elif weight != 1:
            np.multiply(self.flat, self.dtype.type(weight), out=self.flat)
