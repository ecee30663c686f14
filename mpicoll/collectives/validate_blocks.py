"""Checks of collectives in which every rank owns a part of the vector: all forms of reduce_scatter and allgather."""

from __future__ import annotations

import numpy as np

from mpicoll.buffers import reduction_ops
from mpicoll.buffers.buffer_specs import Foreign, in_place
from mpicoll.buffers.flat import resolve
from mpicoll.buffers.flat_buffer import Buffer, check_alike, check_apart, is_part
from mpicoll.buffers.vector_blocks import ScatteredBlocks, resolve_blocks, resolve_counts
from mpicoll.collectives import select
from mpicoll.collectives.call_context import (
    AnyTask,
    CallArguments,
    CallContext,
    algorithm_for,
    choose_reduction,
    native,
)
from mpicoll.collectives.checked_arguments import VectorPart
from mpicoll.collectives.operation import CheckedOperation


def reduce_scatter(scope: CallContext, call: CallArguments) -> AnyTask:
    """Check a Reduce_scatter; without `recvcounts`, each rank's count is the length of its recvbuf."""
    sendbuf, recvbuf, recvcounts, channel = call.sendbuf, call.recvbuf, call.recvcounts, scope.channel
    try:
        recv = resolve(recvbuf, "recvbuf", writable=True)
        send = recv if in_place(sendbuf) else resolve(sendbuf, "sendbuf", writable=False)
    except Foreign:
        return native(scope, call, False)
    if recvcounts is not None:
        counts = [recv.unit * count for count in resolve_counts(recvcounts, channel.size)]
    elif send is recv:
        raise ValueError("recvcounts: None is not possible with MPI.IN_PLACE; give the count of each rank")
    else:
        counts = _everybodys_counts(scope, recv.count)
    return _scattering(scope, call, send, recv, counts)


def reduce_scatter_block(scope: CallContext, call: CallArguments) -> AnyTask:
    """Check a Reduce_scatter_block, whose parts are equally long."""
    sendbuf, recvbuf, size = call.sendbuf, call.recvbuf, scope.channel.size
    inside = in_place(sendbuf)
    try:
        recv = resolve(recvbuf, "recvbuf", writable=True, blocks=size if inside else 1)
        send = recv if inside else resolve(sendbuf, "sendbuf", writable=False, blocks=size)
    except Foreign:
        return native(scope, call, False)
    if send.count % size:
        raise ValueError(f"sendbuf: {send.count} elements cannot be divided among {size} ranks")
    counts = [send.count // size] * size
    return _scattering(scope, call, send, recv, counts)


def _scattering(scope: CallContext, call: CallArguments, send: Buffer, recv: Buffer, counts: list[int]) -> AnyTask:
    """Finish both forms of reduce_scatter; `send` is `recv` for IN_PLACE."""
    channel, rank, op = scope.channel, scope.channel.rank, call.op
    begin, own, total = sum(counts[:rank]), counts[rank], sum(counts)
    if send is not recv:
        check_alike(send, recv)
        check_apart(send, recv)
        if own != recv.count:
            raise ValueError(f"recvbuf has {recv.count} elements, but this rank's count is {own}")
    if send.count != total:
        raise ValueError(f"sendbuf has {send.count} elements, but the counts {counts} add up to {total}")
    chosen = choose_reduction(scope, "reduce_scatter", call.algorithm, op, send)
    if chosen.reducer is None or chosen.algorithm == select.NATIVE:
        return native(scope, call, chosen.algorithm == select.NATIVE, send)
    return CheckedOperation(
        channel,
        "reduce_scatter",
        call.collective.capitalize(),
        chosen.algorithm,
        total,
        send.dtype,
        VectorPart(send, 0, total),
        VectorPart(recv, begin, begin + own),
        source=send,
        counts=tuple(counts),
        op_name=chosen.op_name,
        reducer=chosen.reducer,
        ordered=not reduction_ops.is_commutative(op),
    )


def _everybodys_counts(scope: CallContext, count: int) -> list[int]:
    """Gather one count a rank."""
    counts = np.empty(scope.channel.size, np.int64)
    own = np.array([count], np.int64)
    call = CallArguments("allgather", own, counts, algorithm="bruck")
    send, recv = resolve(own, "sendbuf", writable=False), resolve(counts, "recvbuf", writable=True)
    _gathering(scope, call, "Reduce_scatter counts", send, recv, [1] * scope.channel.size).run(scope.timeout)
    return [int(each) for each in counts]


def allgather(scope: CallContext, call: CallArguments) -> AnyTask:
    """Check an Allgather, whose parts are equally long."""
    sendbuf, recvbuf, size = call.sendbuf, call.recvbuf, scope.channel.size
    recv = resolve(recvbuf, "recvbuf", writable=True, blocks=size, moved=True)
    send = None if in_place(sendbuf) else resolve(sendbuf, "sendbuf", writable=False, moved=True)
    if recv.count % size:
        raise ValueError(f"recvbuf: {recv.count} elements cannot be divided among {size} ranks")
    counts = [recv.count // size] * size
    return _gathering(scope, call, "Allgather", send, recv, counts)


def allgatherv(scope: CallContext, call: CallArguments) -> AnyTask:
    """Check an Allgatherv; `recvbuf` has the counts and displacements of all ranks' parts."""
    sendbuf, recvbuf = call.sendbuf, call.recvbuf
    blocks = resolve_blocks(recvbuf, "recvbuf", scope.channel.size)
    send = None if in_place(sendbuf) else resolve(sendbuf, "sendbuf", writable=False, moved=True)
    recv = blocks.buffer if blocks.is_packed else ScatteredBlocks(blocks)
    return _gathering(scope, call, "Allgatherv", send, recv, blocks.counts)


def _gathering(
    scope: CallContext, call: CallArguments, title: str, send: Buffer | None, recv: Buffer, counts: list[int]
) -> AnyTask:
    """Finish both forms of allgather; `send` is None for IN_PLACE, which this rank's part of `recv` is too."""
    channel, rank = scope.channel, scope.channel.rank
    begin, own, total = sum(counts[:rank]), counts[rank], sum(counts)
    if send is not None:
        check_alike(send, recv)
        if send.count != own:
            raise ValueError(f"sendbuf has {send.count} elements, but recvbuf takes {own} from this rank")
        if is_part(send, recv, begin, begin + own):
            send = None
        else:
            check_apart(send, recv)
    name = algorithm_for(scope, "allgather", call.algorithm, total * recv.dtype.itemsize)
    if name == select.NATIVE:
        return native(scope, call, True)
    given = VectorPart(recv, begin, begin + own, begin) if send is None else VectorPart(send, begin, begin + own)
    return CheckedOperation(
        channel,
        "allgather",
        title,
        name,
        total,
        recv.dtype,
        given,
        VectorPart(recv, 0, total),
        target=recv,
        counts=tuple(counts),
    )
