"""Remote memory: the interface of memory of one rank that others read and write, and its implementation by MPI windows.

:mod:`mpicoll.parameter_server.message_memory` is an implementation by messages, for jobs that outlive dead ranks.

Each 8-byte word and each vector is accessed in one way only, because MPI guarantees no more (MPI 4.1, section 12.7):
either ranks add to it, or one rank replaces it, by accumulates; all ranks read it by accumulates with MPI_NO_OP. These
are atomic for each element, not for a vector. Only `put` writes by MPI_Put, to memory that its owner reads only after a
word has announced the data, and that no other rank accesses.

The data of a call are written when it returns, and may be visible at any time before: a word that announces data has to
be written by a later call.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.errors import MpicollError

CHUNK_NBYTES = 1 << 18
"""Largest accumulate in bytes: MPI libraries hold a lock of the window during an accumulate, and other ranks wait."""
SHARED_MEMORY = Path("/dev/shm")
_ALIGNMENT = 64
_WORD = 8
_KINDS: dict[np.dtype[Any], MPI.Datatype] = {
    np.dtype(np.int64): MPI.INT64_T,
    np.dtype(np.float32): MPI.FLOAT,
    np.dtype(np.float64): MPI.DOUBLE,
}


class Region(ABC):
    """Memory of one rank, its `owner`, that all ranks of a communicator can access.

    Offsets are in bytes; vectors are contiguous int64, float32 or float64.

    Attributes
    ----------
    local : (nbytes,) uint8
        The memory, aligned to 64 bytes; empty but on the owner.
    """

    local: np.ndarray

    @abstractmethod
    def read(self, offset: int, out: np.ndarray) -> None:
        """Read a vector; each element has a value that it had at some time during the call."""

    @abstractmethod
    def replace(self, offset: int, values: np.ndarray) -> None:
        """Write a vector that only this rank writes."""

    @abstractmethod
    def add(self, offset: int, values: np.ndarray) -> None:
        """Add to a vector to which ranks only add."""

    @abstractmethod
    def fetch_add(self, offset: int, value: int) -> int:
        """Add to a word and return its old value."""

    @abstractmethod
    def decide(self, offset: int, value: int) -> int:
        """Set a word to `value` if it is 0, and return the word; it may be accessed by this method only."""

    @abstractmethod
    def put(self, offset: int, *parts: np.ndarray) -> None:
        """Write contiguous arrays one after the other; no rank reads them before a word announces them."""

    @abstractmethod
    def refresh(self) -> None:
        """Make data that were put before the words that the owner has read visible to its loads from `local`."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory; collective."""


class Memory(ABC):
    """Regions of the ranks of a communicator.

    Attributes
    ----------
    comm
        A communicator that nothing else uses.
    """

    comm: MPI.Intracomm

    @abstractmethod
    def region(self, owner: int, nbytes: int) -> Region:
        """Return a new region of zeros; collective, and in the same order on all ranks."""

    @abstractmethod
    def progress(self) -> bool:
        """Let accesses of other ranks to this rank's regions go on; return whether there were any. Local.

        Raises
        ------
        RankFailed, MPI.Exception
            If a rank is known to have died, where the MPI library goes on without it.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks, and let their accesses go on meanwhile; raises as :meth:`progress` does."""

    @abstractmethod
    def settle(self) -> None:
        """Let accesses of other ranks go on until no rank makes any more. Collective, where ranks depend on it.

        Raises
        ------
        CollectiveTimeout
            If ranks do not come within the timeout.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Let no accesses go on any more, since a rank has died; what is in flight stays in memory. Local."""


class WindowMemory(Memory):
    """Regions by one-sided MPI; see :class:`Window`."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm

    def region(self, owner: int, nbytes: int) -> Region:
        """See the interface."""
        return Window(self.comm, owner, nbytes)

    def progress(self) -> bool:
        """Return False: one-sided accesses go on inside of any MPI call."""
        return False

    def barrier(self) -> None:
        """See the interface."""
        self.comm.Barrier()

    def settle(self) -> None:
        """Do nothing: no rank depends on this one."""

    def abandon(self) -> None:
        """Do nothing: windows do not outlive a rank."""


class Window(Region):
    """A region by one-sided MPI: a window of ``MPI_Win_allocate``, in one passive epoch for its whole life.

    MPICH and Open MPI access memory that they have allocated through shared memory on a node; windows on other memory,
    or dynamic ones, would need the owner inside MPI for every access. The constructor is collective over `comm`.

    Raises
    ------
    MpicollError
        If the window's memory model is not unified: `local` could then not be read within the epoch.
    """

    def __init__(self, comm: MPI.Intracomm, owner: int, nbytes: int) -> None:
        mine = comm.rank == owner
        room = nbytes + _ALIGNMENT if mine else 0
        self._owner = owner
        self._window = MPI.Win.Allocate(room, 1, MPI.INFO_NULL, comm)
        if self._window.model != MPI.WIN_UNIFIED:
            self._window.Free()
            name = MPI.get_vendor()[0]
            raise MpicollError(f"parameter server: windows of {name} have no unified memory model here")
        memory = np.asarray(self._window.tomemory()) if mine else np.empty(0, np.uint8)
        shift = np.array([-memory.ctypes.data % _ALIGNMENT if mine else 0], np.int64)
        comm.Bcast(shift, owner)
        self._shift = int(shift[0])
        self.local = memory[self._shift : self._shift + nbytes]
        self.local[:] = 0
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self._window.Sync()
        self._nothing = np.empty(0, np.uint8)

    def read(self, offset: int, out: np.ndarray) -> None:
        """See the interface; in chunks, since accumulates of one window wait for each other."""
        kind = _KINDS[out.dtype]
        for first, part in _chunks(out):
            target = (self._shift + offset + first, part.size, kind)
            into = [part, part.size, kind]
            self._window.Get_accumulate([self._nothing, 0, kind], into, self._owner, target, MPI.NO_OP)
        self._window.Flush(self._owner)

    def replace(self, offset: int, values: np.ndarray) -> None:
        """See the interface."""
        self._accumulate(offset, values, MPI.REPLACE)

    def add(self, offset: int, values: np.ndarray) -> None:
        """See the interface."""
        self._accumulate(offset, values, MPI.SUM)

    def _accumulate(self, offset: int, values: np.ndarray, op: MPI.Op) -> None:
        kind = _KINDS[values.dtype]
        for first, part in _chunks(values):
            target = (self._shift + offset + first, part.size, kind)
            self._window.Accumulate([part, part.size, kind], self._owner, target, op)
        self._window.Flush(self._owner)

    def fetch_add(self, offset: int, value: int) -> int:
        """See the interface."""
        given, found = np.array([value], np.int64), np.empty(1, np.int64)
        kind, target = MPI.INT64_T, (self._shift + offset, 1, MPI.INT64_T)
        self._window.Get_accumulate([given, 1, kind], [found, 1, kind], self._owner, target, MPI.SUM)
        self._window.Flush(self._owner)
        return int(found[0])

    def decide(self, offset: int, value: int) -> int:
        """See the interface."""
        given, zero, found = np.array([value], np.int64), np.zeros(1, np.int64), np.empty(1, np.int64)
        self._window.Compare_and_swap(given, zero, found, self._owner, self._shift + offset)
        self._window.Flush(self._owner)
        return int(found[0]) or value

    def put(self, offset: int, *parts: np.ndarray) -> None:
        """See the interface."""
        place = self._shift + offset
        for part in parts:
            self._window.Put([part, part.nbytes, MPI.BYTE], self._owner, (place, part.nbytes, MPI.BYTE))
            place += part.nbytes
        self._window.Flush(self._owner)

    def refresh(self) -> None:
        """See the interface."""
        self._window.Sync()

    def close(self) -> None:
        """See the interface."""
        self.local = np.empty(0, np.uint8)
        self._window.Unlock_all()
        self._window.Free()


def _chunks(vector: np.ndarray) -> Any:
    """Yield the byte offsets and the parts in which a vector travels."""
    step = CHUNK_NBYTES // vector.itemsize
    for first in range(0, vector.size, step):
        yield first * vector.itemsize, vector[first : first + step]


def free_nbytes() -> int | None:
    """Return the free bytes of the file system in which MPI libraries allocate windows; None if that is unknown."""
    if not SHARED_MEMORY.is_dir():
        return None
    state = os.statvfs(SHARED_MEMORY)
    return state.f_bavail * state.f_frsize


def word_at(number: int) -> int:
    """Return the offset of a word."""
    return number * _WORD


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of 64."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
