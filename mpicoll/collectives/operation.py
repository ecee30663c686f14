"""A collective whose arguments are checked: ready to be run, started or kept.

A :class:`CheckedOperation` knows the whole vector as one run of elements and what part of it comes from, and goes to,
the caller's buffers. Short vectors are *staged*: they are copied into memory of ours and back, so that a plan can be
used again for any buffers of the same length. Long ones are worked on where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpicoll.collectives import compressed, select
from mpicoll.collectives.binding import Allocate, bind, ends, whole_vector
from mpicoll.collectives.checked_arguments import CheckedArguments
from mpicoll.communicator.channel import Channel
from mpicoll.kernels.dispatch_table import STAGED_NBYTES
from mpicoll.messages.call_agreement import agree
from mpicoll.messages.lowering import KernelCall, Phase, lower
from mpicoll.messages.native import NONBLOCKING, Arguments, NativeRun, call_blocking
from mpicoll.messages.p2p import Plan, PlanRun
from mpicoll.progress.call_signature import Signature
from mpicoll.schedules import COLLECTIVES, find


class CheckedOperation(CheckedArguments):
    """A collective whose arguments are checked, and what can be done with it; see the module."""

    def plan(self, tag_slot: int, allocate: Allocate) -> Plan:
        """Bind the algorithm to memory: to the caller's if the vector is long, else to memory from `allocate`."""
        channel, staged, signature = self.channel, self.nbytes <= STAGED_NBYTES, self.signature()
        if self.compression is not None:
            source, target = whole_vector(self, staged, allocate)
            stages = compressed.stages(self, target if source is None else source, target, allocate)
            inbox, outbox = ends(self, target, staged)
        else:
            row = find(self.collective, self.algorithm)
            segments = select.segments(row, self.nbytes, channel.size)
            schedule = row.schedule(channel.size, channel.rank, root=self.root, segments=segments)
            vector, inbox, outbox = bind(self, schedule, staged, allocate)
            stages = lower(schedule, vector, self.reducer, lambda count: allocate(count, self.carrier))
        if self.persistent:
            stages, inbox, outbox = self._with_copies(stages, inbox, outbox), None, None
        tag = channel.tags.tag(tag_slot, signature)
        empty_tag = channel.tags.tag(tag_slot, signature.in_common())
        return Plan(channel, stages, signature, tag, inbox=inbox, outbox=outbox, empty_tag=empty_tag)

    def _with_copies(
        self, stages: Sequence[Phase], inbox: np.ndarray | None, outbox: np.ndarray | None
    ) -> tuple[Phase, ...]:
        """Return stages that also copy the data in and the result out: the caller's memory stays the same."""
        before, after = [], []
        if inbox is not None and self.given is not None:
            before = [KernelCall(np.copyto, (inbox, self.given.view(self.carrier)))]
        if outbox is not None and self.result is not None:
            after = [KernelCall(np.copyto, (self.result.view(self.carrier), outbox))]
        return (Phase(None, tuple(before), None), *stages, Phase(None, tuple(after), None))

    def shared_plan(self) -> Plan:
        """Return the plan for a blocking call, from the last calls if possible."""
        key: tuple[Any, ...] = (
            self.title,  # the plan carries the signature, and titles differ where collectives do not
            self.collective,
            self.algorithm,
            self.count,
            self.dtype,
            self.op_name,
            self.reducer,
            self.root,
            self.counts,
            self.recvcounts,
            self.compression,
            compressed.variant(self.compression),
        )
        if self.nbytes > STAGED_NBYTES:
            key += (
                self.source and self.source.address,
                self.target and self.target.address,
                self.given is not None and self.given.buffer is self.target,
            )
        else:
            key += (self.given is not None, self.result is not None)
        plan = self.channel.cached_plan(key)
        if plan is None:
            self.channel.working_memory.restart()
            plan = self.plan(0, self.channel.working_memory.take)
            self.channel.keep_plan(key, plan)
        return plan

    def check(self, signature: Signature, number: int, timeout: float) -> None:
        """Compare the call with the other ranks', as far as the mode asks for it."""
        channel = self.channel
        if channel.check == "full":
            agree(channel, signature, number, timeout)
        elif COLLECTIVES[self.collective].early and channel.check == "default":
            code = signature.common_code  # all ranks have this one, and so compare the call at the same time
            if code not in channel.agreed:
                agree(channel, signature, number, timeout)
                channel.agreed.add(code)

    def begin(self, plan: Plan, timeout: float, *, blocking: bool = True) -> PlanRun:
        """Enter the collective, copy the data in and return the run, not yet advanced.

        Comparing the call with the other ranks' waits for them: nonblocking calls do it only if ``full`` asks for it.
        """
        number = self.channel.enter(plan.signature)
        if blocking or self.channel.check == "full":
            self.check(plan.signature, number, timeout)
        self.load(plan)
        return PlanRun(self.channel, plan, number, patient=blocking)

    def load(self, plan: Plan) -> None:
        """Copy the caller's data to where the plan wants it."""
        if plan.inbox is not None and self.given is not None:
            np.copyto(plan.inbox, self.given.view(self.carrier))

    def unload(self, plan: Plan) -> None:
        """Copy the result to where the caller wants it."""
        if self.result is not None:
            if plan.outbox is not None:
                np.copyto(self.result.view(self.carrier), plan.outbox)
            self.result.buffer.give_back()

    def run(self, timeout: float) -> Plan:
        """Do it and wait for the end; return the plan, which is kept for the next time."""
        plan = self.shared_plan()
        self.begin(plan, timeout).finish(timeout)
        self.unload(plan)
        return plan


@dataclass
class NativeOperation:
    """A call that the MPI library makes.

    Attributes
    ----------
    chosen
        True for ``algorithm="native"``: then a blocking call is made as any program would make it.
    """

    channel: Channel
    collective: str
    title: str
    arguments: Arguments
    chosen: bool

    def signature(self) -> Signature:
        """Return what is known of the call."""
        return Signature.of(f"{self.title}(algorithm=native)")

    def enter(self, timeout: float) -> int:
        """Enter the collective and return its number."""
        signature = self.signature()
        number = self.channel.enter(signature)
        if self.channel.check == "full":
            agree(self.channel, signature, number, timeout)
        return number

    def start(self, timeout: float) -> NativeRun:
        """Start it nonblocking; if the MPI library refuses it, the other ranks are told."""
        number = self.enter(timeout)
        try:
            return self.begin(number)
        except Exception as error:
            self.channel.refuse_entered(number, error)
            raise

    def begin(self, number: int) -> NativeRun:
        """Make the MPI library's nonblocking call."""
        request = NONBLOCKING[self.collective](self.channel.comm, *self.arguments)
        return NativeRun(self.channel, request, self.signature(), number)

    def run(self, timeout: float) -> None:
        """Do it and wait for the end."""
        if self.chosen:
            self.enter(timeout)
            call_blocking(self.channel, self.collective, self.arguments)
        else:
            self.start(timeout).finish(timeout)


def fresh_memory(count: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Allocate memory for a plan that does not share the channel's."""
    return np.empty(count, dtype)
