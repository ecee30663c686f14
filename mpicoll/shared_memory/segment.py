"""Memory segment of this process, which the other processes of the node can map; it holds the shared arrays.

Each process has one segment for all communicators: an anonymous file (`memfd_create`). It uses memory only for pages
that have been written, is not limited by the size of /dev/shm, and is freed when the last process that maps it ends,
however it ends. Other processes open it through /proc, which the system allows to processes of the same user.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import sys
import threading
from functools import lru_cache
from pathlib import Path

import numpy as np

from mpicoll.environment import local_ranks, random_number

_MAP_NORESERVE = 0x4000
_ADDRESS_SPACE = 32 << 40
"""A quarter of what a process has on x86-64."""
_TIMES_MEMORY = 16
"""Address space of a segment over the memory of the machine: each communicator reserves what it may need at most, and a
program may have as many as the MPI library allows."""
FIRST_FREE = 4096
"""The first page holds the nonce."""


class MemorySegment:
    """The memory segment of this process.

    Attributes
    ----------
    address, nbytes
        Its address and length; both are 0 if there is none.
    fd
        The file descriptor by which other processes open it.
    nonce
        A random number in its first word, by which other processes check that they have mapped the right memory.
    """

    def __init__(self) -> None:
        self.address, self.nbytes, self.fd, self.nonce = 0, 0, -1, 0
        if not hasattr(os, "memfd_create") or is_off():
            return
        nbytes = _capacity()
        try:
            fd = os.memfd_create("mpicoll", os.MFD_CLOEXEC)
            os.ftruncate(fd, nbytes)
            self._memory = _map(fd, nbytes)
        except OSError:
            return
        self.nonce = random_number(62)
        self._memory[:8].view(np.int64)[0] = self.nonce
        self.address, self.nbytes, self.fd = self._memory.ctypes.data, nbytes, fd


def is_off() -> bool:
    """Return whether the environment switches memory segments off; MPICOLL_ARENA is an older name."""
    return "off" in (os.environ.get("MPICOLL_SEGMENTS"), os.environ.get("MPICOLL_ARENA"))


def _capacity() -> int:
    """Return how much address space to take: more than there is memory, and room for the others' segments."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    processes = max(local_ranks() or 1, os.cpu_count() or 1)
    times = _TIMES_MEMORY if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY else 2
    return int(min(times * memory, _ADDRESS_SPACE // processes // FIRST_FREE * FIRST_FREE))


def _map(fd: int, nbytes: int) -> np.ndarray:
    """Map a file for as long as the process lives: the last arrays are freed when the interpreter is nearly gone."""
    memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | _MAP_NORESERVE)
    if hasattr(mmap, "MADV_DONTDUMP"):  # a core dump would write all of it, holes included, for each rank
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_DONTDUMP)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    return np.frombuffer(memory, np.uint8)


_making = threading.Lock()


def own() -> MemorySegment:
    """Return this process' segment; it is made at the first call."""
    with _making:
        return _own()


@lru_cache(maxsize=1)
def _own() -> MemorySegment:
    return MemorySegment()


_peers: dict[tuple[int, int], np.ndarray] = {}


def map_peer(pid: int, fd: int, nbytes: int, nonce: int) -> int:
    """Map the segment of another process; return its address here, 0 if that is not possible."""
    if nbytes == 0 or own().nbytes == 0:
        return 0
    if (pid, nonce) not in _peers:
        try:
            opened = _open(f"/proc/{pid}/fd/{fd}")
        except OSError:
            return 0
        try:
            if os.pread(opened, 8, 0) != nonce.to_bytes(8, sys.byteorder):
                return 0
            _peers[pid, nonce] = _map(opened, nbytes)
        except (OSError, ValueError):
            return 0
        finally:
            os.close(opened)
    return _peers[pid, nonce].ctypes.data


def _open(path: str) -> int:
    """Open a segment through its owner's descriptor; OSError for anything that is no file of ours.

    In another PID namespace the path leads to a file of a stranger, of which even opening could have an effect.
    """
    if not str(Path(path).readlink()).startswith("/memfd:mpicoll"):
        raise FileNotFoundError(path)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)
