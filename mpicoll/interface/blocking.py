"""Blocking collectives with mpi4py's names and arguments.

One compiled function, :func:`mpicoll.kernels.dispatch.call`, makes plain calls; all others take the general path,
:func:`mpicoll.collectives.execute.go_on`. The methods repeat each other on purpose: one more Python call between them
and the compiled function would take a twentieth of the time of a short collective.
"""

# mypy: disable-error-code="override"
# mpi4py's stubs know neither our keywords nor our operations.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from mpicoll.collectives import select
from mpicoll.collectives.alltoallw import BlockExchange
from mpicoll.collectives.call_context import AnyOp, CallContext
from mpicoll.collectives.execute import go_on, run
from mpicoll.collectives.vector_calls import VectorCalls
from mpicoll.compression import Compressor, ErrorFeedback
from mpicoll.interface.derived_communicators import DerivedIntracomm
from mpicoll.kernels.counted_calls import call_counted
from mpicoll.kernels.dispatch import FOR_SHARED, FOR_SINGLE_COPY, call
from mpicoll.kernels.operation_words import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BARRIER,
    BCAST,
    DONE,
    EXSCAN,
    GATHER,
    OTHER,
    REDUCE,
    REDUCE_SCATTER,
    SCAN,
    SCATTER,
)


class BlockingCollectives(DerivedIntracomm):
    """Blocking collectives with mpi4py's names and arguments, and ``algorithm`` to choose one.

    Elements are reduced in an order that the algorithm fixes, so that all ranks get equal bits, the same in every run.
    """

    _scope: CallContext
    _size: int
    _uncompressed: Any
    _block_exchange: BlockExchange
    _vector_calls: VectorCalls
    _auto_table: int
    _table: int

    def Allreduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: AnyOp = MPI.SUM,
        *,
        algorithm: str | None = None,
        compression: str | Compressor | ErrorFeedback | None = None,
    ) -> None:
        """Reduce over all ranks; every rank gets the result, with equal bits.

        Parameters
        ----------
        sendbuf, recvbuf
            Buffers as mpi4py takes them: arrays, or lists such as ``[array, count, MPI.FLOAT]``; of the same element
            type and count on all ranks. ``MPI.IN_PLACE`` as `sendbuf` takes the data from `recvbuf`.
        op
            An operation of MPI, or of :func:`mpicoll.op`.
        algorithm
            ``"auto"``, ``"native"`` (the MPI library), or another name in :meth:`~mpicoll.Intracomm.algorithms`; by
            default that of the communicator.
        compression
            Compressor of the messages, such as ``"int8"``, or an :class:`~mpicoll.ErrorFeedback`, for SUM of float32.
            If there are several nodes, only messages between them are compressed. The guide on compression states the
            rounding errors. ``"auto:int8"`` or ``"auto"`` compresses only if that is faster; the first call with a
            vector length may measure it.

        Raises
        ------
        TypeError, ValueError, UnknownAlgorithm, UnknownCompressor
            If an argument is wrong; the message names it and its value. The other ranks raise RemoteError.
        MismatchError, CollectiveTimeout, CorruptPayload
            On every rank of the call; see :mod:`mpicoll.errors`.
        CommunicatorBroken
            If an earlier call has failed.
        """
        if compression is not None and not (type(compression) is str and compression in self._uncompressed):
            run(self._scope, "allreduce", sendbuf, recvbuf, op, 0, algorithm, None, compression)
            return
        table = self._table if algorithm is None else self._table_for(algorithm)
        status = OTHER
        if table:
            status = call.run(table, ALLREDUCE, sendbuf, recvbuf, op, 0)
        if status != DONE:
            go_on(self._scope, table, status, algorithm, "allreduce", sendbuf, recvbuf, op)

    def Reduce(
        self, sendbuf: Any, recvbuf: Any, op: AnyOp = MPI.SUM, root: int = 0, *, algorithm: str | None = None
    ) -> None:
        """Reduce over all ranks to `root`; `recvbuf` is ignored on the other ranks. See :meth:`Allreduce`."""
        table = self._table if algorithm is None else self._table_for(algorithm)
        status = OTHER
        if table:
            status = call.run(table, REDUCE, sendbuf, recvbuf, op, root)
        if status != DONE:
            go_on(self._scope, table, status, algorithm, "reduce", sendbuf, recvbuf, op, root)

    def Bcast(self, buf: Any, root: int = 0, *, algorithm: str | None = None) -> None:
        """Broadcast: copy `buf` of the root to `buf` of all other ranks, of the same count and element type."""
        table = self._table if algorithm is None else self._table_for(algorithm)
        status = OTHER
        if table:
            status = call.run(table, BCAST, None, buf, None, root)
        if status != DONE:
            go_on(self._scope, table, status, algorithm, "bcast", None, buf, MPI.SUM, root)

    def Reduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: AnyOp = MPI.SUM,
        *,
        algorithm: str | None = None,
    ) -> None:
        """Reduce over all ranks and scatter the result: rank r gets the r-th part, of ``recvcounts[r]`` elements.

        By default the counts are the lengths of all ranks' `recvbuf`; ``MPI.IN_PLACE`` needs `recvcounts`. See
        :meth:`Allreduce` for the other parameters.
        """
        if self._vector_calls.table and algorithm is None and recvcounts is not None:
            self._vector_calls.reduce_scatter(sendbuf, recvbuf, recvcounts, op)
        else:
            run(self._scope, "reduce_scatter", sendbuf, recvbuf, op, 0, algorithm, recvcounts)

    def Reduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: AnyOp = MPI.SUM, *, algorithm: str | None = None
    ) -> None:
        """Reduce over all ranks and scatter the result: rank r gets the r-th of `size` equal parts."""
        table = self._table if algorithm is None else self._table_for(algorithm)
        status = OTHER
        if table:
            status = call.run(table, REDUCE_SCATTER, sendbuf, recvbuf, op, 0)
        if status != DONE:
            go_on(self._scope, table, status, algorithm, "reduce_scatter_block", sendbuf, recvbuf, op)

    def Allgather(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> None:
        """Gather a part of equal length from every rank, in rank order, on all ranks."""
        table = self._table if algorithm is None else self._table_for(algorithm)
        status = OTHER
        if table:
            status = call.run(table, ALLGATHER, sendbuf, recvbuf, None, 0)
        if status != DONE:
            go_on(self._scope, table, status, algorithm, "allgather", sendbuf, recvbuf)

    def Allgatherv(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> None:
        """Gather parts of any length on all ranks: ``recvbuf = [data, counts, displs, datatype]``."""
        if self._vector_calls.table and algorithm is None:
            self._vector_calls.allgatherv(sendbuf, recvbuf)
        elif not self._vector_calls.is_copied(sendbuf, recvbuf, algorithm):
            run(self._scope, "allgatherv", sendbuf, recvbuf, MPI.SUM, 0, algorithm)

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None) -> None:
        """Gather a part of equal length from every rank, in rank order, on `root`; others' `recvbuf` is ignored."""
        table = self._table if algorithm is None else self._table_for(algorithm)
        status = OTHER
        if table:
            status = call.run(table, GATHER, sendbuf, recvbuf, None, root)
        if status != DONE:
            go_on(self._scope, table, status, algorithm, "gather", sendbuf, recvbuf, MPI.SUM, root)

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None) -> None:
        """Gather parts of any length on `root`, where ``recvbuf = [data, counts, displs, datatype]``."""
        calls = self._vector_calls
        if calls.table and algorithm is None and type(root) is int and 0 <= root < self._size:
            status = call_counted.run(calls.table, GATHER, sendbuf, recvbuf, root)
            if status != DONE:
                calls.go_on_gatherv(status, sendbuf, recvbuf, root)
        elif not calls.is_copied(sendbuf, recvbuf, algorithm, root):
            run(self._scope, "gatherv", sendbuf, recvbuf, MPI.SUM, root, algorithm)

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None) -> None:
        """Scatter: rank r gets the r-th of `size` equal parts of the root's `sendbuf`; others' `sendbuf` is ignored."""
        table = self._table if algorithm is None else self._table_for(algorithm)
        status = OTHER
        if table:
            status = call.run(table, SCATTER, sendbuf, recvbuf, None, root)
        if status != DONE:
            go_on(self._scope, table, status, algorithm, "scatter", sendbuf, recvbuf, MPI.SUM, root)

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None) -> None:
        """Scatter parts of any length of the root's buffer, where ``sendbuf = [data, counts, displs, datatype]``."""
        calls = self._vector_calls
        if calls.table and algorithm is None and type(root) is int and 0 <= root < self._size:
            status = call_counted.run(calls.table, SCATTER, recvbuf, sendbuf, root)
            if status != DONE:
                calls.go_on_scatterv(status, sendbuf, recvbuf, root)
        elif not calls.is_copied(sendbuf, recvbuf, algorithm, root):
            run(self._scope, "scatterv", sendbuf, recvbuf, MPI.SUM, root, algorithm)

    def Alltoall(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> None:
        """Send the r-th of `size` equal parts of `sendbuf` to rank r; get a part from every rank, in rank order."""
        table = self._table if algorithm is None else self._table_for(algorithm)
        status = OTHER
        if table:
            status = call.run(table, ALLTOALL, sendbuf, recvbuf, None, 0)
        if status != DONE:
            go_on(self._scope, table, status, algorithm, "alltoall", sendbuf, recvbuf)

    def Alltoallv(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> None:
        """Send a part of any length to each rank; both buffers are ``[data, counts, displs, datatype]``."""
        if self._block_exchange.takes(algorithm):
            self._block_exchange.alltoallv(sendbuf, recvbuf, algorithm)
        elif not self._vector_calls.is_copied(sendbuf, recvbuf, algorithm):
            run(self._scope, "alltoallv", sendbuf, recvbuf, MPI.SUM, 0, algorithm)

    def Alltoallw(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> None:
        """Give each rank its block from every rank, each with a datatype of its own.

        Parameters
        ----------
        sendbuf, recvbuf
            ``[data, (counts, displs), datatypes]`` or ``[data, datatypes]``, with one of each for every rank;
            displacements are in bytes. ``MPI.IN_PLACE`` as `sendbuf` takes the data from `recvbuf`.

        Notes
        -----
        On one node every block is copied straight between the layouts of sender and receiver if the sender's array lies
        in shared memory (:func:`mpicoll.shared_arrays`), else through a stage in the caches or by the system, from
        process to process. Between nodes blocks are packed.

        Raises
        ------
        MismatchError
            If a block has another length than its receiver expects; on a rank where blocks are short perhaps only in
            its next call.
        """
        self._block_exchange.alltoallw(sendbuf, recvbuf, algorithm)

    def Scan(self, sendbuf: Any, recvbuf: Any, op: AnyOp = MPI.SUM, *, algorithm: str | None = None) -> None:
        """Inclusive prefix reduction: rank r gets the reduction over ranks 0 to r, in rank order."""
        table = self._table if algorithm is None else self._table_for(algorithm)
        status = OTHER
        if table:
            status = call.run(table, SCAN, sendbuf, recvbuf, op, 0)
        if status != DONE:
            go_on(self._scope, table, status, algorithm, "scan", sendbuf, recvbuf, op)

    def Exscan(self, sendbuf: Any, recvbuf: Any, op: AnyOp = MPI.SUM, *, algorithm: str | None = None) -> None:
        """Exclusive prefix reduction over ranks 0 to r - 1, in rank order; rank 0's `recvbuf` is not written."""
        table = self._table if algorithm is None else self._table_for(algorithm)
        status = OTHER
        if table:
            status = call.run(table, EXSCAN, sendbuf, recvbuf, op, 0)
        if status != DONE:
            go_on(self._scope, table, status, algorithm, "exscan", sendbuf, recvbuf, op)

    def Barrier(self, *, algorithm: str | None = None) -> None:
        """Wait until every rank has called it."""
        table = self._table if algorithm is None else self._table_for(algorithm)
        status = OTHER
        if table:
            status = call.run(table, BARRIER, None, None, None, 0)
        if status != DONE:
            go_on(self._scope, table, status, algorithm, "barrier")

    def _table_for(self, algorithm: Any) -> int:
        """Return the address of the table for the compiled path, 0 if this algorithm has none."""
        if algorithm == select.AUTO:
            return self._auto_table
        means = self._scope.means
        if algorithm == select.SHARED and means.shared_nbytes == math.inf and self._auto_table:
            return self._auto_table + FOR_SHARED
        if algorithm == select.SINGLE_COPY and means.copies and self._auto_table:
            return self._auto_table + FOR_SINGLE_COPY
        return 0
