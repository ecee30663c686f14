"""Execution of blocking, nonblocking and persistent calls, on shared memory, by messages or by the MPI library."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mpicoll.buffers.held_memory import held
from mpicoll.buffers.reduction_ops import has_kernels
from mpicoll.collectives import (
    compiled_calls,
    gathered_reductions,
    kept_reductions,
    on_shared_memory,
    plan_cache,
    select,
    shared_requests,
    validate,
)
from mpicoll.collectives.call_context import AnyOp, CallArguments, CallContext, is_auto
from mpicoll.collectives.interrupted_calls import refuse_if_running
from mpicoll.collectives.message_requests import MessageRequest
from mpicoll.collectives.native_requests import NativeRequest, NonblockingNativeRequest
from mpicoll.collectives.nonblocking_messages import NonblockingMessageRequest
from mpicoll.collectives.operation import CheckedOperation, NativeOperation
from mpicoll.collectives.plain_arguments import plain_arguments
from mpicoll.collectives.requests import PersistentRequest, Request
from mpicoll.communicator.call_lock import Nested
from mpicoll.kernels.dispatch import call
from mpicoll.kernels.known_reductions import NOT_COMBINED
from mpicoll.kernels.operation_words import COLLECTIVES, DONE, OTHER, REDUCE_SCATTER, WAITING
from mpicoll.kernels.packed_views import PACKED
from mpicoll.messages.call_agreement import NoSlotFree, settle

_NUMBERS = {name: number for number, name in enumerate(COLLECTIVES)} | {"reduce_scatter_block": REDUCE_SCATTER}


def run(scope: CallContext, collective: str, sendbuf: Any, recvbuf: Any, op: AnyOp, root: Any, *settings: Any) -> None:
    """Make a blocking call, with a cached plan if it was made before (see :mod:`mpicoll.collectives.plan_cache`).

    Parameters
    ----------
    settings
        The further fields of a :class:`~mpicoll.collectives.call_context.CallArguments`, in its order.
    """
    try:
        scope.channel.alone.call(_run_alone, scope, collective, sendbuf, recvbuf, op, root, *settings)
    except Nested:  # the interrupted call may be using its plan: the MPI library makes this one
        made = CallArguments(collective, sendbuf, recvbuf, op, root, *settings)
        validate.prepare(scope, made._replace(algorithm=select.NATIVE, compression=None)).run(scope.timeout)


def _run_alone(
    scope: CallContext, collective: str, sendbuf: Any, recvbuf: Any, op: AnyOp, root: Any, *settings: Any
) -> None:
    channel = scope.channel
    if channel.refusal is not None:
        settle(channel, scope.timeout)
    refuse_if_running(channel)
    key = plan_cache.key_of(scope, collective, sendbuf, recvbuf, op, root, *settings)
    lane = channel.plans.lanes.get(key) if key is not None else None
    if lane is not None:
        plan_cache.repeat(channel, lane, sendbuf, recvbuf, scope.timeout)
        return
    made = CallArguments(collective, sendbuf, recvbuf, op, root, *settings)
    task = validate.prepare(scope, made)
    if isinstance(task, CheckedOperation) and task.algorithm in select.ON_NODE:
        if on_shared_memory.run(task, scope.timeout, is_auto(scope, made.algorithm)):
            return
        # Its plan is not kept: ranks with other arrays would try shared memory again.
        _make_in_another_way(scope, made._replace(algorithm=None))
        return
    plan = task.run(scope.timeout)
    if plan is not None:
        compiled_calls.learn(scope, made, task, plan)
    if key is not None and plan is not None:
        plan_cache.note(channel, key, task, plan)


def go_on(
    scope: CallContext,
    table: int,
    status: int,
    algorithm: str | None,
    collective: str,
    sendbuf: Any = None,
    recvbuf: Any = None,
    op: AnyOp = MPI.SUM,
    root: Any = 0,
) -> None:
    """Complete a call for which :func:`mpicoll.kernels.dispatch.call` returned `status`, which may be DONE.

    Parameters
    ----------
    table
        With which it was called; 0 if it was not.
    """
    if status >= PACKED:
        _complete_packed(scope, table, status - PACKED, algorithm, collective, sendbuf, recvbuf, op, root)
        return
    if status != OTHER and not scope.channel.dispatch.running:
        kept = held(sendbuf), held(recvbuf)
        if status == WAITING:
            status = on_shared_memory.go_on(scope.channel)
        if status != DONE:
            complete(scope, status, CallArguments(collective, sendbuf, recvbuf, op, root))
        del kept
        return
    if status != OTHER:
        root = int(root)  # compiled code has accepted it
    plain, has_root = None, type(root) is int and 0 <= root < scope.channel.size
    may_gather = status == OTHER and table != 0 and has_root and collective in gathered_reductions.COLLECTIVES
    if may_gather and _reduce_known(scope, table, collective, sendbuf, recvbuf, op, root):
        return
    if may_gather and not has_kernels(op) and _gather(scope, table, collective, sendbuf, recvbuf, op, root):
        return
    if table and has_root:
        plain = plain_arguments(collective, sendbuf, recvbuf, scope.channel.size, scope.channel.rank == root)
    if status == OTHER:
        if plain is not None:
            scope.channel.dispatch.begin_packing(scope.channel.node is None)
            status = call.run(table, _NUMBERS[collective], plain.sendbuf, plain.recvbuf, op, root)
        if status == OTHER:
            if may_gather and has_kernels(op) and _gather(scope, table, collective, sendbuf, recvbuf, op, root):
                return
            run(scope, collective, sendbuf, recvbuf, op, root, algorithm)
            return
    if plain is not None:
        sendbuf, recvbuf = plain.sendbuf, plain.recvbuf
    if status != DONE:
        complete(scope, status, CallArguments(collective, sendbuf, recvbuf, op, root))
    if plain is not None:
        plain.unpack()


def _complete_packed(scope: CallContext, table: int, status: int, *call: Any) -> None:
    """Complete a call whose arguments compiled code has packed; see :func:`go_on`."""
    dispatch = scope.channel.dispatch
    if dispatch.running:
        dispatch.forget_packed()  # its result comes through memory of the plan
    with dispatch.unpacking():
        go_on(scope, table, status, *call)


def _gather(scope: CallContext, table: int, collective: str, sendbuf: Any, recvbuf: Any, op: AnyOp, root: int) -> bool:
    """Make a reduction that no kernel executes, if compiled code can gather it; return whether it has been made."""
    begun = gathered_reductions.begin(scope.channel, table, collective, sendbuf, recvbuf, op, root)
    if begun is None:
        return False
    go_on(scope, 0, begun.status, None, "allgatherv", begun.own, begun.rows)
    begun.vectors.combine(begun.rows)
    kept_reductions.note(begun.vectors, sendbuf, recvbuf)
    return True


def _reduce_known(
    scope: CallContext, table: int, collective: str, sendbuf: Any, recvbuf: Any, op: AnyOp, root: int
) -> bool:
    """Make a reduction that no kernel executes, if compiled code knows it; return whether it has been made."""
    known = scope.channel.kept_reductions
    status = OTHER if known is None else known.begin(table, collective, sendbuf, recvbuf, op, root)
    if status == OTHER:
        return False
    if status not in (DONE, NOT_COMBINED):
        kept = held(sendbuf), held(recvbuf)
        try:
            go_on(scope, 0, status, None, "allgatherv", *known.memory)
            status = known.combine()
        finally:
            known.end()
        del kept
    if status == NOT_COMBINED:
        raise known.error
    return True


def complete(scope: CallContext, status: int, made: CallArguments) -> None:
    """Complete a call that has begun with `status`."""
    kept = held(made.sendbuf), held(made.recvbuf)
    try:
        scope.channel.alone.call_later(_complete_alone, scope, status, made)
    finally:
        del kept


def _complete_alone(scope: CallContext, status: int, made: CallArguments) -> None:
    if scope.channel.dispatch.running:
        compiled_calls.end(scope.channel, status, made.sendbuf, made.recvbuf, scope.timeout)
    elif not on_shared_memory.end(scope.channel, status, scope.timeout):
        _make_in_another_way(scope, made)


def _make_in_another_way(scope: CallContext, made: CallArguments) -> None:
    """Make a call by messages whose buffers the ranks cannot all access."""
    scope.channel.dispatch.forget_packed()
    validate.prepare(scope.by_messages(), made).run(scope.timeout)


def start(scope: CallContext, *what: Any) -> Request:
    """Start a nonblocking call with the fields of a :class:`~mpicoll.collectives.call_context.CallArguments`."""
    if scope.channel.size == 1:  # no other rank takes part
        run(scope, *CallArguments(*what))
        return Request(scope.timeout)
    scope = scope._replace(is_blocking=False, may_wait=False)
    return scope.channel.alone.call(_start_alone, scope, CallArguments(*what))


def _start_alone(scope: CallContext, made: CallArguments) -> Request:
    refuse_if_running(scope.channel)
    settle(scope.channel, scope.timeout)
    task = validate.prepare(scope, made)
    if isinstance(task, CheckedOperation) and task.algorithm in select.ON_NODE:
        return shared_requests.SharedRequest(task, scope.timeout)
    if isinstance(task, CheckedOperation):
        return NonblockingMessageRequest(task, scope.timeout)
    assert isinstance(task, NativeOperation)  # parts arrive in blocking calls only
    return NonblockingNativeRequest(task, scope.timeout)


def keep(scope: CallContext, *what: Any) -> PersistentRequest:
    """Set up a persistent call with the fields of a :class:`~mpicoll.collectives.call_context.CallArguments`."""
    scope.channel.is_lent = True
    return scope.channel.alone.call(_keep_alone, scope._replace(is_blocking=False), CallArguments(*what))


def _keep_alone(scope: CallContext, made: CallArguments) -> PersistentRequest:
    refuse_if_running(scope.channel)
    settle(scope.channel, scope.timeout)
    task = validate.prepare(scope, made)
    if isinstance(task, CheckedOperation) and task.algorithm in select.ON_NODE:
        lane = shared_requests.find_lane(task, scope.timeout)
        if lane.number >= 0:
            return shared_requests.PersistentSharedRequest(task, lane, scope.timeout)
        task = validate.prepare(scope.by_messages(), made._replace(algorithm=None))
    if isinstance(task, CheckedOperation):
        try:
            return MessageRequest(task, scope.timeout)
        except NoSlotFree:
            if made.compression is not None:
                raise
        task = validate.prepare(scope, made._replace(algorithm=select.NATIVE))
    assert isinstance(task, NativeOperation)
    return NativeRequest(task, scope.timeout)
