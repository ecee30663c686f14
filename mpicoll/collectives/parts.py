"""Checks of calls in which every rank has a part of a vector: reduce_scatter and allgather in all their forms."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicoll.collectives import select
from mpicoll.collectives.call import AnyTask, Call, Scope, algorithm_for, choose_reduction, native, native_op
from mpicoll.collectives.task import Part, Task
from mpicoll.runtime import ops
from mpicoll.runtime.blocks import ScatteredBlocks, resolve_blocks, resolve_counts
from mpicoll.runtime.buffers import Buffer, check_alike, check_apart, resolve
from mpicoll.runtime.specs import Foreign, in_place


def reduce_scatter(scope: Scope, call: Call) -> AnyTask:
    """Without `recvcounts` each rank's count is that of its own recvbuf."""
    sendbuf, recvbuf, recvcounts, channel = call.sendbuf, call.recvbuf, call.recvcounts, scope.channel
    try:
        recv = resolve(recvbuf, "recvbuf", writable=True)
        send = recv if in_place(sendbuf) else resolve(sendbuf, "sendbuf", writable=False)
    except Foreign:
        arguments = (sendbuf, recvbuf, recvcounts, native_op(call.op))
        return native(scope, "reduce_scatter", "Reduce_scatter", arguments, False)
    if recvcounts is not None:
        counts = resolve_counts(recvcounts, channel.size)
    elif send is recv:
        raise ValueError("recvcounts: needed with MPI.IN_PLACE")
    else:
        counts = _everybodys_counts(scope, recv.count)
    return _scattering(scope, call, (sendbuf, recvbuf, recvcounts), send, recv, counts)


def reduce_scatter_block(scope: Scope, call: Call) -> AnyTask:
    """Check a call whose parts are equally long."""
    sendbuf, recvbuf, size = call.sendbuf, call.recvbuf, scope.channel.size
    inside = in_place(sendbuf)
    try:
        recv = resolve(recvbuf, "recvbuf", writable=True, blocks=size if inside else 1)
        send = recv if inside else resolve(sendbuf, "sendbuf", writable=False, blocks=size)
    except Foreign:
        arguments = (sendbuf, recvbuf, native_op(call.op))
        return native(scope, "reduce_scatter_block", "Reduce_scatter_block", arguments, False)
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
    chosen = choose_reduction(scope, "reduce_scatter", call.algorithm, op, send, recv)
    if chosen.reducer is None or chosen.algorithm == select.NATIVE:
        collective = "reduce_scatter_block" if blocks else "reduce_scatter"
        arguments = (*given, native_op(op, send))
        return native(scope, collective, title, arguments, chosen.algorithm == select.NATIVE)
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


def allgather(scope: Scope, call: Call) -> AnyTask:
    """Check a call whose parts are equally long."""
    sendbuf, recvbuf, size = call.sendbuf, call.recvbuf, scope.channel.size
    try:
        recv = resolve(recvbuf, "recvbuf", writable=True, blocks=size)
        send = None if in_place(sendbuf) else resolve(sendbuf, "sendbuf", writable=False)
    except Foreign:
        return native(scope, "allgather", "Allgather", (sendbuf, recvbuf), False)
    if recv.count % size:
        raise ValueError(f"recvbuf: {recv.count} elements cannot be divided among {size} ranks")
    counts = [recv.count // size] * size
    return _gathering(scope, call, "Allgather", send, recv, counts)


def allgatherv(scope: Scope, call: Call) -> AnyTask:
    """The specification of recvbuf says how much each rank gives and where it goes."""
    sendbuf, recvbuf = call.sendbuf, call.recvbuf
    try:
        blocks = resolve_blocks(recvbuf, "recvbuf", scope.channel.size)
        send = None if in_place(sendbuf) else resolve(sendbuf, "sendbuf", writable=False)
    except Foreign:
        return native(scope, "allgatherv", "Allgatherv", (sendbuf, recvbuf), False)
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
    name = algorithm_for(scope, "allgather", call.algorithm, total * recv.dtype.itemsize)
    if name == select.NATIVE:
        return native(scope, call.collective, title, (call.sendbuf, call.recvbuf), True)
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
