"""What every benchmark needs to know of its surroundings."""

from __future__ import annotations

from mpi4py import MPI

from mpicoll.measure import Timing, compare

__all__ = ["Timing", "compare", "library"]


def library() -> str:
    """Return the MPI library's name and version."""
    lines = MPI.Get_library_version().replace("\0", "").splitlines()
    first = " ".join(lines[0].split(",")[0].split())
    return first.replace("MPICH Version:", "MPICH")
