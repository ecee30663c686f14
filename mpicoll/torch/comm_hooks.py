"""Compressed gradients in DistributedDataParallel: communication hooks with error feedback for each bucket."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from mpicoll.comm import Intracomm
from mpicoll.compression import Compressor, ErrorFeedback, compressor
from mpicoll.compression.error_feedback import chosen
from mpicoll.torch import tensor_collectives
from mpicoll.torch.group_queues import queue_of

DENSE_BYTES = 4 << 10
"""Buckets of fewer bytes are not compressed by default."""


class _Bucket(NamedTuple):
    """Compression of one bucket, with the numbers and lengths of its parameters, in the order of their gradients."""

    numbers: tuple[int, ...]
    counts: tuple[int, ...]
    compression: Compressor | ErrorFeedback | None


class CompressionHook:
    """A communication hook of DistributedDataParallel that averages compressed gradients.

    :func:`hook` makes it. One object serves one model.

    Parameters
    ----------
    spec
        A compressor or its specification, such as ``"int8"`` or ``"topk:0.01"``.
    error_feedback
        Whether the error of a bucket is added to its gradients of the next step; None if the compressor needs it.
    dense_bytes
        Buckets of fewer bytes are sent uncompressed.

    Raises
    ------
    UnknownCompressor, ValueError, TypeError
        If an argument is wrong; the message names it.

    Notes
    -----
    DistributedDataParallel divides the gradients into other buckets after the first step. Residuals of gradients follow
    their parameters; what the compressor itself remembers, and residuals of sums, begin anew.
    """

    def __init__(
        self, spec: str | Compressor, *, error_feedback: bool | None = None, dense_bytes: int = DENSE_BYTES
    ) -> None:
        self.compressor = compressor(spec)
        self.dense_bytes = int(dense_bytes)
        _, self.error_feedback = chosen(self.compressor, error_feedback, np.dtype(np.float32))
        self.__name__ = self.__qualname__ = f"mpicoll.torch.hook({spec!r})"  # DistributedDataParallel logs it
        self._buckets: dict[int, _Bucket] = {}
        self._numbers: dict[int, int] = {}  # of parameters, in the order in which they came first, by id
        self._parameters: list[Any] = []  # so that no other object gets the id of one of them
        self._residuals: dict[int, np.ndarray] = {}  # of parameters that are in no bucket now, by number
        self._steps = 0

    def __call__(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start to average a bucket over the ranks; return a future that gets it.

        Parameters
        ----------
        state
            The process group, of any backend whose ranks are ranks of MPI; None for the default group.
        bucket
            The bucket, of real floating-point gradients. Those that are not float32 are compressed as float32.

        Raises
        ------
        TypeError
            If the gradients are not real floating-point numbers.
        """
        tensor = bucket.buffer()
        if not tensor.is_floating_point():
            raise TypeError(f"hook: gradients of {tensor.dtype} cannot be compressed")
        queue, comm = queue_of(state)
        compression = self._compression(bucket)
        call = partial(tensor_collectives.make_call, comm, average, tensor, compression)
        return queue.put("hook", call, tensor).get_future()

    def _compression(self, bucket: dist.GradBucket) -> Compressor | ErrorFeedback | None:
        """Return how a bucket is compressed; anew if it has other parameters than before."""
        index, numbers = bucket.index(), tuple(self._number(parameter) for parameter in bucket.parameters())
        found = self._buckets.get(index)
        if found is None or found.numbers != numbers:
            self._keep_residuals(index)
            shapes = [tuple(gradient.shape) for gradient in bucket.gradients()]
            found = self._buckets[index] = self._made(numbers, shapes)
        return found.compression

    def _number(self, parameter: torch.Tensor) -> int:
        number = self._numbers.setdefault(id(parameter), len(self._numbers))
        if number == len(self._parameters):
            self._parameters.append(parameter)
        return number

    def _made(self, numbers: tuple[int, ...], shapes: list[tuple[int, ...]]) -> _Bucket:
        counts = tuple(math.prod(shape) for shape in shapes)
        if 4 * sum(counts) < self.dense_bytes:
            return _Bucket(numbers, counts, None)
        made = self.compressor.shaped(shapes)
        if not self.error_feedback:
            return _Bucket(numbers, counts, made)
        feedback = ErrorFeedback(made)
        if not self._residuals.keys().isdisjoint(numbers):
            parts = [
                self._residuals.pop(number, np.zeros(count, np.float32))
                for number, count in zip(numbers, counts, strict=True)
            ]
            feedback.load({"residual": np.concatenate(parts), "steps": np.array(self._steps, np.int64)})
        return _Bucket(numbers, counts, feedback)

    def _keep_residuals(self, first: int) -> None:
        """Take the buckets from number `first` on apart; those before it are in use in this step."""
        for index in [index for index in self._buckets if index >= first]:
            residuals, steps = _residuals_of(self._buckets.pop(index))
            self._residuals.update(residuals)
            self._steps = max(self._steps, steps)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of this rank's residuals for a checkpoint: ``steps``, and tensors by parameter.

        They are for this rank, of the same number of ranks, and for a model with the same parameters. No step may be
        under way.
        """
        residuals, steps = dict(self._residuals), self._steps
        for bucket in self._buckets.values():
            more, count = _residuals_of(bucket)
            residuals.update(more)
            steps = max(steps, count)
        return {
            "steps": steps,
            "residuals": {str(number): torch.from_numpy(array.copy()) for number, array in sorted(residuals.items())},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, before the first step.

        Raises
        ------
        ValueError
            If `state` is not valid, or a step has been made. Nothing is changed then.
        """
        if self._numbers:
            raise ValueError("state: a step has been made with this hook; load into a new one")
        if set(state) != {"steps", "residuals"}:
            raise ValueError(f"state: {', '.join(sorted(state))} are not residuals and steps")
        steps = np.array(state["steps"], np.int64)
        residuals = {int(number): np.array(each.numpy()) for number, each in state["residuals"].items()}
        for residual in residuals.values():
            ErrorFeedback(self.compressor).check_state({"residual": residual, "steps": steps}, residual.size)
        self._residuals, self._steps = residuals, int(steps)


def _residuals_of(bucket: _Bucket) -> tuple[dict[int, np.ndarray], int]:
    """Return copies of the residuals of a bucket's parameters, by number, and the number of steps."""
    feedback = bucket.compression
    state = feedback.state() if isinstance(feedback, ErrorFeedback) else {}
    if not state:
        return {}, 0
    parts = np.split(state["residual"], np.cumsum(bucket.counts)[:-1])
    return dict(zip(bucket.numbers, parts, strict=True)), int(state["steps"])


# DistributedDataParallel compares annotations with these objects, not with their names.
CompressionHook.__call__.__annotations__.update(
    {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
)


def average(comm: Intracomm, tensor: torch.Tensor, compression: Compressor | ErrorFeedback | None) -> None:
    """Replace a tensor with its mean over the ranks, by compressed messages if `compression` is given; blocking."""
    if compression is None:
        tensor_collectives.allreduce(comm, tensor, dist.ReduceOp.AVG)
    else:
        tensor_collectives.compressed_sum(comm, tensor, compression, mean=True)


def hook(
    spec: str | Compressor, *, error_feedback: bool | None = None, dense_bytes: int = DENSE_BYTES
) -> CompressionHook:
    """Return a communication hook that averages compressed gradients.

    Parameters
    ----------
    spec
        A compressor or its specification, such as ``"int8"`` or ``"topk:0.01"``.
    error_feedback, dense_bytes
        See :class:`CompressionHook`, which is returned.

    Examples
    --------
    >>> compress = mpicoll.torch.hook("topk:0.01")
    >>> ddp.register_comm_hook(None, compress)
    >>> torch.save({"model": ddp.state_dict(), "hook": compress.state_dict()}, f"rank-{rank}.pt")
    """
    return CompressionHook(spec, error_feedback=error_feedback, dense_bytes=dense_bytes)
