"""Spare channels: those of freed communicators, kept for the next communicators of the same ranks.

A program that makes a communicator for every step of its work makes the same ones again and again: the rows and columns
of a grid. A channel with all that belongs to it takes some hundred microseconds to make, as long as many collectives.

A channel becomes a spare if all its ranks say so when its communicator is freed, and serves a new communicator if all
ranks of that one find the same spare; neither depends on what one rank knows alone. No object but communicators refers
to a spare: see :attr:`mpicoll.communicator.channel.Channel.is_lent`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple, Protocol

from mpi4py import MPI

from mpicoll.communicator.communicator_objects import CommunicatorObjects
from mpicoll.communicator.spare_agreement import Family, agree, offer_of
from mpicoll.progress.failed_ranks import is_failure, survives_failures

MAX_SPARES = 16
"""The largest number of spares that one channel keeps; they hold shared memory, and a communicator of MPI."""
MAX_IN_PROCESS = 256
"""The largest number of spares in a process. Most belong to communicators that are never freed."""
MAX_ALIKE = 4
"""The largest number of spares for the same ranks, of one communicator."""

_in_process = 0
"""Number of spares in this process."""
_counting = threading.RLock()


class Reusable(Protocol):
    """A :class:`~mpicoll.communicator.channel.Channel`, as far as spares are concerned."""

    session: int
    broken: str | None
    origin: Origin | None
    spares: SpareChannels
    dispatch: Any
    handles: CommunicatorObjects

    @property
    def is_reusable(self) -> bool:
        """True if nothing has gone wrong on this rank, and nothing is in use."""

    def close(self, keep: Callable[[], None] | None = None) -> None:
        """Free everything when all ranks have called this, or if all give `keep` nearly nothing, and call it."""

    def abandon(self) -> None:
        """Give up a spare; not collective."""

    def revoke(self, reason: BaseException | str) -> None:
        """End what other ranks do on it, because one has died; not collective."""


class Found(NamedTuple):
    """A spare channel, or None, and for a new one what the ranks have agreed on, see :class:`Agreement`."""

    channel: Any
    session: int
    places: Any
    memory: Any


class SpareChannels:
    """Spares of the channels that were derived from one channel, by their ranks, settings and grids.

    Those of one rank are in :mod:`mpicoll.communicator.one_rank_channels`.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Hashable, Reusable]] = []
        self._is_open = True
        self._lock = threading.RLock()  # threads may free communicators together, the garbage collector anywhere

    def has_room(self, key: Hashable) -> bool:
        """Return whether this rank can keep another spare under `key`."""
        has_room = len(self._kept) < MAX_SPARES and _in_process < MAX_IN_PROCESS
        return has_room and sum(kept[0] == key for kept in tuple(self._kept)) < MAX_ALIKE

    def keep(self, key: Hashable, channel: Reusable) -> bool:
        """Keep a spare; on all its ranks. Return False after :meth:`close`."""
        with self._lock:
            if self._is_open:
                _count(1)
                self._kept.append((key, channel))
            return self._is_open

    def find(self, comm: MPI.Intracomm, key: Hashable, family: Family, make: Callable[[], Any] | None = None) -> Found:
        """Take the spare that all ranks of the new communicator `comm` find under their keys; see `agree`.

        Where this rank has none, it makes the memory for a new channel before, so that all learn its places at once.
        """
        spare = self._take(key)
        memory = make() if spare is None and make is not None else None
        offer = 0 if spare is None else offer_of(spare.session, spare.dispatch.number)
        try:
            agreement = agree(comm, family, offer, () if memory is None else memory.places())
        except BaseException as error:
            if spare is not None:
                _give_up(spare, error)
            raise
        if spare is not None and not agreement.is_common:  # the others have lost it, or ask with other settings
            spare.abandon()
            spare = None
        return Found(spare, agreement.session, agreement.places, memory)

    def _take(self, key: Hashable | None = None) -> Reusable | None:
        """Return the oldest spare under `key`, or of all, which is the same on all ranks, whoever has freed them."""
        with self._lock:
            found = [kept for kept in self._kept if key is None or kept[0] == key]
            if not found:
                return None
            oldest = min(found, key=lambda kept: kept[1].session)
            self._kept.remove(oldest)
            _count(-1)
        return oldest[1]

    def close(self, *, broken: bool) -> None:
        """Free all spares, in an order that all ranks share, and keep no more; collective.

        They may have been kept in different orders, where several threads free communicators.

        A rank on which the communicator is `broken` gives them up, so that those on which it is not do not wait.
        """
        with self._lock:
            self._is_open = False
        while (channel := self._take()) is not None:
            if broken:
                channel.abandon()
            else:
                channel.close()


def _count(change: int) -> None:
    """Count a spare that is kept, or no longer kept."""
    global _in_process
    with _counting:
        _in_process += change


def _give_up(spare: Reusable, error: BaseException) -> None:
    """Give up a spare that other ranks may be using already."""
    if is_failure(error) and survives_failures():
        spare.revoke(error)
    else:
        spare.abandon()


class Origin(NamedTuple):
    """The channel from which another one was derived, and the key of the latter's spares there."""

    parent: weakref.ref[Any]
    key: Hashable

    def home(self) -> SpareChannels | None:
        """Return where spares are kept, None if the channel has been freed, or is broken."""
        channel = self.parent()
        return None if channel is None or channel.broken is not None else channel.spares


def retire(channel: Reusable) -> None:
    """Keep the channel of a communicator that is being freed as a spare if all ranks can, else free it; collective."""
    origin = channel.origin
    home = None if origin is None else origin.home()
    may_keep = origin is not None and home is not None and channel.is_reusable and home.has_room(origin.key)
    channel.close(partial(_keep, channel) if may_keep else None)


def _keep(channel: Reusable) -> None:
    """Keep a channel as a spare; where its home has been freed meanwhile, free it, as the other ranks do."""
    channel.handles.leave()
    origin = channel.origin
    home = None if origin is None else origin.home()
    if origin is None or home is None or not home.keep(origin.key, channel):
        channel.close()
