"""Checks of the caller's arguments, which make a :class:`~mpicoll.collectives.operation.CheckedOperation`.

The checks for collectives in which ranks own parts are in :mod:`mpicoll.collectives.validate_blocks` and
:mod:`mpicoll.collectives.validate_moves`. Calls that mpicoll's algorithms do not support become a
:class:`~mpicoll.collectives.operation.NativeOperation`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpicoll.buffers import reduction_ops
from mpicoll.buffers.buffer_specs import DeviceMemory, Foreign, in_place
from mpicoll.buffers.flat import resolve
from mpicoll.buffers.flat_buffer import Buffer, check_alike, check_apart
from mpicoll.collectives import compressed, compression_tuning, select, validate_blocks, validate_moves
from mpicoll.collectives.call_context import (
    AnyTask,
    CallArguments,
    CallContext,
    Chosen,
    algorithm_for,
    check_root,
    choose_reduction,
    native,
)
from mpicoll.collectives.checked_arguments import VectorPart
from mpicoll.collectives.operation import CheckedOperation
from mpicoll.errors import CollectiveTimeout, MismatchError, RemoteError
from mpicoll.messages.call_agreement import refuse


def prepare(scope: CallContext, call: CallArguments) -> AnyTask:
    """Check the arguments of a call and choose its algorithm.

    Raises
    ------
    CommunicatorBroken
        If an earlier failure left messages in flight.
    TypeError, ValueError, UnknownAlgorithm
        If the arguments cannot be used; the other ranks are told, so that they do not wait for this one.
    """
    scope.channel.ensure_usable()
    try:
        operation = _prepare(scope, call)
        if isinstance(operation, CheckedOperation) and operation.algorithm == select.HIERARCHY:
            from mpicoll.collectives.hierarchy import HierarchicalOperation  # needed over several nodes only

            return HierarchicalOperation.of(operation)
        return operation
    except (MismatchError, RemoteError, CollectiveTimeout):  # of a call inside, which all ranks have heard of
        raise
    except Exception as error:  # memory that is missing, or an error of MPI, on this rank alone too
        refuse(scope.channel, call.collective, error, scope.timeout)


def _prepare(scope: CallContext, call: CallArguments) -> AnyTask:
    try:
        return _PREPARE[call.collective](scope, call)
    except DeviceMemory:
        if (call.algorithm or scope.algorithm) != select.NATIVE:
            raise
        return native(scope, call, True)


def _pair(sendbuf: Any, recvbuf: Any) -> tuple[Buffer | None, Buffer]:
    """Resolve both buffers; None for the first if it is IN_PLACE or the same memory as the second."""
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


def _reduction(scope: CallContext, call: CallArguments) -> AnyTask:
    """Check an allreduce, scan or exscan; rank 0 has no result of an exscan."""
    sendbuf, recvbuf, op, collective = call.sendbuf, call.recvbuf, call.op, call.collective
    try:
        send, recv = _pair(sendbuf, recvbuf)
    except Foreign:
        return native(scope, call, False, inside=sendbuf is recvbuf)
    if send is not None:
        _check_counts(send.count, recv.count)
    if call.compression is not None:
        call = call._replace(compression=compression_tuning.resolve(scope, call, send or recv, prepare))
    if call.compression is not None:
        chosen, compression = _choose_compressed(scope, call, recv)
    else:
        chosen, compression = choose_reduction(scope, collective, call.algorithm, op, recv), None
    if chosen.reducer is None or chosen.algorithm == select.NATIVE:
        return native(scope, call, chosen.algorithm == select.NATIVE, recv, inside=send is None)
    gets = collective != "exscan" or scope.channel.rank > 0
    return CheckedOperation(
        scope.channel,
        collective,
        collective.capitalize(),
        chosen.algorithm,
        recv.count,
        recv.dtype,
        VectorPart(send or recv, 0, recv.count),
        VectorPart(recv, 0, recv.count) if gets else None,
        source=send,
        target=recv,
        op_name=chosen.op_name,
        reducer=chosen.reducer,
        ordered=collective != "allreduce" or not reduction_ops.is_commutative(op),
        compression=compression,
    )


def _choose_compressed(
    scope: CallContext, call: CallArguments, buffer: Buffer
) -> tuple[Chosen, compressed.Compression]:
    wanted = call.algorithm or select.AUTO
    ranks = (scope.channel.size, scope.nodes)
    name, made = compressed.choose(call.compression, call.op, buffer.dtype, buffer.count, wanted, *ranks)
    return Chosen(name, reduction_ops.reducer_for(call.op, buffer.dtype), "SUM"), made


def _reduce(scope: CallContext, call: CallArguments) -> AnyTask:
    """Check a Reduce: only the root's recvbuf counts, and only the root may pass IN_PLACE."""
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
        return native(scope, call, False, inside=at_root and sendbuf is recvbuf)
    data = send or recv
    assert data is not None
    if send is not None and recv is not None:
        _check_counts(send.count, recv.count)
    chosen = choose_reduction(scope, "reduce", call.algorithm, op, data)
    if chosen.reducer is None or chosen.algorithm == select.NATIVE:
        return native(scope, call, chosen.algorithm == select.NATIVE, data, inside=send is None)
    result = VectorPart(recv, 0, recv.count) if recv is not None else None
    return CheckedOperation(
        scope.channel,
        "reduce",
        "Reduce",
        chosen.algorithm,
        data.count,
        data.dtype,
        VectorPart(data, 0, data.count),
        result,
        source=send,
        target=recv,
        root=root,
        op_name=chosen.op_name,
        reducer=chosen.reducer,
        ordered=not reduction_ops.is_commutative(op),
    )


def _bcast(scope: CallContext, call: CallArguments) -> AnyTask:
    root = check_root(call.root, scope.channel.size)
    at_root = scope.channel.rank == root
    buffer = resolve(call.recvbuf, "buf", writable=not at_root, moved=True)
    name = algorithm_for(scope, "bcast", call.algorithm, buffer.nbytes)
    if name == select.NATIVE:
        return native(scope, call, True)
    part = VectorPart(buffer, 0, buffer.count)
    given, result = (part, None) if at_root else (None, part)
    return CheckedOperation(
        scope.channel, "bcast", "Bcast", name, buffer.count, buffer.dtype, given, result, target=buffer, root=root
    )


def _barrier(scope: CallContext, call: CallArguments) -> AnyTask:
    name = algorithm_for(scope, "barrier", call.algorithm, 0)
    if name == select.NATIVE:
        return native(scope, call, True)
    return CheckedOperation(scope.channel, "barrier", "Barrier", name, 0, np.dtype(np.uint8), None, None)


_PREPARE: dict[str, Callable[[CallContext, CallArguments], AnyTask]] = {
    "allreduce": _reduction,
    "reduce": _reduce,
    "bcast": _bcast,
    "reduce_scatter": validate_blocks.reduce_scatter,
    "reduce_scatter_block": validate_blocks.reduce_scatter_block,
    "allgather": validate_blocks.allgather,
    "allgatherv": validate_blocks.allgatherv,
    "barrier": _barrier,
    "gather": validate_moves.gather,
    "gatherv": validate_moves.gather,
    "scatter": validate_moves.scatter,
    "scatterv": validate_moves.scatter,
    "alltoall": validate_moves.alltoall,
    "alltoallv": validate_moves.alltoallv,
    "scan": _reduction,
    "exscan": _reduction,
}
