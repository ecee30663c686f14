"""Horovod's optimizer: gradients are averaged during the backward pass, before the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from mpicoll.compression import Compressor, ErrorFeedback, compressor
from mpicoll.torch import tensor_communicator as communicator
from mpicoll.torch.call_queue import QueuedWork
from mpicoll.torch.tensor_memory import empty
from mpicoll.torch.uneven_inputs import Attendance

BUCKET_BYTES = 4 << 20
DENSE_BYTES = 4 << 10


class GradientBucket:
    """Gradients of several parameters of one dtype, in one vector that is reduced by one call.

    Parameters
    ----------
    parameters
        The parameters, in the order in which their gradients are expected.
    compression
        As for :func:`DistributedOptimizer`.
    """

    def __init__(self, parameters: list[torch.Tensor], compression: Any) -> None:
        self.parameters = parameters
        count = sum(parameter.numel() for parameter in parameters)
        self._vector = empty(count, dtype=parameters[0].dtype)
        parts = self._vector.split([parameter.numel() for parameter in parameters])
        self._parts = [part.view(each.shape) for part, each in zip(parts, parameters, strict=True)]
        self._compression = _compression(compression, parameters) if self._vector.nbytes >= DENSE_BYTES else None
        self.missing = len(parameters)

    def start(self, op: Any, scale: float) -> QueuedWork:
        """Start to reduce the gradients times `scale`; one that is None counts as zeros."""
        for part, parameter in zip(self._parts, self.parameters, strict=True):
            if parameter.grad is None:
                part.zero_()
            else:
                part.copy_(parameter.grad.detach())
        if scale != 1.0:
            self._vector.mul_(scale)
        return self._reduce(op)

    def start_with_zeros(self, op: Any) -> QueuedWork:
        """Start to reduce zeros in place of gradients of this rank."""
        self._vector.zero_()
        return self._reduce(op)

    def _reduce(self, op: Any) -> QueuedWork:
        arguments = self._vector, op, self._compression
        return communicator.start("gradients", self._vector, communicator.reduce_in_place, *arguments)

    def finish(self, scale: float) -> None:
        """Write the result times `scale` to the gradients; one that is None, as this rank did not use it, is made."""
        if scale != 1.0:
            self._vector.mul_(scale)
        for part, parameter in zip(self._parts, self.parameters, strict=True):
            if parameter.grad is None:
                parameter.grad = part.clone()
            else:
                parameter.grad.detach().copy_(part)


def _compression(given: str | Compressor | None, parameters: list[torch.Tensor]) -> Compressor | ErrorFeedback | None:
    """Return the compressor of a bucket, with error feedback if it needs that."""
    if given is None:
        return None
    made = compressor(given).shaped([tuple(parameter.shape) for parameter in parameters])
    return ErrorFeedback(made) if made.needs_feedback else made


class GradientReducer:
    """Buckets of gradients that are reduced as they become complete, in the same order on all ranks.

    Parameters
    ----------
    parameters
        The parameters, in the order of the forward pass.
    op, compression, bucket_bytes, passes
        As for :func:`DistributedOptimizer`.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], op: Any, compression: Any, bucket_bytes: int, passes: int
    ) -> None:
        self._op, self._passes = op, passes
        self._buckets = [GradientBucket(each, compression) for each in _cut(parameters, bucket_bytes)]
        self._works: list[QueuedWork] = []
        self._seen: dict[torch.Tensor, int] = {}
        self._attendance: Attendance | None = None
        self._by_initial_size = True
        self.is_on = True
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._ready, bucket))

    def _ready(self, bucket: GradientBucket, parameter: torch.Tensor) -> None:
        """Note that a gradient has been accumulated; start what is complete."""
        if not self.is_on:
            return
        self._seen[parameter] = self._seen.get(parameter, 0) + 1
        if self._seen[parameter] > self._passes:
            raise RuntimeError(
                f"gradients: {self._passes} backward passes since the last step are one too many; call step(), "
                "or give backward_passes_per_step"
            )
        if self._seen[parameter] == self._passes:
            bucket.missing -= 1
            self._start_complete()

    def _start_complete(self) -> None:
        while len(self._works) < len(self._buckets) and self._buckets[len(self._works)].missing == 0:
            self._start_next()

    def _start_next(self) -> None:
        if self._attendance is not None and not self._works:
            self._attendance.send(True)
        scale = 1.0 / self._passes if self._op == communicator.Average else 1.0
        self._works.append(self._buckets[len(self._works)].start(self._op, scale))

    def synchronize(self) -> None:
        """Reduce what is left, wait for all, and write the results to the gradients; collective."""
        while len(self._works) < len(self._buckets):
            self._start_next()
        works, self._works = self._works, []
        self._seen.clear()
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
        scale = self._scale_of_present()
        for bucket, work in zip(self._buckets, works, strict=True):
            work.wait()
            bucket.finish(scale)

    def _scale_of_present(self) -> float:
        """Return the factor that makes an average over all ranks one over those that take part."""
        if self._attendance is None or not self._buckets:
            return 1.0
        present = len(self._attendance.receive())
        by_present = self._op == communicator.Average and not self._by_initial_size
        return communicator.size() / present if by_present else 1.0

    def begin_uneven(self, by_initial_size: bool) -> None:
        """Let ranks run out of samples from now on; collective."""
        if self._attendance is not None:
            raise RuntimeError("join: it is inside another join")
        self._attendance, self._by_initial_size = Attendance(), by_initial_size

    def end_uneven(self) -> None:
        """Let every rank have samples again; local."""
        self._attendance = None

    def shadow(self) -> int:
        """Take part with zeros until no rank has samples; return the highest of the ranks that stopped last.

        Collective over ranks that call this, or reduce their gradients.
        """
        attendance = self._attendance
        assert attendance is not None
        while True:
            attendance.send(False)
            if not attendance.receive():
                return attendance.present[-1]
            for work in [bucket.start_with_zeros(self._op) for bucket in self._buckets]:
                work.wait()


def _cut(parameters: Iterable[torch.Tensor], nbytes: int) -> list[list[torch.Tensor]]:
    """Return parameters that need a gradient, last ones first, in lists of one dtype and of about `nbytes` bytes."""
    lists: list[list[torch.Tensor]] = []
    room = 0
    for parameter in reversed([each for each in parameters if each.requires_grad]):
        if not lists or room < parameter.nbytes or lists[-1][0].dtype != parameter.dtype:
            lists.append([])
            room = max(nbytes, parameter.nbytes)
        lists[-1].append(parameter)
        room -= parameter.nbytes
    return lists


class _Distributed:
    """Methods of an optimizer whose gradients are reduced over the ranks; they are mixed into its class."""

    _reducer: GradientReducer
    _skips = False

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, for instance to clip them; call step inside skip_synchronize."""
        self._reducer.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let :meth:`step` take the gradients as they are, after :meth:`synchronize`."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of backward passes without reducing them; the next pass outside reduces their sum."""
        self._reducer.is_on = False
        try:
            yield
        finally:
            self._reducer.is_on = True

    @contextmanager
    def join(self, divide_by_initial_size: bool = True) -> Iterator[None]:
        """Let ranks take different numbers of steps; collective, as is the end of the block.

        A rank that leaves the block takes part in the steps of the others with zeros, until all have left. Then the
        parameters and the state of the optimizer are those of the rank that was the last to leave, the highest one if
        there are several, on all ranks. Buffers of the model are not sent; nothing but this optimizer's steps may
        communicate inside the block. A rank that raises does not take part.

        Parameters
        ----------
        divide_by_initial_size
            True if ``Average`` divides by the number of all ranks, False if by that of the ranks that have samples.

        Raises
        ------
        RuntimeError
            If it is inside another ``join``.

        Examples
        --------
        >>> with optimizer.join():
        ...     for x, y in batches:  # not as many on all ranks
        ...         optimizer.zero_grad()
        ...         loss(model(x), y).backward()
        ...         optimizer.step()
        """
        self._reducer.begin_uneven(divide_by_initial_size)
        try:
            yield
            last = self._reducer.shadow()
        finally:
            self._reducer.end_uneven()
        groups = self.param_groups  # type: ignore[attr-defined]
        broadcast_parameters([("", each) for group in groups for each in group["params"]], last)
        broadcast_optimizer_state(self, last)

    def step(self, closure: Any = None) -> Any:
        """Reduce what is left of the gradients, then take the optimizer's step; collective."""
        if not self._skips:
            self._reducer.synchronize()
        return super().step(closure)  # type: ignore[misc]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: str | Compressor | None = None,
    backward_passes_per_step: int = 1,
    op: Any = communicator.Average,
    bucket_bytes: int = BUCKET_BYTES,
) -> Any:
    """Return an optimizer that averages gradients over all ranks while the backward pass computes them.

    It is of a class derived from the optimizer's, and shares its parameter groups and its state. Call
    :func:`mpicoll.torch.init` first. Every rank must construct it with the same arguments, for the same model.

    Parameters
    ----------
    optimizer
        An optimizer of PyTorch.
    named_parameters
        The model's parameters, in the order of the forward pass; by default the optimizer's.
    compression
        A compressor or its specification, such as ``"int8"``, for real gradients; with error feedback if it needs
        that. Buckets of less than 4 KB are not compressed.
    backward_passes_per_step
        Number of backward passes whose gradients one step adds up, or averages.
    op
        ``Average`` or ``Sum``.
    bucket_bytes
        Number of bytes that one call reduces, if no single gradient is longer.

    Raises
    ------
    RuntimeError
        If :func:`mpicoll.torch.init` was not called.
    ValueError
        If an argument is out of range.

    Examples
    --------
    >>> optimizer = mpicoll.torch.DistributedOptimizer(optimizer, model.named_parameters())
    >>> mpicoll.torch.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    communicator.world()
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step: {backward_passes_per_step} is less than 1")
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes: {bucket_bytes} is less than 1")
    if named_parameters is not None:
        parameters = [parameter for _, parameter in named_parameters]
    else:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kind = type(optimizer)
    made: Any = object.__new__(type(f"Distributed{kind.__name__}", (_Distributed, kind), {}))
    made.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    made._reducer = GradientReducer(parameters, op, compression, bucket_bytes, backward_passes_per_step)
    return made


def broadcast_parameters(parameters: Any, root_rank: int = 0) -> None:
    """Broadcast tensors from the root, in place; collective over all ranks.

    Parameters
    ----------
    parameters
        A ``state_dict()``, or pairs of name and tensor such as ``named_parameters()``; the same on all ranks.
    """
    pairs = parameters.items() if hasattr(parameters, "items") else parameters
    tensors = [tensor for _, tensor in pairs if isinstance(tensor, torch.Tensor)]
    for work in [communicator.broadcast_async_(tensor, root_rank) for tensor in tensors]:
        work.wait()


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Give all ranks the root's optimizer state, parameter groups and learning rates included; collective.

    Ranks whose optimizer has made no step yet get the tensors of the root's.
    """
    state = communicator.broadcast_object(
        optimizer.state_dict() if communicator.rank() == root_rank else None, root_rank
    )
    if communicator.rank() != root_rank:
        optimizer.load_state_dict(state)
