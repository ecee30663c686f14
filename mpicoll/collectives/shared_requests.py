"""Requests of nonblocking and persistent calls on the shared memory of a node."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.flat import from_array
from mpicoll.buffers.reduction_ops import reducer_for
from mpicoll.collectives import select
from mpicoll.collectives.checked_arguments import VectorPart
from mpicoll.collectives.interrupted_calls import abandon_start, abandon_turn
from mpicoll.collectives.on_shared_memory import OperationWords, fill, number_of, operation_or_refusal, run, unload
from mpicoll.collectives.operation import CheckedOperation
from mpicoll.collectives.requests import FREED, STARTED_AGAIN, JobRequest, PersistentRequest, Request
from mpicoll.kernels import operation_words as words
from mpicoll.kernels.executor import begin
from mpicoll.kernels.operation_words import DONE, OTHER
from mpicoll.progress import progress_engine
from mpicoll.progress.driver_thread import driver
from mpicoll.shared_memory.domain_memory import PLAN_LANES
from mpicoll.shared_memory.shared_operation import QueuedOperation, SharedOperation


class SharedRequest(Request):
    """The request of one nonblocking call on shared memory that is started on the general path.

    If its lane is still in use on this rank, the operation starts when the one before it has ended.
    """

    def __init__(self, task: CheckedOperation, timeout: float) -> None:
        super().__init__(timeout)
        channel, node = task.channel, task.channel.node
        assert node is not None
        self._task: CheckedOperation | None = task
        self._operation = operation_or_refusal(task, timeout)
        with node.nonblocking.alone():
            number = number_of(channel, self._operation, timeout, nonblocking=True)
            try:
                self._take_lane(number)
            except BaseException as error:  # of a signal handler
                if self._flight is not None:
                    self.give_up(error)
                abandon_turn(channel, None, number, error)
                raise

    def _take_lane(self, number: int) -> None:
        """Begin the operation in the next lane, or let it wait there."""
        assert self._task is not None
        channel, node = self._task.channel, self._task.channel.node
        assert node is not None
        lane = node.nonblocking.take_turn(node, self._task.nbytes)
        self._job = lane.job
        flight = QueuedOperation(channel, self._job, number, self._operation.signature, self._task.op_name)
        flight.begins_after(lane.last, self._start)
        node.nonblocking.end_turn(lane, self)
        self._begin(flight)

    def advance(self) -> bool:
        """Advance the operation, see :meth:`Request.advance`; nothing if the one before it in its lane has to end."""
        flight = self._flight
        if isinstance(flight, QueuedOperation) and not flight.may_start:
            return False
        return super().advance()

    def _start(self) -> int:
        assert self._task is not None
        fill(self._job, self._task, self._operation)
        return int(begin.run(self._job.ctypes.data))

    def _complete(self) -> None:
        assert self._task is not None
        unload(self._task, self._operation.aside)
        self._task, self._operation = None, OperationWords({}, None)  # the lane keeps this request, not its buffers
        super()._complete()


class PersistentSlot(NamedTuple):
    """Number of a free operation lane, -1 if there is none; and whether all ranks' buffers lie in memory segments."""

    number: int
    near: bool


class PersistentSharedRequest(JobRequest, PersistentRequest):
    """A persistent collective on shared memory: all its data are in a job, and one compiled call starts it."""

    def __init__(self, task: CheckedOperation, lane: PersistentSlot, timeout: float) -> None:
        super().__init__(timeout)
        node = task.channel.node
        assert node is not None
        self._channel, self._node, self._lane = task.channel, node, lane
        operation = operation_or_refusal(task, timeout)
        self._job = node.take_lane(lane.number, node.near_slot_nbytes(task.collective) if lane.near else None)
        self._task: CheckedOperation | None = task
        self._address = self._job.ctypes.data
        self._aside = operation.aside
        self._plain = self._aside is None and all(
            part is None or part.buffer.destination is None for part in (task.given, task.result)
        )
        self._short = self._address if self._plain else 0
        self._number = number_of(task.channel, operation, timeout)
        fill(self._job, task, operation)
        call, name = operation.words[words.CALL], task.op_name
        self._operation = SharedOperation(task.channel, self._job, self._number, OTHER, name, call=call)

    def Start(self) -> None:
        """Start the operation; see :meth:`PersistentRequest.Start`."""
        if self.active:
            self._refuse_second_start()
        status = OTHER
        try:
            if self._channel.broken is None:
                status = begin.run(self._short)
            if status != DONE:
                self._start_the_long_way(status)
        except BaseException as error:
            if self._flight is None:
                abandon_start(self._channel, self._job, self._number, error)
            raise
        self.active = True

    @property
    def job_address(self) -> int:
        """Address of the job for :func:`mpicoll.kernels.executor.begin`; 0 if it cannot start this operation alone."""
        return self._short if self._channel.broken is None and not self.active else 0

    def continue_start(self, status: int) -> None:
        """Go on after compiled code has begun the operation with `status`."""
        if status != DONE:
            self._start_the_long_way(status)
        self.active = True

    def _start_the_long_way(self, status: int) -> None:
        """Complete a start for which `begin` returned `status`."""
        task = self._task
        if task is None:
            raise RuntimeError(FREED)
        self._channel.ensure_usable()
        if status == OTHER and self._plain:
            raise RuntimeError(STARTED_AGAIN)
        if not self._plain:
            task.refresh()
            status = begin.run(self._address)
        if status == DONE:
            unload(task, self._aside)
        else:
            self._flight = self._operation.restart(status)
            progress_engine.add(self)
            if driver() is not None:
                self._let_drive()

    def _complete(self) -> None:
        if not self._plain and self._task is not None:
            unload(self._task, self._aside)
        self._flight = None  # last: it is what a thread in Wait looks at while another one is here

    def Free(self) -> None:
        """Free the request; local."""
        self._refuse_free()
        if self._task is not None:
            self._node.return_lane(self._lane.number, self._job)
        self._task, self._short = None, 0


_FAR = 1 << PLAN_LANES


def find_lane(wanted: CheckedOperation, timeout: float) -> PersistentSlot:
    """Return an operation lane that is free on all ranks; collective."""
    node = wanted.channel.node
    assert node is not None
    places = [part.address(wanted.carrier) for part in (wanted.given, wanted.result) if part is not None]
    far = not all(map(node.in_own_arena, places))
    busy = np.array([node.busy_lanes | far * _FAR], np.int64)
    part = VectorPart(from_array(busy, "lanes", writable=True), 0, 1)
    reducer = reducer_for(MPI.BOR, busy.dtype)
    task = CheckedOperation(
        wanted.channel, "allreduce", "Lanes", select.SHARED, 1, busy.dtype, part, part, op_name="BOR", reducer=reducer
    )
    run(task, timeout)
    used = int(busy[0])
    if used & _FAR and wanted.nbytes > node.slot_nbytes and node.method == words.NOTHING:
        return PersistentSlot(-1, False)
    free = [lane for lane in range(PLAN_LANES) if not used >> lane & 1]
    return PersistentSlot(free[0] if free else -1, not used & _FAR)
