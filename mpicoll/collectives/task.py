"""A collective whose arguments are checked: ready to be run, started or kept.

A :class:`Task` knows the whole vector as one run of elements and what part of it comes from, and goes to, the
caller's buffers. Short vectors are *staged*: they are copied into memory of ours and back, so that a plan can be used
again for any buffers of the same length. Long ones are worked on where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpicoll.collectives import compressed, select
from mpicoll.collectives.binding import Allocate, bind, ends, whole_vector
from mpicoll.kernels import reduce as kernels
from mpicoll.kernels.table import STAGED_NBYTES
from mpicoll.runtime.agreement import agree
from mpicoll.runtime.buffers import Buffer, view_at
from mpicoll.runtime.channel import Channel
from mpicoll.runtime.lowering import Call, Stage, lower
from mpicoll.runtime.native import Arguments, NativeRun, call_blocking
from mpicoll.runtime.ops import Reducer
from mpicoll.runtime.p2p import Plan, Run
from mpicoll.runtime.supervisor import Signature
from mpicoll.schedules import COLLECTIVES, find


@dataclass(frozen=True)
class Part:
    """Elements ``start`` to ``stop - 1`` of the vector, which stand in `buffer` from element `displ` on."""

    buffer: Buffer
    start: int
    stop: int
    displ: int = 0

    def address(self, carrier: np.dtype[Any]) -> int:
        """Return where the first element is."""
        return self.buffer.address + self.displ * carrier.itemsize

    def view(self, carrier: np.dtype[Any]) -> np.ndarray:
        """Return the elements in the caller's buffer."""
        return view_at(self.address(carrier), self.stop - self.start, carrier)


@dataclass
class Task:
    """See the module. Collectives differ only in these facts.

    Attributes
    ----------
    counts
        Elements per rank, for collectives in which ranks own parts of the vector; None where the vector is one piece.
    given, result
        The parts of the vector that the caller's buffers supply and receive; None if nothing.
    source, target
        Buffers that hold the whole vector and may be used in place of copies: `source` is only read, `target` written.
    """

    channel: Channel
    collective: str
    title: str
    algorithm: str
    count: int
    dtype: np.dtype[Any]
    given: Part | None
    result: Part | None
    source: Buffer | None = None
    target: Buffer | None = None
    counts: tuple[int, ...] | None = None
    recvcounts: tuple[int, ...] | None = None
    """What comes from each rank in an alltoall, where that is not what goes to it."""
    uneven: bool = False
    """Whether ranks know only their own counts, so that counts cannot be compared."""
    root: int = 0
    op_name: str = ""
    reducer: Reducer | None = None
    ordered: bool = False
    """Whether operands must be combined in rank order."""
    compression: compressed.Compression | None = None
    """How messages are compressed, if they are; see :func:`mpicoll.collectives.compressed.algorithms`."""
    persistent: bool = False
    """Whether it is set up once, and then started in an order that need not be the same on all ranks."""
    kept: Any = None
    """What must live as long as the task."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole vector."""
        return self.count * self.dtype.itemsize

    @property
    def carrier(self) -> np.dtype[Any]:
        """The type in which kernels see the elements."""
        return kernels.carrier(self.dtype)

    def signature(self) -> Signature:
        """Return the call as every rank must make it."""
        parts = [f"count={self.count}" if self.counts is None else f"counts={_short(self.counts)}"]
        if self.uneven:
            parts = []
        parts.append(f"dtype={self.dtype}")
        if self.op_name:
            parts.append(f"op={self.op_name}")
        if COLLECTIVES[self.collective].rooted:
            parts.append(f"root={self.root}")
        if self.compression is not None:
            parts.append(f"compression={self.compression}")
        return Signature.of(f"{self.title}({', '.join(parts)}, algorithm={self.algorithm})")

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
        return Plan(channel, stages, signature, channel.tags.tag(tag_slot, signature), inbox=inbox, outbox=outbox)

    def _with_copies(
        self, stages: Sequence[Stage], inbox: np.ndarray | None, outbox: np.ndarray | None
    ) -> tuple[Stage, ...]:
        """Return stages that also copy the data in and the result out: the caller's memory stays the same."""
        before, after = [], []
        if inbox is not None and self.given is not None:
            before = [Call(np.copyto, (inbox, self.given.view(self.carrier)))]
        if outbox is not None and self.result is not None:
            after = [Call(np.copyto, (self.result.view(self.carrier), outbox))]
        return (Stage(None, tuple(before), None), *stages, Stage(None, tuple(after), None))

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
            self.channel.arena.restart()
            plan = self.plan(0, self.channel.arena.take)
            self.channel.keep_plan(key, plan)
        return plan

    def check(self, signature: Signature, number: int, timeout: float) -> None:
        """Compare the call with the other ranks', as far as the mode asks for it."""
        channel = self.channel
        if channel.check == "full":
            agree(channel, signature, number, timeout)
        elif COLLECTIVES[self.collective].early and channel.check == "default" and signature.code not in channel.agreed:
            agree(channel, signature, number, timeout)
            channel.agreed.add(signature.code)

    def begin(self, plan: Plan, timeout: float, *, blocking: bool = True) -> Run:
        """Enter the collective, copy the data in and return the run, not yet advanced.

        Comparing the call with the other ranks' waits for them: nonblocking calls do it only if ``full`` asks for it.
        """
        number = self.channel.enter(plan.signature)
        if blocking or self.channel.check == "full":
            self.check(plan.signature, number, timeout)
        self.load(plan)
        return Run(self.channel, plan, number, patient=blocking)

    def refresh(self) -> None:
        """Take the present contents of arrays that are stood in for by copies; persistent operations start with it."""
        for buffer in {id(b): b for b in (self.source, self.target, self.given and self.given.buffer) if b}.values():
            buffer.take_in()

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


def _short(counts: tuple[int, ...]) -> str:
    return str(list(counts)) if len(counts) <= 16 else f"{list(counts[:8])}... (hash {hash(counts) & 0xFFFFFFFF:08x})"


@dataclass
class NativeTask:
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
            return NativeRun(self.channel, self.collective, self.arguments, self.signature(), number)
        except Exception as error:
            self.channel.refuse_entered(number, error)
            raise

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
