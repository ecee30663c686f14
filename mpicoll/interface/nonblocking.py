"""Nonblocking collectives of the mpi4py face."""

# mypy: disable-error-code="override"
# mpi4py's stubs know neither our keywords nor our operations and requests.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.collectives import library_alltoallw
from mpicoll.collectives.call_context import AnyOp
from mpicoll.collectives.dispatched_requests import start_quickly
from mpicoll.collectives.execute import start
from mpicoll.collectives.nonblocking_vectors import NonblockingVectorCalls
from mpicoll.collectives.plain_arguments import plain_arguments
from mpicoll.collectives.requests import Request
from mpicoll.compression import Compressor, ErrorFeedback
from mpicoll.interface.blocking import BlockingCollectives
from mpicoll.kernels.operation_words import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BCAST,
    COLLECTIVES,
    EXSCAN,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCAN,
    SCATTER,
)


class NonblockingCollectives(BlockingCollectives):
    """Nonblocking collectives: each starts an operation and returns its request."""

    _nonblocking_table: int
    _nonblocking_vector_calls: NonblockingVectorCalls

    def _quick(
        self, collective: int, sendbuf: Any, recvbuf: Any, algorithm: str | None, op: Any = None, root: Any = 0
    ) -> Request | None:
        """Start a plain call by one compiled function; None, having done nothing, if it is not plain."""
        if not self._nonblocking_table or algorithm is not None:
            return None
        if type(sendbuf) is not np.ndarray or type(recvbuf) is not np.ndarray:
            plain = plain_arguments(COLLECTIVES[collective], sendbuf, recvbuf, self._size)
            if plain is not None:
                sendbuf, recvbuf = plain
        return start_quickly(self._scope, self._nonblocking_table, collective, sendbuf, recvbuf, op, root)

    def Ibarrier(self, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Barrier`; return its request."""
        quick = self._quick(BARRIER, None, None, algorithm)
        if quick is not None:
            return quick
        return start(self._scope, "barrier", None, None, MPI.SUM, 0, algorithm)

    def Ibcast(self, buf: Any, root: int = 0, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Bcast`; return its request."""
        quick = self._quick(BCAST, None, buf, algorithm, root=root)
        if quick is not None:
            return quick
        return start(self._scope, "bcast", None, buf, MPI.SUM, root, algorithm)

    def Igather(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Gather`; return its request."""
        quick = self._quick(GATHER, sendbuf, recvbuf, algorithm, root=root)
        if quick is not None:
            return quick
        return start(self._scope, "gather", sendbuf, recvbuf, MPI.SUM, root, algorithm)

    def Igatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Gatherv`; return its request. ``"auto"`` takes the MPI library's function."""
        return self._nonblocking_vector_calls.start("gatherv", sendbuf, recvbuf, root, algorithm)

    def Iscatter(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Scatter`; return its request."""
        quick = self._quick(SCATTER, sendbuf, recvbuf, algorithm, root=root)
        if quick is not None:
            return quick
        return start(self._scope, "scatter", sendbuf, recvbuf, MPI.SUM, root, algorithm)

    def Iscatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Scatterv`; return its request. ``"auto"`` takes the MPI library's function."""
        return self._nonblocking_vector_calls.start("scatterv", sendbuf, recvbuf, root, algorithm)

    def Iallgather(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Allgather`; return its request."""
        quick = self._quick(ALLGATHER, sendbuf, recvbuf, algorithm)
        if quick is not None:
            return quick
        return start(self._scope, "allgather", sendbuf, recvbuf, MPI.SUM, 0, algorithm)

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Allgatherv`; return its request."""
        quick = None
        if self._nonblocking_table and algorithm is None:
            quick = self._vector_calls.start_allgatherv(self._nonblocking_table, sendbuf, recvbuf)
        if quick is not None:
            return quick
        return start(self._scope, "allgatherv", sendbuf, recvbuf, MPI.SUM, 0, algorithm)

    def Ialltoall(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Alltoall`; return its request."""
        quick = self._quick(ALLTOALL, sendbuf, recvbuf, algorithm)
        if quick is not None:
            return quick
        return start(self._scope, "alltoall", sendbuf, recvbuf, MPI.SUM, 0, algorithm)

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Alltoallv`; return its request. ``"auto"`` takes the MPI library's function."""
        return self._nonblocking_vector_calls.start("alltoallv", sendbuf, recvbuf, 0, algorithm)

    def Ialltoallw(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start :meth:`Alltoallw`, by the MPI library."""
        return library_alltoallw.start(self._scope, sendbuf, recvbuf)

    def Ireduce(
        self, sendbuf: Any, recvbuf: Any, op: AnyOp = MPI.SUM, root: int = 0, *, algorithm: str | None = None
    ) -> Request:
        """Start :meth:`Reduce`; return its request."""
        quick = self._quick(REDUCE, sendbuf, recvbuf, algorithm, op, root=root)
        if quick is not None:
            return quick
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
        """Start :meth:`Allreduce`; return its :class:`~mpicoll.Request`, which says when it progresses."""
        quick = self._quick(ALLREDUCE, sendbuf, recvbuf, algorithm, op) if compression is None else None
        if quick is not None:
            return quick
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
        """Start :meth:`Reduce_scatter`; return its request."""
        quick, table = None, self._nonblocking_table
        if table and algorithm is None and recvcounts is not None:
            quick = self._vector_calls.start_reduce_scatter(table, sendbuf, recvbuf, recvcounts, op)
        if quick is not None:
            return quick
        return start(self._scope, "reduce_scatter", sendbuf, recvbuf, op, 0, algorithm, recvcounts)

    def Ireduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: AnyOp = MPI.SUM, *, algorithm: str | None = None
    ) -> Request:
        """Start :meth:`Reduce_scatter_block`; return its request."""
        quick = self._quick(REDUCE_SCATTER, sendbuf, recvbuf, algorithm, op)
        if quick is not None:
            return quick
        return start(self._scope, "reduce_scatter_block", sendbuf, recvbuf, op, 0, algorithm)

    def Iscan(self, sendbuf: Any, recvbuf: Any, op: AnyOp = MPI.SUM, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Scan`; return its request."""
        quick = self._quick(SCAN, sendbuf, recvbuf, algorithm, op)
        if quick is not None:
            return quick
        return start(self._scope, "scan", sendbuf, recvbuf, op, 0, algorithm)

    def Iexscan(self, sendbuf: Any, recvbuf: Any, op: AnyOp = MPI.SUM, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Exscan`; return its request."""
        quick = self._quick(EXSCAN, sendbuf, recvbuf, algorithm, op)
        if quick is not None:
            return quick
        return start(self._scope, "exscan", sendbuf, recvbuf, op, 0, algorithm)
