"""From what the caller passed to a :class:`~mpicoll.collectives.task.Task`: every check of arguments is here.

What hand-written algorithms do not handle becomes a :class:`~mpicoll.collectives.task.NativeTask`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.collectives import compressed, payoff, select
from mpicoll.collectives.task import NativeTask, Part, Task, in_place
from mpicoll.errors import MpicollError
from mpicoll.runtime import ops
from mpicoll.runtime.agreement import agree
from mpicoll.runtime.buffers import (
    Buffer,
    Foreign,
    ScatteredBlocks,
    check_alike,
    check_apart,
    resolve,
    resolve_blocks,
    resolve_counts,
)
from mpicoll.runtime.channel import Channel
from mpicoll.runtime.ops import Operation
from mpicoll.runtime.supervisor import Signature

AnyTask = Task | NativeTask
AnyOp = MPI.Op | Operation


class Scope(NamedTuple):
    """Where a call is made: the channel and the settings of the communicator object."""

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
    """What the caller passed; what a collective does not have is left out."""

    collective: str
    sendbuf: Any = None
    recvbuf: Any = None
    op: AnyOp = MPI.SUM
    root: Any = 0
    algorithm: str | None = None
    recvcounts: Any = None
    compression: Any = None


def prepare(scope: Scope, call: Call) -> AnyTask:
    """Check a call and choose how it is done.

    Raises
    ------
    CommunicatorBroken
        If an earlier failure left messages in flight.
    TypeError, ValueError, UnknownAlgorithm
        If the arguments cannot be used; the other ranks are told, so that they do not wait for this one.
    """
    scope.channel.ensure_usable()
    try:
        return _PREPARE[call.collective](scope, call)
    except (TypeError, ValueError, MpicollError) as error:
        channel = scope.channel
        if channel.check == "full" and channel.broken is None:
            signature = Signature.refusing(call.collective)
            agree(channel, signature, channel.enter(signature), scope.timeout, error)
        channel.refuse(error)
        raise


def _pair(sendbuf: Any, recvbuf: Any) -> tuple[Buffer | None, Buffer]:
    """Resolve both buffers; None for the first if it is, or says, IN_PLACE."""
    recv = resolve(recvbuf, "recvbuf", writable=True)
    if in_place(sendbuf):
        return None, recv
    send = resolve(sendbuf, "sendbuf", writable=False)
    check_alike(send, recv)
    if send.address == recv.address and send.count == recv.count and recv.destination is None:
        return None, recv
    check_apart(send, recv)
    return send, recv


def _check_counts(send: int, recv: int) -> None:
    if send != recv:
        raise ValueError(f"sendbuf has {send} elements, but recvbuf {recv}")


def _check_root(root: Any, size: int) -> int:
    if isinstance(root, bool) or not isinstance(root, (int, np.integer)):
        raise TypeError(f"root: {root!r} is not a rank")
    if not 0 <= root < size:
        raise ValueError(f"root: {root} is not in 0..{size - 1}")
    return int(root)


def _algorithm(scope: Scope, collective: str, wanted: str | None, nbytes: int, *, commutative: bool = True) -> str:
    return select.resolve(collective, wanted, scope.algorithm, nbytes, scope.means, commutative=commutative)


class _Chosen(NamedTuple):
    """What decides how a reducing call is done; `reducer` is None if the MPI library has to do it."""

    algorithm: str
    reducer: ops.Reducer | None
    op_name: str


def _choose_reduction(
    scope: Scope, collective: str, algorithm: str | None, op: AnyOp, buffer: Buffer, nbytes: int
) -> _Chosen:
    reducer = ops.reducer_for(op, buffer.dtype)
    name = _algorithm(scope, collective, algorithm, nbytes, commutative=ops.is_commutative(op))
    return _Chosen(name, reducer, ops.name_of(op) or "")


def _native(scope: Scope, collective: str, title: str, arguments: tuple[Any, ...], chosen: bool) -> NativeTask:
    return NativeTask(scope.channel, collective, title, arguments, chosen)


def _native_op(op: AnyOp, *buffers: Buffer | None) -> MPI.Op:
    """Return an operation that the MPI library can apply."""
    if isinstance(op, MPI.Op):
        return op
    dtype = next((buffer.dtype for buffer in buffers if buffer is not None), None)
    if dtype is None:
        raise TypeError(f"op: {op!r} needs buffers with elements that Numba knows")
    return op.mpi_op(dtype)


def _allreduce(scope: Scope, call: Call) -> AnyTask:
    sendbuf, recvbuf, op = call.sendbuf, call.recvbuf, call.op
    try:
        send, recv = _pair(sendbuf, recvbuf)
    except Foreign:
        return _native(scope, "allreduce", "Allreduce", (sendbuf, recvbuf, _native_op(op)), False)
    if send is not None:
        _check_counts(send.count, recv.count)
    if call.compression is not None:
        call = call._replace(compression=payoff.resolve(scope, call, send or recv, prepare))
    if call.compression is not None:
        chosen, compression = _choose_compressed(scope, call, recv)
    else:
        chosen, compression = _choose_reduction(scope, "allreduce", call.algorithm, op, recv, recv.nbytes), None
    if chosen.reducer is None or chosen.algorithm == select.NATIVE:
        arguments = (MPI.IN_PLACE if send is None else sendbuf, recvbuf, _native_op(op, recv))
        return _native(scope, "allreduce", "Allreduce", arguments, chosen.algorithm == select.NATIVE)
    given, result = Part(send or recv, 0, recv.count), Part(recv, 0, recv.count)
    return Task(
        scope.channel,
        "allreduce",
        "Allreduce",
        chosen.algorithm,
        recv.count,
        recv.dtype,
        given,
        result,
        source=send,
        target=recv,
        op_name=chosen.op_name,
        reducer=chosen.reducer,
        ordered=not ops.is_commutative(op),
        compression=compression,
    )


def _choose_compressed(scope: Scope, call: Call, buffer: Buffer) -> tuple[_Chosen, compressed.Compression]:
    wanted = call.algorithm or select.AUTO
    ranks = (scope.channel.size, scope.nodes)
    name, made = compressed.choose(call.compression, call.op, buffer.dtype, buffer.count, wanted, *ranks)
    return _Chosen(name, ops.reducer_for(call.op, buffer.dtype), "SUM"), made


def _reduce(scope: Scope, call: Call) -> AnyTask:
    """Only the root's recvbuf is looked at, and only the root may pass IN_PLACE."""
    sendbuf, recvbuf, op = call.sendbuf, call.recvbuf, call.op
    root = _check_root(call.root, scope.channel.size)
    at_root = scope.channel.rank == root
    try:
        if at_root:
            send, recv = _pair(sendbuf, recvbuf)
        elif in_place(sendbuf):
            raise ValueError("sendbuf: only the root may pass MPI.IN_PLACE to Reduce")
        else:
            send, recv = resolve(sendbuf, "sendbuf", writable=False), None
    except Foreign:
        return _native(scope, "reduce", "Reduce", (sendbuf, recvbuf, _native_op(op), root), False)
    data = send or recv
    assert data is not None
    if send is not None and recv is not None:
        _check_counts(send.count, recv.count)
    chosen = _choose_reduction(scope, "reduce", call.algorithm, op, data, data.nbytes)
    if chosen.reducer is None or chosen.algorithm == select.NATIVE:
        arguments = (MPI.IN_PLACE if send is None else sendbuf, recvbuf, _native_op(op, data), root)
        return _native(scope, "reduce", "Reduce", arguments, chosen.algorithm == select.NATIVE)
    result = Part(recv, 0, recv.count) if recv is not None else None
    return Task(
        scope.channel,
        "reduce",
        "Reduce",
        chosen.algorithm,
        data.count,
        data.dtype,
        Part(data, 0, data.count),
        result,
        source=send,
        target=recv,
        root=root,
        op_name=chosen.op_name,
        reducer=chosen.reducer,
        ordered=not ops.is_commutative(op),
    )


def _bcast(scope: Scope, call: Call) -> AnyTask:
    buf, root = call.recvbuf, _check_root(call.root, scope.channel.size)
    at_root = scope.channel.rank == root
    try:
        buffer = resolve(buf, "buf", writable=not at_root)
    except Foreign:
        return _native(scope, "bcast", "Bcast", (buf, root), False)
    name = _algorithm(scope, "bcast", call.algorithm, buffer.nbytes)
    if name == select.NATIVE:
        return _native(scope, "bcast", "Bcast", (buf, root), True)
    part = Part(buffer, 0, buffer.count)
    given, result = (part, None) if at_root else (None, part)
    return Task(
        scope.channel, "bcast", "Bcast", name, buffer.count, buffer.dtype, given, result, target=buffer, root=root
    )


def _reduce_scatter(scope: Scope, call: Call) -> AnyTask:
    """Without `recvcounts` each rank's count is that of its own recvbuf."""
    sendbuf, recvbuf, recvcounts, channel = call.sendbuf, call.recvbuf, call.recvcounts, scope.channel
    try:
        recv = resolve(recvbuf, "recvbuf", writable=True)
        send = recv if in_place(sendbuf) else resolve(sendbuf, "sendbuf", writable=False)
    except Foreign:
        arguments = (sendbuf, recvbuf, recvcounts, _native_op(call.op))
        return _native(scope, "reduce_scatter", "Reduce_scatter", arguments, False)
    if recvcounts is not None:
        counts = resolve_counts(recvcounts, channel.size)
    elif send is recv:
        raise ValueError("recvcounts: needed with MPI.IN_PLACE")
    else:
        counts = _everybodys_counts(scope, recv.count)
    return _scattering(scope, call, (sendbuf, recvbuf, recvcounts), send, recv, counts)


def _reduce_scatter_block(scope: Scope, call: Call) -> AnyTask:
    sendbuf, recvbuf, size = call.sendbuf, call.recvbuf, scope.channel.size
    inside = in_place(sendbuf)
    try:
        recv = resolve(recvbuf, "recvbuf", writable=True, blocks=size if inside else 1)
        send = recv if inside else resolve(sendbuf, "sendbuf", writable=False, blocks=size)
    except Foreign:
        arguments = (sendbuf, recvbuf, _native_op(call.op))
        return _native(scope, "reduce_scatter_block", "Reduce_scatter_block", arguments, False)
    if send.count % size:
        raise ValueError(f"sendbuf: {send.count} elements cannot be divided among {size} ranks")
    counts = [send.count // size] * size
    return _scattering(scope, call, (sendbuf, recvbuf), send, recv, counts)


def _scattering(
    scope: Scope, call: Call, given: tuple[Any, ...], send: Buffer, recv: Buffer, counts: list[int]
) -> AnyTask:
    """Finish both forms of reduce_scatter; `send` is `recv` for IN_PLACE."""
    channel, rank, op = scope.channel, scope.channel.rank, call.op
    begin, own, total = sum(counts[:rank]), counts[rank], sum(counts)
    blocks = len(given) == 2
    title = "Reduce_scatter_block" if blocks else "Reduce_scatter"
    if send is not recv:
        check_alike(send, recv)
        check_apart(send, recv)
        if own != recv.count:
            raise ValueError(f"recvbuf has {recv.count} elements, but this rank's count is {own}")
    if send.count != total:
        raise ValueError(f"sendbuf has {send.count} elements, but the counts {counts} add up to {total}")
    chosen = _choose_reduction(scope, "reduce_scatter", call.algorithm, op, send, send.nbytes)
    if chosen.reducer is None or chosen.algorithm == select.NATIVE:
        collective = "reduce_scatter_block" if blocks else "reduce_scatter"
        arguments = (*given, _native_op(op, send))
        return _native(scope, collective, title, arguments, chosen.algorithm == select.NATIVE)
    return Task(
        channel,
        "reduce_scatter",
        title,
        chosen.algorithm,
        total,
        send.dtype,
        Part(send, 0, total),
        Part(recv, begin, begin + own),
        source=send,
        counts=tuple(counts),
        op_name=chosen.op_name,
        reducer=chosen.reducer,
        ordered=not ops.is_commutative(op),
    )


def _everybodys_counts(scope: Scope, count: int) -> list[int]:
    """Gather one count a rank."""
    counts = np.empty(scope.channel.size, np.int64)
    own = np.array([count], np.int64)
    call = Call("allgather", own, counts, algorithm="bruck")
    send, recv = resolve(own, "sendbuf", writable=False), resolve(counts, "recvbuf", writable=True)
    _gathering(scope, call, "Reduce_scatter counts", send, recv, [1] * scope.channel.size).run(scope.timeout)
    return [int(each) for each in counts]


def _allgather(scope: Scope, call: Call) -> AnyTask:
    sendbuf, recvbuf, size = call.sendbuf, call.recvbuf, scope.channel.size
    try:
        recv = resolve(recvbuf, "recvbuf", writable=True, blocks=size)
        send = None if in_place(sendbuf) else resolve(sendbuf, "sendbuf", writable=False)
    except Foreign:
        return _native(scope, "allgather", "Allgather", (sendbuf, recvbuf), False)
    if recv.count % size:
        raise ValueError(f"recvbuf: {recv.count} elements cannot be divided among {size} ranks")
    counts = [recv.count // size] * size
    return _gathering(scope, call, "Allgather", send, recv, counts)


def _allgatherv(scope: Scope, call: Call) -> AnyTask:
    """The specification of recvbuf says how much each rank gives and where it goes."""
    sendbuf, recvbuf = call.sendbuf, call.recvbuf
    try:
        blocks = resolve_blocks(recvbuf, "recvbuf", scope.channel.size)
        send = None if in_place(sendbuf) else resolve(sendbuf, "sendbuf", writable=False)
    except Foreign:
        return _native(scope, "allgatherv", "Allgatherv", (sendbuf, recvbuf), False)
    recv = blocks.buffer if blocks.is_packed else ScatteredBlocks(blocks)
    return _gathering(scope, call, "Allgatherv", send, recv, blocks.counts)


def _gathering(scope: Scope, call: Call, title: str, send: Buffer | None, recv: Buffer, counts: list[int]) -> AnyTask:
    """Finish both forms of allgather; `send` is None for IN_PLACE."""
    channel, rank = scope.channel, scope.channel.rank
    begin, own, total = sum(counts[:rank]), counts[rank], sum(counts)
    if send is not None:
        check_alike(send, recv)
        if send.count != own:
            raise ValueError(f"sendbuf has {send.count} elements, but recvbuf takes {own} from this rank")
        check_apart(send, recv)
    name = _algorithm(scope, "allgather", call.algorithm, total * recv.dtype.itemsize)
    if name == select.NATIVE:
        return _native(scope, call.collective, title, (call.sendbuf, call.recvbuf), True)
    given = Part(recv, begin, begin + own, begin) if send is None else Part(send, begin, begin + own)
    return Task(
        channel,
        "allgather",
        title,
        name,
        total,
        recv.dtype,
        given,
        Part(recv, 0, total),
        target=recv,
        counts=tuple(counts),
    )


def _barrier(scope: Scope, call: Call) -> AnyTask:
    name = _algorithm(scope, "barrier", call.algorithm, 0)
    if name == select.NATIVE:
        return _native(scope, "barrier", "Barrier", (), True)
    return Task(scope.channel, "barrier", "Barrier", name, 0, np.dtype(np.uint8), None, None)


_PREPARE: dict[str, Callable[[Scope, Call], AnyTask]] = {
    "allreduce": _allreduce,
    "reduce": _reduce,
    "bcast": _bcast,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_block": _reduce_scatter_block,
    "allgather": _allgather,
    "allgatherv": _allgatherv,
    "barrier": _barrier,
}
