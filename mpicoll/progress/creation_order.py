"""Barrier before a communicator is made, for MPI libraries in which two threads that make some can deadlock.

MPI lets threads make communicators at the same time, each from a communicator of its own. Open MPI 5 hangs there where
one thread makes a communicator of all ranks and another one of some of them, and a rank is ahead of the others: in a
loop on 2 ranks after some hundred communicators. Where all ranks of the parent have come before any goes on, it did not
hang in a hundred times as many.
"""

from __future__ import annotations

from mpi4py import MPI

_MUST_MEET = MPI.get_vendor()[0] == "Open MPI"
"""True if the ranks wait for each other. It depends on the library alone, so that all ranks do the same."""


def meet_before_making(parent: MPI.Comm) -> None:
    """Wait for all ranks of the communicator that is about to make another, where its library needs it; collective.

    Nothing happens on an intercommunicator.
    """
    if _MUST_MEET and parent.Get_size() > 1 and not parent.Is_inter():
        MPI.Comm.Barrier(parent)


def private_duplicate(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a duplicate of a communicator, see :func:`meet_before_making`; collective."""
    meet_before_making(comm)
    return comm.Dup()
