"""Compact descriptions of all ranks' schedules, for thousands of ranks.

In a ring the schedule of rank r is that of rank 0 with peers and chunks shifted by r. Such a *rotation* is described by
the steps of rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpicoll.schedules.types import Recv, Schedule, Send, Step, chunk_bounds

Steps = tuple[Step, ...]


class Rotation(NamedTuple):
    """Steps of one send and one receive, of one chunk each, that are equal on all ranks but for a shift.

    Attributes
    ----------
    steps
        The steps of the rank at place 0.
    segments
        Number of chunks of each rank.
    first
        The rank at place 0: rank r works on the chunks of place ``(r - first) % size``.
    """

    steps: Steps
    segments: int = 1
    window: int = 1
    first: int = 0

    def steps_of(self, rank: int, size: int) -> Steps:
        """Return the steps of one rank."""
        chunks = size * self.segments
        ahead = (rank - self.first) % size * self.segments

        def moved(message: Send | Recv) -> Send | Recv:
            start = (message.start + ahead) % chunks
            return message._replace(peer=(message.peer + rank) % size, start=start, stop=start + 1)

        return tuple(
            Step(
                tuple(moved(send) for send in step.sends),  # type: ignore[misc]
                tuple(moved(recv) for recv in step.recvs),  # type: ignore[misc]
            )
            for step in self.steps
        )


class Irregular(NamedTuple):
    """Steps of each rank, listed explicitly."""

    steps: tuple[Steps, ...]
    window: int = 1

    def steps_of(self, rank: int, size: int) -> Steps:
        """Return the steps of one rank."""
        return self.steps[rank]


Part = Rotation | Irregular


class Structure(NamedTuple):
    """Parts of all ranks' steps; a message is received in the part in which it is sent."""

    size: int
    chunks: int
    parts: tuple[Part, ...]
    vectors: int = 1
    """Number of vectors that the chunks make up: in alltoall those of all ranks."""

    def bounds(self, count: int) -> list[int]:
        """Return the offsets of the chunks for vectors of `count` elements, or bytes."""
        return chunk_bounds(count * self.vectors, self.chunks)


def written_down(schedules: Sequence[Schedule]) -> Structure:
    """Return the structure of any schedules, one for each rank, with explicit steps."""
    part = Irregular(tuple(schedule.steps for schedule in schedules), schedules[0].window)
    first = schedules[0]
    return Structure(first.size, first.chunks, (part,), first.chunks // first.chunks_per_vector)
