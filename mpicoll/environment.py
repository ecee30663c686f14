"""What the launcher says about this process, read from the environment: no MPI, no heavy imports."""

from __future__ import annotations

import os

_WORLD_SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_NTASKS")
_LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE", "PALS_LOCAL_SIZE")


def _first_number(names: tuple[str, ...]) -> int | None:
    for name in names:
        text = os.environ.get(name, "")
        if text.isdigit() and int(text) > 0:
            return int(text)
    return None


def launched_size() -> int | None:
    """Return the number of ranks that the launcher started, or None if there was no launcher."""
    return _first_number(_WORLD_SIZE)


def local_ranks() -> int | None:
    """Return the number of ranks on this node, or None if the launcher does not say."""
    return _first_number(_LOCAL_SIZE)


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
