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
from mpicoll.torch.differentiable import has_gradient, is_recorded, with_gradients
from mpicoll.torch.row_exchanges import factor_of_gradient, reduce_rows, start_reducescatter
from mpicoll.torch.tensor_allreduce import Allreduce, check_sum
from mpicoll.torch.tensor_communicator import Average, gather_rows
from mpicoll.torch.tensor_memory import check_rows
from mpicoll.torch.world import make, rank, size, start

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

    Tensors of one dtype travel together, up to 1 MiB in a message, unless messages are compressed. All ranks give the
    same number of tensors, each once; each has the same shape and dtype on all of them. See
    :func:`~mpicoll.torch.allreduce_async_` for the other parameters; an `ErrorFeedback` is for a single tensor.

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
    how, given = Allreduce(average, op, prescale_factor, postscale_factor, compression), list(tensors)
    if not any(map(is_recorded, given)):
        return _reduced(given, how)
    return with_gradients(given, partial(_reduced, how=how), partial(_gradients, how=how))


def _reduced(tensors: list[torch.Tensor], how: Allreduce) -> list[torch.Tensor]:
    copies = [tensor.detach().clone() for tensor in tensors]
    make("grouped_allreduce", how.reduce_group, copies)
    return copies


def _gradients(gradients: list[torch.Tensor], how: Allreduce) -> list[torch.Tensor]:
    check_sum(how.chosen_op, "which alone have a gradient")
    return grouped_allreduce(gradients, how.average, None, None, how.op, how.prescale_factor, how.postscale_factor)


def grouped_allgather(tensors: Tensors, name: str | None = None) -> list[torch.Tensor]:
    """Return for each tensor of a list the rows of all ranks. See :func:`~mpicoll.torch.allgather`.

    The backward pass is one for the whole list, as that of :func:`grouped_allreduce`.
    """
    given = list(tensors)
    counts = [np.empty(size(), np.int64) for _ in given]
    if not any(map(is_recorded, given)):
        return _gathered(given, counts)
    of_gradients = [own for own, tensor in zip(counts, given, strict=True) if has_gradient(tensor)]
    return with_gradients(given, partial(_gathered, counts=counts), partial(_own_rows, counts=of_gradients))


def _gathered(tensors: Tensors, counts: Sequence[np.ndarray]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    make("grouped_allgather", _gather_each, [tensor.detach() for tensor in tensors], counts, found)
    return found


def _own_rows(gradients: Tensors, counts: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Return this rank's rows of the averages of the gradients."""
    means = grouped_allreduce(gradients)
    begins = [int(numbers[: rank()].sum()) for numbers in counts]
    return [
        mean.narrow(0, begin, int(numbers[rank()])) for mean, begin, numbers in zip(means, begins, counts, strict=True)
    ]


def grouped_allgather_async(tensors: Tensors, name: str | None = None) -> QueuedWork:
    """Start :func:`grouped_allgather`; return a handle for the list of results.

    The tensors must stay as they are until the call has ended.
    """
    found: list[torch.Tensor] = []
    given = [tensor.detach() for tensor in tensors]
    counts = [np.empty(size(), np.int64) for _ in given]
    return start("grouped_allgather", found, _gather_each, given, counts, found, pick=list)


def _gather_each(comm: Intracomm, tensors: Tensors, counts: Sequence[np.ndarray], found: list[torch.Tensor]) -> None:
    for tensor in tensors:
        check_rows(tensor)
    for tensor, numbers in zip(tensors, counts, strict=True):
        gather_rows(comm, tensor, numbers, found)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: str | Compressor | ErrorFeedback | None = None,
    op: Any = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return this rank's rows of the reduction of each tensor of a list. See :func:`~mpicoll.torch.reducescatter`.

    The backward pass is one for the whole list, as that of :func:`grouped_allreduce`.
    """
    how, given = Allreduce(None, op, prescale_factor, postscale_factor, compression), list(tensors)
    if not any(map(is_recorded, given)):
        return reduce_rows(given, how)
    return with_gradients(given, partial(reduce_rows, how=how), partial(_gathered_gradients, how=how))


def _gathered_gradients(gradients: Tensors, how: Allreduce) -> list[torch.Tensor]:
    factor = factor_of_gradient(how)
    return grouped_allgather([gradient * factor for gradient in gradients])


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: Any = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> QueuedWork:
    """Start :func:`grouped_reducescatter`; return a handle for the list of results.

    The tensors must stay as they are until the call has ended.
    """
    how = Allreduce(None, op, prescale_factor, postscale_factor, None)
    return start_reducescatter("grouped_reducescatter", list(tensors), how, list)
