"""Operation lanes of the nonblocking operations of a communicator, used in turn.

All ranks use the same lane for an operation, since they start their nonblocking operations in the same order.

Where no core is free to drive operations beside the program, those of more than
:data:`~mpicoll.kernels.operation_words.AT_ONCE_NBYTES` bytes have lanes of their own, which are few: their stages, of
512 KB each, stay in the caches so. With two ranks on a core each an Iallreduce of 512 KB to 4 MB takes 0.7 to 0.9 of
the time that it takes with eight lanes. One of 64 KB takes 1.3 times as long with two lanes as with eight, since a rank
writes to what the other one has just read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from mpicoll.buffers.known_types import room_for_copies
from mpicoll.errors import CommunicatorBusy
from mpicoll.kernels.operation_words import AT_ONCE_NBYTES, LONGEST, ROOM, SIZE
from mpicoll.kernels.packed_views import PACKED_NBYTES, unpack_later
from mpicoll.shared_memory.domain_memory import LONG_LANES, NONBLOCKING_LANES


class Ending(Protocol):
    """An operation that the next operation in its lane waits for."""

    @property
    def has_ended(self) -> bool:
        """True if it has ended, successfully or not."""
        ...

    def advance(self) -> bool:
        """Advance it without waiting; return whether it has ended."""
        ...

    def complete(self) -> None:
        """Wait until it has ended."""


class HasJobs(Protocol):
    """A domain of shared memory."""

    def nonblocking_job(self, number: int) -> np.ndarray:
        """Return the job of a lane: from number 0 on those for short vectors, and those for long ones behind them."""
        ...


class NonblockingLane:
    """A nonblocking operation lane: its job, the job's address, and its last operation on this rank, or None."""

    __slots__ = ("_room", "address", "is_long", "job", "last")

    def __init__(self, job: np.ndarray, is_long: bool) -> None:
        self.job, self.address, self.is_long = job, int(job.ctypes.data), is_long
        self.last: Ending | None = None
        self._room: np.ndarray | None = None

    def begin_packing(self) -> None:
        """Let compiled code pack and unpack entries of derived datatypes in calls in this lane."""
        if self._room is None:
            self._room = room_for_copies(PACKED_NBYTES, int(self.job[SIZE]))
        if self._room is not None:
            self.job[ROOM] = self._room.ctypes.data

    def unpack(self) -> None:
        """Copy the result of the operation in this lane, which has packed its arguments, to its places."""
        unpack_later.run(int(self.job[ROOM]))

    def is_free(self) -> bool:
        """Return whether its last operation has ended on this rank, which it may do now."""
        last = self.last
        return last is None or last.has_ended or last.advance()


class NonblockingLanes:
    """The lanes of nonblocking operations, of which each has one operation in flight.

    Parameters
    ----------
    driven
        Operations progress beside the program on all ranks: then long ones use the lanes of short ones.

    Attributes
    ----------
    is_busy
        True while a call takes a turn: another one then raises CommunicatorBusy. Whoever sets it has read it, and
        resets it in a ``try`` statement that follows at once. In between, CPython runs no signal handler; from 3.11 on
        it does not change threads there either, so that of two threads only one sets it. A lock would take a tenth of
        the time of a short call.
    """

    def __init__(self, *, driven: bool) -> None:
        self._longest = 0 if driven else AT_ONCE_NBYTES
        self.is_busy = False
        self._turns: dict[bool, list[NonblockingLane]] = {}  # the least recently used one first

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Return a block of which one is executed at a time; what starts short calls spells it out."""
        if self.is_busy:
            raise CommunicatorBusy
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False

    def take_turn(self, node: HasJobs, nbytes: int) -> NonblockingLane:
        """Take the next lane for so many bytes; :meth:`end_turn` or :meth:`undo_turn` returns it.

        The lanes do not keep `node`, whose they are: its memory is free when nobody else does.
        """
        is_long = 0 < self._longest < nbytes
        if is_long not in self._turns:
            self._turns[is_long] = self._made(node, is_long)
        return self._turns[is_long].pop(0)

    def _made(self, node: HasJobs, is_long: bool) -> list[NonblockingLane]:
        first, count = (NONBLOCKING_LANES, LONG_LANES) if is_long else (0, NONBLOCKING_LANES)
        jobs = list(map(node.nonblocking_job, range(first, first + count)))
        for job in jobs:
            job[LONGEST] = 0 if is_long else self._longest
        return [NonblockingLane(job, is_long) for job in jobs]

    def end_turn(self, lane: NonblockingLane, operation: Ending) -> None:
        """Return a lane with the operation that uses it now."""
        lane.last = operation
        self._turns[lane.is_long].append(lane)

    def undo_turn(self, lane: NonblockingLane) -> None:
        """Return a lane unused."""
        self._turns[lane.is_long].insert(0, lane)
