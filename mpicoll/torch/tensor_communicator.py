"""Collectives of tensors for programs without ``torch.distributed``, with the names of Horovod's functions.

A program that imports ``horovod.torch as hvd`` runs with ``import mpicoll.torch as hvd``, as far as it uses these
functions, those of :mod:`~mpicoll.torch.grouped_calls`, :mod:`~mpicoll.torch.row_exchanges` and
:mod:`~mpicoll.torch.world`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed import ReduceOp

from mpicoll.comm import Intracomm
from mpicoll.compression import Compressor, ErrorFeedback
from mpicoll.torch import tensor_collectives
from mpicoll.torch.call_queue import QueuedWork
from mpicoll.torch.differentiable import is_recorded, with_gradient
from mpicoll.torch.tensor_allreduce import Allreduce, check_sum
from mpicoll.torch.tensor_memory import check_rows
from mpicoll.torch.world import make, rank, size, start

Average, Sum, Min, Max, Product = ReduceOp.AVG, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT


class Compression:
    """Names of compressors for ``compression=``, as Horovod has them; any specification of mpicoll's may be given."""

    none: str | None = None
    fp16: str | None = "fp16"


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: str | Compressor | ErrorFeedback | None = None,
) -> QueuedWork:
    """Start to reduce a tensor over all ranks, in place; return a handle for :func:`synchronize`.

    Parameters
    ----------
    tensor
        A tensor of the CPU, of the same shape and dtype on all ranks.
    average
        Older form of `op`: True is ``Average``, False ``Sum``.
    name
        Not used: the order of calls says which belong together, and must be the same on all ranks.
    op
        ``Average``, which None stands for, ``Sum``, ``Min``, ``Max`` or ``Product``.
    prescale_factor, postscale_factor
        Factors of real or complex tensors before and after the reduction.
    compression
        For averages and sums of float32: a compressor, as for :meth:`mpicoll.Intracomm.Allreduce`.

    Raises
    ------
    TypeError
        If `average` is neither a bool nor None.
    ValueError
        If `average` and `op` are both given, or an argument does not fit the tensor.
    """
    how = Allreduce(average, op, prescale_factor, postscale_factor, compression)
    return start("allreduce", tensor, how, tensor)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: str | Compressor | ErrorFeedback | None = None,
) -> torch.Tensor:
    """Reduce a tensor over all ranks, in place; return it. See :func:`allreduce_async_`."""
    make("allreduce", Allreduce(average, op, prescale_factor, postscale_factor, compression), tensor)
    return tensor


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> QueuedWork:
    """Start to reduce a tensor over all ranks into a new one; return a handle. See :func:`allreduce_async_`."""
    return allreduce_async_(tensor.detach().clone(), average, name, op, prescale_factor, postscale_factor)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: str | Compressor | ErrorFeedback | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return the reduction of a tensor over all ranks. See :func:`allreduce_async_`.

    Where autograd records it, the tensor's gradient is the same reduction of the ranks' gradients, uncompressed; only
    ``Average`` and ``Sum`` have one. The backward pass is collective then: the tensor must require a gradient on all
    ranks or on none.
    """
    how = Allreduce(average, op, prescale_factor, postscale_factor, compression)
    if not is_recorded(tensor):
        return _allreduced(tensor, how)
    return with_gradient(tensor, partial(_allreduced, how=how), partial(_gradient_of_allreduce, how=how))


def _allreduced(tensor: torch.Tensor, how: Allreduce) -> torch.Tensor:
    made = tensor.detach().clone()
    make("allreduce", how, made)
    return made


def _gradient_of_allreduce(gradient: torch.Tensor, how: Allreduce) -> torch.Tensor:
    check_sum(how.chosen_op, "which alone have a gradient")
    return allreduce(gradient, how.average, None, None, how.op, how.prescale_factor, how.postscale_factor)


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> QueuedWork:
    """Start to broadcast a tensor from the root, in place; return a handle for :func:`synchronize`."""
    return start("broadcast", tensor, tensor_collectives.broadcast, tensor, root_rank)


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> QueuedWork:
    """Start to broadcast the root's tensor into a new one; return a handle for :func:`synchronize`."""
    return broadcast_async_(tensor.detach().clone(), root_rank)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Broadcast a tensor from the root, in place; return it."""
    make("broadcast", tensor_collectives.broadcast, tensor, root_rank)
    return tensor


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return the root's tensor; `tensor` of the other ranks has the same shape and dtype, and stays as it is.

    Where autograd records it, the gradient of the root's tensor is, as in Horovod, the average of the ranks' gradients,
    and that of the others zero. The backward pass is collective, see :func:`allreduce`.
    """
    if not is_recorded(tensor):
        return broadcast_(tensor.detach().clone(), root_rank)

    def gradient_of(gradient: torch.Tensor) -> torch.Tensor:
        mean = allreduce(gradient)
        # Not zeros_like: a second derivative is collective, too, and needs the node of autograd on every rank.
        return mean if rank() == root_rank else mean.masked_fill(torch.tensor(True), 0.0)

    return with_gradient(tensor, lambda each: broadcast_(each.detach().clone(), root_rank), gradient_of)


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return the rows of all ranks' tensors, in rank order; the numbers of rows may differ.

    Where autograd records it, the gradient of a rank's rows is, as in Horovod, the average of the ranks' gradients for
    them. The backward pass is collective, see :func:`allreduce`.

    Raises
    ------
    ValueError
        If the tensor has no dimension.
    """
    counts = np.empty(size(), np.int64)
    if not is_recorded(tensor):
        return _gathered(tensor, counts)

    def gradient_of(gradient: torch.Tensor) -> torch.Tensor:
        return allreduce(gradient).narrow(0, int(counts[: rank()].sum()), int(counts[rank()]))

    return with_gradient(tensor, lambda each: _gathered(each, counts), gradient_of)


def _gathered(tensor: torch.Tensor, counts: np.ndarray) -> torch.Tensor:
    """Return the rows of all ranks; write their numbers to `counts`."""
    found: list[torch.Tensor] = []
    make("allgather", gather_rows, tensor.detach(), counts, found)
    return found[0]


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> QueuedWork:
    """Start to gather the rows of all ranks' tensors; return a handle for :func:`synchronize`. See :func:`allgather`.

    The tensor must stay as it is until the call has ended.
    """
    found: list[torch.Tensor] = []
    return start("allgather", found, gather_rows, tensor.detach(), np.empty(size(), np.int64), found)


def gather_rows(comm: Intracomm, tensor: torch.Tensor, counts: np.ndarray, found: list[torch.Tensor]) -> None:
    """Append a tensor with the rows of all ranks to `found`; write their numbers to `counts`."""
    check_rows(tensor)
    comm.Allgather(np.array([tensor.shape[0]], np.int64), counts)
    found.append(tensor_collectives.gathered_rows(comm, tensor.contiguous(), counts.tolist()))


def broadcast_object(value: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return the root's object, of any kind that can be pickled."""
    found: list[Any] = []
    make("broadcast_object", lambda comm: found.append(comm.bcast(value, root_rank)))
    return found[0]


def allgather_object(value: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, of any kind that can be pickled, in rank order."""
    found: list[Any] = []
    make("allgather_object", lambda comm: found.append(comm.allgather(value)))
    return list(found[0])
