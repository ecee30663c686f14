"""Execution of collectives in compiled programs, on XLA's own buffers and without a copy."""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mpicoll.comm import Intracomm
from mpicoll.errors import CollectiveTimeout
from mpicoll.jax.jax_communicators import Collective
from mpicoll.jax.xla_call_frame import DEADLINE_EXCEEDED, INTERNAL, INVALID_ARGUMENT, handler

TARGET = "mpicoll_collective"
"""Name of the handler in XLA's programs."""

_last_error: BaseException | None = None


def last_error() -> BaseException | None:
    """Return the exception of the last collective that failed in a program of JAX, on this rank; None if none has.

    JAX itself raises ``jax.errors.JaxRuntimeError`` with the name and the text of this exception.
    """
    return _last_error


class _Vector:
    """Count and element type of a buffer, which is the same in each run of a program."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        self.count, self.dtype = math.prod(shape), dtype
        self._memory = ctypes.c_char * (self.count * dtype.itemsize)

    def at(self, address: int) -> np.ndarray:
        """Return the memory of the buffer as an array of shape (count,)."""
        if not self.count:
            return np.empty(0, self.dtype)
        return np.frombuffer(memoryview(self._memory.from_address(address)), self.dtype)


class _Call:
    """A collective with the vectors of one place in a program."""

    def __init__(self, collective: Collective, arguments: Sequence[Any], results: Sequence[Any]) -> None:
        self.collective = collective
        self._arguments = [_Vector(each.shape, np.dtype(each.dtype)) for each in arguments]
        self._results = [_Vector(each.shape, np.dtype(each.dtype)) for each in results]

    def run(self, arguments: Sequence[int], results: Sequence[int]) -> None:
        """Run the collective on the buffers at these addresses."""
        comm = self.collective.group.comm
        if comm is None:
            raise ValueError(f"comm: the communicator of {self.collective} was freed")
        given = [vector.at(address) for vector, address in zip(self._arguments, arguments, strict=True)]
        for each in given:
            each.flags.writeable = False
        made = [vector.at(address) for vector, address in zip(self._results, results, strict=True)]
        _RUN[self.collective.kind](comm, self.collective, *given, *made)


_calls: list[_Call] = []
_numbers: dict[tuple[Any, ...], int] = {}


def number_of(collective: Collective, arguments: Sequence[Any], results: Sequence[Any]) -> int:
    """Return the number by which a program calls a collective on vectors of these shapes and element types.

    It means the same in this process only. A program that is loaded from JAX's persistent cache is found there by its
    text, numbers included, so that its numbers are those of this process.
    """
    key = (collective, *((tuple(each.shape), np.dtype(each.dtype)) for each in (*arguments, *results)))
    if key not in _numbers:
        _calls.append(_Call(collective, arguments, results))
        _numbers[key] = len(_calls) - 1
    return _numbers[key]


def _execute(number: int, arguments: Sequence[int], results: Sequence[int]) -> None:
    if not 0 <= number < len(_calls):
        raise RuntimeError("mpicoll.jax: the program was compiled in another process; collectives cannot be exported")
    _calls[number].run(arguments, results)


def _describe(error: BaseException) -> tuple[int, str]:
    global _last_error
    _last_error = error
    logging.getLogger("mpicoll.jax").debug("a collective failed", exc_info=error)
    code = DEADLINE_EXCEEDED if isinstance(error, CollectiveTimeout) else INTERNAL
    if isinstance(error, (TypeError, ValueError)):
        code = INVALID_ARGUMENT
    return code, f"{type(error).__name__}: {error}"


def _allreduce(comm: Intracomm, collective: Collective, x: np.ndarray, result: np.ndarray) -> None:
    comm.Allreduce(x, result, collective.op, compression=collective.compression)


def _bcast(comm: Intracomm, collective: Collective, x: np.ndarray, result: np.ndarray) -> None:
    if comm.rank == collective.root:
        np.copyto(result, x)
    comm.Bcast(result, collective.root)


def _reduce(comm: Intracomm, collective: Collective, x: np.ndarray, result: np.ndarray) -> None:
    comm.Reduce(x, result if comm.rank == collective.root else None, collective.op, collective.root)
    if comm.rank != collective.root:
        result.fill(0)


def _allgather(comm: Intracomm, collective: Collective, x: np.ndarray, result: np.ndarray) -> None:
    comm.Allgather(x, result)


def _reduce_scatter(comm: Intracomm, collective: Collective, x: np.ndarray, result: np.ndarray) -> None:
    comm.Reduce_scatter_block(x, result, collective.op)


def _alltoall(comm: Intracomm, collective: Collective, x: np.ndarray, result: np.ndarray) -> None:
    comm.Alltoall(x, result)


def _barrier(comm: Intracomm, collective: Collective) -> None:
    comm.Barrier()


_RUN: dict[str, Callable[..., None]] = {
    "allreduce": _allreduce,
    "bcast": _bcast,
    "reduce": _reduce,
    "allgather": _allgather,
    "reduce_scatter": _reduce_scatter,
    "alltoall": _alltoall,
    "barrier": _barrier,
}

_handler = handler(_execute, _describe)
jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(ctypes.cast(_handler, ctypes.c_void_p).value), platform="cpu")
