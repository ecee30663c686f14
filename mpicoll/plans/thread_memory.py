"""Memory of one process for ranks that are threads, on which the compiled executor runs."""

from __future__ import annotations

import importlib
import os
import types

import numpy as np

from mpicoll import kernels
from mpicoll.kernels import reduce

Array = np.ndarray
_INT64 = np.dtype(np.int64)
_EXECUTOR = ("operation_words", "executor", "counted_parts")


class ThreadMemory:
    """Memory of some ranks that are threads of this process; addresses are those of the machine.

    It has what :class:`~mpicoll.plans.simulated_executor.Ranks` uses of
    :class:`~mpicoll.plans.simulated_memory.Memory`, so that the same operations run on both: there with a proof of
    their order, here at full speed with the machine code that programs use. Without JIT compilation the executor has
    no machine code, and nothing of this works.

    Parameters
    ----------
    size
        Number of ranks, each of which is one thread.
    nbytes
        Bytes of memory.
    """

    def __init__(self, size: int, nbytes: int) -> None:
        self.size, self.rank = size, -1
        self._words = np.zeros(nbytes // 8 + 8, np.int64)
        self._begin = -(-self._words.ctypes.data // 64) * 64
        self._free, self._end = self._begin, self._words.ctypes.data + self._words.nbytes
        add = reduce.reducer("SUM", _INT64)
        assert add is not None
        self._add = add

    def load_executor(self) -> types.SimpleNamespace:
        """Return the executor's modules, compiled."""
        return types.SimpleNamespace(
            **{name: importlib.import_module(f"{kernels.__name__}.{name}") for name in _EXECUTOR}
        )

    def private(self, nbytes: int) -> int:
        """Allocate memory, all of which the ranks share; return its address."""
        address, self._free = self._free, -(-(self._free + nbytes) // 64) * 64
        if self._free > self._end:
            raise MemoryError(f"{nbytes} bytes do not fit into the memory of the threads")
        return address

    shared = private

    def load(self, address: int) -> int:
        """Return the word at `address`."""
        return int(self.read(address, 1)[0])

    def store(self, address: int, value: int) -> None:
        """Write a word."""
        self.fill(address, np.array([value], np.int64))

    def fill(self, address: int, values: Array) -> None:
        """Write an array of int64 elements."""
        first = (address - self._words.ctypes.data) // 8
        self._words[first : first + values.size] = values.reshape(-1)

    write = fill

    def read(self, address: int, count: int) -> Array:
        """Return int64 elements."""
        first = (address - self._words.ctypes.data) // 8
        return self._words[first : first + count].copy()

    def pid(self, process: int) -> int:
        """Return the number by which the system knows a process: all ranks are in this one."""
        return os.getpid()

    def reducer(self, *, raises: bool) -> int:
        """Return the address of the machine code that adds int64 elements."""
        if raises:
            raise ValueError("raises: the compiled sum raises no exception")
        return reduce.native_address(self._add, _INT64)
