"""Agreement of the ranks of a new communicator on the spare channel that serves it, or on a number for a new channel.

Each rank offers the spare that it has found. Where all ranks of the parent make communicators in the same call, as in
``Split``, and share memory, they read each other's offers there, and those who offer a spare read them when they need
it. Else the MPI library compares the offers, on the new communicator.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.errors import CollectiveTimeout
from mpicoll.progress import progress_engine
from mpicoll.progress.failed_ranks import raise_if_failed
from mpicoll.progress.waiting import LOOK_AFTER_SECONDS, wait_until
from mpicoll.shared_memory.announcements import Round

NO_ROOM = -1
"""Offer of a rank that has no spare, and no room for another one."""
MEETING_SECONDS = 60.0
"""The longest time that a rank waits for those that make communicators in the same call."""
_MASK = (1 << 61) - 1
_numbers = itertools.count(1 + secrets.randbits(61))
"""Numbers for channels, other ones in each process."""


class Agreement(NamedTuple):
    """Agreement of the ranks of a new communicator.

    Attributes
    ----------
    is_common
        Whether all ranks have offered the same spare.
    nobody
        Whether none has offered one.
    keepable
        Whether all ranks have room for the channel, once it is a spare.
    session
        A number for a channel that is made instead.
    places
        The numbers that each rank has told of itself, int64 of shape (size, 4), if none has offered a spare, else None.
    """

    is_common: bool
    nobody: bool
    keepable: bool
    session: int
    places: np.ndarray | None = None


class Family(NamedTuple):
    """The ranks of a new communicator among those of its parent.

    Attributes
    ----------
    parent
        Channel of the parent.
    ranks
        The parent's ranks that are those of the new communicator.
    everybody
        Whether all ranks of the parent make communicators in this call, be it MPI.COMM_NULL.
    """

    parent: Any
    ranks: list[int]
    everybody: bool

    @property
    def in_memory(self) -> bool:
        """True if the offers are told in shared memory."""
        return self.everybody and self.parent.node is not None


def offer_of(session: int, calls: int) -> int:
    """Return the number by which ranks offer a spare: equal for one channel on which they have made as many calls.

    Numbers of channels follow each other, so that a sum of the two would not do.
    """
    return 1 + (hash((session, calls)) & _MASK)


class Offer(NamedTuple):
    """Offer of a spare, or of none, to the other ranks of the parent.

    All of them have begun to make communicators when it is made, so that nobody waits long for the outcome.
    """

    family: Family
    number: int
    told: Round

    def outcome(self) -> bool | None:
        """Return whether all ranks of the new communicator have made this offer; None as long as this is not known."""
        if not self.told.is_complete() or self.told.told is None:
            return None
        offers = self.told.told[:, 0].tolist()
        return all(offers[rank] == self.number for rank in self.family.ranks)

    def await_outcome(self) -> bool:
        """Wait for the outcome; return whether all ranks of the new communicator have made this offer.

        Raises
        ------
        CollectiveTimeout
            If a rank does not come.
        RankFailed
            If one has died, and the MPI library lets the others go on.
        """
        numbers_of(self.family.parent, self.told)
        return bool(self.outcome())

    def agreement(self) -> Agreement:
        """Return what the ranks of the new communicator agree on where this rank offers no spare."""
        told = numbers_of(self.family.parent, self.told)[self.family.ranks]
        offers = told[:, 0].tolist()
        nobody = max(offers) <= 0
        return Agreement(False, nobody, NO_ROOM not in offers, int(told[0, 1]), told[:, 2:] if nobody else None)


def propose(family: Family, offer: int, places: Sequence[int] = ()) -> Offer:
    """Tell all ranks of the parent what this one offers, see :func:`offer_of`; collective over `everybody`.

    Raises
    ------
    CollectiveTimeout, RankFailed
        If a rank did not come to the round before.
    """
    return Offer(family, offer, meet(family.parent, offer, next(_numbers), *places))


def agree(comm: MPI.Intracomm, offer: int) -> Agreement:
    """Compare the offers of the ranks of `comm`, which are spares, 0, or NO_ROOM; by the MPI library, collective."""
    agreed = np.array([offer, -offer, next(_numbers) if comm.rank == 0 else 0, offer == NO_ROOM], np.int64)
    comm.Allreduce(MPI.IN_PLACE, agreed, MPI.MAX)
    highest, lowest, fresh, lacks_room = agreed.tolist()
    return Agreement(highest == -lowest > 0, highest <= 0, not lacks_room, fresh)


def meet(parent: Any, *numbers: int) -> Round:
    """Tell some numbers to all ranks of a channel whose ranks share memory; collective.

    A rank waits only for those that did not come to the round before.
    """
    announcements = parent.node.announcements
    numbers_of(parent, announcements.last)
    started: Round = announcements.start(*numbers)
    return started


def numbers_of(parent: Any, awaited: Round) -> np.ndarray:
    """Return the numbers that all ranks tell in a round, when it is complete."""
    if not awaited.is_complete():
        is_complete = progress_engine.with_progress(awaited.is_complete)
        wait_until(is_complete, parent.polls, lambda waited: _look(parent, awaited, waited))
    assert awaited.told is not None
    return awaited.told


def _look(parent: Any, awaited: Round, waited: float) -> float:
    """Raise if the wait has to end; return at how many seconds to look again."""
    raise_if_failed(parent.comm)
    if waited >= MEETING_SECONDS:
        missing = awaited.missing()
        text = f"the communicator is made by all ranks of another one, and {missing} did not come"
        raise CollectiveTimeout(f"{text} within {MEETING_SECONDS:g} s", missing)
    return waited + LOOK_AFTER_SECONDS
