"""Common memory of the ranks of a node in a file that all of them map, where they cannot map each other's segments.

The ranks may be in different PID namespaces, or may not see each other in /proc, so they open the file by its name in
/dev/shm. The name is removed as soon as all ranks have the file open: nothing is left behind however they end. A window
of the MPI library would serve as well, but Open MPI 5 corrupts its heap where two threads make windows at the same time
(its choice of a component for one-sided communication is shared by them), and MPICH crashes where it has no
communicator left for the window.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np
from mpi4py import MPI

DIRECTORY = Path("/dev/shm")
_TOKEN_NBYTES = 16


class NoCommonMemory(Exception):
    """A rank cannot have the memory that the ranks need in common; raised on all ranks."""


def common_memory(comm: MPI.Intracomm, nbytes: int) -> np.ndarray:
    """Return memory that all ranks have in common; collective.

    It is freed when no rank has the array, or a view of it, any more.

    Parameters
    ----------
    nbytes
        Its length, the same on all ranks.

    Returns
    -------
    memory
        Array of `nbytes` zeros of type uint8.

    Raises
    ------
    NoCommonMemory
        If a rank cannot make, open or map the file.
    """
    token = np.frombuffer(bytearray(os.urandom(_TOKEN_NBYTES)), np.uint8)
    comm.Bcast(token)
    path = DIRECTORY / f"mpicoll-{token.tobytes().hex()}"
    memory = None
    try:
        memory = _made(path, nbytes) if comm.rank == 0 else None
        comm.Barrier()
        if comm.rank:
            memory = _opened(path, nbytes)
        agreed = np.array([memory is not None])
        comm.Allreduce(MPI.IN_PLACE, agreed, MPI.LAND)
    finally:
        if comm.rank == 0:
            path.unlink(missing_ok=True)
    if memory is None or not agreed[0]:
        raise NoCommonMemory(f"not every rank can open a file of {nbytes} bytes in {DIRECTORY}")
    return memory


def _made(path: Path, nbytes: int) -> np.ndarray | None:
    """Return the memory of a new file of zeros, None if it cannot be made."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            system = os.fstatvfs(descriptor)
            if system.f_bavail * system.f_frsize < 2 * nbytes:  # a page that does not fit would end the process
                return None
            os.ftruncate(descriptor, nbytes)
            return _mapped(descriptor, nbytes)
        finally:
            os.close(descriptor)
    return None


def _opened(path: Path, nbytes: int) -> np.ndarray | None:
    """Return the memory of the first rank's file; None if it is not there, not of this user, or of another length."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if (found.st_uid, found.st_size) == (os.geteuid(), nbytes):
                return _mapped(descriptor, nbytes)
        finally:
            os.close(descriptor)
    return None


def _mapped(descriptor: int, nbytes: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
