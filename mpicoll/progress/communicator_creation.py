"""Creation of communicators by mpicoll, with a barrier where threads of the MPI library would deadlock without one.

MPI lets threads make communicators at the same time, each from a communicator of its own. Open MPI 5 hangs where one
thread makes a communicator of all ranks, another one of some of them, and a rank is ahead of the others: on 2 ranks
after some hundred communicators. With a barrier on the parent before each, no hang was seen in ten thousand.
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
    """Return a communicator of the same ranks and topology, see :func:`meet_before_making`; collective.

    Without a topology it has none of the attributes that the program has attached: to copy them calls its functions,
    which may fail on one rank alone, and a copy would live on after the program has freed the original.
    """
    meet_before_making(comm)
    if comm.Get_topology() != MPI.UNDEFINED:
        return comm.Dup()
    group = comm.Get_group()
    try:
        return MPI.Intracomm(MPI.Intracomm.Create(comm, group))
    finally:
        group.Free()


def node_communicator(comm: MPI.Intracomm) -> MPI.Comm:
    """Return a communicator of the ranks that share memory with this rank; collective, see `meet_before_making`."""
    meet_before_making(comm)
    return comm.Split_type(MPI.COMM_TYPE_SHARED)
