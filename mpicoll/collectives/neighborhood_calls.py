"""Neighbourhood collectives of the MPI library, with mpicoll's deadline, exceptions and requests.

They are called on the private duplicate, which has the topology of the user's communicator. mpi4py checks the
arguments; a rank whose arguments are refused tells the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.collectives.call_context import CallContext
from mpicoll.collectives.interrupted_calls import refuse_if_running
from mpicoll.collectives.native_requests import NativeRequest, NonblockingNativeRequest
from mpicoll.collectives.operation import NativeOperation
from mpicoll.collectives.requests import PersistentRequest, Request
from mpicoll.messages.call_agreement import settle
from mpicoll.messages.native import BLOCKING, NONBLOCKING, NativeRun

_IN_ANOTHER_ORDER = (
    ("neighbor_alltoall", "neighbor_alltoallv", "neighbor_alltoallw") if MPI.get_vendor()[0] == "Open MPI" else ()
)
"""Collectives whose nonblocking form swaps the two parts for a rank that is a neighbour twice."""


class Neighborhood(NamedTuple):
    """Neighbours of a rank.

    Attributes
    ----------
    sources
        The ranks from which data come, and MPI.PROC_NULL.
    doubled
        Whether ranks may be neighbours twice: in a grid with a periodic dimension of one or two ranks. Equal on all
        ranks.
    """

    sources: tuple[int, ...]
    doubled: bool


@dataclass
class NeighborhoodOperation(NativeOperation):
    """A neighbourhood collective; data come from `sources` only."""

    sources: tuple[int, ...] = ()

    def follow(self, request: MPI.Request, number: int) -> NativeRun:
        """Return the run of a request that has been started."""
        return NativeRun(self.channel, request, self.signature(), number, self.sources)

    def run_after_meeting(self, timeout: float) -> None:
        """Make the MPI library's blocking call after a nonblocking one among the neighbours, which has a deadline."""
        comm, number = self.channel.comm, self.enter(timeout)
        try:
            self.keep().Free()  # mpi4py checks the arguments
            here, there = np.zeros(1, np.uint8), np.empty(len(self.sources), np.uint8)
            meeting = NONBLOCKING["neighbor_allgather"](comm, here, there)
        except Exception as error:
            self.channel.refuse_entered(number, error)
            raise
        NativeRun(self.channel, meeting, self.signature(), number, self.sources).finish(timeout, self)
        BLOCKING[self.collective](comm, *self.arguments)


def _operation(scope: CallContext, collective: str, around: Neighborhood, *buffers: Any) -> NeighborhoodOperation:
    channel = scope.channel
    refuse_if_running(channel)
    settle(channel, scope.timeout)
    channel.ensure_usable()
    return NeighborhoodOperation(channel, collective, collective.capitalize(), buffers, False, sources=around.sources)


def run(scope: CallContext, collective: str, around: Neighborhood, sendbuf: Any, recvbuf: Any) -> None:
    """Make a blocking call."""
    scope.channel.alone.call(_run_alone, scope, collective, around, sendbuf, recvbuf)


def _run_alone(scope: CallContext, collective: str, around: Neighborhood, sendbuf: Any, recvbuf: Any) -> None:
    operation = _operation(scope, collective, around, sendbuf, recvbuf)
    if around.doubled and collective in _IN_ANOTHER_ORDER:
        operation.run_after_meeting(scope.timeout)
    else:
        operation.run(scope.timeout)


def start(scope: CallContext, collective: str, around: Neighborhood, sendbuf: Any, recvbuf: Any) -> Request:
    """Start a nonblocking call."""

    def made() -> Request:
        return NonblockingNativeRequest(_operation(scope, collective, around, sendbuf, recvbuf), scope.timeout)

    return scope.channel.alone.call(made)


def keep(scope: CallContext, collective: str, around: Neighborhood, sendbuf: Any, recvbuf: Any) -> PersistentRequest:
    """Set up a persistent call."""
    scope.channel.is_lent = True

    def made() -> PersistentRequest:
        return NativeRequest(_operation(scope, collective, around, sendbuf, recvbuf), scope.timeout)

    return scope.channel.alone.call(made)
