"""Optimizer state in files: mapped into memory, and released from it after each update."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpicoll.consensus import all_succeed
from mpicoll.errors import UsageError
from mpicoll.optim.optimizers import Optimizer


class OffloadedState:
    """File for the state of a rank's optimizers. The constructor is collective.

    The file has no name, so that the system removes it when the process ends, however it ends. Its space is reserved at
    once. The operating system keeps what fits into its cache and writes the rest; after :meth:`release` the pages no
    longer count as memory of this process. (Ren et al., "ZeRO-Offload", USENIX ATC 2021, and Rajbhandari et al.,
    "ZeRO-Infinity", SC21, offload to other memory and to disks.)

    Parameters
    ----------
    folder
        Folder of the file, best on a local disk.
    sizes
        Bytes of a state vector of each optimizer.
    slots
        Number of state vectors of an optimizer.

    Raises
    ------
    UsageError
        On every rank, if one of them cannot write there, or there is no space.
    """

    def __init__(self, folder: str, sizes: Sequence[int], slots: int, comm: MPI.Intracomm) -> None:
        self._used, self._ranges = 0, list[tuple[int, int]]()
        nbytes = max(mmap.PAGESIZE, slots * sum(map(_paged, sizes)))
        self._map: mmap.mmap = all_succeed(comm, lambda: _mapped(folder, nbytes, comm.Get_rank()))

    def take(self, optimizer: Optimizer) -> Optimizer:
        """Replace the state of a new optimizer by zeros in the file; return the optimizer."""
        first = self._used
        for name, vector in optimizer.state.items():
            if vector.size:
                optimizer.state[name] = np.frombuffer(self._map, vector.dtype, vector.size, self._used)
            self._used += _paged(vector.nbytes)
        self._ranges.append((first, self._used - first))
        return optimizer

    def release(self, number: int) -> None:
        """Release the memory of optimizer `number`, until it is used again; the state stays in the file."""
        start, nbytes = self._ranges[number]
        if nbytes:
            self._map.madvise(mmap.MADV_DONTNEED, start, nbytes)


def _paged(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _mapped(folder: str, nbytes: int, rank: int) -> mmap.mmap:
    """Return a file of `nbytes` zeros, mapped into memory."""
    try:
        with tempfile.TemporaryFile(dir=Path(folder).expanduser()) as file:
            # A page without space on the disk would end the process when it is written.
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return mmap.mmap(file.fileno(), nbytes)
    except OSError as error:
        raise UsageError(f"--offload {folder}: rank {rank}: {error.strerror or error}") from None
