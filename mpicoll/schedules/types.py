"""Schedules: steps of sends and receives over chunk numbers, for one rank, and nothing else.

Terms
-----
chunk
    The smallest piece of the vector that a schedule speaks of, by its number. Which elements a chunk holds is
    decided only when a buffer arrives (:mod:`mpicoll.messages.lowering`).
step
    Sends and receives that are posted together and waited for together. A receive that reduces is folded into the
    vector after *all* messages of its step are through, in the order in which the receives are listed.
window
    How many steps may be in flight: step ``i`` is posted when step ``i - window`` is complete.

Messages carry no tags of their own: the k-th send from rank a to rank b meets the k-th receive at b from a.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Reduce(IntEnum):
    """Treatment of a received range."""

    COPY = 0
    """It replaces the rank's own chunks."""
    RECEIVED_FIRST = 1
    """own = received OP own."""
    OWN_FIRST = 2
    """own = own OP received."""
    REPLACE = 3
    """It replaces the rank's own chunks when all messages of the step are through, so that they may be sent in it."""


class Send(NamedTuple):
    """Send chunks ``start`` to ``stop - 1`` to rank ``peer``."""

    peer: int
    start: int
    stop: int


class Recv(NamedTuple):
    """Receive chunks ``start`` to ``stop - 1`` from rank ``peer``."""

    peer: int
    start: int
    stop: int
    reduce: Reduce = Reduce.COPY


class Step(NamedTuple):
    """Messages that are posted together; either tuple may be empty."""

    sends: tuple[Send, ...] = ()
    recvs: tuple[Recv, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """One rank's part of an algorithm: data that can be run, proved, priced and drawn.

    Parameters
    ----------
    collective, algorithm
        Their names, as in :mod:`mpicoll.schedules.collective_table` and :mod:`mpicoll.schedules.algorithms`.
    size, rank
        Number of ranks and this one. ``root`` matters to rooted collectives only.
    chunks
        Number of chunks. Where ranks own parts it is a multiple of ``size``, and consecutive runs of
        ``chunks // size`` of them belong to rank 0, 1, ...
    steps
        The steps in order. ``window`` of them may be in flight.
    """

    collective: str
    algorithm: str
    size: int
    rank: int
    chunks: int
    steps: tuple[Step, ...]
    window: int = 1
    root: int = 0

    def owner(self, chunk: int) -> int:
        """Return the rank that `chunk` belongs to where ranks own parts."""
        return chunk // (self.chunks // self.size)

    @property
    def chunks_per_vector(self) -> int:
        """Number of chunks that make up one rank's vector: in alltoall the chunks of all ranks' vectors differ."""
        return self.chunks // self.size if self.collective == "alltoall" else self.chunks

    def bounds(self, count: int) -> list[int]:
        """Return the ``chunks + 1`` offsets of the chunks for vectors of `count` elements, or bytes."""
        return chunk_bounds(count * (self.chunks // self.chunks_per_vector), self.chunks)


def chunk_bounds(count: int, chunks: int) -> list[int]:
    """Return ``chunks + 1`` element offsets that cut `count` elements so that chunks differ by at most one element.

    The first ``count % chunks`` chunks are the longer ones.
    """
    quotient, remainder = divmod(count, chunks)
    return [index * quotient + min(index, remainder) for index in range(chunks + 1)]
