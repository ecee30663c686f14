"""Checks of calls that move parts between ranks: gather, scatter and alltoall in all their forms.

In Gatherv and Scatterv only the root knows all counts, in Alltoallv every rank only its own. Where ranks share memory
the root tells its counts first; messages need no more than what each rank knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicoll.collectives import select
from mpicoll.collectives.call import AnyTask, Call, Scope, algorithm_for, check_root, native
from mpicoll.collectives.task import Part, Task
from mpicoll.runtime.blocks import ScatteredBlocks, resolve_blocks
from mpicoll.runtime.buffers import Buffer, check_alike, check_apart, from_array, resolve
from mpicoll.runtime.specs import Foreign, in_place

_DIRECT = {"gather": "linear", "scatter": "linear", "alltoall": "pairwise"}
"""Algorithms in which parts go from one rank straight to the other, so that only those two need know their length."""


def gather(scope: Scope, call: Call) -> AnyTask:
    """Check a call whose parts are equally long; only the root's recvbuf is looked at."""
    root, size = check_root(call.root, scope.channel.size), scope.channel.size
    recv = None
    try:
        if scope.channel.rank == root:
            recv = resolve(call.recvbuf, "recvbuf", writable=True, blocks=size)
        send = _send_of_gather(scope, call, root)
    except Foreign:
        return native(scope, "gather", "Gather", (call.sendbuf, call.recvbuf, root), False)
    if recv is not None and recv.count % size:
        raise ValueError(f"recvbuf: {recv.count} elements cannot be divided among {size} ranks")
    own = send.count if send is not None else recv.count // size if recv is not None else 0
    return _gather(scope, call, root, send, recv, (own,) * size)


def _send_of_gather(scope: Scope, call: Call, root: int) -> Buffer | None:
    """Resolve sendbuf; None for IN_PLACE, which only the root may pass."""
    if not in_place(call.sendbuf):
        return resolve(call.sendbuf, "sendbuf", writable=False)
    if scope.channel.rank != root:
        raise ValueError(f"sendbuf: only the root may pass MPI.IN_PLACE to {call.collective.capitalize()}")
    return None


def _gather(
    scope: Scope,
    call: Call,
    root: int,
    send: Buffer | None,
    recv: Buffer | None,
    counts: tuple[int, ...],
    uneven: bool = False,
) -> AnyTask:
    """Finish both forms of gather."""
    rank, total = scope.channel.rank, sum(counts)
    begin, end = sum(counts[:rank]), sum(counts[: rank + 1])
    if recv is not None and recv.count != total:
        raise ValueError(f"recvbuf has {recv.count} elements, but {total} are gathered")
    if send is not None and send.count != end - begin:
        raise ValueError(f"sendbuf has {send.count} elements, but the root takes {end - begin} from this rank")
    if send is not None and recv is not None:
        check_alike(send, recv)
        check_apart(send, recv)
    data = send or recv
    assert data is not None
    title = call.collective.capitalize()
    name = _algorithm(scope, call, "gather", total * data.dtype.itemsize, uneven)
    if name == select.NATIVE:
        return native(scope, call.collective, title, (call.sendbuf, call.recvbuf, root), True)
    given = Part(data, begin, end, begin if send is None else 0)
    result = Part(recv, 0, total) if recv is not None else None
    return Task(
        scope.channel, "gather", title, name, total, data.dtype, given, result,
        target=recv, counts=counts, uneven=uneven, root=root,
    )  # fmt: skip


def gatherv(scope: Scope, call: Call) -> AnyTask:
    """Check a call in which the root's recvbuf says how much each rank gives and where it goes."""
    root, size, rank = check_root(call.root, scope.channel.size), scope.channel.size, scope.channel.rank
    recv, counts = None, None
    try:
        if rank == root:
            blocks = resolve_blocks(call.recvbuf, "recvbuf", size)
            recv, counts = blocks.buffer if _covers(blocks.buffer, blocks) else ScatteredBlocks(blocks), blocks.counts
        send = _send_of_gather(scope, call, root)
    except Foreign:
        return native(scope, "gatherv", "Gatherv", (call.sendbuf, call.recvbuf, root), False)
    uneven = not _tells_counts(scope)
    if not uneven:
        counts = _counts_from_root(scope, counts, root)
    elif counts is None:
        counts = [send.count if peer == rank and send is not None else 0 for peer in range(size)]
    assert counts is not None
    return _gather(scope, call, root, send, recv, tuple(counts), uneven)


def scatter(scope: Scope, call: Call) -> AnyTask:
    """Check a call whose parts are equally long; only the root's sendbuf is looked at."""
    root, size = check_root(call.root, scope.channel.size), scope.channel.size
    send = None
    try:
        if scope.channel.rank == root:
            send = resolve(call.sendbuf, "sendbuf", writable=False, blocks=size)
        recv = _recv_of_scatter(scope, call, root)
    except Foreign:
        return native(scope, "scatter", "Scatter", (call.sendbuf, call.recvbuf, root), False)
    if send is not None and send.count % size:
        raise ValueError(f"sendbuf: {send.count} elements cannot be divided among {size} ranks")
    own = recv.count if recv is not None else send.count // size if send is not None else 0
    return _scatter(scope, call, root, send, recv, (own,) * size)


def _recv_of_scatter(scope: Scope, call: Call, root: int) -> Buffer | None:
    """Resolve recvbuf; None for IN_PLACE, which only the root may pass."""
    if not in_place(call.recvbuf):
        return resolve(call.recvbuf, "recvbuf", writable=True)
    if scope.channel.rank != root:
        raise ValueError(f"recvbuf: only the root may pass MPI.IN_PLACE to {call.collective.capitalize()}")
    return None


def _scatter(
    scope: Scope,
    call: Call,
    root: int,
    send: Buffer | None,
    recv: Buffer | None,
    counts: tuple[int, ...],
    uneven: bool = False,
) -> AnyTask:
    """Finish both forms of scatter."""
    rank, total = scope.channel.rank, sum(counts)
    begin, end = sum(counts[:rank]), sum(counts[: rank + 1])
    if send is not None and send.count != total:
        raise ValueError(f"sendbuf has {send.count} elements, but {total} are scattered")
    if recv is not None and recv.count != end - begin:
        raise ValueError(f"recvbuf has {recv.count} elements, but the root has {end - begin} for this rank")
    if send is not None and recv is not None:
        check_alike(send, recv)
        check_apart(send, recv)
    data = send or recv
    assert data is not None
    title = call.collective.capitalize()
    name = _algorithm(scope, call, "scatter", total * data.dtype.itemsize, uneven)
    if name == select.NATIVE:
        return native(scope, call.collective, title, (call.sendbuf, call.recvbuf, root), True)
    given = Part(send, 0, total) if send is not None else None
    result = Part(recv, begin, end) if recv is not None else None
    return Task(
        scope.channel, "scatter", title, name, total, data.dtype, given, result,
        source=send, target=recv, counts=counts, uneven=uneven, root=root,
    )  # fmt: skip


def scatterv(scope: Scope, call: Call) -> AnyTask:
    """Check a call in which the root's sendbuf says how much each rank gets and where it is."""
    root, size, rank = check_root(call.root, scope.channel.size), scope.channel.size, scope.channel.rank
    send, counts = None, None
    try:
        if rank == root:
            blocks = resolve_blocks(call.sendbuf, "sendbuf", size, writable=False)
            send, counts = blocks.buffer if _covers(blocks.buffer, blocks) else ScatteredBlocks(blocks), blocks.counts
        recv = _recv_of_scatter(scope, call, root)
    except Foreign:
        return native(scope, "scatterv", "Scatterv", (call.sendbuf, call.recvbuf, root), False)
    uneven = not _tells_counts(scope)
    if not uneven:
        counts = _counts_from_root(scope, counts, root)
    elif counts is None:
        counts = [recv.count if peer == rank and recv is not None else 0 for peer in range(size)]
    assert counts is not None
    return _scatter(scope, call, root, send, recv, tuple(counts), uneven)


def alltoall(scope: Scope, call: Call) -> AnyTask:
    """Check a call whose parts are equally long."""
    size = scope.channel.size
    try:
        recv = resolve(call.recvbuf, "recvbuf", writable=True, blocks=size)
        send = None if in_place(call.sendbuf) else resolve(call.sendbuf, "sendbuf", writable=False, blocks=size)
    except Foreign:
        return native(scope, "alltoall", "Alltoall", (call.sendbuf, call.recvbuf), False)
    if recv.count % size:
        raise ValueError(f"recvbuf: {recv.count} elements cannot be divided among {size} ranks")
    if send is not None and send.count != recv.count:
        raise ValueError(f"sendbuf has {send.count} elements, but recvbuf {recv.count}")
    counts = (recv.count // size,) * size
    name = _algorithm(scope, call, "alltoall", recv.nbytes, False)
    return _alltoall(scope, call, name, send, recv, counts, counts)


def alltoallv(scope: Scope, call: Call) -> AnyTask:
    """Check a call in which both buffers say where parts are; by messages, since no rank knows all counts."""
    size, sendbuf = scope.channel.size, call.sendbuf
    try:
        into = resolve_blocks(call.recvbuf, "recvbuf", size)
        out = None if in_place(sendbuf) else resolve_blocks(sendbuf, "sendbuf", size, writable=False)
    except Foreign:
        return native(scope, "alltoallv", "Alltoallv", (sendbuf, call.recvbuf), False)
    recv = into.buffer if _covers(into.buffer, into) else ScatteredBlocks(into)
    send = None
    if out is not None:
        send = out.buffer if _covers(out.buffer, out) else ScatteredBlocks(out)
    name = _algorithm(scope, call, "alltoall", 0, True)
    counts = into.counts if out is None else out.counts
    return _alltoall(scope, call, name, send, recv, tuple(counts), tuple(into.counts))


def _alltoall(
    scope: Scope,
    call: Call,
    name: str,
    send: Buffer | None,
    recv: Buffer,
    counts: tuple[int, ...],
    recvcounts: tuple[int, ...],
) -> AnyTask:
    """Finish both forms of alltoall; `send` is None for IN_PLACE."""
    title, uneven, rank = call.collective.capitalize(), call.collective == "alltoallv", scope.channel.rank
    if counts[rank] != recvcounts[rank]:
        raise ValueError(f"sendbuf has {counts[rank]} elements for the own rank, but recvbuf {recvcounts[rank]}")
    if send is not None:
        check_alike(send, recv)
        check_apart(send, recv)
    if name == select.NATIVE:
        return native(scope, call.collective, title, (call.sendbuf, call.recvbuf), True)
    data = send or recv
    return Task(
        scope.channel, "alltoall", title, name, max(data.count, recv.count), recv.dtype,
        Part(data, 0, data.count), Part(recv, 0, recv.count),
        source=send, target=recv, counts=counts, recvcounts=recvcounts, uneven=uneven,
    )  # fmt: skip


def _covers(buffer: Buffer, blocks: Any) -> bool:
    """Return whether blocks follow each other without gaps and make up the whole buffer."""
    return bool(blocks.is_packed and sum(blocks.counts) == buffer.count)


def _algorithm(scope: Scope, call: Call, collective: str, nbytes: int, uneven: bool) -> str:
    """Return the algorithm; where ranks do not know all counts, they cannot choose by them."""
    if not uneven:
        return algorithm_for(scope, collective, call.algorithm, nbytes)
    wanted = call.algorithm or scope.algorithm
    if wanted in (select.NATIVE, _DIRECT[collective]):
        return wanted
    if call.algorithm not in (None, select.AUTO):
        direct = _DIRECT[collective]
        raise ValueError(f"algorithm: {wanted!r} needs all counts on all ranks; take {direct!r} or 'native'")
    return _DIRECT[collective]


def _tells_counts(scope: Scope) -> bool:
    """Return whether the root tells all ranks its counts; the same on all ranks."""
    return scope.means.shared_nbytes >= 0 and scope.may_wait


def _counts_from_root(scope: Scope, counts: Sequence[int] | None, root: int) -> list[int]:
    """Spread the root's counts."""
    words = np.zeros(scope.channel.size, np.int64)
    if counts is not None:
        words[:] = counts
    part = Part(from_array(words, "counts", writable=True), 0, words.size)
    at_root = scope.channel.rank == root
    given, result = (part, None) if at_root else (None, part)
    task = Task(
        scope.channel, "bcast", "Counts", "tree", words.size, words.dtype, given, result, target=part.buffer, root=root
    )
    task.run(scope.timeout)
    return [int(count) for count in words]
