"""Persistent collectives with mpi4py's names and arguments."""

# mypy: disable-error-code="override"
# mpi4py's stubs know neither our keywords nor our operations and requests.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from mpicoll.collectives import library_alltoallw
from mpicoll.collectives.call_context import AnyOp
from mpicoll.collectives.execute import keep
from mpicoll.collectives.requests import PersistentRequest
from mpicoll.compression import Compressor, ErrorFeedback
from mpicoll.interface.nonblocking import NonblockingCollectives


class PersistentCollectives(NonblockingCollectives):
    """Persistent collectives: set up once, started any number of times; each method returns an inactive request.

    Hints, in `info`, have no effect.
    """

    def Barrier_init(self, info: MPI.Info = MPI.INFO_NULL, *, algorithm: str | None = None) -> PersistentRequest:
        """Set up a persistent :meth:`Barrier`; return its request."""
        return keep(self._scope, "barrier", None, None, MPI.SUM, 0, algorithm)

    def Bcast_init(
        self, buf: Any, root: int = 0, info: MPI.Info = MPI.INFO_NULL, *, algorithm: str | None = None
    ) -> PersistentRequest:
        """Set up a persistent :meth:`Bcast`; return its request."""
        return keep(self._scope, "bcast", None, buf, MPI.SUM, root, algorithm)

    def Gather_init(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, info: MPI.Info = MPI.INFO_NULL, *, algorithm: str | None = None
    ) -> PersistentRequest:
        """Set up a persistent :meth:`Gather`; return its request."""
        return keep(self._scope, "gather", sendbuf, recvbuf, MPI.SUM, root, algorithm)

    def Gatherv_init(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, info: MPI.Info = MPI.INFO_NULL, *, algorithm: str | None = None
    ) -> PersistentRequest:
        """Set up a persistent :meth:`Gatherv`; return its request."""
        return keep(self._scope, "gatherv", sendbuf, recvbuf, MPI.SUM, root, algorithm)

    def Scatter_init(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, info: MPI.Info = MPI.INFO_NULL, *, algorithm: str | None = None
    ) -> PersistentRequest:
        """Set up a persistent :meth:`Scatter`; return its request."""
        return keep(self._scope, "scatter", sendbuf, recvbuf, MPI.SUM, root, algorithm)

    def Scatterv_init(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, info: MPI.Info = MPI.INFO_NULL, *, algorithm: str | None = None
    ) -> PersistentRequest:
        """Set up a persistent :meth:`Scatterv`; return its request."""
        return keep(self._scope, "scatterv", sendbuf, recvbuf, MPI.SUM, root, algorithm)

    def Allgather_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, algorithm: str | None = None
    ) -> PersistentRequest:
        """Set up a persistent :meth:`Allgather`; return its request."""
        return keep(self._scope, "allgather", sendbuf, recvbuf, MPI.SUM, 0, algorithm)

    def Allgatherv_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, algorithm: str | None = None
    ) -> PersistentRequest:
        """Set up a persistent :meth:`Allgatherv`; return its request."""
        return keep(self._scope, "allgatherv", sendbuf, recvbuf, MPI.SUM, 0, algorithm)

    def Alltoall_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, algorithm: str | None = None
    ) -> PersistentRequest:
        """Set up a persistent :meth:`Alltoall`; return its request."""
        return keep(self._scope, "alltoall", sendbuf, recvbuf, MPI.SUM, 0, algorithm)

    def Alltoallv_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, algorithm: str | None = None
    ) -> PersistentRequest:
        """Set up a persistent :meth:`Alltoallv`; return its request."""
        return keep(self._scope, "alltoallv", sendbuf, recvbuf, MPI.SUM, 0, algorithm)

    def Alltoallw_init(self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL) -> PersistentRequest:
        """Set up :meth:`Alltoallw`, by the MPI library; hints have no effect."""
        return library_alltoallw.keep(self._scope, sendbuf, recvbuf)

    def Reduce_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: AnyOp = MPI.SUM,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str | None = None,
    ) -> PersistentRequest:
        """Set up a persistent :meth:`Reduce`; return its request."""
        return keep(self._scope, "reduce", sendbuf, recvbuf, op, root, algorithm)

    def Allreduce_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: AnyOp = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str | None = None,
        compression: str | Compressor | ErrorFeedback | None = None,
    ) -> PersistentRequest:
        """Set up a persistent :meth:`Allreduce` for these buffers; ``Start`` and ``Wait`` of its request run it."""
        return keep(self._scope, "allreduce", sendbuf, recvbuf, op, 0, algorithm, None, compression)

    def Reduce_scatter_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: AnyOp = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str | None = None,
    ) -> PersistentRequest:
        """Set up a persistent :meth:`Reduce_scatter`; return its request."""
        return keep(self._scope, "reduce_scatter", sendbuf, recvbuf, op, 0, algorithm, recvcounts)

    def Reduce_scatter_block_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: AnyOp = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str | None = None,
    ) -> PersistentRequest:
        """Set up a persistent :meth:`Reduce_scatter_block`; return its request."""
        return keep(self._scope, "reduce_scatter_block", sendbuf, recvbuf, op, 0, algorithm)

    def Scan_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: AnyOp = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str | None = None,
    ) -> PersistentRequest:
        """Set up a persistent :meth:`Scan`; return its request."""
        return keep(self._scope, "scan", sendbuf, recvbuf, op, 0, algorithm)

    def Exscan_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: AnyOp = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        algorithm: str | None = None,
    ) -> PersistentRequest:
        """Set up a persistent :meth:`Exscan`; return its request."""
        return keep(self._scope, "exscan", sendbuf, recvbuf, op, 0, algorithm)
