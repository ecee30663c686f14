"""Arrays that some ranks have read, copied to all ranks: one copy for each rank, or one for each node."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpicoll.communicator.topology import node_ids
from mpicoll.consensus import all_succeed
from mpicoll.errors import DataError
from mpicoll.shared_memory.peers import process_namespace

_BCAST_NBYTES = 1 << 28
_ALIGNMENT = 64
_FILE = "mpicoll-data"

Specification = Mapping[str, tuple[str, tuple[int, ...]]]
"""Element type and shape of each array, equal on all ranks."""


class DistributedArrays:
    """Arrays that all ranks hold and ranks fill row by row. The constructor and every method are collective.

    Parameters
    ----------
    shared
        True for one copy on each node, in an anonymous file that its ranks map; False for one on each rank.

    Attributes
    ----------
    arrays : dict of str to array
        The arrays; read-only after :meth:`finish`. A node's memory is freed when its ranks have dropped them.

    Raises
    ------
    DataError
        On every rank, if there is no memory on one of them, or a rank cannot map that of another one.
    """

    def __init__(self, specification: Specification, comm: MPI.Intracomm, *, shared: bool) -> None:
        self._comm, self._node = comm, _Node(comm) if shared else None
        places, nbytes = _places(specification)
        memory = self._node.memory(nbytes) if self._node else all_succeed(comm, lambda: _private(nbytes))
        self.arrays = {
            name: memory[start : start + math.prod(shape) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
            for (name, (dtype, shape)), start in zip(specification.items(), places, strict=True)
        }

    def fill(self, name: str, first: int, rows: int, owner: int, data: np.ndarray | None) -> None:
        """Copy `rows` rows of rank `owner` to all, from row `first` on.

        Parameters
        ----------
        data : (rows, ...) array on rank `owner`
            None on the others.
        """
        into = self.arrays[name][first : first + rows]
        if data is not None:
            into[...] = data
        flat = into.reshape(-1).view(np.uint8)
        for start in range(0, len(flat), _BCAST_NBYTES):
            part = flat[start : start + _BCAST_NBYTES]
            if self._node is None:
                self._comm.Bcast(part, owner)
            else:
                self._node.spread(part, owner)

    def finish(self) -> dict[str, np.ndarray]:
        """Return the arrays, all of which have been filled."""
        if self._node is not None:
            self._node.close()
        for array in self.arrays.values():
            array.flags.writeable = False
        return self.arrays


class _Node:
    """Ranks of a node, and the first rank of each node."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm, self._ids = comm, node_ids(MPI.Intracomm(comm))
        rank, self._order = comm.Get_rank(), list(dict.fromkeys(self._ids.tolist()))
        self._here = comm.Split(int(self._ids[rank]), rank)
        self._first = self._here.Get_rank() == 0
        self._leaders = comm.Split(0 if self._first else MPI.UNDEFINED, rank)

    def memory(self, nbytes: int) -> np.ndarray:
        """Return `nbytes` bytes that the ranks of the node share."""
        made: tuple[int, mmap.mmap] | None = all_succeed(
            self._comm, lambda: _make(nbytes, self._comm.Get_rank()) if self._first else None
        )
        card = np.array([process_namespace(), os.getpid(), made[0] if made else -1], np.int64)
        own = int(card[0])
        self._here.Bcast(card)
        space, pid, fd = card.tolist()
        opened = all_succeed(self._comm, lambda: None if made else _open(pid, fd, nbytes, space == own))
        self._here.Barrier()
        if made:
            os.close(made[0])  # the mapping stays
        return np.frombuffer(made[1] if made else opened, np.uint8)

    def spread(self, part: np.ndarray, owner: int) -> None:
        """Copy a part of the memory, which rank `owner` has written, to all nodes."""
        self._here.Barrier()
        if self._first and self._leaders.Get_size() > 1:
            self._leaders.Bcast(part, self._order.index(int(self._ids[owner])))
        self._here.Barrier()

    def close(self) -> None:
        """Free the communicators."""
        self._here.Free()
        if self._first:
            self._leaders.Free()


def _places(specification: Specification) -> tuple[list[int], int]:
    """Return the first byte of each array in a common memory, and its length, at least one page."""
    places, end = [], 0
    for dtype, shape in specification.values():
        places.append(end)
        end += -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
    return places, max(end, mmap.PAGESIZE)


def _private(nbytes: int) -> np.ndarray:
    try:
        return np.empty(nbytes, np.uint8)
    except MemoryError:
        raise DataError(f"the data set takes {nbytes} bytes, more memory than there is") from None


def _make(nbytes: int, rank: int) -> tuple[int, mmap.mmap]:
    """Return an anonymous file of `nbytes` bytes, and its mapping."""
    fd = -1
    try:
        fd = os.memfd_create(_FILE, os.MFD_CLOEXEC)
        os.posix_fallocate(fd, 0, nbytes)
        return fd, mmap.mmap(fd, nbytes)
    except (OSError, AttributeError) as error:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise DataError(f"--share-data: rank {rank} cannot make {nbytes} bytes of shared memory: {error}") from None


def _open(pid: int, fd: int, nbytes: int, same_namespace: bool) -> mmap.mmap:
    """Map the file of another process of this node."""
    path = Path(f"/proc/{pid}/fd/{fd}")
    try:
        # In another PID namespace the path leads to a file of a stranger.
        if not same_namespace or not str(path.readlink()).startswith(f"/memfd:{_FILE}"):
            raise FileNotFoundError(f"{path} is not visible here")
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(opened).st_size != nbytes:
                raise ValueError(f"{path} has another length")
            return mmap.mmap(opened, nbytes)
        finally:
            os.close(opened)
    except (OSError, ValueError) as error:
        raise DataError(f"--share-data: a rank cannot map the memory of process {pid}: {error}") from None
