"""Reductions of lists of objects, in the order and with the association of mpi4py's.

mpi4py reduces along a binomial tree and scans by recursive doubling; the same association gives the same bits of
floating-point numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from mpicoll.buffers.reduction_ops import UserOperation

AnyCallable = Callable[[Any, Any], Any]

OPS = ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR", "MAXLOC", "MINLOC", "REPLACE",
       "NO_OP")  # fmt: skip
OP_NAMES = ("a function", *OPS)
"""By number; 0 is whatever is not predefined."""
PREDEFINED = [getattr(MPI, name) for name in OPS]
"""Predefined operations, from number 1 on."""
_NUMBERS = {id(op): number for number, op in enumerate(PREDEFINED, 1)}
_BY_HANDLE = {op.handle: number for number, op in enumerate(PREDEFINED, 1)}
_QUICKER = {1: operator.add, 2: operator.mul}
"""Functions that do the same as an operation, sooner."""


def number_of(op: Any) -> int:
    """Return the number of a predefined operation, 0 for anything else."""
    number = _NUMBERS.get(id(op))
    if number is None:
        number = _BY_HANDLE.get(op.handle, 0) if isinstance(op, MPI.Op) else 0
    return number


def is_function(op: Any) -> bool:
    """Return whether :func:`function_of` takes it."""
    return isinstance(op, UserOperation) or callable(op)


def function_of(op: Any, number: int) -> AnyCallable:
    """Return what combines two objects.

    Raises
    ------
    TypeError
        If `op` cannot be called.
    """
    if number:
        return _QUICKER.get(number) or PREDEFINED[number - 1]
    if isinstance(op, UserOperation):
        return op.function
    if not callable(op):
        raise TypeError(f"op: {op!r} is neither an MPI.Op nor a function of two objects")
    return op


def fold(function: AnyCallable, objects: Sequence[Any]) -> Any:
    """Reduce all objects; None for none."""
    if len(objects) == 2:
        return function(objects[0], objects[1])
    partial, step = list(objects), 1
    while step < len(partial):
        for place in range(0, len(partial) - step, 2 * step):
            partial[place] = function(partial[place], partial[place + step])
        step *= 2
    return partial[0] if partial else None


def fold_before(function: AnyCallable, objects: Sequence[Any], rank: int, *, inclusive: bool) -> Any:
    """Reduce the objects before `rank`, and its own if `inclusive`; None for none."""
    result, there, block = (objects[rank], True, 1) if inclusive else (None, False, 1)
    while block <= rank:
        if rank & block:
            first = rank & ~(2 * block - 1)
            before = fold(function, objects[first : first + block])
            result, there = (function(before, result) if there else before), True
        block *= 2
    return result
