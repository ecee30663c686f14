"""Execution of checked calls on the shared memory of a node."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from mpicoll.collectives import select
from mpicoll.collectives.binding import Allocate
from mpicoll.collectives.operation import CheckedOperation, fresh_memory
from mpicoll.communicator.channel import Channel
from mpicoll.kernels import dispatch_table as table_words
from mpicoll.kernels import operation_words as words
from mpicoll.kernels import reduce as kernels
from mpicoll.kernels.executor import advance, await_others, begin
from mpicoll.kernels.operation_words import WAITING
from mpicoll.messages.call_agreement import agree, refuse
from mpicoll.progress import progress_engine
from mpicoll.progress.call_signature import Signature
from mpicoll.shared_memory import slot_lengths
from mpicoll.shared_memory.fast_dispatch import DTYPE_NUMBERS, op_word
from mpicoll.shared_memory.packed_calls import hash_of_offsets, mix_distinction, signature_of
from mpicoll.shared_memory.shared_operation import SharedOperation

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
    operation = operation_or_refusal(task, timeout)
    number = number_of(channel, operation, timeout)
    fill(node.blocking, task, operation)
    if is_auto and node.trials is not None:
        node.blocking[words.TIME_NEXT] = node.trials.are_for(task.collective, task.nbytes)
    status = begin.run(node.blocking_address)
    flight = SharedOperation(channel, node.blocking, number, status, task.op_name, patient=True)
    flight.may_fall_back = True
    flight.finish(timeout)
    if flight.falls_back:
        return False
    unload(task, operation.aside)
    return True


def operation_or_refusal(task: CheckedOperation, timeout: float) -> OperationWords:
    """Return an operation as words; if there is no memory for its result, the other ranks are told."""
    try:
        return operation_of(task)
    except Exception as error:
        refuse(task.channel, task.collective, error, timeout)


def number_of(channel: Channel, operation: OperationWords, timeout: float, *, nonblocking: bool = False) -> int:
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


def unload(task: CheckedOperation, aside: np.ndarray | None) -> None:
    """Copy the result from temporary memory, if it was made there, and give it to the caller."""
    if task.result is not None:
        if aside is not None:
            np.copyto(task.result.view(task.carrier), aside)
        task.result.buffer.give_back()
