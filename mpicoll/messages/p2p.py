"""Execution of schedules by mpi4py's point-to-point calls.

A :class:`Plan` is a schedule bound to memory: persistent requests and kernel calls in order, made once and started any
number of times. A :class:`PlanRun` is a run of a plan. Blocking, nonblocking and persistent collectives use the same
plans; they differ only in who calls :meth:`PlanRun.advance`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.communicator.channel import Channel
from mpicoll.errors import CorruptPayload, MpicollError
from mpicoll.messages.bound_plan import Table
from mpicoll.messages.lowering import KernelCall, Message, Phase
from mpicoll.progress.call_signature import Signature, Waiting
from mpicoll.progress.progress_engine import InFlight

_SPINS, _YIELDS = 50, 50
"""Number of polls for messages, without and with yielding the core, before other operations are advanced. Yielding
takes less than a microsecond if no other process waits for the core; otherwise it may be the one that is waited for."""


class Plan:
    """A schedule bound to memory and to a tag.

    Parameters
    ----------
    empty_tag
        The tag of messages without elements, whose sender need not know the element type; `tag` by default.

    Attributes
    ----------
    inbox, outbox
        Memory to copy the caller's data to before a run, and to copy the result from after it; None if the plan works
        on the caller's memory.
    sent_nbytes
        Bytes of the messages that a run sends, without those whose length depends on data.
    used
        The number of the last collective that ran the plan from Python.
    lanes
        Keys of the plan in the channel's plan cache.
    table, awaited
        The rows; and by row the step whose messages are awaited there, or None.
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
    ) -> None:
        self.signature = signature
        self._empty_tag = tag if empty_tag is None else empty_tag
        self.inbox, self.outbox = inbox, outbox
        self.requests: list[list[MPI.Prequest]] = []
        self.peers: list[tuple[int, ...]] = []
        self.table = Table()
        self.awaited: list[int | None] = [None]
        self._receives: list[MPI.Prequest] = []
        self._waits: list[list[Any]] = []
        self.sent_nbytes = 0
        self.used = 0
        self.lanes: list[Hashable] = []
        for stage in stages:
            self._add(channel, stage, tag)
            self.awaited += [stage.waits_for] * (len(self.table.steps) - len(self.awaited))
        self.table.close()

    @property
    def last_use(self) -> int:
        """The number of the last collective that ran the plan."""
        return max(self.used, self.table.begun)

    def _add(self, channel: Channel, stage: Phase, tag: int) -> None:
        if stage.waits_for is not None:
            wait, posted = self._waits[stage.waits_for], self.requests[stage.waits_for]
            self.table.wait(wait, fixed=wait is posted)
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
        self._waits.append([*post, *(MPI.REQUEST_NULL for _ in late)] if late else post)
        if late:
            self.table.call(KernelCall(_send, (channel, late, tag, self._waits[-1])))
        if post:
            self.table.post(post)

    def free(self) -> None:
        """Free the requests; none may be active."""
        for requests in self.requests:
            for request in requests:
                request.Free()
        self.requests, self._receives, self._waits, self.table = [], [], [], Table()

    def cancel(self) -> None:
        """Cancel the receives that are still posted, so that nothing more is written to the caller's memory."""
        for request in self._receives:
            if not request.Test():
                request.Cancel()
                request.Test()


def _is_empty(message: Message) -> bool:
    return isinstance(message.data, np.ndarray) and message.data.size == 0


def _send(channel: Channel, messages: Sequence[Message], tag: int, waits: list[MPI.Request]) -> None:
    """Send messages whose data are known only now; their requests are the last ones of `waits`."""
    for place, message in enumerate(messages, len(waits) - len(messages)):
        data = message.data()  # type: ignore[operator]
        channel.sent_nbytes += data.nbytes
        waits[place] = channel.comm.Isend(data, message.peer, tag)


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
        if status is not None:
            plan.table.resume(status)
        else:
            channel.sent_nbytes += plan.sent_nbytes
            plan.table.start()
        if patient:
            self.be_patient()

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
        plan, steps = self.plan, len(self.plan.requests)
        step = plan.awaited[plan.table.at] if plan.table.at < len(plan.awaited) else steps - 1
        peers = plan.peers[step] if step is not None and steps else ()
        return Waiting(self.number, plan.signature, f"step {(step or 0) + 1} of {steps}", peers)

    def abandon(self, error: BaseException) -> None:
        """Cancel posted receives, keep the memory of sends alive, and tell the other ranks if they cannot know."""
        self.plan.cancel()
        self.channel.break_off(f"{type(error).__name__}: {error}", self.plan)
        if not isinstance(error, MpicollError) or isinstance(error, CorruptPayload):
            self.channel.watchdog.give_up(self.number, error)
