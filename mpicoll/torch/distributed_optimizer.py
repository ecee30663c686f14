"""Horovod's optimizer: gradients are averaged during the backward pass, before the optimizer's step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from mpicoll.compression import Compressor
from mpicoll.torch import feedback_state
from mpicoll.torch import tensor_communicator as communicator
from mpicoll.torch.gradient_reducer import GradientReducer
from mpicoll.torch.tensor_allreduce import check_sum
from mpicoll.torch.world import rank, world

BUCKET_BYTES = 4 << 20


class _Distributed:
    """Methods of an optimizer whose gradients are reduced over the ranks; they are mixed into its class."""

    _reducer: GradientReducer
    _op: Any
    _skips = False

    def compression_state_dict(self) -> dict[str, Any]:
        """Return copies of this rank's residuals of error feedback, for a checkpoint between two steps.

        They are for this rank, of the same number of ranks, and for the same model, compression and `bucket_bytes`.
        """
        return feedback_state.saved([bucket.compression for bucket in self._covering_reducer().buckets])

    def load_compression_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`compression_state_dict` returned.

        Raises
        ------
        ValueError
            If `state` is for another layout or compression, or is not valid. Nothing is changed then.
        """
        buckets = self._covering_reducer().buckets
        feedback_state.restore([each.compression for each in buckets], [each.count for each in buckets], state)

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, for instance to clip them; call step inside skip_synchronize.

        Collective. Parameters that were added to the optimizer, or unfrozen, since the last step are reduced, too.
        """
        self._covering_reducer().synchronize()

    def _covering_reducer(self) -> GradientReducer:
        """Return the reducer, with buckets for all parameters that need a gradient now."""
        self._reducer.cover(_parameters_of(self))
        return self._reducer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as optimizers of PyTorch do."""
        self._reducer.is_synchronized = False
        super().zero_grad(set_to_none)  # type: ignore[misc]

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
        communicate inside the block, none of them has a closure, and no parameter is added or unfrozen. A rank that
        raises does not take part.

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
        broadcast_parameters([("", each) for each in _parameters_of(self)], last)
        broadcast_optimizer_state(self, last)

    def step(self, closure: Any = None) -> Any:
        """Reduce what is left of the gradients, then take the optimizer's step; collective.

        Nothing is reduced, with a warning, if :meth:`synchronize` was called before and no backward pass since.

        Parameters
        ----------
        closure
            A function without arguments that computes gradients and returns the loss. Each time that the optimizer
            calls it, both are reduced over the ranks, so that all ranks decide the same by the loss: LBFGS works. Every
            rank must give one, or none. Inside :meth:`skip_synchronize` nothing is reduced.

        Returns
        -------
        tensor, float or object
            The closure's loss, reduced by `op` if it is a number or a tensor of one element; None without a closure.

        Raises
        ------
        RuntimeError
            If there is a closure inside :meth:`join`.
        """
        if not self._skips and closure is not None:
            closure = self._reducing(closure)
        elif not self._skips:
            if self._reducer.is_synchronized:
                warnings.warn("step: synchronize() was called before; call step inside skip_synchronize", stacklevel=2)
            self.synchronize()
        try:
            return super().step(closure)  # type: ignore[misc]
        finally:
            self._reducer.is_synchronized = False

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that reduces gradients and loss of another one."""
        if self._reducer.is_uneven:
            raise RuntimeError("step: a closure was given inside join, where ranks without samples cannot follow it")

        def call() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            return _reduced(loss, self._op)

        return call


def _reduced(loss: Any, op: Any) -> Any:
    """Return a loss reduced over the ranks; what is no single number as it is."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return communicator.allreduce_(loss.detach().clone(), op=op)
    if isinstance(loss, (int, float)):
        return communicator.allreduce_(torch.tensor(loss, dtype=torch.float64), op=op).item()
    return loss


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: str | Compressor | None = None,
    backward_passes_per_step: int = 1,
    op: Any = communicator.Average,
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> Any:
    """Return an optimizer that averages gradients over all ranks while the backward pass computes them.

    It is of a class derived from the optimizer's, and shares its parameter groups and its state. Call
    :func:`mpicoll.torch.init` first. Every rank must construct it with the same arguments, for the same model, and
    freeze, unfreeze and add the same parameters.

    Parameters
    ----------
    optimizer
        An optimizer of PyTorch.
    named_parameters
        The model's parameters, in the order of the forward pass, with all of the optimizer's; by default these. Those
        that need no gradient yet, or are added to the optimizer later, are reduced from the step on that needs them.
    compression
        A compressor or its specification, such as ``"int8"``, for real gradients; with error feedback if it needs
        that. Buckets of less than 4 KB are not compressed.
    backward_passes_per_step
        Number of backward passes whose gradients one step adds up. They are not divided by it, with either `op`: divide
        the loss by it for the mean over the passes.
    op
        ``Average`` over the ranks, or ``Sum``.
    bucket_bytes
        Number of bytes that one call reduces, if no single gradient is longer.

    Raises
    ------
    RuntimeError
        If :func:`mpicoll.torch.init` was not called.
    ValueError
        If an argument is out of range, or `named_parameters` lacks parameters of the optimizer.

    Notes
    -----
    Sparse gradients, as of ``Embedding(sparse=True)``, are reduced and returned as dense ones. Optimizers that take
    sparse ones only, such as ``SparseAdam``, refuse them.

    Examples
    --------
    >>> optimizer = mpicoll.torch.DistributedOptimizer(optimizer, model.named_parameters())
    >>> mpicoll.torch.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    _check(backward_passes_per_step, bucket_bytes, op)
    parameters = _parameters_of(optimizer) if named_parameters is None else _named(optimizer, named_parameters)
    kind = type(optimizer)
    made: Any = object.__new__(type(f"Distributed{kind.__name__}", (_Distributed, kind), {}))
    made.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    made._op = op
    made._reducer = GradientReducer(parameters, op, compression, bucket_bytes, backward_passes_per_step)
    return made


def _check(passes: int, bucket_bytes: int, op: Any) -> None:
    world()
    if passes < 1:
        raise ValueError(f"backward_passes_per_step: {passes} is less than 1")
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes: {bucket_bytes} is less than 1")
    check_sum(op, "which gradients need")


def _parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _named(optimizer: Any, named: Iterable[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Return the named parameters; raise ValueError if one of the optimizer's is not among them."""
    parameters, found = _parameters_of(optimizer), [parameter for _, parameter in named]
    known = {id(parameter) for parameter in found}
    missing = [parameter for parameter in parameters if id(parameter) not in known]
    if missing:
        raise ValueError(
            f"named_parameters: {len(missing)} of the optimizer's {len(parameters)} parameters are not among them, "
            f"the first of shape {tuple(missing[0].shape)}"
        )
    return found


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
    state = communicator.broadcast_object(optimizer.state_dict() if rank() == root_rank else None, root_rank)
    if rank() != root_rank:
        optimizer.load_state_dict(state)
