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
from typing import NamedTuple

from mpicoll.kernels.instructions import (
    AGAIN,
    ALL,
    AT_WORK,
    CHUNK,
    COPY,
    DELIVER,
    DONE,
    END,
    ENTER,
    IF,
    INPUT,
    INPUT_IS_STAGED,
    IS_PULLED,
    IS_PUSHED,
    MEET,
    NONE,
    NOT_AHEAD,
    OTHERS_ARE_STAGED,
    OUTPUT,
    OUTPUT_IS_REMOTE,
    OUTPUT_IS_STAGED,
    PART,
    RECV,
    REDUCE,
    RESOLVE,
    ROW_WORDS,
    SCRATCH,
    SEGMENT,
    SEGMENTS,
    SEND,
    SLOT,
    STAGED_INPUT,
    STAGED_OUTPUT,
    STARTED,
    TILE,
    TILES,
    WAIT_DONE,
)

Row = tuple[int, ...]


class PlanHeader(NamedTuple):
    """Header of a plan, row 0: facts that hold for all segments of an operation."""

    read: int = ALL
    written: int = NONE
    by_parts: bool = False
    send_part: bool = False
    recv_part: bool = False
    turns: bool = False
    split: int = 1
    early: bool = False


class Operand(NamedTuple):
    """Memory of a rank that holds a chunk, or a part."""

    space: int
    rank: int = 0
    part: int = 0


def _row(*words: int) -> Row:
    return words + (0,) * (ROW_WORDS - len(words))


def _copy(to: Operand, source: Operand, kind: int, what: int = COPY) -> Row:
    return _row(what, *to, *source, kind)


def _reduce(to: Operand, space: int, ranks: range, kind: int) -> Row:
    return _row(REDUCE, *to, space, ranks[0], ranks[-1], kind)


def _when(condition: int, rows: list[Row], rank: int = 0) -> list[Row]:
    """Execute rows if a condition holds."""
    return [_row(IF, condition, len(rows), rank), *rows] if rows else []


def _tiles(kind: int, index: int, body: list[Row]) -> list[Row]:
    """Execute rows for each tile of a range."""
    loop = len(body) + 1
    return [_row(TILES, 0, loop, index, 0, 0, 0, kind), *body, _row(AGAIN, 0, loop + 1)]


class _Ranks(NamedTuple):
    """The rank that a plan is for, and the others."""

    size: int
    rank: int
    root: int

    @property
    def others(self) -> list[int]:
        """The other ranks, starting with the next one, so that not all ranks start with the same."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    @property
    def is_root(self) -> bool:
        return self.rank == self.root

    @property
    def everybody(self) -> range:
        return range(self.size)


class Work(NamedTuple):
    """A rank's part in a long operation, without the rows that all operations have.

    Attributes
    ----------
    stages
        Rows that copy the rank's private sendbuf to its stage.
    meets
        The rank whose record is needed, or ALL.
    uses
        The rank whose buffers are used, ALL or NONE.
    rows
        Rows that copy and reduce.
    waits
        Rows that wait for ranks that must be done before this rank may leave.
    collects
        Rows that copy results from the other ranks' stages to a private recvbuf.
    """

    stages: list[Row]
    meets: int
    uses: int
    rows: list[Row]
    waits: list[Row]
    collects: list[Row]


_ALL_DONE = [_row(WAIT_DONE, ALL)]


def _long(header: PlanHeader, work: Work) -> list[Row]:
    rows = [_row(*map(int, header)), _row(ENTER, 1)]
    rows += _when(INPUT_IS_STAGED, work.stages)
    rows += [_row(STARTED), _row(MEET, work.meets), _row(RESOLVE)]
    if work.uses != NONE:
        rows.append(_row(AT_WORK, work.uses))
    rows += [*work.rows, _row(DONE)]
    rows += _when(NOT_AHEAD, work.waits)
    rows += _when(OUTPUT_IS_STAGED, work.collects)
    return [*rows, _row(SEGMENTS)]


def _short(header: PlanHeader, fill: list[Row], meets: int, rows: list[Row]) -> list[Row]:
    return [_row(*map(int, header)), _row(ENTER, 0), *fill, _row(STARTED), _row(MEET, meets), *rows, _row(END)]


def _fill(ranks: _Ranks, kind: int = SEGMENT) -> list[Row]:
    """Copy the own sendbuf to the own slot."""
    return [_copy(Operand(SLOT, ranks.rank, ranks.rank), Operand(SEND, 0, ranks.rank), kind)]


def _reduced_slots(ranks: _Ranks, kind: int = SEGMENT) -> list[Row]:
    return [_reduce(Operand(RECV, 0, ranks.rank), SLOT, ranks.everybody, kind)]


# Barrier --------------------------------------------------------------------------------------------------------------


def _barrier(ranks: _Ranks, long: bool) -> list[Row]:
    return _short(PlanHeader(), [], ALL, [])


# Reductions -----------------------------------------------------------------------------------------------------------


def _stage_chunks(ranks: _Ranks, kind: int) -> list[Row]:
    """Copy the chunks that other ranks reduce to the rank's stage."""
    return [
        _copy(Operand(STAGED_INPUT, ranks.rank, owner), Operand(SEND, 0, owner), kind) for owner in sorted(ranks.others)
    ]


def _collect_chunks(ranks: _Ranks) -> list[Row]:
    owners = sorted(ranks.others)
    return [_copy(Operand(RECV, 0, owner), Operand(STAGED_OUTPUT, owner, owner), CHUNK) for owner in owners]


def _allreduce(ranks: _Ranks, long: bool) -> list[Row]:
    if not long:
        return _short(PlanHeader(), _fill(ranks), ALL, _reduced_slots(ranks))
    rank = ranks.rank
    own = Operand(OUTPUT, rank, rank)
    staged = _copy(Operand(STAGED_OUTPUT, rank, rank), own, TILE)
    deliver = [_copy(Operand(OUTPUT, peer, rank), own, TILE, DELIVER) for peer in ranks.others]
    body = [_reduce(own, INPUT, ranks.everybody, TILE), *_when(OTHERS_ARE_STAGED, [staged]), *deliver]
    work = Work(_stage_chunks(ranks, CHUNK), ALL, ALL, _tiles(CHUNK, rank, body), _ALL_DONE, _collect_chunks(ranks))
    return _long(PlanHeader(written=ALL), work)


def _reduce_to_root(ranks: _Ranks, long: bool) -> list[Row]:
    rank, root = ranks.rank, ranks.root
    if not long:
        return _short(PlanHeader(), _fill(ranks), ALL if ranks.is_root else rank, _reduced_slots(ranks) * ranks.is_root)
    to = Operand(OUTPUT, root, rank)
    body = [_reduce(to, INPUT, ranks.everybody, TILE)]
    body += _when(OUTPUT_IS_REMOTE, [_copy(to, Operand(SCRATCH), TILE)], root)
    collects = _collect_chunks(ranks) if ranks.is_root else []
    work = Work(_stage_chunks(ranks, CHUNK), ALL, ALL, _tiles(CHUNK, rank, body), _ALL_DONE, collects)
    return _long(PlanHeader(written=root), work)


def _reduce_scatter(ranks: _Ranks, long: bool) -> list[Row]:
    header = PlanHeader(by_parts=True, recv_part=True, split=ranks.size)
    if not long:
        return _short(header, _fill(ranks), ALL, _reduced_slots(ranks, PART))
    body = [_reduce(Operand(RECV, 0, ranks.rank), INPUT, ranks.everybody, TILE)]
    return _long(header, Work(_stage_chunks(ranks, PART), ALL, ALL, _tiles(PART, ranks.rank, body), _ALL_DONE, []))


# Collectives that only move data --------------------------------------------------------------------------------------


def _bcast(ranks: _Ranks, long: bool) -> list[Row]:
    rank, root = ranks.rank, ranks.root
    if not long:
        fill, rows = _fill(ranks), [_copy(Operand(RECV), Operand(SLOT, root), SEGMENT)]
        return _short(PlanHeader(), fill * ranks.is_root, root, rows * (not ranks.is_root))
    header = PlanHeader(read=root, turns=True, early=True)
    if ranks.is_root:
        staged = [_copy(Operand(STAGED_INPUT, rank), Operand(SEND), SEGMENT)]
        return _long(header, Work(staged, rank, NONE, [], _ALL_DONE, []))
    return _long(header, Work([], root, root, [_copy(Operand(RECV), Operand(INPUT, root), SEGMENT)], [], []))


def _allgather(ranks: _Ranks, long: bool) -> list[Row]:
    header, rank = PlanHeader(by_parts=True, send_part=True, turns=True), ranks.rank
    if not long:
        rows = [_copy(Operand(RECV, 0, peer), Operand(SLOT, peer, peer), PART) for peer in ranks.everybody]
        return _short(header, _fill(ranks, PART), ALL, rows)
    staged = [_copy(Operand(STAGED_INPUT, rank, rank), Operand(SEND, 0, rank), PART)]
    rows = [_copy(Operand(RECV, 0, peer), Operand(INPUT, peer, peer), PART) for peer in (rank, *ranks.others)]
    return _long(header, Work(staged, ALL, ALL, rows, _ALL_DONE, []))


def _gather(ranks: _Ranks, long: bool) -> list[Row]:
    rank, root = ranks.rank, ranks.root
    header = PlanHeader(written=root, by_parts=True, send_part=True, turns=True)
    meets = ALL if ranks.is_root else rank
    if not long:
        rows = [_copy(Operand(RECV, 0, peer), Operand(SLOT, peer, peer), PART) for peer in ranks.everybody]
        return _short(header, _fill(ranks, PART), meets, rows * ranks.is_root)
    own = _copy(Operand(OUTPUT, root, rank), Operand(SEND, 0, rank), PART)
    if not ranks.is_root:
        staged = [_copy(Operand(STAGED_INPUT, rank, rank), Operand(SEND, 0, rank), PART)]
        waits = _when(IS_PULLED, [_row(WAIT_DONE, root)], root)
        return _long(header, Work(staged, ALL, root, _when(IS_PUSHED, [own], root), waits, []))
    pulled = [_copy(Operand(RECV, 0, peer), Operand(INPUT, peer, peer), PART) for peer in (rank, *ranks.others)]
    rows = _when(IS_PUSHED, [own], root) + _when(IS_PULLED, pulled, root)
    return _long(header, Work([], ALL, ALL, rows, _when(IS_PUSHED, [_row(WAIT_DONE, ALL)], root), []))


def _scatter(ranks: _Ranks, long: bool) -> list[Row]:
    rank, root = ranks.rank, ranks.root
    header = PlanHeader(read=root, by_parts=True, recv_part=True, turns=True, split=ranks.size)
    own = Operand(RECV, 0, rank)
    kept = [_copy(own, Operand(SEND, 0, rank), PART)]
    if not long:
        fill = [_copy(Operand(SLOT, rank), Operand(SEND), SEGMENT)] * ranks.is_root
        return _short(header, fill, root, kept if ranks.is_root else [_copy(own, Operand(SLOT, root, rank), PART)])
    if ranks.is_root:
        staged = [_copy(Operand(STAGED_INPUT, rank, peer), Operand(SEND, 0, peer), PART) for peer in ranks.others]
        return _long(header, Work(staged, rank, NONE, kept, _ALL_DONE, []))
    return _long(header, Work([], root, root, [_copy(own, Operand(INPUT, root, rank), PART)], [], []))


def _alltoall(ranks: _Ranks, long: bool) -> list[Row]:
    header, rank = PlanHeader(by_parts=True, turns=True, split=ranks.size), ranks.rank
    if not long:
        fill = [_copy(Operand(SLOT, rank), Operand(SEND), SEGMENT)]
        rows = [_copy(Operand(RECV, 0, peer), Operand(SLOT, peer, rank), PART) for peer in ranks.everybody]
        return _short(header, fill, ALL, rows)
    staged = [_copy(Operand(STAGED_INPUT, rank, peer), Operand(SEND, 0, peer), PART) for peer in ranks.others]
    rows = [_copy(Operand(RECV, 0, peer), Operand(INPUT, peer, rank), PART) for peer in (rank, *ranks.others)]
    return _long(header, Work(staged, ALL, ALL, rows, _ALL_DONE, []))


# Prefix reductions ----------------------------------------------------------------------------------------------------


def _prefix(ranks: _Ranks, long: bool, last: int) -> list[Row]:
    """Return the plan of a rank that reduces the vectors of ranks 0 to `last` by itself."""
    space, kind = (INPUT, TILE) if long else (SLOT, SEGMENT)
    rows = [_reduce(Operand(RECV), space, range(last + 1), kind)] if last > 0 else []
    if last == 0:
        rows = [_copy(Operand(RECV), Operand(space), kind)]
    if not long:
        return _short(PlanHeader(), _fill(ranks), ALL, rows)
    # Nobody reads what the last rank has.
    staged = [_copy(Operand(STAGED_INPUT, ranks.rank), Operand(SEND), SEGMENT)] * (ranks.rank + 1 < ranks.size)
    return _long(PlanHeader(turns=True), Work(staged, ALL, ALL, _tiles(SEGMENT, 0, rows), _ALL_DONE, []))


def _scan(ranks: _Ranks, long: bool) -> list[Row]:
    return _prefix(ranks, long, ranks.rank)


def _exscan(ranks: _Ranks, long: bool) -> list[Row]:
    return _prefix(ranks, long, ranks.rank - 1)


_MAKE: dict[str, Callable[[_Ranks, bool], list[Row]]] = {
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
    return tuple(_MAKE[collective](_Ranks(size, rank, root), long))
