"""Lowering of a schedule onto memory: chunk numbers become slices, and steps become phases of waits, kernels and posts.

The vector of a rank has up to two places in memory: the *source* (sendbuf), which is only read, and the *target*
(recvbuf, or a working buffer). Every chunk starts in the source if there is one, and moves to the target with the
first write. Tracking the place of each chunk avoids the initial copy of sendbuf in an out-of-place collective: a first
partial sum is received directly into the target and reduced there with the source. Only if a chunk is in the target
already, the message is received into scratch memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpicoll.buffers.reduction_ops import Reducer
from mpicoll.messages.calls import Call, KernelCall
from mpicoll.schedules import COLLECTIVES
from mpicoll.schedules.collective_table import Where
from mpicoll.schedules.types import Recv, Reduce, Schedule, Send, Step

MAX_MESSAGE_NBYTES = 1 << 30
"""Longer messages are split, since MPI libraries count the bytes of a message in 32 bits."""


class Message(NamedTuple):
    """A slice of memory to send or to receive into.

    `data` of a send may be a function that returns the memory when the message is posted, if its length depends on
    data; the receiver provides memory for the longest message.
    """

    is_send: bool
    peer: int
    data: np.ndarray | Callable[[], np.ndarray]


class Phase(NamedTuple):
    """Wait for the messages of step `waits_for`, run the calls, post `messages` (None: post nothing)."""

    waits_for: int | None
    calls: tuple[Call, ...]
    messages: tuple[Message, ...] | None


class Vector(NamedTuple):
    """A rank's memory for one collective, as flat arrays of the carrier type.

    Attributes
    ----------
    source, target
        Memory that is only read, None for an operation in place; memory that is written.
    bounds
        Element offsets of the chunks in `target`; chunks that are never there have length 0.
    source_bounds
        Element offsets of the chunks in `source`, if they differ from `bounds`.
    """

    source: np.ndarray | None
    target: np.ndarray
    bounds: Sequence[int]
    source_bounds: Sequence[int] | None = None


def lower(
    schedule: Schedule, vector: Vector, reducer: Reducer | None, scratch: Callable[[int], np.ndarray]
) -> tuple[Phase, ...]:
    """Return the phases of `schedule` for one rank.

    Parameters
    ----------
    reducer
        The kernel; None for collectives that only move data.
    scratch
        ``scratch(count)`` returns working memory for `count` elements of the carrier type.
    """
    return _Lowering(schedule, vector, reducer, scratch).stages()


class _Lowering:
    def __init__(
        self, schedule: Schedule, vector: Vector, reducer: Reducer | None, scratch: Callable[[int], np.ndarray]
    ) -> None:
        self.schedule = schedule
        self.vector = vector
        self.reducer = reducer
        self.in_source = [vector.source is not None] * schedule.chunks
        self.source_bounds = vector.bounds if vector.source_bounds is None else vector.source_bounds
        self._scratch_for = scratch
        self._scratch = np.empty(0, vector.target.dtype)
        self._scratch_used = [0] * schedule.window

    def stages(self) -> tuple[Phase, ...]:
        steps, window = self.schedule.steps, self.schedule.window
        self._scratch = self._scratch_for(window * self._scratch_per_step())
        lowered: list[tuple[tuple[KernelCall, ...], tuple[Message, ...], tuple[KernelCall, ...]]] = []
        result = []
        for number in range(len(steps) + window):
            done = number - window
            calls = lowered[done][2] if done >= 0 else ()
            messages = None
            if number < len(steps):
                lowered.append(self._lower_step(number, steps[number]))
                calls, messages = calls + lowered[number][0], lowered[number][1]
            result.append(Phase(done if done >= 0 else None, calls, messages))
        leftover = tuple(self._into_target(0, self.schedule.chunks)) if self._target_is_result() else ()
        if leftover:
            result.append(Phase(None, leftover, None))
        return tuple(result)

    def _target_is_result(self) -> bool:
        schedule = self.schedule
        if COLLECTIVES[schedule.collective].ends is Where.ROOT:
            return schedule.rank == schedule.root
        return schedule.collective != "exscan" or schedule.rank > 0

    def _scratch_per_step(self) -> int:
        """The most elements that one step may receive beside the vector."""
        bounds = self.vector.bounds
        loads = (
            sum(bounds[recv.stop] - bounds[recv.start] for recv in step.recvs if recv.reduce is not Reduce.COPY)
            for step in self.schedule.steps
        )
        return max(loads, default=0)

    def _lower_step(
        self, number: int, step: Step
    ) -> tuple[tuple[KernelCall, ...], tuple[Message, ...], tuple[KernelCall, ...]]:
        """Return the copies before, the messages (receives first, so that they are posted first), the calls after."""
        slot = number % self.schedule.window
        self._scratch_used[slot] = 0
        before: list[KernelCall] = []
        sends: list[Message] = []
        for send in step.sends:
            before += self._in_one_place(send)
            sends += self._split(True, send.peer, self._chunks(send))
        recvs: list[Message] = []
        after: list[KernelCall] = []
        for recv in step.recvs:
            landing, call = self._land(recv, slot)
            recvs += self._split(False, recv.peer, landing)
            after += call
        return tuple(before), tuple(recvs + sends), tuple(after)

    def _split(self, is_send: bool, peer: int, data: np.ndarray) -> Iterator[Message]:
        limit = max(1, MAX_MESSAGE_NBYTES // data.itemsize)
        for start in range(0, max(data.size, 1), limit):
            yield Message(is_send, peer, data[start : start + limit])

    def _range(self, message: Send | Recv) -> slice:
        return slice(self.vector.bounds[message.start], self.vector.bounds[message.stop])

    def _chunks(self, message: Send | Recv) -> np.ndarray:
        """Return where the chunks live; they are all in the same place."""
        source = self.vector.source
        if source is not None and message.start < message.stop and self.in_source[message.start]:
            return source[self.source_bounds[message.start] : self.source_bounds[message.stop]]
        return self.vector.target[self._range(message)]

    def _in_one_place(self, message: Send | Recv) -> list[KernelCall]:
        """Move a range that lives partly in the source to the target as a whole."""
        homes = self.in_source[message.start : message.stop]
        return [] if len(set(homes)) <= 1 else self._into_target(message.start, message.stop)

    def _into_target(self, start: int, stop: int) -> list[KernelCall]:
        """Copy runs of chunks that still live in the source."""
        calls, chunk = [], start
        while chunk < stop:
            end = chunk
            while end < stop and self.in_source[end]:
                self.in_source[end] = False
                end += 1
            calls += self._copies(chunk, end)
            chunk = end + 1
        return calls

    def _copies(self, start: int, stop: int) -> list[KernelCall]:
        """Copy chunks from the source to the target, those which the target has."""
        (source, target, bounds, _), found = self.vector, []
        runs = [(start, stop)] if self.source_bounds is bounds else [(chunk, chunk + 1) for chunk in range(start, stop)]
        for first, end in runs:
            part, own = slice(bounds[first], bounds[end]), slice(self.source_bounds[first], self.source_bounds[end])
            if source is not None and part.stop > part.start and own.stop > own.start:
                found.append(KernelCall(np.copyto, (target[part], source[own])))
        return found

    def _land(self, recv: Recv, slot: int) -> tuple[np.ndarray, list[KernelCall]]:
        """Return where a message is received, and the call that completes it."""
        part = self._range(recv)
        target = self.vector.target[part]
        if recv.reduce is Reduce.COPY:
            self.in_source[recv.start : recv.stop] = [False] * (recv.stop - recv.start)
            return target, []
        if recv.reduce is Reduce.REPLACE:
            return self._replace(recv, target, slot)
        before = self._in_one_place(recv)
        if self.vector.source is not None and recv.start < recv.stop and self.in_source[recv.start]:
            self.in_source[recv.start : recv.stop] = [False] * (recv.stop - recv.start)
            landing, own = target, self.vector.source[part]
        else:
            landing, own = self._take_scratch(slot, target.size), target
        operands = (own, landing) if recv.reduce is Reduce.OWN_FIRST else (landing, own)
        assert self.reducer is not None
        return landing, [*before, KernelCall(self.reducer, (target, *operands), True)] if target.size else []

    def _replace(self, recv: Recv, target: np.ndarray, slot: int) -> tuple[np.ndarray, list[KernelCall]]:
        """Receive beside the vector what replaces chunks that may be sent in the same step."""
        self.in_source[recv.start : recv.stop] = [False] * (recv.stop - recv.start)
        landing = self._take_scratch(slot, target.size)
        return landing, [KernelCall(np.copyto, (target, landing))] if target.size else []

    def _take_scratch(self, slot: int, count: int) -> np.ndarray:
        share = self._scratch.size // self.schedule.window
        start = slot * share + self._scratch_used[slot]
        self._scratch_used[slot] += count
        return self._scratch[start : start + count]
