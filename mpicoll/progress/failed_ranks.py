"""Failure detection: ranks that have died while the MPI library lets the others go on.

User-Level Failure Mitigation (ULFM; Bland et al., "Post-failure recovery of MPI communication capability", IJHPCA 2013)
is a part of Open MPI 5, turned on by ``mpirun --with-ft ulfm``. Elsewhere the launcher ends the job when a rank dies.
"""

from __future__ import annotations

import contextlib
from functools import lru_cache

from mpi4py import MPI

from mpicoll.environment import survives_dead_ranks
from mpicoll.errors import RankFailed

_PROBE_TAG = 0
_ERROR_CLASSES = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED}


@lru_cache(maxsize=1)
def survives_failures() -> bool:
    """Return True if the MPI library reports dead ranks and goes on without them in this job."""
    name, version = MPI.get_vendor()
    return name == "Open MPI" and version >= (5,) and survives_dead_ranks()


def is_failure(error: BaseException) -> bool:
    """Return True for an error that a dead rank may cause in any call of the MPI library, or in a wait of ours."""
    return isinstance(error, RankFailed) or (
        isinstance(error, MPI.Exception) and error.Get_error_class() in _ERROR_CLASSES
    )


def failed_ranks(comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return the ranks of a communicator that are known to have died, in ascending order; local."""
    if not survives_failures():
        return ()
    with contextlib.suppress(MPI.Exception):
        comm.Iprobe(MPI.ANY_SOURCE, _PROBE_TAG)  # the library takes notice of deaths only while it is called
    dead, everybody = comm.Get_failed(), comm.Get_group()
    try:
        return tuple(sorted(dead.Translate_ranks(None, everybody))) if dead.size else ()
    finally:
        dead.Free()
        everybody.Free()


def raise_if_failed(comm: MPI.Intracomm) -> None:
    """Raise if a rank of a communicator is known to have died, or another rank has revoked it; local.

    Raises
    ------
    RankFailed
        On this rank.
    """
    if not survives_failures():
        return
    if dead := failed_ranks(comm):
        numbers = ", ".join(map(str, dead))
        raise RankFailed(f"rank{'s' * (len(dead) > 1)} {numbers} of {comm.Get_size()} died", dead)
    if comm.Is_revoked():
        raise RankFailed("another rank has found that a rank died")
