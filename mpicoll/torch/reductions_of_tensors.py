"""Reduction operations of ``torch.distributed`` as operations of MPI, with factors before and divisors after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch.distributed import ReduceOp

from mpicoll.torch.tensor_memory import MOVED_ONLY, memory

_OPS = {
    "SUM": MPI.SUM,
    "AVG": MPI.SUM,
    "PREMUL_SUM": MPI.SUM,
    "PRODUCT": MPI.PROD,
    "MIN": MPI.MIN,
    "MAX": MPI.MAX,
    "BAND": MPI.BAND,
    "BOR": MPI.BOR,
    "BXOR": MPI.BXOR,
}
_OF_BOOL = {
    "SUM": MPI.LOR,
    "PRODUCT": MPI.LAND,
    "MIN": MPI.LAND,
    "MAX": MPI.LOR,
    "BAND": MPI.LAND,
    "BOR": MPI.LOR,
    "BXOR": MPI.LXOR,
}
"""As NCCL has them: a sum of bools is true if one of them is."""
_WIDE = {
    torch.float16: torch.float32,
    **dict.fromkeys((torch.int8, torch.uint8, torch.int16, torch.uint16), torch.int32),
    **dict.fromkeys((torch.int32, torch.uint32), torch.int64),
}
"""Types in which sums for a mean are computed, as they may be out of the range of the elements.

To divide before the sum, as NCCL does, rounds twice, and makes small numbers of float16 and small integers zero.
"""
_BITWISE, _ORDERING = ("BAND", "BOR", "BXOR"), ("MIN", "MAX")


class Reduction(NamedTuple):
    """An operation on elements of one type.

    Attributes
    ----------
    op
        The operation of MPI.
    factor
        Number, or tensor of one element, to multiply all elements with before it; None for none.
    mean
        Whether to divide the result by the number of ranks.
    wide
        Element type of the sum for a mean, if it is another one than that of the elements.
    """

    op: MPI.Op
    factor: Any = None
    mean: bool = False
    wide: torch.dtype | None = None


_known: dict[tuple[int, torch.dtype], Reduction] = {}


PLAIN_OPS: dict[tuple[int, torch.dtype], MPI.Op] = {
    (hash(getattr(ReduceOp, name)), dtype): _OPS[name]
    for name in ("SUM", "PRODUCT", "MIN", "MAX")
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64)
}
"""Operations that need nothing before or after them, on elements that NumPy has."""


def reduction(op: Any, dtype: torch.dtype) -> Reduction:
    """Return the reduction for a ReduceOp and elements of `dtype`.

    Raises
    ------
    ValueError
        If the operation is not defined on such elements.
    """
    key = hash(op), dtype  # its hash is its number, and comparing two of them takes longer
    found = _known.get(key)
    if found is None or found.factor is not None:
        found = _known[key] = _reduction(op, dtype)
    return found


def _reduction(op: Any, dtype: torch.dtype) -> Reduction:
    name = _name(op)
    real = dtype.is_floating_point or dtype.is_complex
    undefined = (
        name not in _OPS
        or dtype in MOVED_ONLY  # MPI would reduce their bytes
        or (name in _BITWISE and real)
        or (name in _ORDERING and dtype.is_complex)
        or (dtype == torch.bool and name not in _OF_BOOL)
    )
    if undefined:
        raise ValueError(f"op: {name} is not defined on tensors of {dtype}")
    if dtype == torch.bool:
        return Reduction(_OF_BOOL[name])
    factor = ReduceOp.__getstate__(op)[1] if name == "PREMUL_SUM" else None
    if factor is not None and not torch.can_cast(torch.result_type(torch.empty(0, dtype=dtype), factor), dtype):
        raise ValueError(f"op: {name} by {factor} is not defined on tensors of {dtype}")
    return Reduction(_OPS[name], factor, name == "AVG", _WIDE.get(dtype) if name == "AVG" else None)


def _name(op: Any) -> str:
    return next((name for name in _OPS if op == getattr(ReduceOp, name)), str(op))


def prepared(tensor: torch.Tensor, how: Reduction) -> torch.Tensor:
    """Return the elements to reduce: times the factor, or of the wider type; the tensor itself if there is neither."""
    if how.factor is not None:
        return tensor.detach().clone().mul_(how.factor)
    return tensor if how.wide is None else tensor.detach().to(how.wide)


def reduce_into(room: torch.Tensor, how: Reduction, size: int, reduce: Callable[[torch.Tensor], None]) -> None:
    """Have `reduce` write the reduction to a contiguous tensor; divide it for a mean, and narrow it to `room`."""
    total = room if how.wide is None else room.to(how.wide)
    reduce(total)
    if how.mean:
        divide(total, size)
    if total is not room:
        room.copy_(total)


def divide(tensor: torch.Tensor, size: int) -> None:
    """Divide a tensor by `size` in place; integers are truncated toward zero."""
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain)  # PyTorch's division of complex numbers rounds more than once
    if plain.is_floating_point():
        plain.div_(size)
    elif plain.dtype == torch.uint64:  # PyTorch does not divide them
        array = memory(plain)
        array //= np.uint64(size)
    else:
        plain.div_(size, rounding_mode="trunc")
