"""Plans of collectives on shared memory.

A plan is a function of integers only. A *short* vector, which fits into a slot, is copied to the rank's own slot, and
every rank computes its result from all slots. A *long* one is divided: each rank computes one chunk (or its part) of
the result, from all sendbufs for all recvbufs. Private buffers pass through stages, segment by segment.

A long allreduce on 4 ranks, rank 1's plan::

    ENTER                      wait for the operation before; publish call and addresses
    IF input is staged         stage 1 <- own sendbuf, chunks 0, 2 and 3
    STARTED, MEET all          all ranks make this call
    RESOLVE, AT_WORK all
    TILES of chunk 1           own recvbuf <- chunk 1 of sendbufs 0 + 1 + 2 + 3
                               recvbufs 2, 3, 0 <- own recvbuf        (once to the own stage, where they are staged)
    DONE, WAIT_DONE all
    IF output is staged        own recvbuf <- chunks 0, 2 and 3 from stages 0, 2 and 3
    SEGMENTS                   the same with the next segment, if something is staged
"""

from __future__ import annotations

from collections.abc import Callable

from mpicoll.kernels.instructions import (
    ALL,
    AT_WORK,
    CHUNK,
    DELIVER,
    INPUT,
    INPUTS,
    IS_DIVIDED,
    IS_PULLED,
    IS_PUSHED,
    IS_UNDIVIDED,
    MAY_DIVIDE,
    MEET,
    NONE,
    OTHERS_ARE_STAGED,
    OUTPUT,
    OUTPUT_IS_REMOTE,
    OUTPUTS,
    PART,
    RECV,
    RESOLVE,
    SCRATCH,
    SEGMENT,
    SEND,
    SLOT,
    STAGED_INPUT,
    STAGED_OUTPUT,
    TILE,
    WAIT_DONE,
)
from mpicoll.plans.plan_rows import (
    ALL_DONE,
    Operand,
    PlanHeader,
    Ranks,
    Row,
    Work,
    copy,
    long_plan,
    reduce,
    row,
    short_plan,
    tiles,
    when,
)


def _fill(ranks: Ranks, kind: int = SEGMENT) -> list[Row]:
    """Copy the own sendbuf to the own slot."""
    return [copy(Operand(SLOT, ranks.rank, ranks.rank), Operand(SEND, 0, ranks.rank), kind)]


def _reduced_slots(ranks: Ranks, kind: int = SEGMENT) -> list[Row]:
    return [reduce(Operand(RECV, 0, ranks.rank), SLOT, ranks.everybody, kind)]


# Barrier --------------------------------------------------------------------------------------------------------------


def _barrier(ranks: Ranks, long: bool) -> list[Row]:
    return short_plan(PlanHeader(), [], ALL, [])


# Reductions -----------------------------------------------------------------------------------------------------------


def _stage_chunks(ranks: Ranks, kind: int) -> list[Row]:
    """Copy the chunks that other ranks reduce to the rank's stage."""
    return [
        copy(Operand(STAGED_INPUT, ranks.rank, owner), Operand(SEND, 0, owner), kind) for owner in sorted(ranks.others)
    ]


def _collect_chunks(ranks: Ranks) -> list[Row]:
    owners = sorted(ranks.others)
    return [copy(Operand(RECV, 0, owner), Operand(STAGED_OUTPUT, owner, owner), CHUNK) for owner in owners]


def _allreduce(ranks: Ranks, long: bool) -> list[Row]:
    if not long:
        return short_plan(PlanHeader(), _fill(ranks), ALL, _reduced_slots(ranks))
    rank = ranks.rank
    own = Operand(OUTPUT, rank, rank)
    staged = copy(Operand(STAGED_OUTPUT, rank, rank), own, TILE)
    deliver = [copy(Operand(OUTPUT, peer, rank), own, TILE, DELIVER) for peer in ranks.others]
    body = [reduce(own, INPUT, ranks.everybody, TILE), *when(OTHERS_ARE_STAGED, [staged]), *deliver]
    work = Work(_stage_chunks(ranks, CHUNK), ALL, ALL, tiles(CHUNK, rank, body), ALL_DONE, _collect_chunks(ranks))
    return long_plan(PlanHeader(written=ALL), work)


def _reduce_to_root(ranks: Ranks, long: bool) -> list[Row]:
    rank, root = ranks.rank, ranks.root
    if not long:
        return short_plan(
            PlanHeader(), _fill(ranks), ALL if ranks.is_root else rank, _reduced_slots(ranks) * ranks.is_root
        )
    to = Operand(OUTPUT, root, rank)
    body = [reduce(to, INPUT, ranks.everybody, TILE)]
    body += when(OUTPUT_IS_REMOTE, [copy(to, Operand(SCRATCH), TILE)], root)
    collects = _collect_chunks(ranks) if ranks.is_root else []
    work = Work(_stage_chunks(ranks, CHUNK), ALL, ALL, tiles(CHUNK, rank, body), ALL_DONE, collects)
    return long_plan(PlanHeader(written=root), work)


def _reduce_scatter(ranks: Ranks, long: bool) -> list[Row]:
    header = PlanHeader(by_parts=True, recv_part=True, turns=True, split=ranks.size)
    if not long:
        return short_plan(header, _fill(ranks), ALL, _reduced_slots(ranks, PART))
    body = [reduce(Operand(RECV, 0, ranks.rank), INPUT, ranks.everybody, TILE)]
    return long_plan(header, Work(_stage_chunks(ranks, PART), ALL, ALL, tiles(PART, ranks.rank, body), ALL_DONE, []))


# Collectives that only move data --------------------------------------------------------------------------------------


def _bcast(ranks: Ranks, long: bool) -> list[Row]:
    rank, root = ranks.rank, ranks.root
    if not long:
        fill, rows = _fill(ranks), [copy(Operand(RECV), Operand(SLOT, root), SEGMENT)]
        return short_plan(PlanHeader(), fill * ranks.is_root, root, rows * (not ranks.is_root))
    if ranks.size == 2:
        return _bcast_to_one(ranks)
    header = PlanHeader(read=root, turns=True, early=True)
    if ranks.is_root:
        staged = [copy(Operand(STAGED_INPUT, rank), Operand(SEND), SEGMENT)]
        return long_plan(header, Work(staged, rank, NONE, [], ALL_DONE, []))
    return long_plan(header, Work([], root, root, [copy(Operand(RECV), Operand(INPUT, root), SEGMENT)], [], []))


def _bcast_to_one(ranks: Ranks) -> list[Row]:
    """Return the plan of a long bcast on two ranks, each of which copies a half where both can reach the buffers.

    Root 0 writes chunk 0 to rank 1, and rank 1 reads chunk 1. Through stages, and in operations that only one of the
    ranks may be at work on, rank 1 copies all of it.
    """
    rank, root = ranks.rank, ranks.root
    peer = 1 - root
    header = PlanHeader(read=root, written=peer, turns=True, early=True)
    if ranks.is_root:
        staged = [copy(Operand(STAGED_INPUT, rank), Operand(SEND), SEGMENT)]
        half = [row(AT_WORK, peer), copy(Operand(OUTPUT, peer, rank), Operand(SEND, 0, rank), CHUNK)]
        help_ = [row(MEET, peer), row(RESOLVE, OUTPUTS), *when(IS_DIVIDED, half, peer)]
        return long_plan(header, Work(staged, rank, NONE, when(MAY_DIVIDE, help_), ALL_DONE, [], INPUTS))
    half = [copy(Operand(RECV, 0, rank), Operand(INPUT, root, rank), CHUNK)]
    whole = [copy(Operand(RECV), Operand(INPUT, root), SEGMENT)]
    rows = when(IS_DIVIDED, half, rank) + when(IS_UNDIVIDED, whole, rank)
    return long_plan(header, Work([], root, root, rows, when(IS_DIVIDED, [row(WAIT_DONE, root)], rank), [], INPUTS))


def _allgather(ranks: Ranks, long: bool) -> list[Row]:
    header, rank = PlanHeader(by_parts=True, send_part=True, turns=True), ranks.rank
    if not long:
        rows = [copy(Operand(RECV, 0, peer), Operand(SLOT, peer, peer), PART) for peer in ranks.everybody]
        return short_plan(header, _fill(ranks, PART), ALL, rows)
    staged = [copy(Operand(STAGED_INPUT, rank, rank), Operand(SEND, 0, rank), PART)]
    rows = [copy(Operand(RECV, 0, peer), Operand(INPUT, peer, peer), PART) for peer in (rank, *ranks.others)]
    return long_plan(header, Work(staged, ALL, ALL, rows, ALL_DONE, []))


def _gather(ranks: Ranks, long: bool) -> list[Row]:
    rank, root = ranks.rank, ranks.root
    header = PlanHeader(written=root, by_parts=True, send_part=True, turns=True)
    meets = ALL if ranks.is_root else rank
    if not long:
        rows = [copy(Operand(RECV, 0, peer), Operand(SLOT, peer, peer), PART) for peer in ranks.everybody]
        return short_plan(header, _fill(ranks, PART), meets, rows * ranks.is_root)
    own = copy(Operand(OUTPUT, root, rank), Operand(SEND, 0, rank), PART)
    if not ranks.is_root:
        staged = [copy(Operand(STAGED_INPUT, rank, rank), Operand(SEND, 0, rank), PART)]
        waits = when(IS_PULLED, [row(WAIT_DONE, root)], root)
        return long_plan(header, Work(staged, ALL, root, when(IS_PUSHED, [own], root), waits, []))
    pulled = [copy(Operand(RECV, 0, peer), Operand(INPUT, peer, peer), PART) for peer in (rank, *ranks.others)]
    rows = when(IS_PUSHED, [own], root) + when(IS_PULLED, pulled, root)
    return long_plan(header, Work([], ALL, ALL, rows, when(IS_PUSHED, [row(WAIT_DONE, ALL)], root), []))


def _scatter(ranks: Ranks, long: bool) -> list[Row]:
    rank, root = ranks.rank, ranks.root
    header = PlanHeader(read=root, by_parts=True, recv_part=True, turns=True, split=ranks.size)
    own = Operand(RECV, 0, rank)
    kept = [copy(own, Operand(SEND, 0, rank), PART)]
    if not long:
        fill = [copy(Operand(SLOT, rank), Operand(SEND), SEGMENT)] * ranks.is_root
        return short_plan(header, fill, root, kept if ranks.is_root else [copy(own, Operand(SLOT, root, rank), PART)])
    if ranks.is_root:
        staged = [copy(Operand(STAGED_INPUT, rank, peer), Operand(SEND, 0, peer), PART) for peer in ranks.others]
        return long_plan(header, Work(staged, rank, NONE, kept, ALL_DONE, []))
    return long_plan(header, Work([], root, root, [copy(own, Operand(INPUT, root, rank), PART)], [], []))


def _alltoall(ranks: Ranks, long: bool) -> list[Row]:
    header, rank = PlanHeader(by_parts=True, turns=True, split=ranks.size), ranks.rank
    if not long:
        fill = [copy(Operand(SLOT, rank), Operand(SEND), SEGMENT)]
        rows = [copy(Operand(RECV, 0, peer), Operand(SLOT, peer, rank), PART) for peer in ranks.everybody]
        return short_plan(header, fill, ALL, rows)
    staged = [copy(Operand(STAGED_INPUT, rank, peer), Operand(SEND, 0, peer), PART) for peer in ranks.others]
    rows = [copy(Operand(RECV, 0, peer), Operand(INPUT, peer, rank), PART) for peer in (rank, *ranks.others)]
    return long_plan(header, Work(staged, ALL, ALL, rows, ALL_DONE, []))


# Prefix reductions ----------------------------------------------------------------------------------------------------


def _prefix(ranks: Ranks, long: bool, last: int) -> list[Row]:
    """Return the plan of a rank that reduces the vectors of ranks 0 to `last` by itself."""
    space, kind = (INPUT, TILE) if long else (SLOT, SEGMENT)
    rows = [reduce(Operand(RECV), space, range(last + 1), kind)] if last > 0 else []
    if last == 0:
        rows = [copy(Operand(RECV), Operand(space), kind)]
    if not long:
        return short_plan(PlanHeader(), _fill(ranks), range(ranks.rank) if ranks.rank else 0, rows)
    # Nobody reads what the last rank has.
    staged = [copy(Operand(STAGED_INPUT, ranks.rank), Operand(SEND), SEGMENT)] * (ranks.rank + 1 < ranks.size)
    return long_plan(PlanHeader(turns=True), Work(staged, ALL, ALL, tiles(SEGMENT, 0, rows), ALL_DONE, []))


def _scan(ranks: Ranks, long: bool) -> list[Row]:
    return _prefix(ranks, long, ranks.rank)


def _exscan(ranks: Ranks, long: bool) -> list[Row]:
    return _prefix(ranks, long, ranks.rank - 1)


_MAKE: dict[str, Callable[[Ranks, bool], list[Row]]] = {
    "barrier": _barrier,
    "allreduce": _allreduce,
    "reduce": _reduce_to_root,
    "bcast": _bcast,
    "reduce_scatter": _reduce_scatter,
    "allgather": _allgather,
    "gather": _gather,
    "scatter": _scatter,
    "alltoall": _alltoall,
    "scan": _scan,
    "exscan": _exscan,
}
COLLECTIVES = tuple(_MAKE)
"""Collectives that have plans."""


def make(collective: str, size: int, rank: int, *, root: int = 0, long: bool = False) -> tuple[Row, ...]:
    """Return a rank's plan, a row for each instruction.

    Parameters
    ----------
    long
        Whether the vector is longer than a slot; equal on all ranks.
    """
    return tuple(_MAKE[collective](Ranks(size, rank, root), long))
