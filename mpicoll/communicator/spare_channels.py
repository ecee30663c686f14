"""Spare channels: those of freed communicators, kept for the next communicators of the same ranks.

A program that makes a communicator for every step of its work makes the same ones again and again: the rows and columns
of a grid. A channel with all that belongs to it takes some hundred microseconds to make, as long as many collectives.

A channel becomes a spare if all its ranks say so when its communicator is freed, and serves a new communicator if all
ranks of that one find the same spare; neither depends on what one rank knows alone. Where ranks share memory, none
waits for either: a rank that frees a communicator tells what it says, and keeps the channel. It looks at what the
others have said when it wants to use it again; then it tells what it has found, and keeps a `Claim`, which it settles
before the first collective::

    Free()              Split()                       first collective, or the next Free
    tell "keep"    ->   all kept it? tell offer  ->   all offer it? use it, or put it back

No object but communicators refers to a spare: see :attr:`mpicoll.communicator.channel.Channel.is_lent`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

from mpi4py import MPI

from mpicoll.communicator.communicator_objects import CommunicatorObjects
from mpicoll.communicator.spare_agreement import NO_ROOM, Agreement, Family, Offer, agree, offer_of, propose
from mpicoll.progress.failed_ranks import is_failure, survives_failures
from mpicoll.shared_memory.announcements import Round

MAX_SPARES = 16
"""Number of spares of one channel from which on new channels do not become spares; they hold shared memory."""
MAX_IN_PROCESS = 256
"""The same for all spares in a process. Most belong to communicators that are never freed."""
MAX_ALIKE = 4
"""The largest number of spares for the same ranks, of one communicator. All these ranks keep as many, and so agree on
whether it is reached, without waiting."""

_in_process = 0
"""Number of spares in this process."""


class Reusable(Protocol):
    """A :class:`~mpicoll.communicator.channel.Channel`, as far as spares are concerned."""

    session: int
    broken: str | None
    origin: Origin | None
    spares: SpareChannels
    dispatch: Any
    node: Any
    handles: CommunicatorObjects

    @property
    def is_reusable(self) -> bool:
        """True if nothing has gone wrong on this rank, and nothing is in use."""

    def close(self, *, spare: bool = False) -> bool:
        """Free everything, or if all ranks say `spare` nearly nothing; return which. Collective."""

    def abandon(self) -> None:
        """Give up a spare; not collective."""

    def revoke(self, reason: str) -> None:
        """End what other ranks do on it, because one has died; not collective."""


class Fresh(NamedTuple):
    """Facts for a new channel, of which the ranks have no spare: see :class:`Agreement`; `memory` of this rank."""

    session: int
    keepable: bool
    places: Any
    memory: Any


class Claim:
    """A spare that this rank has found for a new communicator, before it knows whether all ranks have.

    If that communicator is freed before the ranks know, the claim itself becomes a spare.

    Attributes
    ----------
    channel
        The channel of the communicator, once there is one.
    communicator
        Weak reference to the communicator object, which a claim tells when it is freed.
    """

    communicator: weakref.ref[Any]

    def __init__(self, home: SpareChannels, key: Hashable, spare: Reusable, offer: Offer) -> None:
        self._home, self._key, self.spare, self._offer = home, key, spare, offer
        self._is_settled = False
        self._lock = threading.RLock()  # threads may make the first call together
        self.channel: Any = None

    def settle(self) -> Any:
        """Return the channel; None, on all ranks, if they have found different spares, which they give up."""
        with self._lock:
            if not self._is_settled:
                self._is_settled = True
                try:
                    is_common = self._offer.await_outcome()
                except BaseException as error:
                    _give_up(self.spare, error)
                    raise
                if is_common:
                    self.channel = self.spare
                else:  # the others have lost it, or ask with other settings
                    self.spare.abandon()
        return self.channel

    def release(self) -> Any:
        """Return the channel of a communicator that is being freed; None if it was never used, and is a spare again."""
        with self._lock:
            if self._is_settled:
                return self.channel
            communicator = self.communicator()
            if communicator is not None:
                communicator.note_freed()
            if self.spare.origin is None or self.spare.origin.home() is not self._home:
                return self._of_lost_home()
            self._is_settled = True
            self._home.keep(self._key, self)
        return None

    def _of_lost_home(self) -> Any:
        """Return the channel where the parent was freed before; where the parent has failed here, give it up."""
        parent = self._offer.family.parent
        if not parent.has_failed:
            return self.settle()
        self._is_settled = True
        self.spare.abandon()
        return None

    @property
    def session(self) -> int:
        """Number of the spare."""
        return self.spare.session

    def outcome(self) -> bool | None:
        """Return whether all ranks have claimed it, and so kept it again; None as long as this rank does not know."""
        return self._offer.outcome()

    def abandon(self) -> None:
        """Give up the spare."""
        self.spare.abandon()

    def close(self) -> None:
        """Free the spare; collective."""
        self.spare.close()


class SpareChannels:
    """Spares of the channels that were derived from one channel, by their ranks, settings and grids.

    Those of one rank are in :mod:`mpicoll.communicator.one_rank_channels`.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, list[Any]] = {}
        self._count = 0

    def has_room(self, key: Hashable) -> bool:
        """Return whether another spare can be kept under `key`."""
        return len(self._kept.get(key, ())) < MAX_ALIKE

    def keep(self, key: Hashable, spare: Reusable | Claim) -> None:
        """Keep a spare; on all its ranks."""
        self._add(1)
        self._kept.setdefault(key, []).append(spare)

    def find(
        self, comm: MPI.Intracomm, key: Hashable, family: Family, make: Callable[[], Any] | None = None
    ) -> Reusable | Claim | Fresh | None:
        """Find the spare that all ranks of the new communicator `comm` find under their keys.

        Return a spare; or the claim to one; or what a new channel needs; or None, if they find different spares.

        Where this rank has none, it makes the memory for a new channel before, so that all learn its places at once.
        """
        spare = self._take(key)
        memory = make() if spare is None and make is not None else None
        offer = 0 if self._count < MAX_SPARES and _in_process < MAX_IN_PROCESS else NO_ROOM
        if spare is not None:
            offer = offer_of(spare.session, spare.dispatch.number)
        try:
            if not family.in_memory:
                agreement = agree(comm, offer)
            elif spare is not None:
                return Claim(self, key, spare, propose(family, offer))
            else:
                proposed = propose(family, offer, () if memory is None else memory.places())
                agreement = proposed.agreement()
        except BaseException as error:
            if spare is not None:
                _give_up(spare, error)
            raise
        return self._found(key, spare, agreement, memory)

    def _found(self, key: Hashable, spare: Reusable | None, agreement: Agreement, memory: Any) -> Any:
        if agreement.is_common:
            return spare
        if spare is not None:
            spare.abandon()
        if not agreement.nobody:
            return None
        places = None if memory is None else agreement.places
        return Fresh(agreement.session, agreement.keepable, places, memory)

    def _take(self, key: Hashable) -> Reusable | None:
        """Return the newest spare of which this rank sees that all have kept it; it is no spare any more."""
        kept = self._kept.get(key, [])
        for place in reversed(range(len(kept))):
            is_kept = _is_kept_by_all(kept[place])
            if is_kept is None:
                continue
            spare = kept.pop(place)
            self._add(-1)
            if not kept:
                del self._kept[key]
            if is_kept:
                taken: Reusable = spare.spare if isinstance(spare, Claim) else spare
                return taken
            spare.abandon()
        return None

    def close(self, *, broken: bool) -> None:
        """Free all spares, in an order that all ranks share; collective.

        They may have been kept in different orders, where several threads free communicators.

        A rank on which the communicator is `broken` gives them up, so that those on which it is not do not wait.
        """
        kept = (channel for channels in self._kept.values() for channel in channels)
        for channel in sorted(kept, key=lambda channel: channel.session):
            self._add(-1)
            if broken or _is_kept_by_all(channel) is False:
                channel.abandon()
            else:
                channel.close()
        self._kept.clear()

    def _add(self, change: int) -> None:
        """Count a spare that is kept, or no longer kept."""
        global _in_process
        self._count += change
        _in_process += change


def _is_kept_by_all(spare: Reusable | Claim) -> bool | None:
    """Return whether all ranks have kept a spare; None as long as this rank does not know."""
    if isinstance(spare, Claim):
        return spare.outcome()
    if spare.node is None:  # they have agreed by messages
        return True
    kept: Round = spare.node.announcements.last
    return 0 not in kept.told[:, 0].tolist() if kept.is_complete() and kept.told is not None else None


def _give_up(spare: Reusable, error: BaseException) -> None:
    """Give up a spare that other ranks may be using already."""
    if is_failure(error) and survives_failures():
        spare.revoke(f"{type(error).__name__}: {error}")
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
    """Keep the channel of a communicator that is being freed as a spare if this rank can, else free it; collective.

    If other ranks say otherwise, all give it up.
    """
    home = None if channel.origin is None else channel.origin.home()
    key: Any = None if channel.origin is None else channel.origin.key
    may_keep = home is not None and channel.is_reusable and home.has_room(key)
    if channel.close(spare=may_keep) and home is not None:
        channel.handles.leave()
        home.keep(key, channel)
