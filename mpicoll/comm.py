"""The mpi4py face: a communicator on which the usual calls are ours."""

# mypy: disable-error-code="override"
# mpi4py's stubs know neither our keywords nor our operations and requests.

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.collectives import compressed, payoff, select, tables
from mpicoll.collectives.call import Scope
from mpicoll.compression import Compressor
from mpicoll.environment import launcher_mismatch
from mpicoll.interface.persistent import PersistentCollectives
from mpicoll.runtime import abort, shared_arrays
from mpicoll.runtime.channel import Channel
from mpicoll.runtime.registry import channel_of


class Intracomm(PersistentCollectives):
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
        self._nonblocking_table = self._table if channel.node is not None else 0

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

    def _wrap(self, comm: MPI.Comm) -> Any:
        if comm == MPI.COMM_NULL:
            return comm
        return Intracomm(MPI.Intracomm(comm), algorithm=self.algorithm, timeout=self.timeout)


def _wrap_again(comm: MPI.Intracomm, algorithm: str, timeout: float) -> Intracomm:
    return Intracomm(comm, algorithm=algorithm, timeout=timeout)


def _check_settings(algorithm: Any, timeout: Any) -> None:
    """Raise what is wrong with settings of a communicator."""
    select.check_default(algorithm)
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"timeout: {timeout!r} is not a positive number of seconds")
