"""Agreement of the ranks of a new communicator on the spare channel that serves it, or on a number for a new channel.

Each rank offers the spare that it has found. Where all ranks of the parent make communicators in the same call, as in
``Split``, and share memory, they read each other's offers there. Else the MPI library compares them, on the new
communicator.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.communicator import timed_agreement
from mpicoll.communicator.timed_agreement import largest_of_all
from mpicoll.environment import random_number
from mpicoll.errors import CollectiveTimeout
from mpicoll.progress import progress_engine
from mpicoll.progress.failed_ranks import raise_if_failed
from mpicoll.progress.waiting import LOOK_AFTER_SECONDS, wait_until

_MASK = (1 << 61) - 1
_numbers = itertools.count(1 + random_number(61))
"""Numbers for channels, other ones in each process."""


class Agreement(NamedTuple):
    """Outcome of :func:`agree`.

    Attributes
    ----------
    is_common
        Whether all ranks have offered the same spare.
    session
        A number for a channel that is made instead.
    places
        The numbers that each rank has told of itself, int64 of shape (size, 4), if all have, else None.
    """

    is_common: bool
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


def offer_of(session: int, calls: int) -> int:
    """Return the number by which ranks offer a spare: equal for one channel on which they have made as many calls.

    Numbers of channels follow each other, so that a sum of the two would not do.
    """
    return 1 + (hash((session, calls)) & _MASK)


def agree(comm: MPI.Intracomm, family: Family, offer: int, places: Sequence[int] = ()) -> Agreement:
    """Compare the offers of the ranks of `comm`, 0 for no spare; collective, over `everybody` of the family if so.

    Parameters
    ----------
    places
        Four numbers that the other ranks should learn where no rank has a spare.

    Raises
    ------
    CollectiveTimeout
        If a rank does not come.
    RankFailed
        If one has died, and the MPI library lets the others go on.
    """
    if family.everybody and family.parent.node is not None:
        meet(family.parent, offer, next(_numbers), *places)
        told = family.parent.node.announcements.told[family.ranks]
        offers, is_common = told[:, 0], bool((told[:, 0] == offer).all())
        return Agreement(is_common, int(told[0, 1]), told[:, 2:] if places and not offers.any() else None)
    agreed = np.array([offer, -offer, next(_numbers) if comm.rank == 0 else 0], np.int64)
    largest_of_all(comm, agreed, polls=family.parent.polls)
    highest, lowest, fresh = agreed.tolist()
    return Agreement(highest == -lowest, fresh)


def meet(parent: Any, *numbers: int) -> None:
    """Tell some numbers to all ranks of a channel whose ranks share memory, and wait for theirs; collective."""
    announcements = parent.node.announcements
    if announcements.start(*numbers):
        return
    is_complete = progress_engine.with_progress(announcements.is_complete)
    wait_until(is_complete, parent.polls, lambda waited: _look(parent, waited))


def _look(parent: Any, waited: float) -> float:
    """Raise if the wait has to end; return at how many seconds to look again."""
    raise_if_failed(parent.comm)
    if waited >= timed_agreement.MEETING_SECONDS:
        missing = parent.node.announcements.missing()
        text = f"the communicator is made by all ranks of another one, and {missing} did not come"
        raise CollectiveTimeout(f"{text} within {timed_agreement.MEETING_SECONDS:g} s", missing)
    return waited + LOOK_AFTER_SECONDS
