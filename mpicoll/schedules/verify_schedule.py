"""Proof that an algorithm is correct for a given number of ranks.

:func:`verify` replays all ranks on symbols. It proves that

* sends and receives match, in number and in chunks, without deadlock, even if every send is a rendezvous;
* no range is overwritten while a message reads it, and no chunk is sent that the rank does not hold;
* every chunk ends where it belongs with each contributor exactly once, for ``ordered`` algorithms in rank order;
* all ranks compute each chunk by the *same* expression, operand order included: their results are equal bit for bit;
* no rank can finish before every rank has begun (except where only a root's data matters): a rank that called
  something else is therefore always noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpicoll.schedules.algorithms import Algorithm
from mpicoll.schedules.collective_table import COLLECTIVES, Over, Where
from mpicoll.schedules.replay import Replay, ScheduleError, initial_vectors
from mpicoll.schedules.types import Schedule


class Term(NamedTuple):
    """A symbolic value; equal terms are the same object, so comparing identities compares expressions."""

    contributors: int
    """Bit set of ranks."""
    in_order: tuple[int, int] | None
    """First and last rank if the operands are a run of ranks in order, else None."""


class _Terms:
    """Makes each leaf and each (left, right) pair once."""

    def __init__(self) -> None:
        self._leaves: dict[tuple[int, int], Term] = {}
        self._pairs: dict[tuple[int, int], tuple[Term, Term, Term]] = {}

    def leaf(self, rank: int, chunk: int) -> Term:
        return self._leaves.setdefault((rank, chunk), Term(1 << rank, (rank, rank)))

    def combine(self, left: Term, right: Term) -> Term:
        key = (id(left), id(right))
        if key not in self._pairs:
            if twice := left.contributors & right.contributors:
                ranks = ", ".join(str(rank) for rank in range(twice.bit_length()) if twice >> rank & 1)
                raise ScheduleError(f"the contribution of rank {ranks} is counted twice")
            run = None
            if left.in_order and right.in_order and left.in_order[1] + 1 == right.in_order[0]:
                run = (left.in_order[0], right.in_order[1])
            # The operands are kept so that their ids stay theirs.
            self._pairs[key] = (Term(left.contributors | right.contributors, run), left, right)
        return self._pairs[key][0]


def verify(algorithm: Algorithm, size: int, *, root: int = 0, segments: int = 1) -> None:
    """Prove that `algorithm` is correct for `size` ranks.

    Parameters
    ----------
    root, segments
        As for :meth:`Algorithm.schedule`.

    Raises
    ------
    ScheduleError
        If it is not; the message names rank, step and chunk of the first error.
    """
    schedules = [algorithm.schedule(size, rank, root=root, segments=segments) for rank in range(size)]
    verify_schedules(schedules, ordered=algorithm.ordered)


def verify_schedules(schedules: list[Schedule], *, ordered: bool = False) -> None:
    """Prove one schedule per rank, as :func:`verify` does."""
    first, terms = schedules[0], _Terms()
    for rank, schedule in enumerate(schedules):
        same = (schedule.size, schedule.chunks, schedule.root) == (len(schedules), first.chunks, first.root)
        if not same or schedule.rank != rank:
            raise ScheduleError(f"rank {rank}: size, rank, chunks or root differ from the others': {schedule}")
    replay = Replay(schedules, initial_vectors(first, terms.leaf), terms.combine)
    vectors = replay.run()
    _check_synchronised(first, replay.heard_from)
    if first.collective == "barrier":
        return
    for chunk in range(first.chunks):
        _check_chunk(first, chunk, vectors, terms, ordered)


def _check_synchronised(schedule: Schedule, heard_from: list[int]) -> None:
    row = COLLECTIVES[schedule.collective]
    everyone = (1 << schedule.size) - 1
    for rank, known in enumerate(heard_from):
        may_go = row.early and not (row.ends is Where.ROOT and rank == schedule.root)
        if known != everyone and not may_go:
            raise ScheduleError(f"rank {rank} can finish before every rank has begun")


def _receivers(schedule: Schedule, chunk: int) -> Sequence[int]:
    ends = COLLECTIVES[schedule.collective].ends
    if ends is Where.ROOT:
        return (schedule.root,)
    if ends is Where.OWNER:
        return (schedule.owner(chunk),)
    return (chunk % schedule.size,) if ends is Where.COLUMN else range(schedule.size)


def _check_chunk(
    schedule: Schedule, chunk: int, vectors: list[list[Term | None]], terms: _Terms, ordered: bool
) -> None:
    row, receivers = COLLECTIVES[schedule.collective], _receivers(schedule, chunk)
    results = {rank: vectors[rank][chunk] for rank in receivers}
    if row.reduces in (Over.UP_TO, Over.BELOW):
        for rank, result in results.items():
            _check_prefix(chunk, rank, rank + (row.reduces is Over.UP_TO), result)
        return
    wanted = results[receivers[0]]
    if row.reduces is Over.ALL:
        _check_sum(schedule, chunk, receivers[0], wanted, ordered)
    else:
        wanted = terms.leaf(schedule.owner(chunk) if row.begins is Where.OWNER else schedule.root, chunk)
    for rank, result in results.items():
        if result is not wanted:
            raise ScheduleError(f"chunk {chunk}: rank {rank} computes it otherwise than rank {receivers[0]}")


def _check_sum(schedule: Schedule, chunk: int, rank: int, result: Term | None, ordered: bool) -> None:
    if result is None or result.contributors != (1 << schedule.size) - 1:
        raise ScheduleError(f"chunk {chunk} at rank {rank}: contributors missing, {result}")
    if ordered and result.in_order != (0, schedule.size - 1):
        raise ScheduleError(f"chunk {chunk} at rank {rank}: operands are not in rank order")


def _check_prefix(chunk: int, rank: int, ranks: int, result: Term | None) -> None:
    """See that a rank has the sum over the first `ranks` ranks, in rank order."""
    if ranks and (result is None or result.in_order != (0, ranks - 1)):
        raise ScheduleError(f"chunk {chunk} at rank {rank}: {result} is not the sum over ranks 0 to {ranks - 1}")
