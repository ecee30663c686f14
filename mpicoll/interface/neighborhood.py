"""Neighbourhood collectives of the mpi4py face, on communicators with a topology."""

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
    """Collectives among neighbours: the MPI library's own, with deadline and errors as other collectives have.

    :class:`~mpicoll.errors.CollectiveTimeout` names neighbours from which data come. A neighbour that needs nothing of
    a rank that is missing ends the call, and may be named beside it.
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
        """Send the same data to all outgoing neighbours; get those of all incoming ones."""
        run(self._scope, "neighbor_allgather", self._around, sendbuf, recvbuf)

    def Neighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Do so with parts of any length: ``recvbuf = [data, counts, displs, datatype]``."""
        run(self._scope, "neighbor_allgatherv", self._around, sendbuf, recvbuf)

    def Neighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Send a part to each outgoing neighbour; get one from each incoming one."""
        run(self._scope, "neighbor_alltoall", self._around, sendbuf, recvbuf)

    def Neighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Do so with parts of any length; both buffers are ``[data, counts, displs, datatype]``."""
        run(self._scope, "neighbor_alltoallv", self._around, sendbuf, recvbuf)

    def Neighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> None:
        """Do so with a datatype for each neighbour; both buffers are ``[data, counts, displs, datatypes]``."""
        run(self._scope, "neighbor_alltoallw", self._around, sendbuf, recvbuf)

    def Ineighbor_allgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start :meth:`Neighbor_allgather`."""
        return start(self._scope, "neighbor_allgather", self._around, sendbuf, recvbuf)

    def Ineighbor_allgatherv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start :meth:`Neighbor_allgatherv`."""
        return start(self._scope, "neighbor_allgatherv", self._around, sendbuf, recvbuf)

    def Ineighbor_alltoall(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start :meth:`Neighbor_alltoall`."""
        return start(self._scope, "neighbor_alltoall", self._around, sendbuf, recvbuf)

    def Ineighbor_alltoallv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start :meth:`Neighbor_alltoallv`."""
        return start(self._scope, "neighbor_alltoallv", self._around, sendbuf, recvbuf)

    def Ineighbor_alltoallw(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start :meth:`Neighbor_alltoallw`."""
        return start(self._scope, "neighbor_alltoallw", self._around, sendbuf, recvbuf)

    def Neighbor_allgather_init(self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL) -> PersistentRequest:
        """Set up :meth:`Neighbor_allgather`; hints have no effect."""
        return keep(self._scope, "neighbor_allgather", self._around, sendbuf, recvbuf)

    def Neighbor_allgatherv_init(self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL) -> PersistentRequest:
        """Set up :meth:`Neighbor_allgatherv`; hints have no effect."""
        return keep(self._scope, "neighbor_allgatherv", self._around, sendbuf, recvbuf)

    def Neighbor_alltoall_init(self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL) -> PersistentRequest:
        """Set up :meth:`Neighbor_alltoall`; hints have no effect."""
        return keep(self._scope, "neighbor_alltoall", self._around, sendbuf, recvbuf)

    def Neighbor_alltoallv_init(self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL) -> PersistentRequest:
        """Set up :meth:`Neighbor_alltoallv`; hints have no effect."""
        return keep(self._scope, "neighbor_alltoallv", self._around, sendbuf, recvbuf)

    def Neighbor_alltoallw_init(self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL) -> PersistentRequest:
        """Set up :meth:`Neighbor_alltoallw`; hints have no effect."""
        return keep(self._scope, "neighbor_alltoallw", self._around, sendbuf, recvbuf)

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        """Return a list of the objects of all incoming neighbours, None for those that are no rank.

        Raises
        ------
        RemoteError
            If a rank has an object that cannot be pickled; that rank raises the pickler's exception.
        """
        return neighbors.allgather(self._scope, self._around, sendobj)

    def neighbor_alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Return a list of what each incoming neighbour has for this rank; see :meth:`neighbor_allgather`."""
        return neighbors.alltoall(self._scope, self._around, self.outdegree, sendobj)
