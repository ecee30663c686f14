"""Preparation of a process for its first communicator."""

from __future__ import annotations

from mpi4py import MPI

from mpicoll.communicator import abort
from mpicoll.communicator.predefined import WORLD
from mpicoll.environment import launcher_mismatch


def prepare_process() -> None:
    """See to it that an uncaught exception of this rank ends the job; local.

    Raises
    ------
    RuntimeError
        If the launcher belongs to another MPI library than the one that mpi4py has loaded.
    """
    mismatch = launcher_mismatch(WORLD.size, MPI.get_vendor()[0])
    if mismatch is not None:
        raise RuntimeError(mismatch)
    abort.install()
