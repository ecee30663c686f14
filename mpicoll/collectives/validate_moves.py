"""Checks of collectives that move parts between ranks: all forms of gather, scatter and alltoall.

In Gatherv and Scatterv only the root knows all counts, in Alltoallv every rank only its own. Messages need only the
counts that each rank knows, and so does shared memory by default; other algorithms there need all counts on all ranks,
which the root broadcasts first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpicoll.buffers.buffer_specs import in_place
from mpicoll.buffers.datatypes import BYTE
from mpicoll.buffers.flat import resolve
from mpicoll.buffers.flat_buffer import Buffer, check_alike, check_apart, is_part
from mpicoll.buffers.vector_blocks import Blocks, ScatteredBlocks, resolve_blocks
from mpicoll.collectives import counts_from_root, select
from mpicoll.collectives.call_context import (
    AnyTask,
    CallArguments,
    CallContext,
    ToldCounts,
    algorithm_for,
    check_root,
    native,
)
from mpicoll.collectives.checked_arguments import VectorPart
from mpicoll.collectives.counted_call import CountedCall
from mpicoll.collectives.operation import CheckedOperation
from mpicoll.kernels.scattered_parts import has_room


class _Ends(NamedTuple):
    """Buffers of a gather or scatter: the root's, which has all parts, and the one of this rank's part.

    Attributes
    ----------
    whole
        None on ranks other than the root.
    part
        None for IN_PLACE, and where it is this rank's part of `whole`.
    counts
        The root's counts in Gatherv and Scatterv; None on other ranks and in other collectives.
    """

    whole: Buffer | None
    part: Buffer | None
    counts: Sequence[int] | None


def gather(scope: CallContext, call: CallArguments) -> AnyTask:
    """Check a Gather or Gatherv; only the root's recvbuf counts."""
    return _rooted(scope, call, "gather", call.recvbuf, call.sendbuf)


def scatter(scope: CallContext, call: CallArguments) -> AnyTask:
    """Check a Scatter or Scatterv; only the root's sendbuf counts."""
    return _rooted(scope, call, "scatter", call.sendbuf, call.recvbuf)


def _rooted(scope: CallContext, call: CallArguments, collective: str, whole: Any, part: Any) -> AnyTask:
    """Check a call in which the root has the parts of all ranks."""
    size, rank = scope.channel.size, scope.channel.rank
    root, title = check_root(call.root, size), call.collective.capitalize()
    ends = _resolve_ends(scope, call, collective, root, whole, part)
    by_counts = call.collective != collective
    uneven = by_counts and not _tells_counts(scope)
    if by_counts and _is_one_round(scope, call):
        return _counted_call(scope, collective, ends, root)
    counts, dtype = _counts(scope, ends, root, collective if by_counts else "")
    total, begin, end = sum(counts), sum(counts[:rank]), sum(counts[: rank + 1])
    if ends.part is not None and ends.whole is not None and is_part(ends.part, ends.whole, begin, end):
        ends = ends._replace(part=None)
    send, recv = (ends.part, ends.whole) if collective == "gather" else (ends.whole, ends.part)
    _check_ends(ends, send, recv, total, end - begin)
    name = _algorithm(scope, call, collective, total * dtype.itemsize, uneven)
    if name == select.NATIVE:
        return native(scope, call, True)
    whole_part = VectorPart(ends.whole, 0, total) if ends.whole is not None else None
    own_part = VectorPart(ends.part, begin, end) if ends.part is not None else None
    given, result = (own_part, whole_part) if collective == "gather" else (whole_part, own_part)
    if collective == "gather" and given is None:
        assert ends.whole is not None
        given = VectorPart(ends.whole, begin, end, begin)
    return CheckedOperation(
        scope.channel, collective, title, name, total, dtype, given, result,
        source=send if collective == "scatter" else None, target=recv, counts=tuple(counts), uneven=uneven,
        idle=uneven and total == 0, root=root,
    )  # fmt: skip


def _is_one_round(scope: CallContext, call: CallArguments) -> bool:
    """Return whether a Gatherv or Scatterv is one in which only the root learns all lengths; the same on all ranks.

    Where every call is compared before data move, the root tells its counts.
    """
    node, wanted = scope.channel.node, call.algorithm or scope.algorithm
    if node is None or wanted != select.AUTO or scope.channel.check == "full":
        return False
    return scope.is_blocking and _tells_counts(scope) and has_room(scope.channel.size, node.slot_nbytes)


def _counted_call(scope: CallContext, collective: str, ends: _Ends, root: int) -> CountedCall:
    """Finish a Gatherv or Scatterv in one round."""
    rank, part, whole, counts = scope.channel.rank, ends.part, ends.whole, ends.counts
    dtype = next((each.dtype for each in (whole, part) if each is not None and each.count), BYTE)
    if counts is not None and whole is not None:
        begin, end = sum(counts[:rank]), sum(counts[: rank + 1])
        if part is not None and is_part(part, whole, begin, end):
            part = None
        send, recv = (part, whole) if collective == "gather" else (whole, part)
        _check_ends(ends._replace(part=part), send, recv, sum(counts), end - begin)
    return CountedCall(scope.channel, collective, root, dtype, part, whole, counts)


def _check_ends(ends: _Ends, send: Buffer | None, recv: Buffer | None, total: int, own: int) -> None:
    """Compare the buffers with the counts, and with each other."""
    for buffer, count, what in ((ends.whole, total, "the parts of all ranks have"), (ends.part, own, "its part has")):
        if buffer is not None and buffer.count != count:
            raise ValueError(
                f"{'sendbuf' if buffer is send else 'recvbuf'} has {buffer.count} elements, but {what} {count}"
            )
    if send is not None and recv is not None:
        check_alike(send, recv)
        check_apart(send, recv)


def _resolve_ends(scope: CallContext, call: CallArguments, collective: str, root: int, whole: Any, part: Any) -> _Ends:
    """Resolve both buffers; only the root may pass IN_PLACE for its part, and has the other buffer."""
    size, at_root = scope.channel.size, scope.channel.rank == root
    gathers = collective == "gather"
    whole_name, part_name = ("recvbuf", "sendbuf") if gathers else ("sendbuf", "recvbuf")
    everything, counts = None, None
    if at_root and call.collective == collective:
        everything = resolve(whole, whole_name, writable=gathers, blocks=size, moved=True)
        if everything.count % size:
            raise ValueError(f"{whole_name}: {everything.count} elements cannot be divided among {size} ranks")
    elif at_root:
        blocks = resolve_blocks(whole, whole_name, size, writable=gathers)
        everything, counts = _in_order(blocks), blocks.counts
    if not in_place(part):
        return _Ends(everything, resolve(part, part_name, writable=not gathers, moved=True), counts)
    if not at_root:
        raise ValueError(f"{part_name}: only the root may pass MPI.IN_PLACE to {call.collective.capitalize()}")
    return _Ends(everything, None, counts)


def _counts(scope: CallContext, ends: _Ends, root: int, tells: str) -> ToldCounts:
    """Return the counts of all ranks' parts, as far as this rank knows them, 0 for others; and the element type.

    A rank without elements does not know the type of the others': it may have given any.

    Parameters
    ----------
    tells
        The collective, if only the root knows all counts; else "".
    """
    size, rank, part, whole = scope.channel.size, scope.channel.rank, ends.part, ends.whole
    dtype = next((each.dtype for each in (part, whole) if each is not None and each.count), BYTE)
    if not tells:
        own = part.count if part is not None else whole.count // size if whole is not None else 0
        return ToldCounts([own] * size, dtype)
    if _tells_counts(scope):
        told = counts_from_root.broadcast(scope, ends.counts, dtype, root, tells)
        return told._replace(dtype=dtype) if part is not None and part.count else told
    if ends.counts is not None:
        return ToldCounts(ends.counts, dtype)
    return ToldCounts([part.count if peer == rank and part is not None else 0 for peer in range(size)], dtype)


def alltoall(scope: CallContext, call: CallArguments) -> AnyTask:
    """Check an Alltoall, whose parts are equally long."""
    size = scope.channel.size
    recv = resolve(call.recvbuf, "recvbuf", writable=True, blocks=size, moved=True)
    send = None
    if not in_place(call.sendbuf):
        send = resolve(call.sendbuf, "sendbuf", writable=False, blocks=size, moved=True)
    if recv.count % size:
        raise ValueError(f"recvbuf: {recv.count} elements cannot be divided among {size} ranks")
    if send is not None and send.count != recv.count:
        raise ValueError(f"sendbuf has {send.count} elements, but recvbuf {recv.count}")
    counts = (recv.count // size,) * size
    name = _algorithm(scope, call, "alltoall", recv.nbytes, False)
    return _alltoall(scope, call, name, send, recv, counts, counts)


def alltoallv(scope: CallContext, call: CallArguments) -> AnyTask:
    """Check an Alltoallv; it is done by messages, since no rank knows all counts."""
    size, sendbuf = scope.channel.size, call.sendbuf
    into = resolve_blocks(call.recvbuf, "recvbuf", size)
    out = None if in_place(sendbuf) else resolve_blocks(sendbuf, "sendbuf", size, writable=False)
    recv, send = _in_order(into), None if out is None else _in_order(out)
    name = _algorithm(scope, call, "alltoall", 0, True)
    counts = into.counts if out is None else out.counts
    return _alltoall(scope, call, name, send, recv, tuple(counts), tuple(into.counts))


def _alltoall(
    scope: CallContext,
    call: CallArguments,
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
        return native(scope, call, True)
    data = send or recv
    return CheckedOperation(
        scope.channel, "alltoall", title, name, max(data.count, recv.count), (recv if recv.count else data).dtype,
        VectorPart(data, 0, data.count), VectorPart(recv, 0, recv.count),
        source=send, target=recv, counts=counts, recvcounts=recvcounts, uneven=uneven,
        idle=uneven and data.count == recv.count == 0,
    )  # fmt: skip


def _in_order(blocks: Blocks) -> Buffer:
    """Return blocks as memory in which they follow each other: the buffer itself if they make it up, else a copy."""
    if blocks.is_packed and sum(blocks.counts) == blocks.buffer.count:
        return blocks.buffer
    return ScatteredBlocks(blocks)


def _algorithm(scope: CallContext, call: CallArguments, collective: str, nbytes: int, uneven: bool) -> str:
    """Return the algorithm; where ranks do not know all counts, they cannot choose by them."""
    if not uneven:
        return algorithm_for(scope, collective, call.algorithm, nbytes)
    wanted = call.algorithm or scope.algorithm
    direct = select.DIRECT[collective]
    if wanted in (select.NATIVE, direct):
        return wanted
    if call.algorithm not in (None, select.AUTO):
        raise ValueError(f"algorithm: {wanted!r} needs all counts on all ranks; take {direct!r} or 'native'")
    return direct


def _tells_counts(scope: CallContext) -> bool:
    """Return whether the root tells all ranks its counts; the same on all ranks."""
    return scope.means.shared_nbytes >= 0 and scope.may_wait
