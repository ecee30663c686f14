"""COMM_WORLD and COMM_SELF of the MPI library, whatever a program assigns to those names of ``mpi4py.MPI``."""

from __future__ import annotations

from mpi4py import MPI

WORLD, SELF = MPI.Comm(MPI.COMM_WORLD), MPI.Comm(MPI.COMM_SELF)  # not Intracomm, which calls MPI: it may not be there


def is_predefined(comm: MPI.Comm) -> bool:
    """Return whether a communicator is one of them, which MPI never frees."""
    return comm in (WORLD, SELF)
