"""Run schedules over mpi4py point-to-point calls.

A :class:`Plan` is a schedule bound to memory: persistent requests and kernel calls in order, made once and started as
often as wanted. A :class:`Run` is a plan on its way. Blocking, nonblocking and persistent collectives all do the same:
they differ only in who calls :meth:`Run.advance`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.errors import CorruptPayload, MpicollError
from mpicoll.runtime.channel import Channel
from mpicoll.runtime.engine import InFlight
from mpicoll.runtime.lowering import Message, Stage
from mpicoll.runtime.supervisor import Signature, Waiting

_Calls = tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...]
_testall = MPI.Request.Testall
_startall = MPI.Prequest.Startall


class Plan:
    """A schedule bound to memory and to a tag.

    Attributes
    ----------
    inbox, outbox
        Where the caller's data is to be copied before a run and the result is to be copied from after it; None if
        the plan works on the caller's memory.
    sent_nbytes
        Bytes of the messages that a run sends, without those whose length depends on data.
    used
        The number of the last collective that ran it, for the plan cache.
    lanes
        Keys of the channel's lanes that lead to it.
    """

    def __init__(
        self,
        channel: Channel,
        stages: Sequence[Stage],
        signature: Signature,
        tag: int,
        *,
        inbox: np.ndarray | None = None,
        outbox: np.ndarray | None = None,
    ) -> None:
        self.signature = signature
        self.inbox, self.outbox = inbox, outbox
        self.requests: list[list[MPI.Prequest]] = []
        self.stages: list[tuple[list[MPI.Prequest] | None, _Calls, list[MPI.Prequest] | None]] = []
        self.waits_for: list[int | None] = []
        self.peers: list[tuple[int, ...]] = []
        self._receives: list[MPI.Prequest] = []
        self._waits: list[list[Any]] = []
        self.sent_nbytes = 0
        self.used = 0
        self.lanes: list[Hashable] = []
        for stage in stages:
            self._add(channel, stage, tag)

    def _add(self, channel: Channel, stage: Stage, tag: int) -> None:
        wait = self._waits[stage.waits_for] if stage.waits_for is not None else None
        calls = tuple((call.function, call.arguments) for call in stage.calls)
        post = None
        if stage.messages is not None:
            late = [message for message in stage.messages if message.is_send and callable(message.data)]
            early = [message for message in stage.messages if not callable(message.data)]
            post = [_request(channel.comm, message, tag) for message in early]
            self.sent_nbytes += sum(m.data.nbytes for m in early if m.is_send and isinstance(m.data, np.ndarray))
            self.requests.append(post)
            self._receives += [r for r, message in zip(post, early, strict=True) if not message.is_send]
            self.peers.append(tuple({message.peer for message in stage.messages}))
            self._waits.append([*post, *(MPI.REQUEST_NULL for _ in late)] if late else post)
            if late:
                calls += ((_send, (channel, late, tag, self._waits[-1])),)
        self.stages.append((wait, calls, post))
        self.waits_for.append(stage.waits_for)

    def free(self) -> None:
        """Free the requests; none may be active."""
        for requests in self.requests:
            for request in requests:
                request.Free()
        self.requests, self.stages, self._receives, self._waits = [], [], [], []

    def cancel(self) -> None:
        """Take back the receives that are still posted, so that nothing more is written to the caller's memory."""
        for request in self._receives:
            if not request.Test():
                request.Cancel()
                request.Test()


def _send(channel: Channel, messages: Sequence[Message], tag: int, waits: list[MPI.Request]) -> None:
    """Send what messages without fixed data say now; their requests stand at the end of `waits`."""
    for place, message in enumerate(messages, len(waits) - len(messages)):
        data = message.data()  # type: ignore[operator]
        channel.sent_nbytes += data.nbytes
        waits[place] = channel.comm.Isend(data, message.peer, tag)


def _request(comm: MPI.Intracomm, message: Message, tag: int) -> MPI.Prequest:
    if message.is_send:
        return comm.Send_init(message.data, message.peer, tag)
    return comm.Recv_init(message.data, message.peer, tag)


class Run(InFlight):
    """A plan on its way."""

    __slots__ = ("_stage", "plan")

    def __init__(self, channel: Channel, plan: Plan, number: int) -> None:
        super().__init__(channel, number)
        channel.sent_nbytes += plan.sent_nbytes
        self.plan = plan
        self._stage = 0

    def advance(self) -> bool:
        """Go on as far as messages have come, without waiting; return whether the end is reached."""
        stages, position = self.plan.stages, self._stage
        end = len(stages)
        while position < end:
            wait, calls, post = stages[position]
            if wait and not _testall(wait):
                self._stage = position
                return False
            for function, arguments in calls:
                function(*arguments)
            position += 1
            if post:
                _startall(post)
        self._stage = position
        return True

    def waiting(self) -> Waiting:
        """Describe what this run waits for."""
        steps = len(self.plan.requests)
        step = self.plan.waits_for[self._stage] if self._stage < len(self.plan.stages) else steps - 1
        peers = self.plan.peers[step] if step is not None and steps else ()
        return Waiting(self.number, self.plan.signature, f"step {(step or 0) + 1} of {steps}", peers)

    def abandon(self, error: BaseException) -> None:
        """Take back the posted receives, keep the memory for what was sent, tell the others if they cannot know."""
        self.plan.cancel()
        self.channel.break_off(f"{type(error).__name__}: {error}", self.plan)
        if not isinstance(error, MpicollError) or isinstance(error, CorruptPayload):
            self.channel.supervisor.give_up(self.number, error)
