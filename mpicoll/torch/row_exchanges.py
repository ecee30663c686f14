"""Calls of Horovod's interface that divide the rows of a tensor among the ranks."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from mpicoll.comm import Intracomm
from mpicoll.compression import Compressor, ErrorFeedback
from mpicoll.torch import tensor_collectives
from mpicoll.torch.call_queue import QueuedWork
from mpicoll.torch.differentiable import is_recorded, with_gradient
from mpicoll.torch.tensor_allreduce import Allreduce, check_sum, scale
from mpicoll.torch.tensor_communicator import Average, Sum, allgather
from mpicoll.torch.tensor_memory import check_rows
from mpicoll.torch.world import Pick, make, size, start

Splits: TypeAlias = "torch.Tensor | Sequence[int]"


def alltoall(tensor: torch.Tensor, splits: Splits | None = None, name: str | None = None) -> Any:
    """Send each rank a part of a tensor's rows; return the rows that came from all ranks, in rank order.

    Where autograd records it, the gradient of each row is that of the place at which the row has arrived. The backward
    pass is collective, see :func:`~mpicoll.torch.allreduce`.

    Parameters
    ----------
    tensor
        A tensor with at least one dimension; the others are the same on all ranks.
    splits
        Number of rows for each rank, a tensor or a sequence of integers; None for equal parts.
    name
        Not used.

    Returns
    -------
    torch.Tensor or tuple of torch.Tensor
        The rows; with `splits`, also the number of rows that came from each rank, of int64 if the splits are, else of
        int32.

    Raises
    ------
    ValueError
        If the tensor has no dimension, or the splits are not one for each rank, that add up to its rows.
    TypeError
        If the splits are not integers.
    """
    arrived: list[int] = []
    if is_recorded(tensor):
        rows = with_gradient(
            tensor, lambda each: _exchanged(each, splits, arrived), lambda each: alltoall(each, list(arrived))[0]
        )
    else:
        rows = _exchanged(tensor, splits, arrived)
    return rows if splits is None else (rows, _as_splits(arrived, splits))


def _exchanged(tensor: torch.Tensor, splits: Splits | None, arrived: list[int]) -> torch.Tensor:
    """Return the rows from all ranks; append their numbers to `arrived`."""
    found: list[torch.Tensor] = []
    make("alltoall", _exchange, tensor.detach(), splits, found)
    arrived += found[1].tolist()
    return found[0]


def alltoall_async(tensor: torch.Tensor, splits: Splits | None = None, name: str | None = None) -> QueuedWork:
    """Start :func:`alltoall`; return a handle.

    For it ``synchronize`` returns the rows and the number of rows that came from each rank, with splits and without.
    The tensor must stay as it is until the call has ended.
    """
    found: list[torch.Tensor] = []
    given = splits.clone() if isinstance(splits, torch.Tensor) else copy.copy(splits)
    return start("alltoall", found, _exchange, tensor.detach(), given, found, pick=tuple)


def _exchange(comm: Intracomm, tensor: torch.Tensor, splits: Splits | None, found: list[torch.Tensor]) -> None:
    """Append the rows from all ranks to `found`, and their numbers."""
    sent = _checked_splits(tensor, splits, comm.size)
    received = np.empty(comm.size, np.int64)
    comm.Alltoall(sent, received)
    rows = tensor.new_empty((int(received.sum()), *tensor.shape[1:]))
    tensor_collectives.alltoall_single(comm, rows, tensor, received.tolist(), sent.tolist())
    found += [rows, _as_splits(received.tolist(), splits)]


def _as_splits(numbers: list[int], given: Splits | None) -> torch.Tensor:
    is_wide = isinstance(given, torch.Tensor) and given.dtype == torch.int64
    return torch.tensor(numbers, dtype=torch.int64 if is_wide else torch.int32)


def _checked_splits(tensor: torch.Tensor, splits: Splits | None, ranks: int) -> np.ndarray:
    check_rows(tensor)
    rows = tensor.shape[0]
    if splits is None:
        if rows % ranks:
            raise ValueError(f"tensor: its {rows} rows cannot be divided among {ranks} ranks; give splits")
        return np.full(ranks, rows // ranks, np.int64)
    given = splits.detach().cpu().numpy() if isinstance(splits, torch.Tensor) else np.asarray(splits)
    if given.size and given.dtype.kind not in "iu":
        raise TypeError(f"splits: {splits!r} are not integers")
    if given.shape != (ranks,) or (given < 0).any() or given.sum() != rows:
        raise ValueError(f"splits: {given.tolist()} are not {ranks} numbers that add up to {rows} rows")
    return given.astype(np.int64)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: str | Compressor | ErrorFeedback | None = None,
    op: Any = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduction of a tensor over all ranks.

    The rows are divided in rank order; the first ranks get one more where they cannot be divided equally.

    Where autograd records it, the gradient has, as in Horovod, the gradients of all ranks for their rows, times
    the number of ranks for ``Sum``. The backward pass is collective, see :func:`~mpicoll.torch.allreduce`.

    Parameters
    ----------
    tensor
        A tensor with at least one dimension, of the same shape and dtype on all ranks.
    name
        Not used.
    compression
        As for :func:`~mpicoll.torch.allreduce`. All rows are exchanged then, as by an allreduce.
    op, prescale_factor, postscale_factor
        As for :func:`~mpicoll.torch.allreduce`.

    Raises
    ------
    ValueError
        If the tensor has no dimension, or an argument does not fit it.
    """
    how = Allreduce(None, op, prescale_factor, postscale_factor, compression)
    if not is_recorded(tensor):
        return _scattered(how, tensor)
    return with_gradient(tensor, partial(_scattered, how), partial(_gradient_of_reducescatter, how))


def _scattered(how: Allreduce, tensor: torch.Tensor) -> torch.Tensor:
    return reduce_rows([tensor], how)[0]


def reduce_rows(tensors: Sequence[torch.Tensor], how: Allreduce) -> list[torch.Tensor]:
    """Return this rank's rows of the reduction of each tensor of a list."""
    found: list[torch.Tensor] = []
    make("reducescatter", _reduce_each, [tensor.detach() for tensor in tensors], how, found)
    return found


def _gradient_of_reducescatter(how: Allreduce, gradient: torch.Tensor) -> torch.Tensor:
    return allgather(gradient * factor_of_gradient(how))


def factor_of_gradient(how: Allreduce) -> float:
    """Return the factor of the gradients that :func:`reducescatter` gathers; raise ValueError if it has none."""
    check_sum(how.chosen_op, "which alone have a gradient")
    return how.prescale_factor * how.postscale_factor * (size() if how.chosen_op == Sum else 1)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> QueuedWork:
    """Start :func:`reducescatter`; return a handle. The tensor must stay as it is until the call has ended."""
    how = Allreduce(None, op, prescale_factor, postscale_factor, None)
    return start_reducescatter("reducescatter", [tensor], how, operator.itemgetter(0))


def start_reducescatter(what: str, tensors: Sequence[torch.Tensor], how: Allreduce, pick: Pick) -> QueuedWork:
    """Put the call for each tensor of a list into the queue; see :func:`~mpicoll.torch.world.start`."""
    found: list[torch.Tensor] = []
    return start(what, found, _reduce_each, [each.detach() for each in tensors], how, found, pick=pick)


def _reduce_each(comm: Intracomm, tensors: Sequence[torch.Tensor], how: Allreduce, found: list[torch.Tensor]) -> None:
    """Append this rank's rows of the reduction of each tensor to `found`."""
    op = how.check_group(tensors)
    for tensor in tensors:
        check_rows(tensor)
    for tensor in tensors:
        shares = [tensor.shape[0] // comm.size + (rank < tensor.shape[0] % comm.size) for rank in range(comm.size)]
        if how.compression is not None:
            whole = tensor.clone()
            how(comm, whole)
            found.append(whole.narrow(0, sum(shares[: comm.rank]), shares[comm.rank]).clone())
            continue
        given = tensor if how.prescale_factor == 1.0 else tensor * how.prescale_factor
        own = tensor.new_empty((shares[comm.rank], *tensor.shape[1:]))
        width = tensor.shape[1:].numel()
        tensor_collectives.reduce_scatter_parts(comm, own, given, [share * width for share in shares], op)
        scale(own, how.postscale_factor)
        found.append(own)
