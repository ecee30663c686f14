"""Plans that consist of other plans: on the shared memory of a node, and of messages along a lane.

The executor (:mod:`mpicoll.kernels.composition`) runs such a plan in one compiled call, as it runs any other, so that
blocking, nonblocking and persistent calls are the same plan. Only the communicator of the caller numbers and compares
calls; the communicators of nodes and lanes carry data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from mpicoll.collectives.on_shared_memory import operation_of
from mpicoll.collectives.operation import Allocate, CheckedOperation, fresh_memory
from mpicoll.communicator.channel import Channel
from mpicoll.kernels import executor, withdrawal
from mpicoll.kernels import operation_words as words
from mpicoll.kernels.composition import PART_WORDS
from mpicoll.messages.bound_plan import Table
from mpicoll.messages.calls import KernelCall
from mpicoll.messages.p2p import Plan
from mpicoll.progress.call_signature import Signature, Waiting
from mpicoll.shared_memory import slot_lengths
from mpicoll.shared_memory.shared_operation import (
    calls_of,
    progress_of,
    raise_failure,
    start_through_stages,
    wait_for_others,
)

_ABANDONED = "an operation over several nodes was abandoned"


class ComposedPlan(Plan):
    """A plan that consists of other plans; its rows start parts and wait for them, copy, and call functions.

    Attributes
    ----------
    channel
        Of the caller's communicator.
    node_messages
        The messages that stand for the part on shared memory that is at work, or None.
    """

    def __init__(self, channel: Channel, signature: Signature) -> None:
        super().__init__(signature)
        self.channel = channel
        self.node_messages: MessagePart | None = None
        self._parts: list[PlanPart] = []
        self._on_free: list[Callable[[], None]] = []

    def start(self, part: PlanPart) -> None:
        """Add a start of a part."""
        self._parts.append(part)
        self.sent_nbytes += part.sent_nbytes
        self.table.start_part(part)
        self._note(None)

    def finish(self, part: PlanPart, aside: PlanPart | None = None) -> None:
        """Add a wait for the end of a part; another one, if it is given, progresses meanwhile."""
        self.table.finish_part(part, aside)
        self._note(self._parts.index(part))

    def call(self, call: KernelCall) -> None:
        """Add a call of a function, which is called again as long as it returns False, or a copy."""
        self.table.call(call)
        self._note(None)

    def close(self, inbox: np.ndarray | None, outbox: np.ndarray | None) -> None:
        """Add the end of the plan; see :class:`~mpicoll.messages.p2p.Plan` for the memory."""
        self.inbox, self.outbox = inbox, outbox
        self.table.close()

    def when_freed(self, function: Callable[[], None]) -> None:
        """Set a function to be called when the plan is freed, or a run of it is abandoned."""
        self._on_free.append(function)

    def progress(self) -> tuple[str, tuple[int, ...]]:
        """Return the part that is awaited in the present run with its progress, and the ranks waited for."""
        place = self.awaited[self.table.at] if self.table.at < len(self.awaited) else None
        if place is None:
            return "between two parts", ()
        progress, ranks = self._parts[place].progress()
        return f"part {place + 1} of {len(self._parts)} ({self._parts[place].title}), {progress}", ranks

    def free(self) -> None:
        """Free the parts; they refer to the plan, and would keep its memory until the next garbage collection."""
        for part in self._parts:
            part.free()
        self.give_back()
        self._parts, self.table, self.inbox, self.outbox = [], Table(), None, None

    @property
    def _jobs(self) -> Iterable[PlanPart]:
        """One part for each job: those on shared memory have one in common. Parts that Python runs have no job."""
        return {part.address or id(part): part for part in self._parts}.values()

    def cancel(self) -> None:
        """Abandon the present run of all parts."""
        for part in self._jobs:
            part.cancel()
        self.give_back()

    def settle(self) -> None:
        """Wait until no rank is at work on the memory of the run that was abandoned."""
        for part in self._jobs:
            part.settle()

    def give_back(self) -> None:
        """Return what the plan has taken from others; see :meth:`when_freed`."""
        while self._on_free:
            self._on_free.pop()()


class MessagePart:
    """A plan of messages as a part of another plan.

    Parameters
    ----------
    operation
        The operation that the plan is of; it keeps alive the memory that the plan uses.
    """

    words_address = 0

    def __init__(self, operation: CheckedOperation, plan: Plan, title: str) -> None:
        self._operation, self._channel, self._plan, self.title = operation, operation.channel, plan, title
        self.address, self.sent_nbytes = plan.table.address, plan.sent_nbytes

    @property
    def is_compiled(self) -> bool:
        """True if no row needs the interpreter."""
        return self._plan.table.is_compiled

    def start(self) -> None:
        """Start a run, from Python."""
        self._plan.table.start()

    def advance(self, status: int) -> bool:
        """Advance a run for which compiled code has returned `status`; return whether it is complete."""
        self._plan.table.resume(status)
        return self._plan.table.advance()

    def progress(self) -> tuple[str, tuple[int, ...]]:
        """Return the progress of the present run, and the ranks waited for."""
        progress, peers = self._plan.progress()
        return progress, tuple(self._channel.watchdog.numbers[peer] for peer in peers)

    def calls_after(self) -> Sequence[KernelCall]:
        """Return nothing: copies are rows of the plan."""
        return ()

    def free(self) -> None:
        """Free the messages."""
        self._plan.free()

    def cancel(self) -> None:
        """Cancel posted receives; the plan stays alive, since its messages may still be sent."""
        self._plan.cancel()
        self._channel.break_off(_ABANDONED, self._plan)

    def settle(self) -> None:
        """Do nothing: messages are cancelled at once."""


class SharedPart:
    """An operation on the shared memory of a node as a part of another plan.

    If the ranks cannot access each other's buffers, a run is made again through stages or, without those, by messages.
    All ranks of the node find that at the same time, in each run: another run may have other buffers on some ranks.

    Parameters
    ----------
    plan
        The plan that this is a part of.
    job
        The job in which it runs, one part of a plan after the other.
    fallback
        The algorithm by messages, and the tag slot for it.
    """

    is_compiled = True
    sent_nbytes = 0

    def __init__(
        self,
        plan: ComposedPlan,
        job: np.ndarray,
        operation: CheckedOperation,
        title: str,
        allocate: Allocate,
        fallback: tuple[str, int],
    ) -> None:
        self._fallback = fallback
        self._messages: MessagePart | None = None
        node = operation.channel.node
        assert node is not None
        self._plan, self._job, self._operation, self._node, self.title = plan, job, operation, node, title
        made = operation_of(operation, allocate)
        self._aside = made.aside
        long = slot_lengths.is_long(job, operation.collective, operation.nbytes)
        made.words[words.PLAN] = node.plan(operation.collective, operation.root, long)
        # The caller's communicator compares calls, where a rank of this node need not hear of all others.
        self._words = np.array([made.words[words.METHOD], *(made.words[word] for word in words.OPERATION_WORDS)])
        assert self._words.size == PART_WORDS
        self.address, self.words_address = job.ctypes.data, self._words.ctypes.data
        self._status = words.WAITING

    def start(self) -> None:
        """Start a run, from Python."""
        self._job[words.METHOD] = self._words[0]
        self._job[words.OPERATION_WORDS.start : words.OPERATION_WORDS.stop] = self._words[1:]
        self._status = int(executor.begin.run(self.address))

    def advance(self, status: int) -> bool:
        """Advance a run for which compiled code has returned `status`; return whether it is complete.

        Raises
        ------
        MismatchError
            If ranks make different calls; all ranks are told.
        OperationError, RemoteError
            If the run cannot complete.
        """
        if self._plan.node_messages is not None:
            return self._advance(self._plan.node_messages)
        if status == words.WAITING:
            status, self._status = self._status, words.WAITING
        if status == words.WAITING:
            status = int(executor.advance.run(self.address))
        if status == words.MISMATCH:
            self._raise_mismatch()
        raise_failure(status, self._plan.number, self._operation.op_name)
        if status == words.FALLBACK:
            self._start_again()
        return status == words.DONE

    def _start_again(self) -> None:
        """Start the run again, since the system does not copy all ranks' memory between processes."""
        if self._job[words.METHOD] == self._node.method:
            self._start_messages()
            return
        self._status = start_through_stages(self._job, self._node)

    def _start_messages(self) -> None:
        if self._messages is None:
            algorithm, tag_slot = self._fallback
            # On memory of its own: the MPI library may be refused the buffers by the system, too.
            operation = replace(self._operation, algorithm=algorithm, is_part=True, source=None, target=None)
            self._messages = MessagePart(operation, operation.plan(tag_slot, fresh_memory), self.title)
        self._operation.channel.sent_nbytes += self._messages.sent_nbytes
        self._messages.start()
        self._plan.node_messages, self._job[words.STATE] = self._messages, words.BY_MESSAGES

    def _advance(self, messages: MessagePart) -> bool:
        if not messages.advance(words.WAITING):
            return False
        self._plan.node_messages, self._job[words.STATE] = None, words.IDLE
        if self._aside is not None and self._operation.result is not None:  # from where `calls_after` copies it back
            np.copyto(self._aside, self._operation.result.view(self._operation.carrier))
        return True

    def _raise_mismatch(self) -> None:
        watchdog, number = self._plan.channel.watchdog, self._plan.number
        calls, gone = calls_of(self._job, self._operation.channel.watchdog.numbers)
        if len(calls) == 1:
            watchdog.raise_departure(number, gone)
        watchdog.raise_mismatch(Waiting(number, self._plan.signature, *self.progress()), calls)

    def progress(self) -> tuple[str, tuple[int, ...]]:
        """Return the progress of the present run, and the ranks waited for."""
        if self._plan.node_messages is not None:
            return self._plan.node_messages.progress()
        progress, missing = progress_of(self._job, self._node.size)
        return progress, tuple(self._operation.channel.watchdog.numbers[rank] for rank in missing)

    def calls_after(self) -> Sequence[KernelCall]:
        """Return the copy of a result that was written to temporary memory."""
        result = self._operation.result
        if self._aside is None or result is None:
            return ()
        return (KernelCall(np.copyto, (result.view(self._operation.carrier), self._aside)),)

    def free(self) -> None:
        """Free the messages, if there are any; the job belongs to the plan."""
        if self._messages is not None:
            self._messages.free()
            self._messages = None

    @property
    def _is_running(self) -> bool:
        return bool(self._job[words.STATE] != words.IDLE)

    def cancel(self) -> None:
        """Withdraw from the operation."""
        if self._plan.node_messages is not None:
            self._plan.node_messages.cancel()
            self._plan.node_messages, self._job[words.STATE] = None, words.IDLE
        if self._is_running:
            withdrawal.withdraw(self.address)
        self._operation.channel.break_off(_ABANDONED, self._job, self._plan)

    def settle(self) -> None:
        """Wait until no rank of the node is at work on the buffers of the run that was abandoned."""
        if self._is_running:
            wait_for_others(self._job, self._node, self._plan.number)


PlanPart = MessagePart | SharedPart
"""A part of a composed plan: `title` says for messages where and what it is, `sent_nbytes` how much a run sends."""
