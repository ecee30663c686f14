"""Calls of Horovod's interface for lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from mpicoll.comm import Intracomm
from mpicoll.compression import Compressor, ErrorFeedback
from mpicoll.torch.call_queue import QueuedWork
from mpicoll.torch.differentiable import is_recorded, with_gradients
from mpicoll.torch.row_exchanges import reducescatter, start_reducescatter
from mpicoll.torch.tensor_allreduce import Allreduce, check_sum
from mpicoll.torch.tensor_communicator import Average, allgather, gather_rows
from mpicoll.torch.world import make, start

Tensors = Sequence[torch.Tensor]


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: str | Compressor | ErrorFeedback | None = None,
) -> QueuedWork:
    """Start to reduce each tensor of a list over all ranks, in place.

    Tensors of one dtype that have at most 1 MB together travel in one message. All ranks give the same number of
    tensors; each has the same shape and dtype on all of them. See :func:`~mpicoll.torch.allreduce_async_` for the other
    parameters.

    Returns
    -------
    QueuedWork
        A handle; :func:`~mpicoll.torch.synchronize` returns the list of tensors.
    """
    how = Allreduce(average, op, prescale_factor, postscale_factor, compression)
    given = list(tensors)
    return start("grouped_allreduce", given, how.reduce_group, given, pick=list)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    compression: str | Compressor | ErrorFeedback | None = None,
) -> list[torch.Tensor]:
    """Reduce each tensor of a list over all ranks, in place; return them. See :func:`grouped_allreduce_async_`."""
    given = list(tensors)
    how = Allreduce(average, op, prescale_factor, postscale_factor, compression)
    make("grouped_allreduce", how.reduce_group, given)
    return given


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> QueuedWork:
    """Start to reduce each tensor of a list over all ranks into a new one. See :func:`grouped_allreduce_async_`."""
    copies = [tensor.detach().clone() for tensor in tensors]
    return grouped_allreduce_async_(copies, average, name, op, prescale_factor, postscale_factor)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: str | Compressor | ErrorFeedback | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return the reduction of each tensor of a list over all ranks. See :func:`grouped_allreduce_async_`.

    The gradients are those of :func:`~mpicoll.torch.allreduce`: where autograd records one of the tensors, on all ranks
    or on none, the backward pass reduces the gradients of all that are real or complex.
    """
    how = Allreduce(average, op, prescale_factor, postscale_factor, compression)
    if not any(map(is_recorded, tensors)):
        return _reduced(list(tensors), how)
    return with_gradients(list(tensors), partial(_reduced, how=how), partial(_gradients, how=how))


def _reduced(tensors: list[torch.Tensor], how: Allreduce) -> list[torch.Tensor]:
    copies = [tensor.detach().clone() for tensor in tensors]
    make("grouped_allreduce", how.reduce_group, copies)
    return copies


def _gradients(gradients: list[torch.Tensor], how: Allreduce) -> list[torch.Tensor]:
    check_sum(how.chosen_op, "which alone have a gradient")
    return grouped_allreduce(gradients, how.average, None, None, how.op, how.prescale_factor, how.postscale_factor)


def grouped_allgather(tensors: Tensors, name: str | None = None) -> list[torch.Tensor]:
    """Return for each tensor of a list the rows of all ranks. See :func:`~mpicoll.torch.allgather`."""
    return [allgather(tensor) for tensor in tensors]


def grouped_allgather_async(tensors: Tensors, name: str | None = None) -> QueuedWork:
    """Start to gather the rows of all ranks for each tensor of a list; return a handle for the list of results."""
    found: list[torch.Tensor] = []
    return start("grouped_allgather", found, _gather_each, [each.detach() for each in tensors], found, pick=list)


def _gather_each(comm: Intracomm, tensors: Tensors, found: list[torch.Tensor]) -> None:
    for tensor in tensors:
        gather_rows(comm, tensor, np.empty(comm.size, np.int64), found)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: str | Compressor | ErrorFeedback | None = None,
    op: Any = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return this rank's rows of the reduction of each tensor of a list. See :func:`~mpicoll.torch.reducescatter`."""
    factors = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return [reducescatter(tensor, None, compression, op, **factors) for tensor in tensors]


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: Any = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> QueuedWork:
    """Start :func:`grouped_reducescatter`; return a handle for the list of results."""
    how = Allreduce(None, op, prescale_factor, postscale_factor, None)
    return start_reducescatter("grouped_reducescatter", tensors, how, list)
