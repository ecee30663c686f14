"""From what the caller passed to a :class:`~mpicoll.collectives.task.Task`: the checks of arguments.

Those of collectives in which ranks own parts are in :mod:`mpicoll.collectives.parts` and
:mod:`mpicoll.collectives.moves`. What hand-written algorithms do not handle becomes a
:class:`~mpicoll.collectives.task.NativeTask`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.collectives import compressed, moves, parts, payoff, select
from mpicoll.collectives.call import (
    AnyTask,
    Call,
    Chosen,
    Scope,
    algorithm_for,
    check_root,
    choose_reduction,
    native,
    native_op,
)
from mpicoll.collectives.task import Part, Task
from mpicoll.runtime import ops
from mpicoll.runtime.agreement import agree
from mpicoll.runtime.buffers import Buffer, check_alike, check_apart, resolve
from mpicoll.runtime.specs import Foreign, in_place
from mpicoll.runtime.supervisor import Signature


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
    except Exception as error:  # memory that is missing, or an error of MPI, on this rank alone too
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


def _allreduce(scope: Scope, call: Call) -> AnyTask:
    sendbuf, recvbuf, op = call.sendbuf, call.recvbuf, call.op
    try:
        send, recv = _pair(sendbuf, recvbuf)
    except Foreign:
        return native(scope, "allreduce", "Allreduce", (sendbuf, recvbuf, native_op(op)), False)
    if send is not None:
        _check_counts(send.count, recv.count)
    if call.compression is not None:
        call = call._replace(compression=payoff.resolve(scope, call, send or recv, prepare))
    if call.compression is not None:
        chosen, compression = _choose_compressed(scope, call, recv)
    else:
        chosen, compression = choose_reduction(scope, "allreduce", call.algorithm, op, recv, send), None
    if chosen.reducer is None or chosen.algorithm == select.NATIVE:
        arguments = (MPI.IN_PLACE if send is None else sendbuf, recvbuf, native_op(op, recv))
        return native(scope, "allreduce", "Allreduce", arguments, chosen.algorithm == select.NATIVE)
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


def _choose_compressed(scope: Scope, call: Call, buffer: Buffer) -> tuple[Chosen, compressed.Compression]:
    wanted = call.algorithm or select.AUTO
    ranks = (scope.channel.size, scope.nodes)
    name, made = compressed.choose(call.compression, call.op, buffer.dtype, buffer.count, wanted, *ranks)
    return Chosen(name, ops.reducer_for(call.op, buffer.dtype), "SUM"), made


def _reduce(scope: Scope, call: Call) -> AnyTask:
    """Only the root's recvbuf is looked at, and only the root may pass IN_PLACE."""
    sendbuf, recvbuf, op = call.sendbuf, call.recvbuf, call.op
    root = check_root(call.root, scope.channel.size)
    at_root = scope.channel.rank == root
    try:
        if at_root:
            send, recv = _pair(sendbuf, recvbuf)
        elif in_place(sendbuf):
            raise ValueError("sendbuf: only the root may pass MPI.IN_PLACE to Reduce")
        else:
            send, recv = resolve(sendbuf, "sendbuf", writable=False), None
    except Foreign:
        return native(scope, "reduce", "Reduce", (sendbuf, recvbuf, native_op(op), root), False)
    data = send or recv
    assert data is not None
    if send is not None and recv is not None:
        _check_counts(send.count, recv.count)
    chosen = choose_reduction(scope, "reduce", call.algorithm, op, data, recv)
    if chosen.reducer is None or chosen.algorithm == select.NATIVE:
        arguments = (MPI.IN_PLACE if send is None else sendbuf, recvbuf, native_op(op, data), root)
        return native(scope, "reduce", "Reduce", arguments, chosen.algorithm == select.NATIVE)
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
    buf, root = call.recvbuf, check_root(call.root, scope.channel.size)
    at_root = scope.channel.rank == root
    try:
        buffer = resolve(buf, "buf", writable=not at_root)
    except Foreign:
        return native(scope, "bcast", "Bcast", (buf, root), False)
    name = algorithm_for(scope, "bcast", call.algorithm, buffer.nbytes)
    if name == select.NATIVE:
        return native(scope, "bcast", "Bcast", (buf, root), True)
    part = Part(buffer, 0, buffer.count)
    given, result = (part, None) if at_root else (None, part)
    return Task(
        scope.channel, "bcast", "Bcast", name, buffer.count, buffer.dtype, given, result, target=buffer, root=root
    )


def _barrier(scope: Scope, call: Call) -> AnyTask:
    name = algorithm_for(scope, "barrier", call.algorithm, 0)
    if name == select.NATIVE:
        return native(scope, "barrier", "Barrier", (), True)
    return Task(scope.channel, "barrier", "Barrier", name, 0, np.dtype(np.uint8), None, None)


def _prefix(scope: Scope, call: Call) -> AnyTask:
    """Check a scan or exscan; rank 0 gets nothing from an exscan."""
    sendbuf, recvbuf, op, collective = call.sendbuf, call.recvbuf, call.op, call.collective
    title = collective.capitalize()
    try:
        send, recv = _pair(sendbuf, recvbuf)
    except Foreign:
        return native(scope, collective, title, (sendbuf, recvbuf, native_op(op)), False)
    if send is not None:
        _check_counts(send.count, recv.count)
    chosen = choose_reduction(scope, collective, call.algorithm, op, recv, send)
    if chosen.reducer is None or chosen.algorithm == select.NATIVE:
        arguments = (MPI.IN_PLACE if send is None else sendbuf, recvbuf, native_op(op, recv))
        return native(scope, collective, title, arguments, chosen.algorithm == select.NATIVE)
    gets = collective == "scan" or scope.channel.rank > 0
    return Task(
        scope.channel,
        collective,
        title,
        chosen.algorithm,
        recv.count,
        recv.dtype,
        Part(send or recv, 0, recv.count),
        Part(recv, 0, recv.count) if gets else None,
        source=send,
        target=recv,
        op_name=chosen.op_name,
        reducer=chosen.reducer,
        ordered=True,
    )


_PREPARE: dict[str, Callable[[Scope, Call], AnyTask]] = {
    "allreduce": _allreduce,
    "reduce": _reduce,
    "bcast": _bcast,
    "reduce_scatter": parts.reduce_scatter,
    "reduce_scatter_block": parts.reduce_scatter_block,
    "allgather": parts.allgather,
    "allgatherv": parts.allgatherv,
    "barrier": _barrier,
    "gather": moves.gather,
    "gatherv": moves.gather,
    "scatter": moves.scatter,
    "scatterv": moves.scatter,
    "alltoall": moves.alltoall,
    "alltoallv": moves.alltoallv,
    "scan": _prefix,
    "exscan": _prefix,
}
