"""Calls from beginning to end: blocking, nonblocking and persistent ones, each the way that was chosen for it."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mpicoll.collectives import dense, fastlane, hierarchy, known, select, shared
from mpicoll.collectives.call import AnyOp, Call, Scope
from mpicoll.collectives.requests import CollectiveRequest, MessageRequest, NativeRequest, PersistentRequest, Request
from mpicoll.collectives.task import Task
from mpicoll.kernels.job import OTHER
from mpicoll.runtime.agreement import settle
from mpicoll.runtime.channel import BUSY, Channel


def run(scope: Scope, collective: str, sendbuf: Any, recvbuf: Any, op: AnyOp, root: Any, *settings: Any) -> None:
    """Make a blocking call, the short way if it was made before (see :mod:`mpicoll.collectives.fastlane`).

    Parameters
    ----------
    settings
        What else a :class:`~mpicoll.collectives.call.Call` has, in its order.
    """
    channel = scope.channel
    with channel.alone:
        if channel.refusal is not None:
            settle(channel, scope.timeout)
        _refuse_if_running(channel)
        key = fastlane.key_of(scope, collective, sendbuf, recvbuf, op, root, *settings)
        lane = channel.lanes.get(key) if key is not None else None
        if lane is not None:
            fastlane.repeat(channel, lane, sendbuf, recvbuf, scope.timeout)
            return
        made = Call(collective, sendbuf, recvbuf, op, root, *settings)
        task = dense.prepare(scope, made)
        if isinstance(task, Task) and task.algorithm in select.ON_NODE:
            if shared.run(task, scope.timeout):
                return
            task = dense.prepare(scope.by_messages(), made._replace(algorithm=None))
        if isinstance(task, Task) and task.algorithm == select.HIERARCHY:
            hierarchy.run(task, scope.timeout)
            return
        plan = task.run(scope.timeout)
        if plan is not None:
            known.learn(scope, made, task, plan)
        if key is not None and plan is not None:
            fastlane.note(channel, key, task, plan)


def _refuse_if_running(channel: Channel) -> None:
    """Raise RuntimeError if compiled code has begun a call in another thread, which has not taken the lock yet."""
    if channel.front.running:
        raise RuntimeError(BUSY)


def go_on(
    scope: Scope,
    status: int,
    algorithm: str | None,
    collective: str,
    sendbuf: Any = None,
    recvbuf: Any = None,
    op: AnyOp = MPI.SUM,
    root: Any = 0,
) -> None:
    """Do what is left to do of a call after :func:`mpicoll.kernels.calls.call` returned `status`."""
    if status == OTHER:
        run(scope, collective, sendbuf, recvbuf, op, root, algorithm)
        return
    with scope.channel.alone.after_others():
        if scope.channel.front.running:
            known.end(scope.channel, status, recvbuf, scope.timeout)
        elif not shared.end(scope.channel, status, scope.timeout):
            _make_in_another_way(scope, Call(collective, sendbuf, recvbuf, op, root))


def _make_in_another_way(scope: Scope, made: Call) -> None:
    """Make a call for which not all memory is within reach: through stages where there are some, else by messages."""
    task = dense.prepare(scope, made._replace(algorithm=select.SHARED)) if scope.means.copies else None
    if not isinstance(task, Task) or not shared.run(task, scope.timeout):
        dense.prepare(scope.by_messages(), made).run(scope.timeout)


def start(scope: Scope, *what: Any) -> Request:
    """Begin a nonblocking call; `what` is that of a :class:`~mpicoll.collectives.call.Call`."""
    if scope.channel.size == 1:  # there is nobody to wait for
        run(scope, *Call(*what))
        return Request(scope.timeout)
    scope = scope._replace(means=scope.means._replace(hierarchy=False, may_block=False), may_wait=False)
    with scope.channel.alone:
        _refuse_if_running(scope.channel)
        settle(scope.channel, scope.timeout)
        task = dense.prepare(scope, Call(*what))
        if isinstance(task, Task) and task.algorithm in select.ON_NODE:
            return shared.NodeRequest(task, scope.timeout)
        return CollectiveRequest(task, scope.timeout)


def keep(scope: Scope, *what: Any) -> PersistentRequest:
    """Set up a persistent call; `what` is that of a :class:`~mpicoll.collectives.call.Call`."""
    scope = scope._replace(means=scope.means._replace(may_block=False))
    scope = scope if scope.channel.node is not None else scope.by_messages()
    with scope.channel.alone:
        _refuse_if_running(scope.channel)
        settle(scope.channel, scope.timeout)
        task = dense.prepare(scope, Call(*what))
        if isinstance(task, Task) and task.algorithm in select.ON_NODE:
            lane = shared.find_lane(task, scope.timeout)
            if lane.number >= 0:
                return shared.SharedRequest(task, lane, scope.timeout)
            task = dense.prepare(scope.by_messages(), Call(*what)._replace(algorithm=None))
        return MessageRequest(task, scope.timeout) if isinstance(task, Task) else NativeRequest(task, scope.timeout)
