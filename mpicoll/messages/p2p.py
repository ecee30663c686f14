"""Execution of schedules by mpi4py's point-to-point calls.

A :class:`Plan` is a schedule bound to memory: persistent requests and kernel calls in order, made once and started any
number of times. A :class:`PlanRun` is a run of a plan. Blocking, nonblocking and persistent collectives use the same
plans; they differ only in who calls :meth:`PlanRun.advance`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.communicator.channel import Channel
from mpicoll.errors import CorruptPayload, MpicollError, OperationError
from mpicoll.messages.bound_plan import Table
from mpicoll.messages.calls import KernelCall
from mpicoll.messages.lowering import Message, Phase
from mpicoll.messages.prefixed_sends import PrefixedMemory, PrefixedSends, send_late
from mpicoll.messages.received_lengths import Expected, LengthMismatch, ReceivedLengths
from mpicoll.progress.call_signature import Signature, Waiting
from mpicoll.progress.in_flight import InFlight

_SPINS, _YIELDS = 50, 50
"""Number of polls for messages, without and with yielding the core, before other operations are advanced. Yielding
takes less than a microsecond if no other process waits for the core; otherwise it may be the one that is waited for."""

_OF_ONE_RANK = CorruptPayload, OperationError, LengthMismatch
"""Errors of which the other ranks do not know."""
_CANCEL_SECONDS = 1.0
"""How long a failed run waits for messages that cannot be cancelled."""
_MAX_SENT_NBYTES = (1 << 31) - 1
"""MPI_Isend, which compiled code calls, counts bytes in 32 bits; mpi4py sends longer messages."""


class Plan:
    """A collective bound to memory: a table of rows that is run any number of times, one run at a time.

    Parameters
    ----------
    inbox, outbox
        Memory to copy the caller's data to before a run, and to copy the result from after it; None if the plan works
        on the caller's memory.

    Attributes
    ----------
    sent_nbytes
        Bytes of the messages that a run sends, without those whose length depends on data.
    number
        The number of the collective that runs the plan now, or has run it last, where this class knows of the run.
    used
        The number of the last collective that ran the plan from Python.
    lanes
        Keys of the plan in the channel's plan cache.
    table, awaited
        The rows; and by row the number of the step, or of the part, that is awaited there, or None.
    """

    def __init__(
        self, signature: Signature, *, inbox: np.ndarray | None = None, outbox: np.ndarray | None = None
    ) -> None:
        self.signature = signature
        self.inbox, self.outbox = inbox, outbox
        self.table = Table()
        self.awaited: list[int | None] = [None]
        self.sent_nbytes = 0
        self.number = 0
        self.used = 0
        self.lanes: list[Hashable] = []

    @property
    def last_use(self) -> int:
        """The number of the last collective that ran the plan."""
        return max(self.used, self.table.begun)

    def _note(self, awaited: int | None) -> None:
        """Note what the rows that were added since the last time wait for."""
        self.awaited += [awaited] * (len(self.table.steps) - len(self.awaited))

    def progress(self) -> tuple[str, tuple[int, ...]]:
        """Return the progress of the present run, for messages, and the ranks that are waited for."""
        raise NotImplementedError

    def free(self) -> None:
        """Free what the plan holds of the MPI library; it may not be running."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Abandon the present run: nothing more is written to the caller's memory, but by ranks at work on it."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until no rank is at work on the memory of a run that was abandoned."""


class MessagePlan(Plan):
    """A schedule bound to memory and to a tag.

    Parameters
    ----------
    empty_tag
        The tag of messages without elements, whose sender need not know the element type; `tag` by default.
    uneven
        Whether each rank knows only its own counts, so that the lengths of received messages have to be checked.
    """

    def __init__(
        self,
        channel: Channel,
        stages: Sequence[Phase],
        signature: Signature,
        tag: int,
        *,
        inbox: np.ndarray | None = None,
        outbox: np.ndarray | None = None,
        empty_tag: int | None = None,
        uneven: bool = False,
    ) -> None:
        super().__init__(signature, inbox=inbox, outbox=outbox)
        self._empty_tag = tag if empty_tag is None else empty_tag
        self.requests: list[list[MPI.Prequest]] = []
        self.peers: list[tuple[int, ...]] = []
        self._receives: list[MPI.Prequest] = []
        self._waits: list[list[Any]] = []
        self._from_python: set[int] = set()  # steps with requests that only the interpreter knows
        self._checks: list[ReceivedLengths | None] = []
        self._uneven = uneven
        for stage in stages:
            self._add(channel, stage, tag)
            self._note(stage.waits_for)
        self.table.close()

    def progress(self) -> tuple[str, tuple[int, ...]]:
        """Return the step of the present run, and the ranks that it exchanges messages with."""
        steps = len(self.requests)
        step = self.awaited[self.table.at] if self.table.at < len(self.awaited) else steps - 1
        return f"step {(step or 0) + 1} of {steps}", self.peers[step] if step is not None and steps else ()

    def _add(self, channel: Channel, stage: Phase, tag: int) -> None:
        if stage.waits_for is not None:
            step = stage.waits_for
            self.table.wait(self._waits[step], fixed=step not in self._from_python, check=self._checks[step])
        for call in stage.calls:
            self.table.call(call)
        if stage.messages is None:
            return
        late = [message for message in stage.messages if message.is_send and callable(message.data)]
        early = [message for message in stage.messages if not callable(message.data)]
        post = [_request(channel.comm, message, self._empty_tag if _is_empty(message) else tag) for message in early]
        self.sent_nbytes += sum(m.data.nbytes for m in early if m.is_send and isinstance(m.data, np.ndarray))
        self.requests.append(post)
        self._receives += [r for r, message in zip(post, early, strict=True) if not message.is_send]
        self.peers.append(tuple({message.peer for message in stage.messages}))
        self._checks.append(self._check_of(early) if self._uneven else None)
        self._waits.append([*post, *(MPI.REQUEST_NULL for _ in late)] if late else post)
        if late:
            self._send_late(channel, late, tag)
        if post:
            self.table.post(post)

    def _check_of(self, messages: Sequence[Message]) -> ReceivedLengths:
        """Return the check of the lengths of messages that are received."""
        expected = [
            Expected(place, message.peer, message.data.nbytes)
            for place, message in enumerate(messages)
            if not message.is_send and isinstance(message.data, np.ndarray)
        ]
        return ReceivedLengths(self.signature.text, expected, len(messages))

    def _send_late(self, channel: Channel, late: Sequence[Message], tag: int) -> None:
        """Add the start of messages whose lengths are known only then."""
        prefixed = [(each.peer, each.data) for each in late if isinstance(each.data, PrefixedMemory)]
        if len(prefixed) == len(late) and all(data.memory.size <= _MAX_SENT_NBYTES for _, data in prefixed):
            self.table.send(PrefixedSends(channel, prefixed, tag, self._waits[-1]), self._waits[-1])
            return
        self._from_python.add(len(self._waits) - 1)
        self.table.call(KernelCall(_send, (channel, late, tag, self._waits[-1])))

    def free(self) -> None:
        """Free the requests; none may be active."""
        for requests in self.requests:
            for request in requests:
                request.Free()
        self.requests, self._receives, self._waits, self.table = [], [], [], Table()

    def cancel(self) -> None:
        """Cancel the receives that are still posted, so that nothing more is written to the caller's memory.

        The MPI library does not cancel a receive whose message is under way: it is waited for, but not for long.
        """
        posted = []
        for request in self._receives:
            with contextlib.suppress(MPI.Exception):  # one that has failed is over: its sender is dead
                if not request.Test():
                    request.Cancel()
                    posted.append(request)
        until = time.monotonic() + _CANCEL_SECONDS
        while (posted := [request for request in posted if not _has_ended(request)]) and time.monotonic() < until:
            time.sleep(1e-4)


def _has_ended(request: MPI.Request) -> bool:
    with contextlib.suppress(MPI.Exception):
        return bool(request.Test())
    return True


def _is_empty(message: Message) -> bool:
    return isinstance(message.data, np.ndarray) and message.data.size == 0


def _send(channel: Channel, messages: Sequence[Message], tag: int, waits: list[MPI.Request]) -> None:
    """Send messages whose data are known only now; their requests are the last ones of `waits`."""
    send_late(channel, [(each.peer, each.data()) for each in messages], tag, waits)  # type: ignore[operator]


def _request(comm: MPI.Intracomm, message: Message, tag: int) -> MPI.Prequest:
    if message.is_send:
        return comm.Send_init(message.data, message.peer, tag)
    return comm.Recv_init(message.data, message.peer, tag)


class PlanRun(InFlight):
    """A run of a plan.

    Parameters
    ----------
    patient
        Whether the caller waits for this run only.
    status
        The status that compiled code returned when it started the run; None to start it now.
    """

    __slots__ = ("plan",)

    def __init__(
        self, channel: Channel, plan: Plan, number: int, *, patient: bool = True, status: int | None = None
    ) -> None:
        super().__init__(channel, number)
        self.plan = plan
        self._start(status)
        if patient:
            self.be_patient()

    def _start(self, status: int | None) -> None:
        self.plan.number = self.number
        if status is not None:
            self.plan.table.resume(status)
        else:
            self.channel.sent_nbytes += self.plan.sent_nbytes
            self.plan.table.start()

    def resume(self, status: int) -> None:
        """Go on with the `status` that compiled code has returned elsewhere."""
        self.plan.table.resume(status)

    def be_patient(self) -> None:
        """Let compiled code poll more often for messages before it returns."""
        self.plan.table.wait_for(min(_SPINS, self.channel.polls), _YIELDS, self.channel.size)

    @property
    def polls(self) -> int:
        """Number of calls of :meth:`advance` before the core is yielded; 1 for compiled code, which polls by itself."""
        return 1 if self.plan.table.address else super().polls

    def advance(self) -> bool:
        """Advance as far as messages have arrived, waiting some microseconds; return whether the run is complete."""
        return self.plan.table.advance()

    def waiting(self) -> Waiting:
        """Return the state of the wait."""
        progress, peers = self.plan.progress()
        return Waiting(self.number, self.plan.signature, progress, peers)

    def abandon(self, error: BaseException) -> None:
        """Abandon the run, keep the plan alive, and tell the other ranks if they cannot know."""
        try:
            self.plan.cancel()
        finally:
            self.break_off(error)
            self.plan.settle()

    def break_off(self, error: BaseException) -> None:
        """Break the channel, and tell the other ranks if they cannot know."""
        self.channel.break_off(error, self.plan)
        if not isinstance(error, MpicollError) or isinstance(error, _OF_ONE_RANK):
            self.channel.watchdog.give_up(self.number, error)
