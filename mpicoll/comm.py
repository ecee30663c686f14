"""The mpi4py face: a communicator on which the usual calls are ours."""

# mypy: disable-error-code="override"
# mpi4py's stubs know neither our keywords nor our operations and requests.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.collectives import compressed, payoff, select, tables
from mpicoll.collectives.call import AnyOp, Scope
from mpicoll.collectives.requests import PersistentRequest, Request
from mpicoll.collectives.run import go_on, keep, run, start
from mpicoll.compression import Compressor, ErrorFeedback
from mpicoll.derived import Derived
from mpicoll.environment import launcher_mismatch
from mpicoll.kernels.calls import call
from mpicoll.kernels.executor import DONE, OTHER
from mpicoll.kernels.job import ALLGATHER, ALLREDUCE, BARRIER, BCAST, REDUCE, REDUCE_SCATTER
from mpicoll.runtime import abort, shared_arrays
from mpicoll.runtime.channel import Channel
from mpicoll.runtime.registry import channel_of


class Intracomm(Derived):
    """A communicator whose collectives are mpicoll's; everything else is inherited from mpi4py.

    Making one is collective over `comm`: the first time, a private duplicate for our messages is made and cached on
    `comm`, to be freed with it. The user's communicator itself never carries a message of ours.

    Parameters
    ----------
    comm
        An intracommunicator; with or without a topology.
    algorithm
        The default of every call's ``algorithm``: ``"auto"``, ``"native"`` (the MPI library), or the name of an
        algorithm, which is then used for the collectives that have it.
    timeout
        Seconds that a rank waits in one collective before it raises
        :class:`~mpicoll.errors.CollectiveTimeout`.

    Raises
    ------
    TypeError, ValueError, UnknownAlgorithm
        Naming the argument and its value.

    Notes
    -----
    Every rank must make the same calls in the same order, with the same count, dtype, op, root and algorithm. If the
    ranks disagree, all of them get :class:`~mpicoll.errors.MismatchError`; the communicator cannot be used after that
    unless ``MPICOLL_CHECK=full`` is set, in which case each call is compared before any data moves.
    """

    def __new__(cls, comm: MPI.Comm | None = None, **settings: Any) -> Intracomm:
        """Make a second handle of `comm`."""
        if not isinstance(comm, MPI.Intracomm):
            raise TypeError(f"comm: {comm!r} is not an intracommunicator")
        if comm == MPI.COMM_NULL:
            raise ValueError("comm: it is MPI.COMM_NULL")
        return super().__new__(cls, comm)

    def __init__(self, comm: MPI.Intracomm, *, algorithm: str = "auto", timeout: float = 60.0) -> None:
        mismatch = launcher_mismatch(MPI.COMM_WORLD.size, MPI.get_vendor()[0])
        if mismatch is not None:
            raise RuntimeError(mismatch)
        abort.install()
        channel = channel_of(comm)
        means = select.means_of(channel)._replace(rules=tables.of(channel))
        try:
            _check_settings(algorithm, timeout)
        except (TypeError, ValueError) as error:
            channel.refuse(error)  # the others, whose settings may be right, hear of it in their first call
            raise
        self._scope = Scope(channel, means, algorithm, float(timeout))
        self._size = channel.size
        self._uncompressed = channel.uncompressed
        self._auto_table = select.fill_front(channel, means)
        self._table = self._auto_table if algorithm == select.AUTO else 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as mpi4py does: what wraps COMM_WORLD or COMM_SELF does so again, others raise ValueError."""
        return _wrap_again, (MPI.Intracomm(self), self.algorithm, self.timeout)

    @property
    def channel(self) -> Channel:
        """The private side of the communicator; for mpicoll's own tools."""
        return self._scope.channel

    @property
    def algorithm(self) -> str:
        """The default algorithm."""
        return self._scope.algorithm

    @property
    def timeout(self) -> float:
        """Seconds until a waiting rank gives up."""
        return self._scope.timeout

    def algorithms(self, collective: str) -> tuple[str, ...]:
        """Return what ``algorithm=`` may be, besides ``"auto"``, for ``"allreduce"``, ``"bcast"``, ..."""
        return select.names(collective, self._scope.means)

    def choice(
        self, collective: str, nbytes: int, *, commutative: bool = True, compression: str | Compressor | None = None
    ) -> str:
        """Return the algorithm that ``"auto"`` takes for a vector of `nbytes` bytes; local.

        Parameters
        ----------
        compression
            As given to :meth:`Allreduce`, of float32; ``"auto"`` stands for what is known so far.
        """
        means = self._scope.means
        select.names(collective, means)
        if compression is not None and collective != "allreduce":
            raise ValueError(f"compression: {compression!r} is for allreduce, not {collective}")
        spec = payoff.candidate(compression)
        if spec is not None:
            compression = spec if payoff.known(self._scope, spec, nbytes) else None
        if compression is not None:
            facts = (np.dtype(np.float32), nbytes // 4, select.AUTO, self.size, self._scope.nodes)
            return compressed.choose(compression, MPI.SUM, *facts)[0]
        return select.choose(collective, nbytes, means, commutative=commutative)

    def empty(self, shape: Any, dtype: Any = float) -> np.ndarray:
        """Return a new array like :func:`numpy.empty`, in memory that the ranks of this node share.

        Collectives use such arrays, and parts of them, where they are. It is private otherwise, is freed like any
        array, and serves all communicators. Where there is no shared memory it is an ordinary array. Local.
        """
        return shared_arrays.empty(shape, dtype)

    def zeros(self, shape: Any, dtype: Any = float) -> np.ndarray:
        """Return a new array of zeros in shared memory; see :meth:`empty`."""
        return shared_arrays.zeros(shape, dtype)

    # Blocking collectives -------------------------------------------------------------------------------------------

    def Allreduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: AnyOp = MPI.SUM,
        *,
        algorithm: str | None = None,
        compression: str | Compressor | ErrorFeedback | None = None,
    ) -> None:
        """Reduce over all ranks and give the result to all; equal bits on every rank.

        Parameters
        ----------
        compression
            How messages are compressed, such as ``"int8"`` (SUM of float32; between nodes only, where there are
            several); see :mod:`mpicoll.compression` and :mod:`mpicoll.collectives.two_shot` for the errors.
            ``"auto:int8"``, or ``"auto"``, does so where it is faster, which the first call of a length may have to
            measure: see :mod:`mpicoll.collectives.payoff`.
        """
        if compression is not None and not (type(compression) is str and compression in self._uncompressed):
            run(self._scope, "allreduce", sendbuf, recvbuf, op, 0, algorithm, None, compression)
            return
        table = self._table if algorithm is None else self._table_for(algorithm)
        status = OTHER
        if table:
            status = call(table, ALLREDUCE, id(sendbuf), id(recvbuf), id(op), 0)
        if status != DONE:
            go_on(self._scope, status, algorithm, "allreduce", sendbuf, recvbuf, op)

    def Reduce(
        self, sendbuf: Any, recvbuf: Any, op: AnyOp = MPI.SUM, root: int = 0, *, algorithm: str | None = None
    ) -> None:
        """Reduce over all ranks and give the result to `root`."""
        table = self._table if algorithm is None else self._table_for(algorithm)
        status = OTHER
        if table and type(root) is int and 0 <= root < self._size:
            status = call(table, REDUCE, id(sendbuf), id(recvbuf), id(op), root)
        if status != DONE:
            go_on(self._scope, status, algorithm, "reduce", sendbuf, recvbuf, op, root)

    def Bcast(self, buf: Any, root: int = 0, *, algorithm: str | None = None) -> None:
        """Copy the root's buffer to all ranks."""
        table = self._table if algorithm is None else self._table_for(algorithm)
        status = OTHER
        if table and type(root) is int and 0 <= root < self._size:
            status = call(table, BCAST, 0, id(buf), 0, root)
        if status != DONE:
            go_on(self._scope, status, algorithm, "bcast", None, buf, MPI.SUM, root)

    def Reduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: AnyOp = MPI.SUM,
        *,
        algorithm: str | None = None,
    ) -> None:
        """Reduce over all ranks and give rank r the r-th part, of ``recvcounts[r]`` elements."""
        run(self._scope, "reduce_scatter", sendbuf, recvbuf, op, 0, algorithm, recvcounts)

    def Reduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: AnyOp = MPI.SUM, *, algorithm: str | None = None
    ) -> None:
        """Reduce over all ranks and give rank r the r-th of equal parts."""
        table = self._table if algorithm is None else self._table_for(algorithm)
        status = OTHER
        if table:
            status = call(table, REDUCE_SCATTER, id(sendbuf), id(recvbuf), id(op), 0)
        if status != DONE:
            go_on(self._scope, status, algorithm, "reduce_scatter_block", sendbuf, recvbuf, op)

    def Allgather(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> None:
        """Give every rank the parts of all ranks, equally long."""
        table = self._table if algorithm is None else self._table_for(algorithm)
        status = OTHER
        if table:
            status = call(table, ALLGATHER, id(sendbuf), id(recvbuf), 0, 0)
        if status != DONE:
            go_on(self._scope, status, algorithm, "allgather", sendbuf, recvbuf)

    def Allgatherv(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> None:
        """Give every rank the parts of all ranks, of any length: ``recvbuf = [data, counts, displs, datatype]``."""
        run(self._scope, "allgatherv", sendbuf, recvbuf, MPI.SUM, 0, algorithm)

    def Barrier(self, *, algorithm: str | None = None) -> None:
        """Wait until every rank has come."""
        table = self._table if algorithm is None else self._table_for(algorithm)
        status = OTHER
        if table:
            status = call(table, BARRIER, 0, 0, 0, 0)
        if status != DONE:
            go_on(self._scope, status, algorithm, "barrier")

    # Nonblocking collectives ----------------------------------------------------------------------------------------

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

    def Ibcast(self, buf: Any, root: int = 0, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Bcast`."""
        return start(self._scope, "bcast", None, buf, MPI.SUM, root, algorithm)

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

    def Iallgather(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Request:
        """Start :meth:`Allgather`."""
        return start(self._scope, "allgather", sendbuf, recvbuf, MPI.SUM, 0, algorithm)

    # Persistent collectives -----------------------------------------------------------------------------------------

    def Allreduce_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: AnyOp = MPI.SUM,
        *,
        algorithm: str | None = None,
        compression: str | Compressor | ErrorFeedback | None = None,
    ) -> PersistentRequest:
        """Set up :meth:`Allreduce` for these buffers once; ``Start`` and ``Wait`` do it as often as wanted."""
        return keep(self._scope, "allreduce", sendbuf, recvbuf, op, 0, algorithm, None, compression)

    def Reduce_init(
        self, sendbuf: Any, recvbuf: Any, op: AnyOp = MPI.SUM, root: int = 0, *, algorithm: str | None = None
    ) -> PersistentRequest:
        """Set up :meth:`Reduce`."""
        return keep(self._scope, "reduce", sendbuf, recvbuf, op, root, algorithm)

    def Bcast_init(self, buf: Any, root: int = 0, *, algorithm: str | None = None) -> PersistentRequest:
        """Set up :meth:`Bcast`."""
        return keep(self._scope, "bcast", None, buf, MPI.SUM, root, algorithm)

    def Reduce_scatter_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: AnyOp = MPI.SUM,
        *,
        algorithm: str | None = None,
    ) -> PersistentRequest:
        """Set up :meth:`Reduce_scatter`."""
        return keep(self._scope, "reduce_scatter", sendbuf, recvbuf, op, 0, algorithm, recvcounts)

    def Reduce_scatter_block_init(
        self, sendbuf: Any, recvbuf: Any, op: AnyOp = MPI.SUM, *, algorithm: str | None = None
    ) -> PersistentRequest:
        """Set up :meth:`Reduce_scatter_block`."""
        return keep(self._scope, "reduce_scatter_block", sendbuf, recvbuf, op, 0, algorithm)

    def Allgather_init(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> PersistentRequest:
        """Set up :meth:`Allgather`."""
        return keep(self._scope, "allgather", sendbuf, recvbuf, MPI.SUM, 0, algorithm)

    def Barrier_init(self, *, algorithm: str | None = None) -> PersistentRequest:
        """Set up :meth:`Barrier`."""
        return keep(self._scope, "barrier", None, None, MPI.SUM, 0, algorithm)

    def _wrap(self, comm: MPI.Comm) -> Any:
        if comm == MPI.COMM_NULL:
            return comm
        return Intracomm(MPI.Intracomm(comm), algorithm=self.algorithm, timeout=self.timeout)

    def _table_for(self, algorithm: Any) -> int:
        """Return the address of the table for the short way, 0 if this algorithm has none."""
        if algorithm == select.AUTO:
            return self._auto_table
        if algorithm == select.SHARED and self._scope.means.shared_nbytes == math.inf and self._auto_table:
            return self._auto_table + 1
        return 0


def _wrap_again(comm: MPI.Intracomm, algorithm: str, timeout: float) -> Intracomm:
    return Intracomm(comm, algorithm=algorithm, timeout=timeout)


def _check_settings(algorithm: Any, timeout: Any) -> None:
    """Raise what is wrong with settings of a communicator."""
    select.check_default(algorithm)
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"timeout: {timeout!r} is not a positive number of seconds")
