"""Neighbourhood collectives with mpi4py's names and arguments, on communicators with a topology."""

# mypy: disable-error-code="override"
# mpi4py's stubs know neither our requests nor what we return.

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpicoll.collectives.call_context import CallContext
from mpicoll.collectives.neighborhood_calls import Neighborhood, keep, run, start
from mpicoll.collectives.requests import PersistentRequest, Request
from mpicoll.objects import neighbors

if TYPE_CHECKING:
    _Topocomm = MPI.Topocomm
else:
    _Topocomm = object  # see mpicoll/interface/derived_communicators.py


class NeighborhoodCollectives(_Topocomm):
    """Neighbourhood collectives: the MPI library's, with mpicoll's deadline and exceptions.

    :class:`~mpicoll.errors.CollectiveTimeout` names incoming neighbours only. It may name one that has completed the
    call already, beside the one that is missing.
    """

    _scope: CallContext

    @cached_property
    def _around(self) -> Neighborhood:
        """The neighbours of this rank."""
        doubled = False
        if self.topology == MPI.CART:
            dims, periods, _ = MPI.Cartcomm(self).Get_topo()
            doubled = any(periodic and count <= 2 for count, periodic in zip(dims, periods, strict=True))
        return Neighborhood(tuple(self.inedges), doubled)

    def Neighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send `sendbuf` to all outgoing neighbours and gather that of all incoming ones, in their order."""
        run(self._scope, "neighbor_allgather", self._around, sendbuf, recvbuf)

    def Neighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """:meth:`Neighbor_allgather` of parts of any length: ``recvbuf = [data, counts, displs, datatype]``."""
        run(self._scope, "neighbor_allgatherv", self._around, sendbuf, recvbuf)

    def Neighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send one of equal parts to each outgoing neighbour, and get one from each incoming neighbour."""
        run(self._scope, "neighbor_alltoall", self._around, sendbuf, recvbuf)

    def Neighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """:meth:`Neighbor_alltoall` of parts of any length; both buffers are ``[data, counts, displs, datatype]``."""
        run(self._scope, "neighbor_alltoallv", self._around, sendbuf, recvbuf)

    def Neighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> None:
        """:meth:`Neighbor_alltoall` with a datatype for each neighbour: ``[data, counts, displs, datatypes]``."""
        run(self._scope, "neighbor_alltoallw", self._around, sendbuf, recvbuf)

    def Ineighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start :meth:`Neighbor_allgather`; return its request."""
        return start(self._scope, "neighbor_allgather", self._around, sendbuf, recvbuf)

    def Ineighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start :meth:`Neighbor_allgatherv`; return its request."""
        return start(self._scope, "neighbor_allgatherv", self._around, sendbuf, recvbuf)

    def Ineighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start :meth:`Neighbor_alltoall`; return its request."""
        return start(self._scope, "neighbor_alltoall", self._around, sendbuf, recvbuf)

    def Ineighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start :meth:`Neighbor_alltoallv`; return its request."""
        return start(self._scope, "neighbor_alltoallv", self._around, sendbuf, recvbuf)

    def Ineighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start :meth:`Neighbor_alltoallw`; return its request."""
        return start(self._scope, "neighbor_alltoallw", self._around, sendbuf, recvbuf)

    def Neighbor_allgather_init(self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL) -> PersistentRequest:
        """Set up a persistent :meth:`Neighbor_allgather`; `info` has no effect."""
        return keep(self._scope, "neighbor_allgather", self._around, sendbuf, recvbuf)

    def Neighbor_allgatherv_init(self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL) -> PersistentRequest:
        """Set up a persistent :meth:`Neighbor_allgatherv`; `info` has no effect."""
        return keep(self._scope, "neighbor_allgatherv", self._around, sendbuf, recvbuf)

    def Neighbor_alltoall_init(self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL) -> PersistentRequest:
        """Set up a persistent :meth:`Neighbor_alltoall`; `info` has no effect."""
        return keep(self._scope, "neighbor_alltoall", self._around, sendbuf, recvbuf)

    def Neighbor_alltoallv_init(self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL) -> PersistentRequest:
        """Set up a persistent :meth:`Neighbor_alltoallv`; `info` has no effect."""
        return keep(self._scope, "neighbor_alltoallv", self._around, sendbuf, recvbuf)

    def Neighbor_alltoallw_init(self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL) -> PersistentRequest:
        """Set up a persistent :meth:`Neighbor_alltoallw`; `info` has no effect."""
        return keep(self._scope, "neighbor_alltoallw", self._around, sendbuf, recvbuf)

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        """Return a list of the objects of all incoming neighbours, None for ``MPI.PROC_NULL``.

        Raises
        ------
        RemoteError
            If another rank's object cannot be pickled; that rank raises the pickler's exception.
        """
        return neighbors.allgather(self._scope, self._around, sendobj)

    def neighbor_alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Return a list of objects for this rank, one of each incoming neighbour; see :meth:`neighbor_allgather`."""
        return neighbors.alltoall(self._scope, self._around, self.outdegree, sendobj)
