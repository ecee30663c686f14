"""NumPy arrays in the segment: NumPy itself allocates them there, and frees them when they are no longer used.

NumPy lets a program replace the functions that allocate array data (NEP 49). Ours are compiled by Numba, so that they
need neither the interpreter nor its lock. The choice is a context variable: it holds for the thread, or asyncio task,
that made it. Every array remembers the functions that it was allocated with.
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
"""Shorter arrays travel through slots anyway."""
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
    """Return the heap, None if arrays cannot be put into shared memory here; made at the first call."""
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


class shared_arrays:
    """Let NumPy allocate large arrays in shared memory, where collectives use them without a copy.

    Use it as a context manager, or call :meth:`enable` once at the start of a program. It holds for the calling
    thread; arrays made by ``np.empty``, ``x + y``, ``x.copy()`` and so on from then on live in shared memory, as long
    as they are used, and are as private as any array: no other rank reads or writes them but in a collective.

    Parameters
    ----------
    comm
        A communicator, to be made before or afterwards; shared arrays serve all communicators.
    min_nbytes
        Shorter arrays stay in ordinary memory; what was asked for last holds for all threads that use this.

    Notes
    -----
    Where it cannot be done there is one RuntimeWarning, and everything works as before. A process made by ``fork``
    shares these arrays with its parent instead of having copies of them: do not write to them there.
    """

    def __init__(self, comm: MPI.Intracomm | None = None, *, min_nbytes: int = MIN_NBYTES) -> None:
        if not isinstance(comm, (MPI.Intracomm, type(None))):
            raise TypeError(f"comm: {comm!r} is not an intracommunicator")
        if not isinstance(min_nbytes, int) or min_nbytes < 0:
            raise ValueError(f"min_nbytes: {min_nbytes!r} is not a number of bytes")
        self._min_nbytes = min_nbytes
        self._previous: list[tuple[Any, int]] = []

    def enable(self) -> None:
        """Begin."""
        made = source()
        if made is None:
            warnings.warn("arrays cannot be put into shared memory here", RuntimeWarning, stacklevel=2)
            return
        self._previous.append((_set_handler()(made.capsule), int(made.words[heap.THRESHOLD])))
        made.words[heap.THRESHOLD] = max(self._min_nbytes, _EVERYTHING)

    def disable(self) -> None:
        """End; arrays that exist stay where they are."""
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
