"""The MPI library's own collectives: the baseline, and the fallback for unsupported datatypes and operations.

This is the only module that calls them on users' data. They run on the private duplicate of the communicator. For
``algorithm="native"`` the blocking functions are called, without a deadline. The fallback calls the nonblocking
functions, so that its wait has a deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpicoll.communicator.channel import Channel
from mpicoll.errors import MpicollError
from mpicoll.progress.call_signature import Signature, Waiting
from mpicoll.progress.in_flight import InFlight

Arguments = tuple[Any, ...]

BLOCKING: dict[str, Callable[..., None]] = {
    "allreduce": MPI.Intracomm.Allreduce,
    "reduce": MPI.Intracomm.Reduce,
    "bcast": MPI.Intracomm.Bcast,
    "reduce_scatter": MPI.Intracomm.Reduce_scatter,
    "reduce_scatter_block": MPI.Intracomm.Reduce_scatter_block,
    "allgather": MPI.Intracomm.Allgather,
    "allgatherv": MPI.Intracomm.Allgatherv,
    "barrier": MPI.Intracomm.Barrier,
    "gather": MPI.Intracomm.Gather,
    "gatherv": MPI.Intracomm.Gatherv,
    "scatter": MPI.Intracomm.Scatter,
    "scatterv": MPI.Intracomm.Scatterv,
    "alltoall": MPI.Intracomm.Alltoall,
    "alltoallv": MPI.Intracomm.Alltoallv,
    "alltoallw": MPI.Intracomm.Alltoallw,
    "scan": MPI.Intracomm.Scan,
    "exscan": MPI.Intracomm.Exscan,
}
NONBLOCKING: dict[str, Callable[..., MPI.Request]] = {
    "allreduce": MPI.Intracomm.Iallreduce,
    "reduce": MPI.Intracomm.Ireduce,
    "bcast": MPI.Intracomm.Ibcast,
    "reduce_scatter": MPI.Intracomm.Ireduce_scatter,
    "reduce_scatter_block": MPI.Intracomm.Ireduce_scatter_block,
    "allgather": MPI.Intracomm.Iallgather,
    "allgatherv": MPI.Intracomm.Iallgatherv,
    "barrier": MPI.Intracomm.Ibarrier,
    "gather": MPI.Intracomm.Igather,
    "gatherv": MPI.Intracomm.Igatherv,
    "scatter": MPI.Intracomm.Iscatter,
    "scatterv": MPI.Intracomm.Iscatterv,
    "alltoall": MPI.Intracomm.Ialltoall,
    "alltoallv": MPI.Intracomm.Ialltoallv,
    "alltoallw": MPI.Intracomm.Ialltoallw,
    "scan": MPI.Intracomm.Iscan,
    "exscan": MPI.Intracomm.Iexscan,
}
PERSISTENT: dict[str, Callable[..., MPI.Request]] = {
    name: getattr(MPI.Intracomm, f"{function.__name__}_init") for name, function in BLOCKING.items()
}
"""Functions of MPI 4, which mpi4py refuses with NotImplementedError where the library has none."""


def _with_topology(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of mpi4py's communicators with a topology for duplicates of them."""
    return lambda comm, *arguments: method(MPI.Topocomm(comm), *arguments)


NEIGHBORHOOD: dict[str, Callable[..., MPI.Request]] = {
    "neighbor_allgather": _with_topology(MPI.Topocomm.Ineighbor_allgather),
    "neighbor_allgatherv": _with_topology(MPI.Topocomm.Ineighbor_allgatherv),
    "neighbor_alltoall": _with_topology(MPI.Topocomm.Ineighbor_alltoall),
    "neighbor_alltoallv": _with_topology(MPI.Topocomm.Ineighbor_alltoallv),
    "neighbor_alltoallw": _with_topology(MPI.Topocomm.Ineighbor_alltoallw),
}
NEIGHBORHOOD_BLOCKING: dict[str, Callable[..., None]] = {
    "neighbor_alltoall": _with_topology(MPI.Topocomm.Neighbor_alltoall),
    "neighbor_alltoallv": _with_topology(MPI.Topocomm.Neighbor_alltoallv),
    "neighbor_alltoallw": _with_topology(MPI.Topocomm.Neighbor_alltoallw),
}
NEIGHBORHOOD_PERSISTENT: dict[str, Callable[..., MPI.Request]] = {
    "neighbor_allgather": _with_topology(MPI.Topocomm.Neighbor_allgather_init),
    "neighbor_allgatherv": _with_topology(MPI.Topocomm.Neighbor_allgatherv_init),
    "neighbor_alltoall": _with_topology(MPI.Topocomm.Neighbor_alltoall_init),
    "neighbor_alltoallv": _with_topology(MPI.Topocomm.Neighbor_alltoallv_init),
    "neighbor_alltoallw": _with_topology(MPI.Topocomm.Neighbor_alltoallw_init),
}


class NativeRun(InFlight):
    """A collective of the MPI library in flight.

    Parameters
    ----------
    sources
        The ranks from which data come; None for all ranks.
    """

    __slots__ = ("_request", "_sources", "signature")

    def __init__(
        self,
        channel: Channel,
        request: MPI.Request,
        signature: Signature,
        number: int,
        sources: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(channel, number)
        self.signature = signature
        self._request, self._sources = request, sources

    def advance(self) -> bool:
        """Return whether the collective is complete."""
        return bool(self._request.Test())

    def waiting(self) -> Waiting:
        """Return the state of the wait; the progress inside the MPI library is not known."""
        sources = self._sources
        return Waiting(self.number, self.signature, "inside the MPI library", sources or (), sources is not None)

    def abandon(self, error: BaseException) -> None:
        """Mark the channel as broken; the request stays alive because it cannot be cancelled."""
        self.channel.break_off(f"{type(error).__name__}: {error}", self._request)
        if not isinstance(error, MpicollError):
            self.channel.watchdog.give_up(self.number, error)


def call_blocking(channel: Channel, collective: str, arguments: Arguments) -> None:
    """Make the MPI library's blocking call."""
    BLOCKING[collective](channel.comm, *arguments)
