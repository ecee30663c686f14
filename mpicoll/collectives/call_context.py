"""Arguments and context of a call, and the choice of algorithm and kernel that all kinds of calls share."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.buffers import reduction_ops
from mpicoll.buffers.flat_buffer import Buffer
from mpicoll.buffers.reduction_ops import UserOperation
from mpicoll.collectives import gathered_reductions, select
from mpicoll.collectives.counted_call import CountedCall
from mpicoll.collectives.operation import CheckedOperation, NativeOperation
from mpicoll.communicator.channel import Channel
from mpicoll.communicator.mpi_exceptions import RootError

AnyTask = CheckedOperation | NativeOperation | CountedCall
AnyOp = MPI.Op | UserOperation
_REDUCING = ("allreduce", "reduce", "reduce_scatter", "reduce_scatter_block", "scan", "exscan")
_ROOTED = ("reduce", "bcast", "gather", "gatherv", "scatter", "scatterv")


class CallContext(NamedTuple):
    """Context of a call: the channel, its capabilities, and the settings of the communicator object."""

    channel: Channel
    means: select.Capabilities
    algorithm: str
    timeout: float
    is_blocking: bool = True
    may_wait: bool = True
    """Whether choosing the algorithm may exchange messages with other ranks."""

    @property
    def nodes(self) -> int:
        """The number of nodes if there is a hierarchy of them, else 0."""
        cluster = self.channel.cluster
        return len(set(cluster.node_of)) if cluster is not None and self.means.hierarchy else 0

    def by_messages(self) -> CallContext:
        """Return the context without shared memory and hierarchy, for messages only."""
        return self._replace(means=self.means.without_memory())


class ToldCounts(NamedTuple):
    """Counts and element type that the root of a Gatherv or Scatterv has told all ranks."""

    counts: Sequence[int]
    dtype: np.dtype


class CallArguments(NamedTuple):
    """Arguments of a call; those that a collective does not have keep their defaults."""

    collective: str
    sendbuf: Any = None
    recvbuf: Any = None
    op: AnyOp = MPI.SUM
    root: Any = 0
    algorithm: str | None = None
    recvcounts: Any = None
    compression: Any = None


def algorithm_for(
    scope: CallContext, collective: str, wanted: str | None, nbytes: int, *, commutative: bool = True
) -> str:
    """Return the name of the algorithm for a call on `nbytes` bytes."""
    name = select.resolve(collective, wanted, scope.algorithm, nbytes, scope.means, commutative=commutative)
    return tried(scope.channel, collective, nbytes, name, scope.is_blocking) if is_auto(scope, wanted) else name


def is_auto(scope: CallContext, wanted: str | None) -> bool:
    """Return whether nobody has asked for one of the ways to reach private memory of a node."""
    return (scope.algorithm if wanted is None else wanted) not in select.ON_NODE


def tried(channel: Channel, collective: str, nbytes: int, name: str, is_blocking: bool) -> str:
    """Return the algorithm of ``"auto"`` for the next call; without trials (`shared_memory/trials.py`) it is `name`."""
    if name not in select.ON_NODE or channel.node is None or channel.node.trials is None:
        return name
    first = select.ON_NODE.index(name)
    return select.ON_NODE[channel.node.trials.method(collective, nbytes, first, is_blocking)]


def check_root(root: Any, size: int) -> int:
    """Return the root as an int; like mpi4py, accept any index, NumPy's bool, and floats that are whole numbers.

    Raises
    ------
    TypeError, RootError
        If it is no index, or not a rank of the communicator.
    """
    try:
        is_whole = isinstance(root, (float, np.floating)) and float(root).is_integer()
        rank = operator.index(int(root) if is_whole or isinstance(root, np.bool_) else root)
    except TypeError:
        raise TypeError(f"root: {root!r} is not a rank") from None
    if not 0 <= rank < size:
        raise RootError(f"root: {rank} is not in 0..{size - 1}")
    return rank


class Chosen(NamedTuple):
    """Algorithm and kernel of a reducing call; `reducer` is None if only the MPI library can reduce."""

    algorithm: str
    reducer: reduction_ops.Reducer | None
    op_name: str


def choose_reduction(scope: CallContext, collective: str, algorithm: str | None, op: AnyOp, buffer: Buffer) -> Chosen:
    """Choose algorithm and kernel for a call that reduces the elements of `buffer`.

    Kernels also reduce elements of derived datatypes, for which MPI does not define its predefined operations. Ranks
    that give a derived datatype therefore make the same call as ranks that give plain arrays.
    """
    reducer = reduction_ops.reducer_for(op, buffer.dtype)
    commutative = reduction_ops.is_commutative(op)
    name = algorithm_for(scope, collective, algorithm, buffer.nbytes, commutative=commutative)
    return Chosen(name, reducer, reduction_ops.name_of(op) or "")


def native(
    scope: CallContext, call: CallArguments, chosen: bool, *buffers: Buffer | None, inside: bool = False
) -> NativeOperation:
    """Return the operation that leaves a call, or the combination of elements, to the MPI library on all ranks.

    All ranks of a correct program do so, since the criteria are equal on all of them: the algorithm that the caller or
    a table chose; the operation (one of MPI.Op.Create, MAXLOC, MINLOC); in reductions also the element type (long
    double, structures), since MPI requires the same datatype on all ranks. Calls that only move data come here only if
    ``"native"`` is chosen.

    Parameters
    ----------
    chosen
        Whether ``algorithm="native"`` was chosen.
    buffers
        The first that is not None has the element type for an operation of :func:`mpicoll.op`.
    inside
        Whether sendbuf is the memory of recvbuf, for which MPI requires IN_PLACE.
    """
    send, recv, name = MPI.IN_PLACE if inside else call.sendbuf, call.recvbuf, call.collective
    arguments: tuple[Any, ...] = () if name == "barrier" else (recv,) if name == "bcast" else (send, recv)
    if name == "reduce_scatter":
        arguments += (call.recvcounts,)
    if name in _REDUCING:
        arguments += (native_op(call.op, *buffers),)
    root = check_root(call.root, scope.channel.size) if name in _ROOTED else 0
    if name in _ROOTED:
        arguments += (root,)
    made = NativeOperation(scope.channel, name, name.capitalize(), arguments, chosen)
    if chosen or not scope.is_blocking or name not in gathered_reductions.COLLECTIVES:
        return made
    vectors = gathered_reductions.Vectors.of(scope.channel, name, send, recv, call.op, root)
    return made if vectors is None else gathered_reductions.GatheredReduction.of(made, vectors)


def native_op(op: AnyOp, *buffers: Buffer | None) -> MPI.Op:
    """Return an operation that the MPI library can apply."""
    if isinstance(op, MPI.Op):
        return op
    dtype = next((buffer.dtype for buffer in buffers if buffer is not None), None)
    if dtype is None:
        raise TypeError(f"op: {op!r} needs buffers with elements of a type that Numba can compile for")
    return op.mpi_op(dtype)
