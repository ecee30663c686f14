"""Allocator of NumPy arrays in the memory segment of this process.

NumPy lets a program replace the functions that allocate array data (NEP 49). Those of mpicoll are compiled by Numba and
need neither the interpreter nor its lock. The choice is a context variable: it is valid for the thread, or asyncio
task, that made it. Every array is freed by the functions that it was allocated with.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import TracebackType
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.kernels import allocator as heap
from mpicoll.shared_memory import segment

MIN_NBYTES = 16 << 10
"""In bytes. Shorter arrays pass through slots in any case."""
KEPT_NBYTES = 256 << 20
_SET_HANDLER = 304
"""PyDataMem_SetHandler in the table of NumPy's C functions, since 1.22."""
_EVERYTHING, _VERSION = 1, 1


class _Allocator(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("ctx", "malloc", "calloc", "realloc", "free")]


class _Handler(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char * 127), ("version", ctypes.c_uint8), ("allocator", _Allocator)]


class _Source:
    """The heap in this process' segment, and NumPy's handle of it."""

    def __init__(self, home: segment.MemorySegment) -> None:
        self.words = np.zeros(heap.HEAP_WORDS, np.int64)
        words = self.words
        words[heap.BASE], words[heap.END] = home.address, home.address + home.nbytes
        words[heap.NEXT] = home.address + segment.FIRST_FREE
        words[heap.THRESHOLD], words[heap.OPEN], words[heap.KEEP] = MIN_NBYTES, 1, KEPT_NBYTES
        functions = (heap.allocate, heap.allocate_zeros, heap.resize, heap.release)
        allocator = _Allocator(words.ctypes.data, *(function.address for function in functions))
        self._handler = _Handler(b"mpicoll", _VERSION, allocator)
        make_capsule = ctypes.pythonapi.PyCapsule_New
        make_capsule.restype, make_capsule.argtypes = (
            ctypes.py_object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        self._name = ctypes.c_char_p(b"mem_handler")
        self.capsule = make_capsule(ctypes.addressof(self._handler), self._name, None)
        # Arrays may outlive this module when the interpreter ends.
        for kept in (self, self._handler, self.words, self.capsule, self._name):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        os.register_at_fork(after_in_child=self._close)

    def _close(self) -> None:
        self.words[heap.OPEN] = 0


@lru_cache(maxsize=1)
def _set_handler() -> Any:
    """Return NumPy's function."""
    core = np._core if hasattr(np, "_core") else np.core
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = ctypes.cast(get_pointer(core._multiarray_umath._ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
    return ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(table[_SET_HANDLER])


_one_at_a_time = threading.RLock()
"""Held while the heap is made, since two of them would hand out the same memory, and while its threshold is another."""


def source() -> _Source | None:
    """Return the heap, None if arrays cannot be allocated in shared memory here; it is made at the first call."""
    with _one_at_a_time:
        return _source()


@lru_cache(maxsize=1)
def _source() -> _Source | None:
    home = segment.own()
    if home.nbytes == 0 or heap.allocate.address == 0:
        return None
    made = _Source(home)
    return made if _works(made) else None


def _works(made: _Source) -> bool:
    """Put an array there, and have it come back."""
    with _allocating(made, 0):
        first = np.arange(5)
        moved = first.copy()
        moved.resize(5000, refcheck=False)
        zeros = np.zeros(3000)
    inside = [made.words[heap.BASE] <= array.ctypes.data < made.words[heap.END] for array in (first, moved, zeros)]
    right = moved[:5].tolist() == [0, 1, 2, 3, 4] and not zeros.any()
    used = int(made.words[heap.USED])
    del first, moved, zeros
    return all(inside) and right and used > 0 and made.words[heap.USED] == 0


@contextmanager
def _allocating(made: _Source, min_nbytes: int) -> Iterator[None]:
    with _one_at_a_time:
        threshold = int(made.words[heap.THRESHOLD])
        made.words[heap.THRESHOLD] = min_nbytes
        previous = _set_handler()(made.capsule)
        try:
            yield
        finally:
            _set_handler()(previous)
            made.words[heap.THRESHOLD] = threshold


def empty(shape: Any, dtype: Any) -> np.ndarray:
    """Return a new array in shared memory if that is possible, else an ordinary one."""
    made = source()
    if made is None:
        return np.empty(shape, dtype)
    with _allocating(made, 0):
        return np.empty(shape, dtype)


def zeros(shape: Any, dtype: Any) -> np.ndarray:
    """Return a new array of zeros; see :func:`empty`."""
    made = source()
    if made is None:
        return np.zeros(shape, dtype)
    with _allocating(made, 0):
        return np.zeros(shape, dtype)


def untouched_zeros(nbytes: int) -> np.ndarray:
    """Return bytes that are zero and of which few will be used; see :func:`empty`.

    Memory of earlier arrays is given back to the system instead of being written.
    """
    array = empty(nbytes, np.uint8)
    heap.clear(array.ctypes.data, nbytes)
    return array


class shared_arrays:
    """Context manager in which NumPy allocates large arrays in shared memory; collectives use them without a copy.

    A program may also call :meth:`enable` once at its start. It is valid for the calling thread. Arrays made afterwards
    by ``np.empty``, ``x + y``, ``x.copy()`` and so on lie in this process' memory segment until they are freed. Other
    ranks access them in collectives only.

    Parameters
    ----------
    comm
        Any communicator, or None. It has no effect, since shared arrays serve all communicators.
    min_nbytes
        Arrays of fewer bytes stay in ordinary memory. The last value that was enabled is valid for all threads.

    Raises
    ------
    TypeError, ValueError
        If `comm` is not an intracommunicator, or `min_nbytes` is not a number of bytes.

    Notes
    -----
    If there are no memory segments, :meth:`enable` issues a RuntimeWarning, and arrays are ordinary ones. A process
    made by ``fork`` shares these arrays with its parent instead of having copies of them: do not write to them there.
    """

    def __init__(self, comm: MPI.Intracomm | None = None, *, min_nbytes: int = MIN_NBYTES) -> None:
        if not isinstance(comm, (MPI.Intracomm, type(None))):
            raise TypeError(f"comm: {comm!r} is not an intracommunicator")
        if not isinstance(min_nbytes, int) or min_nbytes < 0:
            raise ValueError(f"min_nbytes: {min_nbytes!r} is not a number of bytes")
        self._min_nbytes = min_nbytes
        self._previous: list[tuple[Any, int]] = []

    def enable(self) -> None:
        """Allocate arrays in shared memory from now on; RuntimeWarning if that is not possible."""
        made = source()
        if made is None:
            warnings.warn("arrays cannot be allocated in shared memory here", RuntimeWarning, stacklevel=2)
            return
        self._previous.append((_set_handler()(made.capsule), int(made.words[heap.THRESHOLD])))
        made.words[heap.THRESHOLD] = max(self._min_nbytes, _EVERYTHING)

    def disable(self) -> None:
        """Restore the allocation before the last :meth:`enable`; existing arrays stay in shared memory."""
        made = source()
        if self._previous and made is not None:
            handler, threshold = self._previous.pop()
            _set_handler()(handler)
            made.words[heap.THRESHOLD] = threshold

    def __enter__(self) -> shared_arrays:
        self.enable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.disable()
