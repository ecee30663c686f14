"""Failure detection: ranks that have died while the MPI library lets the others go on.

User-Level Failure Mitigation (ULFM; Bland et al., "Post-failure recovery of MPI communication capability", IJHPCA 2013)
is a part of Open MPI 5, turned on by ``mpirun --with-ft ulfm``. Elsewhere the launcher ends the job when a rank dies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache

from mpi4py import MPI

from mpicoll.environment import survives_dead_ranks
from mpicoll.errors import RankFailed, named_ranks

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


@contextlib.contextmanager
def revoked_after_failure(comm: MPI.Comm) -> Iterator[None]:
    """Revoke a communicator if a rank's death ends the block, so that ranks that wait on it for this one go on too."""
    try:
        yield
    except (MPI.Exception, RankFailed) as error:
        if is_failure(error) and survives_failures():
            comm.Revoke()
        raise


def agree_on_success(comm: MPI.Intracomm, is_done: bool) -> bool:
    """Return True, on all ranks that are left or on none, if all have done their part and none has died meanwhile.

    Collective, also over a communicator that was revoked.
    """
    try:
        return bool(comm.Agree(int(is_done)))
    except MPI.Exception as error:
        if not is_failure(error):
            raise
        return False


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
        raise RankFailed(f"{named_ranks(dead)} of {comm.Get_size()} died", dead)
    if comm.Is_revoked():
        raise RankFailed("another rank has found that a rank died")
