"""All ranks' schedules at once, in few words: for thousands of ranks there are too many steps to write each down.

In a ring every rank does the same as rank 0, with peers and chunks moved on by its number. Such a *rotation* is
described by the steps of rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpicoll.schedules.types import Recv, Schedule, Send, Step, chunk_bounds

Steps = tuple[Step, ...]


class Rotation(NamedTuple):
    """Steps of one send and one receive, of one chunk each, that every rank makes alike.

    Attributes
    ----------
    steps
        Those of rank 0 as if it were at place 0.
    segments
        Chunks that belong to a rank.
    first
        The rank at place 0: rank r works on the chunks of place ``(r - first) % size``.
    """

    steps: Steps
    segments: int = 1
    window: int = 1
    first: int = 0

    def steps_of(self, rank: int, size: int) -> Steps:
        """Write the steps of one rank down."""
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
    """Steps of each rank, written down."""

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
    """How many vectors the chunks make up: in alltoall those of all ranks."""

    def bounds(self, count: int) -> list[int]:
        """Return the offsets of the chunks for vectors of `count` elements, or bytes."""
        return chunk_bounds(count * self.vectors, self.chunks)


def written_down(schedules: Sequence[Schedule]) -> Structure:
    """Return the structure of any schedules."""
    part = Irregular(tuple(schedule.steps for schedule in schedules), schedules[0].window)
    first = schedules[0]
    return Structure(first.size, first.chunks, (part,), first.chunks // first.chunks_per_vector)
