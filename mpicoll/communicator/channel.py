"""The private side of a communicator: a duplicate on which all our messages travel, and what belongs to it.

It is made once per communicator, cached as an attribute of it, and freed with it. Nothing of ours ever touches the
user's communicator, so no receive of theirs can catch our messages.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from mpicoll.communicator.settings import agree_on_settings
from mpicoll.errors import CommunicatorBroken, MpicollError
from mpicoll.kernels.operation_words import empty_job
from mpicoll.progress.call_signature import Signature
from mpicoll.progress.waiting import polls_before_yield
from mpicoll.progress.watchdog import Watchdog
from mpicoll.shared_memory import domain as node
from mpicoll.shared_memory.fast_dispatch import NEWS_EVERY, FastDispatch

MAX_PLANS = 256
"""Plans kept for repeated calls; each holds its requests."""


class Tags:
    """Layout of message tags: some bits number the operation in flight, the rest identify the call.

    A message of a call that its peer does not make finds no receive there, so nothing is overwritten by a wrong
    program, and two operations in flight cannot take each other's messages.
    """

    AGREEMENT, EXCHANGE, SLOTS, FIRST_FREE = 1, 2, 3, 4
    """Values in slot 0; 0 itself is the control tag."""

    def __init__(self, upper_bound: int) -> None:
        bits = min((upper_bound + 1).bit_length() - 1, 29)
        slot_bits = min(12, bits // 3 + 2)
        self.slots = 1 << slot_bits
        self._code_bits = bits - slot_bits

    def tag(self, slot: int, signature: Signature) -> int:
        """Return the tag of a call in a slot; slot 0 is for blocking calls."""
        codes = (1 << self._code_bits) - self.FIRST_FREE
        return (slot << self._code_bits) + self.FIRST_FREE + signature.code % codes


class WorkingMemory:
    """Working memory that blocking calls share, since only one runs at a time; it grows and is never returned."""

    _ALIGNMENT = 64

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._used = 0

    def restart(self) -> None:
        """Begin a new plan: it may use everything."""
        self._used = 0

    def take(self, count: int, dtype: np.dtype[Any]) -> np.ndarray:
        """Return uninitialised memory that no other part of the same plan uses."""
        nbytes = count * dtype.itemsize
        start = self._used
        if start + nbytes > self._memory.size:
            # Plans that hold the old memory keep it alive; parts of this plan may lie in old and new memory.
            grown = max(start + nbytes, 2 * self._memory.size, 1 << 16)
            raw = np.empty(grown + self._ALIGNMENT, np.uint8)
            shift = -raw.ctypes.data % self._ALIGNMENT
            self._memory = raw[shift : shift + grown]
        self._used = start + -(-nbytes // self._ALIGNMENT) * self._ALIGNMENT
        return self._memory[start : start + nbytes].view(dtype)


BUSY = "another collective is being called on this communicator, from a thread or a callback"


class Alone:
    """A lock that is not waited for: `with` raises RuntimeError if another thread, or a caller, is in a collective.

    Parameters
    ----------
    busy
        A word that is 1 while the lock is held, for compiled code to see.
    """

    __slots__ = ("_busy", "_lock")

    def __init__(self, busy: memoryview) -> None:
        self._lock = threading.Lock()
        self._busy = busy

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(BUSY)
        self._busy[0] = 1

    @contextmanager
    def after_others(self) -> Iterator[None]:
        """Wait for the lock, for a call that compiled code has begun; whoever has it now will be refused."""
        with self._lock:
            self._busy[0] = 1
            try:
                yield
            finally:
                self._busy[0] = 0

    def __exit__(self, *error: object) -> None:
        self._busy[0] = 0
        self._lock.release()


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
    oversubscribed: bool

    def close(self) -> None:
        """Free everything; collective."""


class Channel:
    """Private state of one communicator for our collectives.

    Attributes
    ----------
    comm
        The private duplicate.
    node
        The memory that all ranks share, or None if they do not, or if they are to be treated as `alone` on theirs.
    apart
        Whether every rank is on a node of its own.
    cluster
        The division into nodes, if there are several with more than one rank.
    front
        Counts the collectives, alike on all ranks in a correct program, and makes plain calls in one step.
    identity
        This rank's number in COMM_WORLD: random choices of different ranks must differ.
    compressed
        How many operations have compressed their messages here.
    sent_nbytes
        Bytes of all messages that this rank's collectives sent here; what goes through shared memory is none.
    broken
        Why nothing more can be done here, or None.
    refusal
        The number of a collective that this rank has refused and the others perhaps have not, or None.
    rules
        The tuning table, once it has been read; see :mod:`mpicoll.collectives.tuning_table`.
    paying_ranges, uncompressed
        What is known of compressors, and ``compression=`` that never compresses here; see
        :mod:`mpicoll.collectives.compression_tuning`.
    lanes, known
        Decided calls, by what tells them apart, and by their numbers in the dispatch table; see
        :mod:`mpicoll.collectives.plan_cache`.
    occupants
        The requests that took a tag slot last, until they are complete, or freed if they are persistent.
    slots
        Tag slots that the next persistent operations take, free on all ranks; see
        :func:`mpicoll.messages.call_agreement.take_slot`.
    """

    def __init__(self, comm: MPI.Intracomm, *, alone: bool = False, apart: bool = False) -> None:
        self.comm = comm.Dup()
        self.rank, self.size = comm.rank, comm.size
        self.tags = Tags(int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0))
        self.check, session = agree_on_settings(self.comm)
        self.polls = polls_before_yield(self.comm)
        self.apart = apart
        self.node = None if alone else node.make(self.comm, oversubscribed=self.polls == 1)
        self.cluster: Topology | None = None
        job = self.node.blocking if self.node is not None else empty_job(self.size, self.rank)
        self.dispatch = FastDispatch(self.size, None if self.check == "full" else job, checked=self.check == "default")
        self.watchdog = Watchdog(self.comm, session, self.dispatch.recall)
        self.working_memory = WorkingMemory()
        self.agreed: set[int] = set()
        self.broken: str | None = None
        self.refusal: int | None = None
        self.identity = int(MPI.COMM_WORLD.rank)
        self.compressed = 0
        self.sent_nbytes = 0
        self.rules: Any = None
        self.paying_ranges: dict[tuple[Any, ...], Any] = {}
        self.uncompressed: set[str] = set()
        self.alone = Alone(self.dispatch.busy)
        self.lanes: dict[Hashable, Any] = {}
        self.known: dict[int, Any] = {}
        self.occupants: dict[int, Any] = {}
        self.slots = deque(self.persistent_slots)
        self._plans: dict[Hashable, Any] = {}
        self._read_news_at = NEWS_EVERY
        self._nonblocking = 0
        _channels.add(self)

    @property
    def shared_nbytes(self) -> float:
        """The longest vector for which shared memory can be of use; -1 without any."""
        return -1 if self.node is None else self.node.longest

    @property
    def messages_nbytes(self) -> int:
        """Bytes of messages that this rank has sent here, inside its node and along its lane."""
        lanes = (self.cluster.node, self.cluster.lane) if self.cluster else ()
        return sum(each.sent_nbytes + each.dispatch.sent_nbytes for each in (self, *lanes) if each is not None)

    def enter(self, signature: Signature) -> int:
        """Begin a collective: return its number.

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
            self.break_off(f"{type(error).__name__}: {error}")
            raise

    def ensure_usable(self) -> None:
        """Raise CommunicatorBroken if nothing more can be done here."""
        if self.broken is not None:
            raise CommunicatorBroken(f"this communicator is unusable since: {self.broken}")

    def refuse(self, error: Exception) -> None:
        """Tell the others that this rank does not make the call that they make now.

        If they make it, the communicator is broken; :func:`mpicoll.messages.call_agreement.settle` finds out.
        """
        if self.broken is None:
            self.refuse_entered(self.dispatch.count(), error)

    def refuse_entered(self, number: int, error: Exception) -> None:
        """Do so for a call that has its number already."""
        self.refusal = number
        self.dispatch.hold()
        self.watchdog.refuse(number, f"refused its arguments: {type(error).__name__}: {error}")

    def break_off(self, reason: str, *kept: Any) -> None:
        """Mark the channel unusable; what is `kept` stays alive, since others may still write to it."""
        self.broken = self.broken or reason
        self.dispatch.shut()
        _kept.extend([self.node, *kept])

    def cached_plan(self, key: Hashable) -> Any:
        """Return the plan kept under `key`; None if there is none."""
        plan = self._plans.get(key)
        if plan is not None:
            plan.used = self.dispatch.number + 1
        return plan

    def keep_plan(self, key: Hashable, plan: Any) -> None:
        """Keep a plan for the next call; the least recently used one is freed, with the lanes that lead to it."""
        if len(self._plans) >= MAX_PLANS:
            # Calls note the number of the collective, which costs them less than keeping an order would.
            oldest = min(self._plans, key=lambda kept: self._plans[kept].last_use)
            dropped = self._plans.pop(oldest)
            for lane in dropped.lanes:
                del self.lanes[lane]
            self.dispatch.forget(dropped.table.address)
            self.known = {number: each for number, each in self.known.items() if each.plan is not dropped}
            dropped.free()
        plan.used = self.dispatch.number + 1
        self._plans[key] = plan

    def next_slot(self) -> int:
        """Return the tag slot of the next nonblocking operation, alike on all ranks.

        Slots come up again after some thousand operations; who takes one has to wait for its last occupant on this
        rank. On other ranks that one may still be on its way: they receive messages of one tag in the order sent.
        """
        self._nonblocking += 1
        return 1 + self._nonblocking % (self.tags.slots // 2 - 1)

    @property
    def persistent_slots(self) -> range:
        """The tag slots for persistent operations."""
        return range(self.tags.slots // 2, self.tags.slots)

    def release(self) -> None:
        """Free the requests; local, so that it can be done at any time, for instance before MPI is finalised."""
        for plan in self._plans.values():
            if self.broken is None:
                plan.free()
        self._plans.clear()
        self.lanes.clear()
        self.known.clear()
        self.dispatch.forget_all()

    def close(self) -> None:
        """Free everything; collective."""
        _channels.discard(self)
        self.release()
        self.dispatch.shut()
        if self.cluster is not None:
            self.cluster.close()
        if self.watchdog.drain(self.broken is not None):
            if self.node is not None:
                self.node.free()
            self.comm.Free()
        else:
            _kept.extend([self.comm, self.watchdog, self.node])
        self.broken = "it was freed"


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()
_kept: list[Any] = []
"""Memory that other ranks may still use after a failure, for as long as the process lives."""


@atexit.register
def _release_all() -> None:
    """Before MPI is finalised, free requests that would otherwise be reported as leaks."""
    if MPI.Is_initialized() and not MPI.Is_finalized():
        for channel in list(_channels):
            channel.release()
