"""Threads per rank, and the age of the process."""

from __future__ import annotations

import os
import time
from collections.abc import MutableMapping
from pathlib import Path

from mpicoll.environment import cores, local_ranks

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")

_imported = time.perf_counter()


def limit_threads(variables: MutableMapping[str, str] = os.environ, ranks: int | None = None) -> int:
    """Divide the cores among this node's ranks, in the variables that BLAS and Numba read when they are imported.

    Variables that are set already are left unchanged. Returns the cores of each rank, at least 1.

    Parameters
    ----------
    ranks
        Number of ranks; None for that of the launcher.
    """
    ranks = ranks or local_ranks(variables) or 1
    threads = max(1, cores() // ranks)
    for name in _THREAD_VARIABLES:
        variables.setdefault(name, str(threads))
    return threads


def threads() -> int:
    """Return the number of threads in ``OMP_NUM_THREADS``; 1 if it is not set to a number."""
    said = os.environ.get(_THREAD_VARIABLES[0], "")
    return int(said) if said.isdecimal() else 1


def process_age() -> float:
    """Return the seconds since this process started; where that is not known, since this module was imported."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), in ticks since boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return time.perf_counter() - _imported
