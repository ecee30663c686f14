"""Prefix reductions: scan and exscan.

Recursive doubling on 4 ranks with data a, b, c, d: in each step a rank sends its partial result to the rank 1, 2, 4,
... above, and puts the received one in front of its own::

    start    a    b    c     d
    step 1   a    ab   bc    cd       from the rank one below
    step 2   a    ab   abc   abcd     from the rank two below

An exscan first moves everything one rank up, and then scans without rank 0::

    shift    -    a    b     c

Sources: Hillis and Steele, "Data parallel algorithms", CACM 29 (1986); Sanders and Träff, "Parallel prefix (scan)
algorithms for MPI", EuroPVM/MPI 2006, for the pipelined chain.
"""

from __future__ import annotations

from mpicoll.schedules.algorithms import register
from mpicoll.schedules.types import Recv, Reduce, Schedule, Send, Step


def _doubling(size: int, rank: int, first: int) -> list[Step]:
    """Scan over the ranks from `first` on."""
    steps, distance = [], 1
    while rank >= first and distance < size - first:
        above, below = rank + distance, rank - distance
        sends = (Send(above, 0, 1),) if above < size else ()
        recvs = (Recv(below, 0, 1, Reduce.RECEIVED_FIRST),) if below >= first else ()
        steps.append(Step(sends, recvs))
        distance *= 2
    return steps


def _chain(size: int, rank: int, first: int, chunks: int) -> list[Step]:
    """Scan chunk by chunk from each rank to the next one; a rank sends a chunk while it receives the next one."""
    steps = []
    for chunk in range(chunks + 1):
        sends = (Send(rank + 1, chunk - 1, chunk),) if first <= rank < size - 1 and chunk > 0 else ()
        recvs = (Recv(rank - 1, chunk, chunk + 1, Reduce.RECEIVED_FIRST),) if rank > first and chunk < chunks else ()
        steps.append(Step(sends, recvs))
    return steps


def _shift(size: int, rank: int, chunks: int) -> list[Step]:
    """Move every rank's vector one rank up."""
    sends = (Send(rank + 1, 0, chunks),) if rank + 1 < size else ()
    recvs = (Recv(rank - 1, 0, chunks, Reduce.REPLACE),) if rank > 0 else ()
    return [Step(sends, recvs)]


@register("scan", "recursive_doubling", ordered=True)
def doubling_scan(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Every rank adds the partial results of the ranks 1, 2, 4, ... below: ceil(log2 P) steps of whole vectors."""
    return Schedule("scan", "recursive_doubling", size, rank, 1, tuple(_doubling(size, rank, 0)))


@register("scan", "chain", ordered=True, segmented=True)
def chain_scan(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Every rank sends its result to the next one, segment by segment; for long vectors."""
    return Schedule("scan", "chain", size, rank, segments, tuple(_chain(size, rank, 0, segments)))


@register("exscan", "recursive_doubling", ordered=True)
def doubling_exscan(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Shift by one rank, then scan over ranks 1 to P-1 by recursive doubling."""
    steps = _shift(size, rank, 1) + _doubling(size, rank, 1)
    return Schedule("exscan", "recursive_doubling", size, rank, 1, tuple(steps))


@register("exscan", "chain", ordered=True, segmented=True)
def chain_exscan(size: int, rank: int, *, root: int = 0, segments: int = 1) -> Schedule:
    """Shift by one rank, then scan over ranks 1 to P-1 segment by segment; for long vectors."""
    steps = _shift(size, rank, segments) + _chain(size, rank, 1, segments)
    return Schedule("exscan", "chain", size, rank, segments, tuple(steps))
