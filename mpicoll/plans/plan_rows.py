"""Rows of plans on shared memory, and what all plans of them have in common; see :mod:`shared_memory_plans`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mpicoll.kernels.instructions import (
    AGAIN,
    ALL,
    AT_WORK,
    COPY,
    DONE,
    END,
    ENTER,
    IF,
    IN_USE,
    INPUT_IS_STAGED,
    MEET,
    NONE,
    OUTPUT_IS_STAGED,
    REDUCE,
    RESOLVE,
    ROW_WORDS,
    SEGMENTS,
    STARTED,
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


def row(*words: int) -> Row:
    """Return a row whose first words are given; the others are 0."""
    return words + (0,) * (ROW_WORDS - len(words))


def copy(to: Operand, source: Operand, kind: int, what: int = COPY) -> Row:
    """Return a COPY of a range, or a DELIVER."""
    return row(what, *to, *source, kind)


def reduce(to: Operand, space: int, ranks: range, kind: int) -> Row:
    """Return a REDUCE of a range of several ranks' data."""
    return row(REDUCE, *to, space, ranks[0], ranks[-1], kind)


def when(condition: int, rows: list[Row], rank: int = 0) -> list[Row]:
    """Execute rows if a condition holds."""
    return [row(IF, condition, len(rows), rank), *rows] if rows else []


def tiles(kind: int, index: int, body: list[Row]) -> list[Row]:
    """Execute rows for each tile of a range."""
    loop = len(body) + 1
    return [row(TILES, 0, loop, index, 0, 0, 0, kind), *body, row(AGAIN, 0, loop + 1)]


class Ranks(NamedTuple):
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
        """True on the root."""
        return self.rank == self.root

    @property
    def everybody(self) -> range:
        """All ranks, in rank order."""
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
    resolves
        Operand of RESOLVE.
    """

    stages: list[Row]
    meets: int
    uses: int
    rows: list[Row]
    waits: list[Row]
    collects: list[Row]
    resolves: int = 0


ALL_DONE = [row(WAIT_DONE, ALL)]


def long_plan(header: PlanHeader, work: Work) -> list[Row]:
    """Return the plan of a long vector, segment by segment if something passes through stages."""
    rows = [row(*map(int, header)), row(ENTER, 1)]
    rows += when(INPUT_IS_STAGED, work.stages)
    rows += [row(STARTED), row(MEET, work.meets), row(RESOLVE, work.resolves)]
    if work.uses != NONE:
        rows.append(row(AT_WORK, work.uses))
    rows += [*work.rows, row(DONE)]
    rows += when(IN_USE, work.waits)
    rows += when(OUTPUT_IS_STAGED, work.collects)
    return [*rows, row(SEGMENTS)]


def short_plan(header: PlanHeader, fill: list[Row], meets: int | Iterable[int], rows: list[Row]) -> list[Row]:
    """Return the plan of a short vector: rows that fill the own slot, a meeting, and rows that read slots.

    Parameters
    ----------
    meets
        The rank whose record is needed, or ALL, or several ranks.
    """
    meeting = [row(MEET, rank) for rank in ([meets] if isinstance(meets, int) else meets)]
    return [row(*map(int, header)), row(ENTER, 0), *fill, row(STARTED), *meeting, *rows, row(END)]
