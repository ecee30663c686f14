"""Horovod's optimizer: gradients are averaged during the backward pass, before the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from mpicoll.compression import Compressor
from mpicoll.torch import feedback_state
from mpicoll.torch import tensor_communicator as communicator
from mpicoll.torch.gradient_reducer import GradientReducer

BUCKET_BYTES = 4 << 20


class _Distributed:
    """Methods of an optimizer whose gradients are reduced over the ranks; they are mixed into its class."""

    _reducer: GradientReducer
    _skips = False

    def compression_state_dict(self) -> dict[str, Any]:
        """Return copies of this rank's residuals of error feedback, for a checkpoint between two steps.

        They are for this rank, of the same number of ranks, and for the same model, compression and `bucket_bytes`.
        """
        return feedback_state.saved([bucket.compression for bucket in self._reducer.buckets])

    def load_compression_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`compression_state_dict` returned.

        Raises
        ------
        ValueError
            If `state` is for another layout or compression, or is not valid. Nothing is changed then.
        """
        buckets = self._reducer.buckets
        feedback_state.restore([each.compression for each in buckets], [each.count for each in buckets], state)

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
    communicator.check_sum(op, "which gradients need")
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
