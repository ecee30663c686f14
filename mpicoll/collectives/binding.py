"""Binding of a schedule to memory: the place of each chunk on this rank, and the copies in and out.

A vector lies in up to two arrays (see :mod:`mpicoll.messages.lowering`): the source, which is only read, and the
target. In gather, scatter and alltoall a rank holds few of the chunks; memory is allocated for those only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from mpicoll.collectives.checked_arguments import CheckedArguments
from mpicoll.messages.lowering import Vector
from mpicoll.schedules import COLLECTIVES, Schedule, chunk_bounds
from mpicoll.schedules.collective_table import Where

Allocate = Callable[[int, "np.dtype[Any]"], np.ndarray]
"""``allocate(count, dtype)`` returns memory for a plan."""
MOVED_APART = ("gather", "scatter", "alltoall")
"""Collectives in which a rank holds few of the chunks."""


class Binding(NamedTuple):
    """Memory of a plan.

    Attributes
    ----------
    inbox, outbox
        Memory to copy the caller's data to before a run, and to copy the result from after it; None if the plan works
        on the caller's memory.
    """

    vector: Vector
    inbox: np.ndarray | None
    outbox: np.ndarray | None


def bind(task: CheckedArguments, schedule: Schedule, staged: bool, allocate: Allocate) -> Binding:
    """Bind a schedule to the caller's memory, or if `staged` to memory from `allocate`."""
    if task.collective in MOVED_APART:
        return _Apart(task, schedule, staged).bind(allocate)
    source, target = whole_vector(task, staged, allocate)
    inbox, outbox = ends(task, target, staged)
    return Binding(Vector(source, target, _bounds(task, schedule)), inbox, outbox)


def whole_vector(task: CheckedArguments, staged: bool, allocate: Allocate) -> tuple[np.ndarray | None, np.ndarray]:
    """Return source and target of a plan for the whole vector."""
    carrier = task.carrier
    source = None if staged or task.source is None else task.source.view(carrier)
    target = allocate(task.count, carrier) if staged or task.target is None else task.target.view(carrier)
    return source, target


def ends(task: CheckedArguments, target: np.ndarray, staged: bool) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return inbox and outbox of a plan for the whole vector."""
    given, result = task.given, task.result
    copies_in = given is not None and (staged or (task.source is None and given.buffer is not task.target))
    copies_out = result is not None and (staged or result.buffer is not task.target)
    inbox = target[given.start : given.stop] if given is not None and copies_in else None
    return inbox, target[result.start : result.stop] if result is not None and copies_out else None


def _bounds(task: CheckedArguments, schedule: Schedule) -> Sequence[int]:
    """Return the element offsets of the schedule's chunks in the whole vector."""
    if task.counts is None:
        return chunk_bounds(task.count, schedule.chunks)
    return _offsets(_part_lengths(task.counts, schedule))


def _part_lengths(counts: Sequence[int], schedule: Schedule) -> list[int]:
    """Return the lengths of all chunks where ranks own parts of `counts` elements."""
    per_rank = schedule.chunks // schedule.size
    cuts = [chunk_bounds(count, per_rank) for count in counts]
    return [stop - start for cut in cuts for start, stop in pairwise(cut)]


def _offsets(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]


class _Apart:
    """Binding of a collective in which a rank holds few of the chunks."""

    def __init__(self, task: CheckedArguments, schedule: Schedule, staged: bool) -> None:
        assert task.counts is not None
        self._task, self._schedule, self._staged = task, schedule, staged
        row, size, rank = COLLECTIVES[task.collective], schedule.size, schedule.rank
        own = range(rank * schedule.chunks // size, (rank + 1) * schedule.chunks // size)
        everything = range(schedule.chunks if rank == schedule.root else 0)
        self._given = everything if row.begins is Where.ROOT else own
        self._result = everything if row.ends is Where.ROOT else own
        if row.ends is Where.COLUMN:
            self._result = range(rank, schedule.chunks, size)
        # What a rank gives stays where it is, unless it is part of the result.
        self._has_source = row.ends is Where.COLUMN or row.begins is Where.ROOT
        received = {chunk for step in schedule.steps for recv in step.recvs for chunk in range(recv.start, recv.stop)}
        self._held = received.union(self._result, () if self._has_source else self._given)

    def _lengths(self) -> tuple[list[int], list[int]]:
        """Return the lengths of all chunks as seen by their sender and by their receiver."""
        task, size = self._task, self._schedule.size
        if task.collective != "alltoall":
            lengths = _part_lengths(task.counts or (), self._schedule)
            return lengths, lengths
        sent, got = task.counts or (), task.recvcounts or task.counts or ()
        chunks = range(size * size)
        return [sent[chunk % size] for chunk in chunks], [got[chunk // size] for chunk in chunks]

    def bind(self, allocate: Allocate) -> Binding:
        task, carrier = self._task, self._task.carrier
        sent, got = self._lengths()
        bounds = _offsets([length if chunk in self._held else 0 for chunk, length in enumerate(got)])
        given = set(self._given)
        source_bounds = _offsets([length if chunk in given else 0 for chunk, length in enumerate(sent)])
        direct = not self._staged and task.target is not None and self._held == set(self._result)
        target = task.target.view(carrier) if direct and task.target is not None else allocate(bounds[-1], carrier)
        source, inbox = None, None
        if not self._has_source:
            inbox = target[bounds[self._given[0]] : bounds[self._given[-1] + 1]]
            if direct and task.given is not None and task.given.buffer is task.target:
                inbox = None
        elif self._given:
            source = inbox = allocate(source_bounds[-1], carrier)
            if not self._staged and task.source is not None:
                source, inbox = task.source.view(carrier), None
        outbox = None
        if not direct and self._result:
            outbox = target[bounds[self._result[0]] : bounds[self._result[-1] + 1]]
        return Binding(Vector(source, target, bounds, source_bounds), inbox, outbox)
