"""Operations: collectives with checked arguments, to be executed, started, or kept as persistent ones.

A :class:`CheckedOperation` describes the whole vector as one run of elements, and the parts of it that the caller's
buffers supply and receive. Short vectors are *staged*: they are copied to working memory and back, so that one plan
serves all buffers of that length. Plans for long vectors work on the caller's buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.collectives import select
from mpicoll.collectives.binding import Allocate, bind, ends, whole_vector
from mpicoll.collectives.checked_arguments import CheckedArguments
from mpicoll.collectives.plan_feedback import in_key
from mpicoll.communicator.channel import Channel
from mpicoll.errors import MpicollError
from mpicoll.kernels.dispatch_table import STAGED_NBYTES
from mpicoll.messages.call_agreement import PairLengths, agree, compare, refuse
from mpicoll.messages.calls import KernelCall
from mpicoll.messages.lowering import Phase, lower
from mpicoll.messages.native import BLOCKING, NONBLOCKING, PERSISTENT, Arguments, NativeRun
from mpicoll.messages.p2p import MessagePlan, Plan, PlanRun
from mpicoll.progress.call_signature import Signature
from mpicoll.schedules import COLLECTIVES, find


class CheckedOperation(CheckedArguments):
    """A collective with checked arguments that mpicoll's algorithms execute; see the module."""

    def plan(self, tag_slot: int, allocate: Allocate) -> Plan:
        """Return a plan: the algorithm bound to the caller's memory for long vectors, else to that of `allocate`."""
        channel, signature = self.channel, self.signature()
        staged = self.nbytes <= STAGED_NBYTES and not self.is_part
        if self.compression is not None:
            source, target = whole_vector(self, staged, allocate)
            from mpicoll.collectives import compressed_phases

            stages = compressed_phases.stages(self, target if source is None else source, target, allocate)
            inbox, outbox = ends(self, target, staged)
        else:
            row = find(self.collective, self.algorithm)
            segments = select.segments(row, self.nbytes, channel.size)
            schedule = row.schedule(channel.size, channel.rank, root=self.root, segments=segments)
            vector, inbox, outbox = bind(self, schedule, staged, allocate)
            stages = lower(schedule, vector, self.reducer, lambda count: allocate(count, self.carrier))
        if self.persistent or self.is_part:
            stages, inbox, outbox = self._with_copies(stages, inbox, outbox), None, None
        tag = channel.tags.tag(tag_slot, signature)
        empty_tag = channel.tags.tag(tag_slot, signature.in_common())
        return MessagePlan(
            channel, stages, signature, tag, inbox=inbox, outbox=outbox, empty_tag=empty_tag, uneven=self.uneven
        )

    def _with_copies(
        self, stages: Sequence[Phase], inbox: np.ndarray | None, outbox: np.ndarray | None
    ) -> tuple[Phase, ...]:
        """Return the phases with copies in and out, for operations whose buffers are the same in each run."""
        before, after = [], []
        if inbox is not None and self.given is not None:
            before = [KernelCall(np.copyto, (inbox, self.given.view(self.carrier)))]
        if outbox is not None and self.result is not None:
            after = [KernelCall(np.copyto, (self.result.view(self.carrier), outbox))]
        return (Phase(None, tuple(before), None), *stages, Phase(None, tuple(after), None))

    def plan_key(self) -> tuple[Any, ...]:
        """Return what a plan depends on, besides tag slot and working memory."""
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
            in_key(self.compression),
            self.variant(),
        )
        if self.nbytes > STAGED_NBYTES:
            return key + self.memory()
        return (*key, self.given is not None, self.result is not None)

    def resources(self, tag_slot: int) -> tuple[tuple[dict[int, Any], int], ...]:
        """Return what one operation at a time may use: mappings from numbers to requests, and the numbers."""
        return ((self.channel.occupants, tag_slot),)

    def agree_on_memory(self, signature: Signature, number: int, timeout: float) -> None:
        """Agree with the other ranks on memory for a persistent operation, before its plan is made."""

    def plan_or_refusal(self, make: Callable[[], Plan], timeout: float) -> Plan:
        """Return the plan that `make` returns; if it raises an exception, the other ranks are told."""
        try:
            return make()
        except MpicollError:  # of a call inside, which all ranks have heard of
            raise
        except Exception as error:  # there is no memory for it, or a state is not for these ranks
            refuse(self.channel, self.collective, error, timeout)

    def shared_plan(self) -> Plan:
        """Return the plan for a blocking call, the cached one if there is one."""
        key = self.plan_key()
        plan = self.channel.plans.find(key)
        if plan is None:
            self.channel.working_memory.restart()
            plan = self.plan(0, self.channel.working_memory.take)
            self.channel.plans.keep(key, plan)
        return plan

    def memory(self) -> tuple[Any, ...]:
        """Return what a plan for a long vector knows of the caller's memory."""
        return (
            self.source and self.source.address,
            self.target and self.target.address,
            self.given is not None and self.given.buffer is self.target,
        )

    def variant(self) -> str:
        """Return the variant of the plan that the state of the compression asks for; "" if there is only one."""
        if self.compression is None:
            return ""
        from mpicoll.collectives import compressed_phases

        return compressed_phases.variant(self.compression)

    def check(self, signature: Signature, number: int, timeout: float) -> None:
        """Compare the call with the other ranks' calls, if ``MPICOLL_CHECK`` asks for it; see :func:`agree`."""
        channel = self.channel
        if channel.check == "full":
            compare(channel, signature, self.pair_lengths(), number, timeout)
        elif COLLECTIVES[self.collective].early and channel.check == "default":
            code = signature.common_code  # all ranks have this one, and so compare the call at the same time
            if code not in channel.agreed:
                agree(channel, signature, number, timeout)
                channel.agreed.add(code)

    def begin(self, plan: Plan, timeout: float) -> PlanRun:
        """Enter the collective, copy the data in and return the run, not yet advanced."""
        number = self.channel.enter(plan.signature)
        self.check(plan.signature, number, timeout)
        self.load(plan)
        return PlanRun(self.channel, plan, number)

    def load(self, plan: Plan) -> None:
        """Copy the caller's data to the plan's inbox, if it has one."""
        if plan.inbox is not None and self.given is not None:
            np.copyto(plan.inbox, self.given.view(self.carrier))

    def unload(self, plan: Plan) -> None:
        """Copy the result to the caller's buffer."""
        if self.result is not None:
            if plan.outbox is not None:
                np.copyto(self.result.view(self.carrier), plan.outbox)
            self.result.buffer.give_back()

    def run(self, timeout: float) -> Plan | None:
        """Execute the operation and return its plan, which is cached for the next call; None if it is not."""
        plan = self.plan_or_refusal(self.shared_plan, timeout)
        self.begin(plan, timeout).finish(timeout, self)
        self.unload(plan)
        return plan


@dataclass
class NativeOperation:
    """A collective that the MPI library executes.

    Attributes
    ----------
    chosen
        True for ``algorithm="native"``: a blocking call is then the MPI library's blocking one, without a deadline.
    packed
        The call whose packed buffers the arguments are; None where the arguments are the caller's.
    described
        The signature of the call, if it says more than the collective.
    lengths
        Bytes of the blocks, where ranks do not know all counts and this one has read its own.
    """

    channel: Channel
    collective: str
    title: str
    arguments: Arguments
    chosen: bool
    packed: CheckedOperation | None = None
    described: Signature | None = None
    lengths: PairLengths | None = None

    def signature(self) -> Signature:
        """Return the signature of the call."""
        return self.described or Signature.of(f"{self.title}(algorithm=native)")

    def enter(self, timeout: float, *, nonblocking: bool = False) -> int:
        """Enter the collective and return its number."""
        signature = self.signature()
        number = self.channel.enter(signature)
        if self.channel.check == "full":
            compare(self.channel, signature, self.lengths, number, timeout, nonblocking=nonblocking)
        return number

    def start(self, timeout: float, *, nonblocking: bool = True) -> NativeRun:
        """Start the nonblocking form; if the MPI library refuses it, the other ranks are told.

        Parameters
        ----------
        nonblocking
            False for a blocking call, which waits for it.
        """
        number = self.enter(timeout, nonblocking=nonblocking)
        try:
            return self.begin(number)
        except Exception as error:
            self.channel.refuse_entered(number, error)
            raise

    def begin(self, number: int) -> NativeRun:
        """Make the MPI library's nonblocking call."""
        return self.follow(NONBLOCKING[self.collective](self.channel.comm, *self.arguments), number)

    def keep(self) -> MPI.Request:
        """Make the MPI library's persistent call; NotImplementedError where it has none."""
        return PERSISTENT[self.collective](self.channel.comm, *self.arguments)

    def follow(self, request: MPI.Request, number: int) -> NativeRun:
        """Return the run of a request that has been started."""
        return NativeRun(self.channel, request, self.signature(), number)

    def unload(self) -> None:
        """Copy a packed result to its places in the caller's buffer."""
        if self.packed is not None and self.packed.result is not None:
            self.packed.result.buffer.give_back()

    def run(self, timeout: float) -> None:
        """Execute the operation."""
        if self.chosen:
            self.enter(timeout)
            BLOCKING[self.collective](self.channel.comm, *self.arguments)
        else:
            self.start(timeout, nonblocking=False).finish(timeout, self)


def fresh_memory(count: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Allocate memory for a plan that does not share the channel's."""
    return np.empty(count, dtype)
