"""Nonblocking collectives of the mpi4py face."""

# mypy: disable-error-code="override"
# mpi4py's stubs know neither our keywords nor our operations and requests.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from mpicoll.collectives.call import AnyOp
from mpicoll.collectives.requests import Request
from mpicoll.collectives.run import start
from mpicoll.compression import Compressor, ErrorFeedback
from mpicoll.interface.blocking import BlockingCollectives


class NonblockingCollectives(BlockingCollectives):
    """Nonblocking collectives: each starts an operation and returns its request."""

    def Ibarrier(self, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Barrier`."""
        return start(self._scope, "barrier", None, None, MPI.SUM, 0, algorithm)

    def Ibcast(self, buf: Any, root: int = 0, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Bcast`."""
        return start(self._scope, "bcast", None, buf, MPI.SUM, root, algorithm)

    def Igather(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Gather`."""
        return start(self._scope, "gather", sendbuf, recvbuf, MPI.SUM, root, algorithm)

    def Igatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Gatherv`."""
        return start(self._scope, "gatherv", sendbuf, recvbuf, MPI.SUM, root, algorithm)

    def Iscatter(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Scatter`."""
        return start(self._scope, "scatter", sendbuf, recvbuf, MPI.SUM, root, algorithm)

    def Iscatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Scatterv`."""
        return start(self._scope, "scatterv", sendbuf, recvbuf, MPI.SUM, root, algorithm)

    def Iallgather(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Allgather`."""
        return start(self._scope, "allgather", sendbuf, recvbuf, MPI.SUM, 0, algorithm)

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Allgatherv`."""
        return start(self._scope, "allgatherv", sendbuf, recvbuf, MPI.SUM, 0, algorithm)

    def Ialltoall(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Alltoall`."""
        return start(self._scope, "alltoall", sendbuf, recvbuf, MPI.SUM, 0, algorithm)

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Alltoallv`."""
        return start(self._scope, "alltoallv", sendbuf, recvbuf, MPI.SUM, 0, algorithm)

    def Ireduce(
        self, sendbuf: Any, recvbuf: Any, op: AnyOp = MPI.SUM, root: int = 0, *, algorithm: str | None = None
    ) -> Request:
        """Start :meth:`Reduce`."""
        return start(self._scope, "reduce", sendbuf, recvbuf, op, root, algorithm)

    def Iallreduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: AnyOp = MPI.SUM,
        *,
        algorithm: str | None = None,
        compression: str | Compressor | ErrorFeedback | None = None,
    ) -> Request:
        """Start :meth:`Allreduce`; see :class:`~mpicoll.collectives.requests.Request` for when it progresses."""
        return start(self._scope, "allreduce", sendbuf, recvbuf, op, 0, algorithm, None, compression)

    def Ireduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: AnyOp = MPI.SUM,
        *,
        algorithm: str | None = None,
    ) -> Request:
        """Start :meth:`Reduce_scatter`."""
        return start(self._scope, "reduce_scatter", sendbuf, recvbuf, op, 0, algorithm, recvcounts)

    def Ireduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: AnyOp = MPI.SUM, *, algorithm: str | None = None
    ) -> Request:
        """Start :meth:`Reduce_scatter_block`."""
        return start(self._scope, "reduce_scatter_block", sendbuf, recvbuf, op, 0, algorithm)

    def Iscan(self, sendbuf: Any, recvbuf: Any, op: AnyOp = MPI.SUM, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Scan`."""
        return start(self._scope, "scan", sendbuf, recvbuf, op, 0, algorithm)

    def Iexscan(self, sendbuf: Any, recvbuf: Any, op: AnyOp = MPI.SUM, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Exscan`."""
        return start(self._scope, "exscan", sendbuf, recvbuf, op, 0, algorithm)
