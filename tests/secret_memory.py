"""Memory that the system does not copy between processes."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm

_MEMFD_SECRET = 447
"""The number of a system call of Linux on these machines."""


def secret_on_one_rank(comm: Intracomm, count: int) -> np.ndarray:
    """Return an array of float64, on rank 1 in memory that the system does not read for others; skip without any."""
    data = secret(8 * count) if comm.rank == 1 else np.zeros(count)
    seen = np.array([data.size])
    comm.Allreduce(MPI.IN_PLACE, seen, MPI.MIN)
    if seen[0] == 0:
        pytest.skip("this system has no secret memory")
    return data


def secret(nbytes: int) -> np.ndarray:
    """Return memory that not even the system reads for others; empty where there is none."""
    libc = ctypes.CDLL(None, use_errno=True)
    opened = libc.syscall(_MEMFD_SECRET, 0) if platform.machine() in ("x86_64", "aarch64") else -1
    if opened < 0:
        return np.empty(0)
    os.ftruncate(opened, nbytes)
    try:
        return np.frombuffer(mmap.mmap(opened, nbytes), np.float64)
    except OSError:  # more than may be locked
        return np.empty(0)
    finally:
        os.close(opened)
