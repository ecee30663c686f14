"""Channel: the private duplicate of a communicator that carries mpicoll's messages, and the state that belongs to it.

It is made once for each communicator, cached as an attribute of it, and freed with it. The user's communicator carries
no message of mpicoll's, so that no receive of the program can match one.
"""

from __future__ import annotations

import atexit
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from mpicoll.communicator import closing
from mpicoll.communicator.call_lock import lock_of_calls
from mpicoll.communicator.common_facts import CommonFacts, Inheritance
from mpicoll.communicator.communicator_objects import CommunicatorObjects
from mpicoll.communicator.kept_plans import KeptPlans
from mpicoll.communicator.mpi_exceptions import FreedCommunicator
from mpicoll.communicator.predefined import WORLD
from mpicoll.communicator.settings import agree_on_session
from mpicoll.communicator.spare_channels import Origin, SpareChannels
from mpicoll.communicator.tags import Tags
from mpicoll.communicator.working_memory import WorkingMemory
from mpicoll.errors import CommunicatorBroken, MpicollError, described
from mpicoll.kernels.operation_words import empty_job
from mpicoll.progress.call_signature import Signature
from mpicoll.progress.message_drain import Drain
from mpicoll.progress.watchdog import Watchdog
from mpicoll.shared_memory import domain as node
from mpicoll.shared_memory.fast_dispatch import NEWS_EVERY, FastDispatch

FREED = "it was freed"
"""Value of :attr:`Channel.broken` after :meth:`Channel.close`, if nothing had failed."""


class Topology(Protocol):
    """Nodes of a communicator, and the channels in and between them; see :mod:`mpicoll.communicator.topology`."""

    node: Channel
    lane: Channel | None
    lanes: int
    node_of: list[int]
    local_of: list[int]
    my_node: int
    blocked: bool
    even: bool

    def close(self) -> None:
        """Free everything; collective."""


class Channel:
    """Private state of one communicator for our collectives.

    Attributes
    ----------
    comm
        A communicator of MPI that was made for the channel, and is freed with it.
    node
        The shared-memory domain of the ranks, or None if they share no memory or the channel was made `alone`.
    check, polls
        The check mode, ``MPICOLL_CHECK``; number of polls before a wait yields the core.
    is_alone, apart
        Whether ranks are on several nodes, or keep to messages; whether each has a node of its own.
    node_ids
        A number for the node of each rank, see :func:`mpicoll.communicator.topology.node_ids`; None inside a cluster.
    cluster
        The division into nodes, if there are several and one of them has several ranks; else None.
    dispatch
        The dispatch table of compiled calls. It also numbers the collectives, equally on all ranks.
    identity, random_seed, numbered_from
        For keys of random choices: this rank's number in COMM_WORLD; a number for all ranks, and calls before it.
    compression_counter
        Number of operations that have compressed their messages, int64 of shape (1,), which compiled code counts too.
    sent_nbytes
        Bytes of all messages that this rank has sent by collectives from Python; not of data in shared memory.
    broken
        The reason why the channel cannot be used any more, or None.
    refusal
        The number of a collective that this rank has refused and the others perhaps have not, or None.
    rules, tables
        The tuning table, and those for all numbers of ranks; see :mod:`mpicoll.collectives.tuning_table`.
    paying_ranges, uncompressed
        Message sizes for which compressors pay, and values of ``compression=`` that never compress here; see
        :mod:`mpicoll.collectives.compression_tuning`.
    plans
        Plans kept for repeated calls.
    occupants
        By tag slot, the request that took it last, until it is complete; None until a persistent one is freed.
    nonblocking_plans
        Plans of nonblocking calls, see :mod:`mpicoll.collectives.nonblocking_messages`; None before the first.
    slots
        Tag slots for persistent operations, see :func:`mpicoll.messages.call_agreement.take_slot`.
    session
        A random number that identifies the channel, the same on all its ranks.
    is_lent
        Whether an object that may outlive the communicator refers to it: a persistent request, or a tool.
    origin, spares
        Where it is kept as a spare, None if it never is; its own. See :mod:`mpicoll.communicator.spare_channels`.
    handles, state
        The communicator objects that use it, if it has an origin; attributes of the first.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        inherited: Inheritance,
        *,
        alone: bool = False,
        apart: bool = False,
        session: int | None = None,
    ) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.tags = Tags(int(WORLD.Get_attr(MPI.TAG_UB) or 0))
        self.session = agree_on_session(self.comm) if session is None else session
        self.check, self.polls, self.tables = inherited.facts[:3]
        self.is_alone, self.apart = alone, apart
        self.node_ids: np.ndarray | None = None
        self.node = None if alone else self._domain(inherited)
        self.cluster: Topology | None = None
        job = self.node.blocking if self.node is not None else empty_job(self.size, self.rank)
        self.dispatch = FastDispatch(self.size, None if self.check == "full" else job, checked=self.check == "default")
        self.kept_reductions: Any = None
        self.watchdog = Watchdog(self.comm, self.session, self.dispatch.recall)
        self.working_memory = WorkingMemory()
        self.agreed: set[int] = set()
        self.broken: str | None = None
        self.refusal: int | None = None
        self.identity, self.random_seed, self.numbered_from = int(WORLD.rank), 0, 0
        self.compression_counter = np.zeros(1, np.int64)
        self.sent_nbytes = 0
        self.rules: Any = None
        self.paying_ranges: dict[tuple[Any, ...], Any] = {}
        self.uncompressed: set[str] = set()
        self.alone = lock_of_calls(self.dispatch.busy, self.size)
        self.plans = KeptPlans(self.dispatch)
        self.occupants: dict[int, Any] = {}
        self.nonblocking_plans: Any = None
        self.slots = deque(self.tags.persistent_slots)
        self._read_news_at, self._unused_at, self.is_lent = NEWS_EVERY, 0, False
        self.origin: Origin | None = None
        self.spares, self.handles = SpareChannels(), CommunicatorObjects()
        self.state: dict[str, Any] = {}
        live_channels.add(self)

    def _domain(self, inherited: Inheritance) -> node.SharedMemoryDomain | None:
        oversubscribed = self.polls == 1
        if inherited.facts.is_alone:
            return node.make(self.comm, oversubscribed)
        return node.derive(self.comm, oversubscribed, inherited.facts.domain, *inherited[1:])

    @property
    def facts(self) -> CommonFacts:
        """The facts that hold for any of the ranks, too."""
        domain = None if self.node is None else self.node.facts
        return CommonFacts(self.check, self.polls, self.tables, self.is_alone, domain)

    @property
    def compressed(self) -> int:
        """Number of operations that have compressed their messages."""
        return int(self.compression_counter[0])

    @compressed.setter
    def compressed(self, number: int) -> None:
        self.compression_counter[0] = number

    @property
    def shared_nbytes(self) -> float:
        """The longest vector, in bytes, for which shared memory can be used; -1 without shared memory."""
        return -1 if self.node is None else self.node.longest

    @property
    def messages_nbytes(self) -> int:
        """Bytes of all messages that this rank has sent here, including those inside its node and along its lane."""
        lanes = (self.cluster.node, self.cluster.lane) if self.cluster else ()
        return sum(each.sent_nbytes + each.dispatch.sent_nbytes for each in (self, *lanes) if each is not None)

    def enter(self, signature: Signature) -> int:
        """Enter a collective and return its number.

        Raises
        ------
        CommunicatorBroken
            If an earlier failure left messages in flight.
        """
        self.ensure_usable()
        number = self.dispatch.count()
        self.watchdog.record(number, signature)
        if number >= self._read_news_at:
            self._read_news_at = number + NEWS_EVERY
            self._read_news()
        self.dispatch.open()
        return number

    def _read_news(self) -> None:
        try:
            self.watchdog.read_news()
        except MpicollError as error:
            self.break_off(error)
            raise

    def ensure_usable(self) -> None:
        """Raise CommunicatorBroken if an earlier failure has broken the channel."""
        if self.broken is not None:
            failed = CommunicatorBroken(f"communicator: it cannot be used after a failure: {self.broken}")
            raise FreedCommunicator if self.broken == FREED else failed

    def refuse(self, error: BaseException) -> None:
        """Tell the other ranks that this one refuses its next collective because of `error`.

        If another rank calls it, the communicator is broken; :func:`mpicoll.messages.call_agreement.settle` finds out.
        """
        if self.broken is None:
            self.refuse_entered(self.dispatch.count(), error)

    def refuse_entered(self, number: int, error: BaseException) -> None:
        """Tell the other ranks that this one refuses collective `number` because of `error`."""
        self.refusal = number
        self.dispatch.hold()
        self.watchdog.refuse(number, error)

    def break_off(self, reason: BaseException | str, *kept: Any) -> None:
        """Mark the channel as broken; the objects `kept` stay alive, since other ranks may still write to them."""
        self.broken = self.broken or (reason if isinstance(reason, str) else described(reason))
        self.dispatch.shut()
        _kept.extend([self.node, *kept])

    def revoke(self, reason: BaseException | str, *kept: Any) -> None:
        """Break the channel on all ranks because one died, by ULFM; the objects `kept` stay alive. Not collective."""
        self.break_off(reason, self.comm, self.watchdog, *kept)
        self.comm.Revoke()
        for part in (self.cluster.node, self.cluster.lane) if self.cluster else ():
            if part is not None:
                part.revoke(reason)

    def release(self) -> None:
        """Free the requests of all plans; local, so that it is possible at any time before MPI is finalised."""
        self.plans.release(self.broken is not None)
        if self.nonblocking_plans is not None and self.broken is None:
            self.nonblocking_plans.release()
        self.nonblocking_plans = None

    @property
    def has_failed(self) -> bool:
        """True if a failure broke it; False once it has been freed."""
        return self.broken not in (None, FREED)

    @property
    def is_reusable(self) -> bool:
        """True if nothing has gone wrong on this rank, and nothing is in use."""
        node, untroubled = self.node, self.refusal is None and self.watchdog.is_untroubled
        in_memory = node is None or (node.segments and not node.busy_lanes)
        at_rest = not self.dispatch.is_at_work and not self.is_lent
        return self.broken is None and untroubled and in_memory and at_rest and self.cluster is None

    def close(self, keep: Callable[[], None] | None = None) -> None:
        """Free everything when all ranks have called this, which need not be now; where all give `keep`, call that.

        Then only what belongs to single calls is freed: the channel can serve another communicator.
        """
        if self.broken is None and self.refusal is not None and not self.watchdog.await_refusals(self.refusal):
            self.break_off("other ranks made a call that this one refused")
        is_used = self.dispatch.number != self._unused_at  # many communicators see no collective
        if is_used:
            self.release()
        if self.cluster is not None:
            self.cluster.close()
        announcements = None if self.node is None else self.node.announcements
        drain = self.watchdog.drain(self.broken is not None, keep is not None, announcements)
        self.broken = self.broken or FREED
        self.dispatch.hold()
        closing.close(closing.Closing(self, drain, keep, is_used))

    def end(self, drain: Drain, is_drained: bool) -> None:
        """Free everything; all ranks have called :meth:`close`, or the channel is broken."""
        live_channels.discard(self)
        self.dispatch.shut()
        self.state = {}
        self.spares.close(broken=self.has_failed)
        if is_drained:
            self.comm.Free()
        else:
            _kept.extend([self.comm, self.watchdog, self.node, drain])

    def start_anew(self, is_used: bool) -> None:
        """Give the counters the values that they have on a new channel; calls go on being numbered."""
        self.broken = None
        self.compression_counter[0] = self.sent_nbytes = self.random_seed = 0
        self.numbered_from = self.dispatch.number
        if is_used:
            self.working_memory = WorkingMemory()
            self.dispatch.sent_nbytes_word[0] = 0
            self._unused_at = self.dispatch.number

    def abandon(self) -> None:
        """Give up a spare that some of its ranks do not use now, with its own spares; tell them; not collective."""
        self.break_off("other ranks do not use it", self.comm, self.watchdog)
        self.watchdog.drain(broken=True, willing=False)
        self.spares.close(broken=True)


live_channels: weakref.WeakSet[Channel] = weakref.WeakSet()
_kept: list[Any] = []
"""Memory that other ranks may still use after a failure, for as long as the process lives."""


@atexit.register
def _release_all() -> None:
    """Before MPI is finalised, free requests that would otherwise be reported as leaks."""
    if MPI.Is_initialized() and not MPI.Is_finalized():
        for channel in list(live_channels):
            channel.release()
