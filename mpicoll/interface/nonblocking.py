"""Nonblocking collectives of the mpi4py face."""

# mypy: disable-error-code="override"
# mpi4py's stubs know neither our keywords nor our operations and requests.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from mpicoll.kernels.dispatch import call
from mpicoll.kernels.operation_words import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BCAST,
    COLLECTIVES,
    DONE,
    EXSCAN,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCAN,
    SCATTER,
)

_NAMES = dict(enumerate(COLLECTIVES)) | {REDUCE_SCATTER: "reduce_scatter_block"}
"""Collectives with equal parts, by number."""


class NonblockingCollectives(BlockingCollectives):
    """Nonblocking collectives: each starts an operation and returns its request."""

    _nonblocking_table: int
    _nonblocking_vector_calls: NonblockingVectorCalls

    def _start(
        self, collective: int, sendbuf: Any, recvbuf: Any, algorithm: str | None, op: Any = MPI.SUM, root: Any = 0
    ) -> Request:
        """Start a call; one compiled function does it if the call is plain."""
        if self._size == 1 and self._table and algorithm is None:  # it ends at once
            if call.run(self._table, collective, sendbuf, recvbuf, op, root) == DONE:
                return Request(self._scope.timeout)
        elif table := self._nonblocking_table if algorithm is None else self._nonblocking_table_for(algorithm):
            scope = self._scope
            quick = start_quickly(scope, table, collective, sendbuf, recvbuf, op, root)
            if quick is None:
                plain = plain_arguments(_NAMES[collective], sendbuf, recvbuf, self._size, scope.channel.rank == root)
                if plain is not None:
                    unpack = None if plain.place is None else plain.unpack
                    quick = start_quickly(
                        scope, table, collective, plain.sendbuf, plain.recvbuf, op, root, unpack=unpack, was_packed=True
                    )
            if quick is not None:
                return quick
        return start(self._scope, _NAMES[collective], sendbuf, recvbuf, op, root, algorithm)

    def _nonblocking_table_for(self, algorithm: str) -> int:
        """Return the table for an algorithm, 0 for one without; see :meth:`_table_for`."""
        return self._table_for(algorithm) if self._nonblocking_table else 0

    def Ibarrier(self, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Barrier`; return its request."""
        return self._start(BARRIER, None, None, algorithm)

    def Ibcast(self, buf: Any, root: int = 0, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Bcast`; return its request."""
        return self._start(BCAST, None, buf, algorithm, root=root)

    def Igather(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Gather`; return its request."""
        return self._start(GATHER, sendbuf, recvbuf, algorithm, root=root)

    def Igatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Gatherv`; return its request. ``"auto"`` takes the MPI library's function."""
        if self._vector_calls.is_copied(sendbuf, recvbuf, algorithm, root):
            return Request(self._scope.timeout)
        return self._nonblocking_vector_calls.start("gatherv", sendbuf, recvbuf, root, algorithm)

    def Iscatter(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Scatter`; return its request."""
        return self._start(SCATTER, sendbuf, recvbuf, algorithm, root=root)

    def Iscatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Scatterv`; return its request. ``"auto"`` takes the MPI library's function."""
        if self._vector_calls.is_copied(sendbuf, recvbuf, algorithm, root):
            return Request(self._scope.timeout)
        return self._nonblocking_vector_calls.start("scatterv", sendbuf, recvbuf, root, algorithm)

    def Iallgather(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Allgather`; return its request."""
        return self._start(ALLGATHER, sendbuf, recvbuf, algorithm)

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Allgatherv`; return its request."""
        quick = None
        if self._nonblocking_table and algorithm is None:
            quick = self._vector_calls.start_allgatherv(self._nonblocking_table, sendbuf, recvbuf)
        elif self._vector_calls.is_copied(sendbuf, recvbuf, algorithm):
            return Request(self._scope.timeout)
        if quick is not None:
            return quick
        return start(self._scope, "allgatherv", sendbuf, recvbuf, MPI.SUM, 0, algorithm)

    def Ialltoall(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Alltoall`; return its request."""
        return self._start(ALLTOALL, sendbuf, recvbuf, algorithm)

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Alltoallv`; return its request. ``"auto"`` takes the MPI library's function."""
        if self._vector_calls.is_copied(sendbuf, recvbuf, algorithm):
            return Request(self._scope.timeout)
        return self._nonblocking_vector_calls.start("alltoallv", sendbuf, recvbuf, 0, algorithm)

    def Ialltoallw(self, sendbuf: Any, recvbuf: Any) -> Request:
        """Start :meth:`Alltoallw`, by the MPI library."""
        return library_alltoallw.start(self._scope, sendbuf, recvbuf)

    def Ireduce(
        self, sendbuf: Any, recvbuf: Any, op: AnyOp = MPI.SUM, root: int = 0, *, algorithm: str | None = None
    ) -> Request:
        """Start :meth:`Reduce`; return its request."""
        return self._start(REDUCE, sendbuf, recvbuf, algorithm, op, root=root)

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
        if compression is None:
            return self._start(ALLREDUCE, sendbuf, recvbuf, algorithm, op)
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
        return self._start(REDUCE_SCATTER, sendbuf, recvbuf, algorithm, op)

    def Iscan(self, sendbuf: Any, recvbuf: Any, op: AnyOp = MPI.SUM, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Scan`; return its request."""
        return self._start(SCAN, sendbuf, recvbuf, algorithm, op)

    def Iexscan(self, sendbuf: Any, recvbuf: Any, op: AnyOp = MPI.SUM, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Exscan`; return its request."""
        return self._start(EXSCAN, sendbuf, recvbuf, algorithm, op)
