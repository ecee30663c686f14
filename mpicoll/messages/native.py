"""The MPI library's own collectives: the baseline, and the fallback for unsupported datatypes and operations.

Only the functions named here are called on users' data. They run on the private duplicate of the communicator. For
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

_COLLECTIVES = (
    "allreduce",
    "reduce",
    "bcast",
    "reduce_scatter",
    "reduce_scatter_block",
    "allgather",
    "allgatherv",
    "barrier",
    "gather",
    "gatherv",
    "scatter",
    "scatterv",
    "alltoall",
    "alltoallv",
    "alltoallw",
    "scan",
    "exscan",
)
_AMONG_NEIGHBORS = (
    "neighbor_allgather",
    "neighbor_allgatherv",
    "neighbor_alltoall",
    "neighbor_alltoallv",
    "neighbor_alltoallw",
)


def _with_topology(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of mpi4py's communicators with a topology for duplicates of them."""
    return lambda comm, *arguments: method(MPI.Topocomm(comm), *arguments)


def _functions(name_of: Callable[[str], str]) -> dict[str, Callable[..., Any]]:
    """Return mpi4py's functions by collective, under the names that `name_of` gives."""
    functions = {each: getattr(MPI.Intracomm, name_of(each)) for each in _COLLECTIVES}
    functions |= {each: _with_topology(getattr(MPI.Topocomm, name_of(each))) for each in _AMONG_NEIGHBORS}
    return functions


BLOCKING: dict[str, Callable[..., None]] = _functions(str.capitalize)
NONBLOCKING: dict[str, Callable[..., MPI.Request]] = _functions(lambda name: f"I{name}")
PERSISTENT: dict[str, Callable[..., MPI.Request]] = _functions(lambda name: f"{name.capitalize()}_init")
"""Functions of MPI 4, which mpi4py refuses with NotImplementedError where the library has none."""


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
        self.channel.watchdog.record(self.number, self.signature)  # compiled code may have begun it
        return Waiting(self.number, self.signature, "inside the MPI library", sources or (), sources is not None)

    def abandon(self, error: BaseException) -> None:
        """Mark the channel as broken; the request stays alive because it cannot be cancelled."""
        self.channel.break_off(error, self._request)
        if not isinstance(error, MpicollError):
            self.channel.watchdog.give_up(self.number, error)
