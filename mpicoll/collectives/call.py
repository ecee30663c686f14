"""A call as it was made, where it was made, and what every kind of call needs to choose how it is done."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.collectives import select
from mpicoll.collectives.task import NativeTask, Task
from mpicoll.runtime import ops
from mpicoll.runtime.buffers import Buffer, PackedBuffer
from mpicoll.runtime.channel import Channel
from mpicoll.runtime.ops import Operation

AnyTask = Task | NativeTask
AnyOp = MPI.Op | Operation


class Scope(NamedTuple):
    """Context of a call: the channel and the settings of the communicator object."""

    channel: Channel
    means: select.Means
    algorithm: str
    timeout: float
    may_wait: bool = True
    """Whether to decide something may take messages to and from other ranks."""

    @property
    def nodes(self) -> int:
        """The number of nodes if there is a hierarchy of them, else 0."""
        cluster = self.channel.cluster
        return len(set(cluster.node_of)) if cluster is not None and self.means.hierarchy else 0

    def by_messages(self) -> Scope:
        """Return the same with nothing but messages between ranks."""
        return self._replace(means=self.means.without_memory())


class Call(NamedTuple):
    """Arguments of a call; those that a collective does not have keep their defaults."""

    collective: str
    sendbuf: Any = None
    recvbuf: Any = None
    op: AnyOp = MPI.SUM
    root: Any = 0
    algorithm: str | None = None
    recvcounts: Any = None
    compression: Any = None


def algorithm_for(scope: Scope, collective: str, wanted: str | None, nbytes: int, *, commutative: bool = True) -> str:
    """Return the name of the algorithm that does a call on so many bytes."""
    return select.resolve(collective, wanted, scope.algorithm, nbytes, scope.means, commutative=commutative)


def check_root(root: Any, size: int) -> int:
    """Return the root as an int; like mpi4py, take anything that can be an index, and NumPy's bool."""
    try:
        rank = operator.index(int(root) if isinstance(root, np.bool_) else root)
    except TypeError:
        raise TypeError(f"root: {root!r} is not a rank") from None
    if not 0 <= rank < size:
        raise ValueError(f"root: {rank} is not in 0..{size - 1}")
    return rank


class Chosen(NamedTuple):
    """Algorithm and kernel of a reducing call; `reducer` is None if the MPI library has to do it."""

    algorithm: str
    reducer: ops.Reducer | None
    op_name: str


def choose_reduction(
    scope: Scope, collective: str, algorithm: str | None, op: AnyOp, buffer: Buffer, other: Buffer | None = None
) -> Chosen:
    """Choose for a call that combines the elements of `buffer`, whose length decides; `other` is the result's."""
    nbytes = buffer.nbytes
    reducer = ops.reducer_for(op, buffer.dtype)
    if isinstance(op, MPI.Op) and any(isinstance(each, PackedBuffer) for each in (buffer, other)):
        # An MPI.Op made elsewhere combines whole entries, which only the MPI library hands to it. A predefined one is
        # not defined on derived datatypes; the MPI library raises its own error.
        reducer = None
    name = algorithm_for(scope, collective, algorithm, nbytes, commutative=ops.is_commutative(op))
    return Chosen(name, reducer, ops.name_of(op) or "")


def native(scope: Scope, collective: str, title: str, arguments: tuple[Any, ...], chosen: bool) -> NativeTask:
    """Leave a call to the MPI library; `chosen`: because somebody said so.

    All ranks have to do so. They do where `algorithm` or `op` says it, and where the type signature does: long double,
    or elements of several types. Two things only the rank itself knows, and in a call on which they differ, which MPI
    allows, the ranks do not meet (MismatchError): memory shown by DLPack or as a CUDA array only, and MPI_PACKED, which
    goes with every signature.
    """
    return NativeTask(scope.channel, collective, title, arguments, chosen)


def native_op(op: AnyOp, *buffers: Buffer | None) -> MPI.Op:
    """Return an operation that the MPI library can apply."""
    if isinstance(op, MPI.Op):
        return op
    dtype = next((buffer.dtype for buffer in buffers if buffer is not None), None)
    if dtype is None:
        raise TypeError(f"op: {op!r} needs buffers with elements that Numba knows")
    return op.mpi_op(dtype)
