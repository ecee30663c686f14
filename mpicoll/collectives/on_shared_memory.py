"""Execution of checked calls on the shared memory of a node."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.flat import from_array
from mpicoll.buffers.reduction_ops import reducer_for
from mpicoll.collectives import select
from mpicoll.collectives.binding import Allocate
from mpicoll.collectives.checked_arguments import VectorPart
from mpicoll.collectives.interrupted_calls import abandon_start
from mpicoll.collectives.operation import CheckedOperation, fresh_memory
from mpicoll.collectives.requests import FREED, STARTED_AGAIN, JobRequest, PersistentRequest, Request
from mpicoll.communicator.channel import Channel
from mpicoll.kernels import dispatch_table as table_words
from mpicoll.kernels import operation_words as words
from mpicoll.kernels import reduce as kernels
from mpicoll.kernels.executor import advance, await_others, begin
from mpicoll.kernels.operation_words import DONE, OTHER, WAITING
from mpicoll.messages.call_agreement import agree, refuse
from mpicoll.progress import progress_engine
from mpicoll.progress.call_signature import Signature
from mpicoll.progress.driver_thread import driver
from mpicoll.shared_memory import slot_lengths
from mpicoll.shared_memory.domain_memory import PLAN_LANES
from mpicoll.shared_memory.fast_dispatch import DTYPE_NUMBERS, op_word
from mpicoll.shared_memory.packed_calls import hash_of_offsets, mix_distinction, signature_of
from mpicoll.shared_memory.shared_operation import QueuedOperation, SharedOperation

_NEEDS_ROOM = (words.REDUCE_SCATTER, words.ALLTOALL, words.SCAN, words.EXSCAN)
"""Collectives whose result, in place, would overwrite elements that other ranks still read."""


class OperationWords(NamedTuple):
    """An operation as words of a job (see :mod:`mpicoll.kernels.operation_words`).

    Attributes
    ----------
    words
        Values by number of the word.
    aside
        Temporary memory for the result, or None.
    """

    words: dict[int, int]
    aside: np.ndarray | None

    @property
    def signature(self) -> Signature:
        """The call as every rank must make it."""
        return signature_of(self.words[words.CALL], self.words[words.COUNT])


def run(task: CheckedOperation, timeout: float, is_auto: bool = False) -> bool:
    """Execute an operation; return False, having done nothing, if ranks cannot access some rank's buffers.

    Trials may have decided how private memory is reached if it `is_auto`.

    Raises
    ------
    MismatchError, RemoteError, CollectiveTimeout
        The communicator is broken after them.
    """
    node, channel = task.channel.node, task.channel
    assert node is not None
    operation = _operation_or_refusal(task, timeout)
    number = _number(channel, operation, timeout)
    fill(node.blocking, task, operation)
    if is_auto and node.trials is not None:
        node.blocking[words.TIME_NEXT] = node.trials.are_for(task.collective, task.nbytes)
    status = begin.run(node.blocking_address)
    flight = SharedOperation(channel, node.blocking, number, status, task.op_name, patient=True)
    flight.may_fall_back = True
    flight.finish(timeout)
    if flight.falls_back:
        return False
    _unload(task, operation.aside)
    return True


def _operation_or_refusal(task: CheckedOperation, timeout: float) -> OperationWords:
    """Return an operation as words; if there is no memory for its result, the other ranks are told."""
    try:
        return operation_of(task)
    except Exception as error:
        refuse(task.channel, task.collective, error, timeout)


def _number(channel: Channel, operation: OperationWords, timeout: float, *, nonblocking: bool = False) -> int:
    """Enter the collective and return its number."""
    signature = operation.signature
    number = channel.enter(signature)
    if channel.check == "full":
        agree(channel, signature, number, timeout, nonblocking=nonblocking)
    elif channel.check == "default" and operation.words[words.COLLECTIVE] in words.EARLY:
        known = operation.words[words.CALL], operation.words[words.COUNT]
        operation.words[words.CAREFUL] = channel.dispatch.is_new(*known)
    return number


def go_on(channel: Channel) -> int:
    """Go on with a blocking call that :func:`mpicoll.kernels.dispatch.call` started, and return its status.

    Other threads can run meanwhile. A signal handler's exception abandons the call. Most calls of long vectors end
    here, without the objects by which :func:`end` waits: where ranks share cores, making them may take longer.
    """
    node = channel.node
    assert node is not None
    try:
        return int((await_others if progress_engine.may_sleep() else advance).run(node.blocking_address))
    except BaseException as error:  # even if the job is idle: the others may be making the call in another way
        SharedOperation(channel, node.blocking, channel.dispatch.number, WAITING).fail(error)
        raise


def end(channel: Channel, status: int, timeout: float) -> bool:
    """Complete a blocking call that :func:`mpicoll.kernels.dispatch.call` started; False as for :func:`run`."""
    assert channel.node is not None
    flight = SharedOperation(channel, channel.node.blocking, channel.dispatch.number, status, patient=True)
    flight.may_fall_back = True
    flight.finish(timeout)
    return not flight.falls_back


_address_of = functools.lru_cache(maxsize=256)(kernels.native_address)
"""Returns a reducer's address; looking it up takes longer than a short collective."""


def operation_of(task: CheckedOperation, allocate: Allocate = fresh_memory) -> OperationWords:
    """Return an operation as words."""
    node = task.channel.node
    assert node is not None
    collective = words.COLLECTIVES.index(task.collective)
    dtype = DTYPE_NUMBERS[task.dtype] if collective != words.BARRIER else 0  # as compiled code has it
    op = words.COLLECTIVES.index(task.tells) if task.tells else 0
    reducer = 0
    if task.reducer is not None:
        op = op_word(task.op_name, task.dtype, task.reducer)
        reducer = _address_of(task.reducer, task.dtype)
        task.channel.dispatch.learn(op, dtype, reducer)
    bounds, distinction = 0, task.root
    if task.counts is not None:
        offsets = np.concatenate([[0], np.cumsum(task.counts)]).astype(np.int64)
        bounds = offsets.ctypes.data
        distinction = hash_of_offsets(offsets, task.root)
        task.kept = offsets
    if task.whole is not None:
        distinction = mix_distinction(distinction, task.whole)
    send, recv, aside = _addresses(task, collective, node.rank, allocate)
    single_copy = int(task.algorithm == select.SINGLE_COPY)
    values = {
        words.COLLECTIVE: collective,
        words.COUNT: task.count,
        words.ITEMSIZE: task.dtype.itemsize,
        words.ROOT: task.root,
        words.CALL: table_words.pack_call(collective, single_copy, dtype, op, distinction),
        words.REDUCER: reducer,
        words.BOUNDS: bounds,
        words.SEND: send,
        words.RECV: recv,
        words.DISPLS: 0,
        words.CAREFUL: 0,
        words.METHOD: words.TRANSFER if single_copy else node.method,
    }
    return OperationWords(values, aside)


def _addresses(
    task: CheckedOperation, collective: int, rank: int, allocate: Allocate
) -> tuple[int, int, np.ndarray | None]:
    """Return the addresses of the input and of the result, and temporary memory for the result, or None."""
    given, result, aside = task.given, task.result, None
    send = given.address(task.carrier) if given is not None else 0
    recv = result.address(task.carrier) if result is not None else 0
    if collective in _NEEDS_ROOM and given is not None and result is not None and given.buffer is result.buffer:
        aside = allocate(result.stop - result.start, task.carrier)
        recv = aside.ctypes.data
    if collective == words.SCATTER and result is None:  # the root's part stays where it is
        recv = send + sum((task.counts or ())[:rank]) * task.dtype.itemsize
    if collective == words.BCAST:
        send = recv = max(send, recv)
    return send, recv, aside


def fill(job: np.ndarray, task: CheckedOperation, operation: OperationWords) -> None:
    """Write an operation and its plan to a job, and enter the plan in the dispatch table for later calls."""
    node = task.channel.node
    assert node is not None
    for word, value in operation.words.items():
        job[word] = value
    long = slot_lengths.is_long(job, task.collective, task.nbytes)
    job[words.PLAN] = node.plan(task.collective, task.root, long)
    task.channel.dispatch.learn_plan(operation.words[words.COLLECTIVE], long, task.root, int(job[words.PLAN]))


def _unload(task: CheckedOperation, aside: np.ndarray | None) -> None:
    if task.result is not None:
        if aside is not None:
            np.copyto(task.result.view(task.carrier), aside)
        task.result.buffer.give_back()


class SharedRequest(Request):
    """The request of one nonblocking call on shared memory that is started on the general path.

    If its lane is still in use on this rank, the operation starts when the one before it has ended.
    """

    def __init__(self, task: CheckedOperation, timeout: float) -> None:
        super().__init__(timeout)
        channel, node = task.channel, task.channel.node
        assert node is not None
        self._task: CheckedOperation | None = task
        self._operation = _operation_or_refusal(task, timeout)
        with node.nonblocking.alone():
            number = _number(channel, self._operation, timeout, nonblocking=True)
            lane = node.nonblocking.take_turn(node, task.nbytes)
            self._job = lane.job
            flight = QueuedOperation(channel, self._job, number, self._operation.signature, task.op_name)
            flight.begins_after(lane.last, self._start)
            node.nonblocking.end_turn(lane, self)
        self._begin(flight)

    def _start(self) -> int:
        assert self._task is not None
        fill(self._job, self._task, self._operation)
        return int(begin.run(self._job.ctypes.data))

    def _complete(self) -> None:
        assert self._task is not None
        _unload(self._task, self._operation.aside)
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
        operation = _operation_or_refusal(task, timeout)
        self._job = node.take_lane(lane.number, node.near_slot_nbytes(task.collective) if lane.near else None)
        self._task: CheckedOperation | None = task
        self._address = self._job.ctypes.data
        self._aside = operation.aside
        self._plain = self._aside is None and all(
            part is None or part.buffer.destination is None for part in (task.given, task.result)
        )
        self._short = self._address if self._plain else 0
        self._number = _number(task.channel, operation, timeout)
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
            _unload(task, self._aside)
        else:
            self._flight = self._operation.restart(status)
            progress_engine.add(self)
            if driver() is not None:
                self._let_drive()

    def _complete(self) -> None:
        if not self._plain and self._task is not None:
            _unload(self._task, self._aside)
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
