"""Persistent collectives by messages."""

from __future__ import annotations

from typing import Literal

from mpi4py import MPI

from mpicoll.collectives.interrupted_calls import abandon_plan
from mpicoll.collectives.operation import CheckedOperation, fresh_memory
from mpicoll.collectives.requests import FREED, STARTED_AGAIN, JobRequest, PersistentRequest, Request
from mpicoll.compression import ErrorFeedback
from mpicoll.errors import MpicollError
from mpicoll.kernels import composition, nonblocking_calls
from mpicoll.kernels.operation_words import DONE, OTHER, WAITING
from mpicoll.messages.call_agreement import take_slot
from mpicoll.messages.p2p import PlanRun
from mpicoll.progress import progress_engine


class MessageRequest(JobRequest, PersistentRequest):
    """A persistent collective by messages: all its data are in a plan, and one compiled call starts it."""

    def __init__(self, task: CheckedOperation, timeout: float) -> None:
        super().__init__(timeout)
        channel, signature = task.channel, task.signature()
        # Ranks may start theirs in any order, so that only the number from the set-up is the same on all.
        self._number = channel.enter(signature)
        task.check(signature, self._number, timeout)
        self._slot = take_slot(channel, signature, self._number, timeout)
        task.persistent = True
        try:
            task.agree_on_memory(signature, self._number, timeout)
            plan = task.plan(self._slot, fresh_memory)
        except MpicollError:  # which all ranks have heard of
            raise
        except Exception as error:  # there is no memory for it
            channel.refuse_entered(self._number, error)
            raise
        self._channel, self._plan = channel, plan
        self._plain = self._plan.table.is_compiled and all(
            part is None or part.buffer.destination is None for part in (task.given, task.result)
        )
        self._address = self._plan.table.address if self._plain else 0
        self._task: CheckedOperation | None = task
        channel.occupants[self._slot] = None  # not this request, which is freed when nobody has it

    def Start(self) -> None:
        """Start the operation; see :meth:`PersistentRequest.Start`."""
        self._refuse_second_start()
        try:
            status = nonblocking_calls.begin_messages.run(self._address) if self._channel.broken is None else OTHER
            if status != OTHER:
                self._go_on_after(status)
        except BaseException as error:
            if self._flight is None:
                abandon_plan(self._channel, self._plan, self._number, error, self)
            raise
        if status == OTHER:
            self._start_the_long_way()

    def _go_on_after(self, status: int) -> None:
        """Go on after compiled code has begun the operation with `status`."""
        self.active = True
        self._channel.sent_nbytes += self._plan.sent_nbytes
        if status != DONE:
            self._flight = PlanRun(self._channel, self._plan, self._number, patient=False, status=status)
            if status == WAITING or not self.step():
                progress_engine.add(self)

    def _start_the_long_way(self) -> None:
        task = self._task
        if task is None:
            raise RuntimeError(FREED)
        self._channel.ensure_usable()
        if self._plain:
            raise RuntimeError(STARTED_AGAIN)
        if isinstance(task.compression, ErrorFeedback):
            task.compression.check(task.count)
        task.refresh()
        self.active = True
        self._begin(PlanRun(self._channel, self._plan, self._number, patient=False))

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Wait until the operation is complete; see :meth:`Request.Wait`."""
        if not self._plain:
            return Request.Wait(self, status)
        return super().Wait(status)

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return whether the operation is complete; see :meth:`Request.Test`."""
        if not self._plain:
            return Request.Test(self, status)
        return super().Test(status)

    def _go_on(self) -> bool:
        return self._note(composition.advance.run(self._address))

    _look = _go_on

    def Free(self) -> None:
        """Free the request; local."""
        self._refuse_free()
        if self._task is not None:
            self._channel.occupants.pop(self._slot, None)
            if not self._channel.has_failed:
                self._plan.free()
        self._task, self._address = None, 0

    def _complete(self) -> None:
        if self._task is not None and not self._plain:
            self._task.unload(self._plan)
        super()._complete()
