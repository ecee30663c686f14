"""Schedules: one rank's steps of sends and receives over chunk numbers.

Terms
-----
chunk
    The smallest part of the vector that a schedule names, by number. Its elements are determined when the schedule is
    bound to a buffer (:mod:`mpicoll.messages.lowering`).
step
    Sends and receives that are posted together and waited for together. Receives that reduce are reduced into the
    vector after *all* messages of the step have completed, in the order in which they are listed.
window
    The number of steps that may be in flight: step ``i`` is posted when step ``i - window`` is complete.

Messages have no tags of their own: the k-th send from rank a to rank b matches the k-th receive at b from a.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Reduce(IntEnum):
    """Treatment of a received range."""

    COPY = 0
    """The received range replaces the rank's own; it is received in place."""
    RECEIVED_FIRST = 1
    """``own = received OP own``."""
    OWN_FIRST = 2
    """``own = own OP received``."""
    REPLACE = 3
    """The received range replaces the rank's own after all messages of the step, which may send the old one."""


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
    """One rank's part of an algorithm, as data.

    Parameters
    ----------
    collective, algorithm
        Their names, as in :mod:`mpicoll.schedules.collective_table` and :mod:`mpicoll.schedules.algorithms`.
    size, rank
        Number of ranks, and this rank.
    chunks
        Number of chunks. If ranks own parts it is a multiple of ``size``, and consecutive runs of ``chunks // size``
        of them belong to rank 0, 1, ...
    steps
        The steps in order.
    window
        Number of steps that may be in flight.
    root
        The root of rooted collectives; 0 for others.
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
        """Return the rank that `chunk` belongs to, for collectives in which ranks own parts."""
        return chunk // (self.chunks // self.size)

    @property
    def chunks_per_vector(self) -> int:
        """Number of chunks that make up one rank's vector: in alltoall the chunks of all ranks' vectors differ."""
        return self.chunks // self.size if self.collective == "alltoall" else self.chunks

    def bounds(self, count: int) -> list[int]:
        """Return the ``chunks + 1`` offsets of the chunks for vectors of `count` elements, or bytes."""
        return chunk_bounds(count * (self.chunks // self.chunks_per_vector), self.chunks)


def chunk_bounds(count: int, chunks: int) -> list[int]:
    """Return ``chunks + 1`` offsets of chunks of `count` elements, whose lengths differ by at most one element.

    The first ``count % chunks`` chunks are the longer ones.
    """
    quotient, remainder = divmod(count, chunks)
    return [index * quotient + min(index, remainder) for index in range(chunks + 1)]
