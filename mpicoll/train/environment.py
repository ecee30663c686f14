"""What the launcher and the operating system say: ranks on this node, threads, the age of the process."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from mpicoll.environment import cores, launched_size, local_ranks

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")

_imported = time.perf_counter()


def _slurm_local_ranks(variables: Mapping[str, str]) -> int | None:
    """Read ``SLURM_STEP_TASKS_PER_NODE``, for example ``8(x2),4``: eight tasks on nodes 0 and 1, four on node 2."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d{1,6})(?:\(x(\d{1,6})\))?", variables.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)
    node = variables.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None


def limit_threads(variables: MutableMapping[str, str] = os.environ) -> int:
    """Divide the cores among this node's ranks, in the variables that BLAS and Numba read when they are imported.

    Variables that are set already are left alone. Returns the number of threads a rank.
    """
    ranks = local_ranks() or _slurm_local_ranks(variables) or 1
    threads = max(1, cores() // ranks)
    for name in _THREAD_VARIABLES:
        variables.setdefault(name, str(threads))
    return threads


def launched_rank(variables: Mapping[str, str] = os.environ) -> int:
    """Return the rank that the launcher gave to this process; 0 where there is no launcher."""
    for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID"):
        if variables.get(name, "").isdigit():
            return int(variables[name])
    return 0


def launcher_mismatch(size: int, library: str) -> str | None:
    """Return what is wrong if the launcher started several ranks that MPI does not know of, else None.

    Parameters
    ----------
    size
        The size of COMM_WORLD.
    library
        The name of the MPI library, for the message.
    """
    launched = launched_size() or 1
    if size > 1 or launched < 2:
        return None
    return (
        f"the launcher started {launched} processes, but each of them runs alone, because mpi4py loaded another MPI "
        f"library ({library}): start with that library's own mpirun, or choose the library with MPI4PY_LIBMPI"
    )


def process_age() -> float:
    """Return the seconds since this process started; where the system does not say, since this module was imported."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), in ticks since boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return time.perf_counter() - _imported
