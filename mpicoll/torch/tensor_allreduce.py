"""Allreduce of tensors with Horovod's arguments: what they mean, and the call itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ReduceOp

from mpicoll.comm import Intracomm
from mpicoll.compression import Compressor, ErrorFeedback
from mpicoll.torch import tensor_collectives
from mpicoll.torch.differentiable import has_gradient
from mpicoll.torch.reductions_of_tensors import reduction
from mpicoll.torch.tensor_memory import check_dense


@dataclass(frozen=True, slots=True)
class Allreduce:
    """Arguments of an allreduce but its tensors, as :func:`~mpicoll.torch.allreduce_async_` has them."""

    average: bool | None
    op: Any
    prescale_factor: float
    postscale_factor: float
    compression: str | Compressor | ErrorFeedback | None

    @property
    def chosen_op(self) -> Any:
        """The operation; raises TypeError or ValueError if `average` is no bool, or both are given."""
        return _chosen(self.average, self.op)

    def __call__(self, comm: Intracomm, tensor: torch.Tensor) -> None:
        """Scale and reduce a tensor over the ranks of `comm`, in place and blocking."""
        op = self.chosen_op
        self.check_factors(tensor)
        scale(tensor, self.prescale_factor)
        reduce_in_place(comm, tensor, op, self.compression)
        scale(tensor, self.postscale_factor)

    def reduce_group(self, comm: Intracomm, tensors: Sequence[torch.Tensor]) -> None:
        """Scale and reduce several tensors, in place and blocking; short ones that are alike travel together."""
        op = self.check_group(tensors)
        for tensor in tensors:
            scale(tensor, self.prescale_factor)
        if self.compression is None:
            tensor_collectives.allreduce_coalesced(comm, tensors, op)
        else:
            for tensor in tensors:
                reduce_in_place(comm, tensor, op, self.compression)
        for tensor in tensors:
            scale(tensor, self.postscale_factor)

    def check_group(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the operation; raise ValueError or TypeError if one of the tensors cannot be reduced by it.

        What is refused before the first message is told to the other ranks.
        """
        op = self.chosen_op
        if self.compression is not None:
            check_sum(op, "with compression")
        if isinstance(self.compression, ErrorFeedback) and len(tensors) > 1:
            raise ValueError(f"compression: an ErrorFeedback is for one vector, not for {len(tensors)} tensors")
        for tensor in tensors:
            check_dense(tensor)
            self.check_factors(tensor)
            if self.compression is None:
                reduction(op, tensor.dtype)
            else:
                tensor_collectives.check_compressible(tensor)
        return op

    def check_factors(self, tensor: torch.Tensor) -> None:
        """Raise ValueError for factors of a tensor that is neither real nor complex."""
        for name in ("prescale_factor", "postscale_factor"):
            factor = getattr(self, name)
            if factor != 1.0 and not has_gradient(tensor):
                raise ValueError(f"{name}: {factor} with a tensor of {tensor.dtype}, which is not scaled")


def scale(tensor: torch.Tensor, factor: float) -> None:
    """Multiply a tensor by a factor, in place."""
    if factor != 1.0:
        tensor.detach().mul_(factor)


def _chosen(average: bool | None, op: Any) -> Any:
    """Return the operation by Horovod's two arguments for it."""
    if average is None:
        return ReduceOp.AVG if op is None else op
    if not isinstance(average, bool):
        raise TypeError(f"average: {average!r} is neither a bool nor None; give op= or name=")
    if op is not None:
        raise ValueError(f"average: {average} together with op {op}; give op alone")
    return ReduceOp.AVG if average else ReduceOp.SUM


def reduce_in_place(
    comm: Intracomm, tensor: torch.Tensor, op: Any, compression: str | Compressor | ErrorFeedback | None
) -> None:
    """Reduce a tensor over the ranks of `comm`, in place and blocking, with compressed messages or without.

    Raises
    ------
    ValueError
        If `op` is not defined on such elements, or is neither ``Average`` nor ``Sum`` and messages are compressed.
    """
    if compression is None:
        tensor_collectives.allreduce(comm, tensor, op)
        return
    check_sum(op, "with compression")
    tensor_collectives.compressed_sum(comm, tensor, compression, mean=op == ReduceOp.AVG)


def check_sum(op: Any, where: str) -> None:
    """Raise ValueError unless `op` is ``Average`` or ``Sum``."""
    if op not in (ReduceOp.AVG, ReduceOp.SUM):
        raise ValueError(f"op: {op} is neither Average nor Sum, {where}")
