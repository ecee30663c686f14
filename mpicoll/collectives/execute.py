"""Calls from beginning to end: blocking, nonblocking and persistent ones, each the way that was chosen for it."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mpicoll.buffers.whole_arrays import whole_arrays
from mpicoll.collectives import compiled_calls, hierarchy, on_shared_memory, plan_cache, select, validate
from mpicoll.collectives.call_context import AnyOp, CallArguments, CallContext
from mpicoll.collectives.operation import CheckedOperation
from mpicoll.collectives.requests import CollectiveRequest, MessageRequest, NativeRequest, PersistentRequest, Request
from mpicoll.communicator.channel import BUSY, Channel
from mpicoll.kernels.dispatch import call
from mpicoll.kernels.operation_words import COLLECTIVES, DONE, OTHER
from mpicoll.messages.call_agreement import settle


def run(scope: CallContext, collective: str, sendbuf: Any, recvbuf: Any, op: AnyOp, root: Any, *settings: Any) -> None:
    """Make a blocking call, by the compiled path if it was made before (see :mod:`mpicoll.collectives.plan_cache`).

    Parameters
    ----------
    settings
        What else a :class:`~mpicoll.collectives.call_context.CallArguments` has, in its order.
    """
    channel = scope.channel
    with channel.alone:
        if channel.refusal is not None:
            settle(channel, scope.timeout)
        _refuse_if_running(channel)
        key = plan_cache.key_of(scope, collective, sendbuf, recvbuf, op, root, *settings)
        lane = channel.lanes.get(key) if key is not None else None
        if lane is not None:
            plan_cache.repeat(channel, lane, sendbuf, recvbuf, scope.timeout)
            return
        made = CallArguments(collective, sendbuf, recvbuf, op, root, *settings)
        task = validate.prepare(scope, made)
        if isinstance(task, CheckedOperation) and task.algorithm in select.ON_NODE:
            if on_shared_memory.run(task, scope.timeout):
                return
            task = validate.prepare(scope.by_messages(), made._replace(algorithm=None))
        if isinstance(task, CheckedOperation) and task.algorithm == select.HIERARCHY:
            hierarchy.run(task, scope.timeout)
            return
        plan = task.run(scope.timeout)
        if plan is not None:
            compiled_calls.learn(scope, made, task, plan)
        if key is not None and plan is not None:
            plan_cache.note(channel, key, task, plan)


def _refuse_if_running(channel: Channel) -> None:
    """Raise RuntimeError if compiled code has begun a call in another thread, which has not taken the lock yet."""
    if channel.dispatch.running:
        raise RuntimeError(BUSY)


def go_on(
    scope: CallContext,
    status: int,
    algorithm: str | None,
    collective: str,
    sendbuf: Any = None,
    recvbuf: Any = None,
    op: AnyOp = MPI.SUM,
    root: Any = 0,
) -> None:
    """Do what is left to do of a call after :func:`mpicoll.kernels.dispatch.call` returned `status`."""
    if status == OTHER:
        arrays = whole_arrays(collective, sendbuf, recvbuf) if algorithm is None else None
        if arrays is not None:
            status = _dispatch(scope, collective, *arrays, op, root)
        if arrays is None or status == OTHER:
            run(scope, collective, sendbuf, recvbuf, op, root, algorithm)
            return
        if status == DONE:
            return
        sendbuf, recvbuf = arrays
    with scope.channel.alone.after_others():
        if scope.channel.dispatch.running:
            compiled_calls.end(scope.channel, status, recvbuf, scope.timeout)
        elif not on_shared_memory.end(scope.channel, status, scope.timeout):
            _make_in_another_way(scope, CallArguments(collective, sendbuf, recvbuf, op, root))


def _dispatch(scope: CallContext, collective: str, sendbuf: Any, recvbuf: Any, op: AnyOp, root: Any) -> int:
    """Make a call with arrays by compiled code, as the methods of a communicator do; return its status."""
    table = scope.channel.dispatch
    if (
        scope.algorithm != select.AUTO
        or not table.usable
        or type(root) is not int
        or not 0 <= root < scope.channel.size
    ):
        return OTHER
    send = 0 if collective == "bcast" else id(sendbuf)
    return call.run(table.address, COLLECTIVES.index(compiled_calls.PLAIN[collective]), send, id(recvbuf), id(op), root)


def _make_in_another_way(scope: CallContext, made: CallArguments) -> None:
    """Make a call for which not all memory is within reach: through stages where there are some, else by messages."""
    task = validate.prepare(scope, made._replace(algorithm=select.SHARED)) if scope.means.copies else None
    if not isinstance(task, CheckedOperation) or not on_shared_memory.run(task, scope.timeout):
        validate.prepare(scope.by_messages(), made).run(scope.timeout)


def start(scope: CallContext, *what: Any) -> Request:
    """Begin a nonblocking call; `what` is that of a :class:`~mpicoll.collectives.call_context.CallArguments`."""
    if scope.channel.size == 1:  # there is nobody to wait for
        run(scope, *CallArguments(*what))
        return Request(scope.timeout)
    scope = scope._replace(means=scope.means._replace(hierarchy=False, may_block=False), may_wait=False)
    with scope.channel.alone:
        _refuse_if_running(scope.channel)
        settle(scope.channel, scope.timeout)
        task = validate.prepare(scope, CallArguments(*what))
        if isinstance(task, CheckedOperation) and task.algorithm in select.ON_NODE:
            return on_shared_memory.SharedRequest(task, scope.timeout)
        return CollectiveRequest(task, scope.timeout)


def keep(scope: CallContext, *what: Any) -> PersistentRequest:
    """Set up a persistent call; `what` is that of a :class:`~mpicoll.collectives.call_context.CallArguments`."""
    scope = scope._replace(means=scope.means._replace(may_block=False))
    scope = scope if scope.channel.node is not None else scope.by_messages()
    with scope.channel.alone:
        _refuse_if_running(scope.channel)
        settle(scope.channel, scope.timeout)
        task = validate.prepare(scope, CallArguments(*what))
        if isinstance(task, CheckedOperation) and task.algorithm in select.ON_NODE:
            lane = on_shared_memory.find_lane(task, scope.timeout)
            if lane.number >= 0:
                return on_shared_memory.PersistentSharedRequest(task, lane, scope.timeout)
            task = validate.prepare(scope.by_messages(), CallArguments(*what)._replace(algorithm=None))
        return (
            MessageRequest(task, scope.timeout)
            if isinstance(task, CheckedOperation)
            else NativeRequest(task, scope.timeout)
        )
