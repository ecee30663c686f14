"""Cache of calls by messages that compiled code makes again; see :mod:`mpicoll.kernels.call_cache`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicoll.collectives.call_context import AnyTask, CallArguments, CallContext
from mpicoll.collectives.operation import CheckedOperation
from mpicoll.collectives.plan_cache import CachedPlan, whole
from mpicoll.collectives.select import AUTO
from mpicoll.communicator.channel import Channel
from mpicoll.kernels.dispatch_table import KNOWN_LENGTH, STAGED_NBYTES, pack_call
from mpicoll.kernels.operation_words import AT_ONCE_NBYTES, COLLECTIVES
from mpicoll.kernels.reduce import native_address
from mpicoll.messages.p2p import Plan, PlanRun
from mpicoll.shared_memory.fast_dispatch import DTYPE_NUMBERS, CompiledCall, op_number

_PLAIN = {name: name for name in COLLECTIVES if name != "reduce_scatter"} | {"reduce_scatter_block": "reduce_scatter"}
"""Collectives that compiled code makes, by the names of calls; others have signatures, and tags, of their own."""


def learn(scope: CallContext, made: CallArguments, task: AnyTask, plan: Plan) -> None:
    """Enter a call in the cache of compiled code, if its arguments identify it."""
    channel = scope.channel
    if made.algorithm not in (None, AUTO) or scope.algorithm != AUTO or not channel.dispatch.usable:
        return
    if (
        not isinstance(task, CheckedOperation)
        or _PLAIN.get(made.collective) != task.collective
        or not plan.table.is_compiled
    ):
        return
    known = _describe(task, plan)
    if known is None:
        return
    channel.plans.known[channel.dispatch.know(known)] = CachedPlan(plan, plan.inbox, plan.outbox)
    if channel.dispatch.remembered > 2 * KNOWN_LENGTH:
        live = channel.dispatch.known()
        channel.plans.known = {number: lane for number, lane in channel.plans.known.items() if number in live}


def _describe(task: CheckedOperation, plan: Plan) -> CompiledCall | None:
    """Return a call in the words of compiled code; None for one that compiled code cannot make."""
    if (task.count == 0) != (task.collective == "barrier"):
        return None
    dtype = DTYPE_NUMBERS.get(task.dtype) if task.count else 0
    op = 0 if task.reducer is None else op_number(task.op_name, task.dtype, task.reducer)
    plain = task.compression is None and not task.uneven and len(set(task.counts or ())) <= 1
    plain &= all(box is None or box.nbytes <= AT_ONCE_NBYTES for box in (plan.inbox, plan.outbox))
    if not plain or dtype is None or op is None:
        return None
    ends = ((task.given, plan.inbox), (task.result, plan.outbox))
    if not all(whole(part) or (task.nbytes <= STAGED_NBYTES and box is not None) for part, box in ends):
        return None
    send, recv = (0 if part is None else part.address(task.carrier) for part in (task.given, task.result))
    if task.collective == "bcast":
        send = recv = max(send, recv)
    if task.nbytes <= STAGED_NBYTES:
        send = recv = 0
    if task.reducer is not None:
        task.channel.dispatch.learn(op, dtype, native_address(task.reducer, task.dtype))
    call = pack_call(COLLECTIVES.index(task.collective), 0, dtype, op, task.root)
    return CompiledCall(
        call, task.count, send, recv, plan.table.address, plan.inbox, plan.outbox, plan.sent_nbytes, plan.signature
    )


def end(channel: Channel, status: int, sendbuf: Any, recvbuf: Any, timeout: float) -> None:
    """Wait for the end of a call that compiled code began with `status`."""
    lane, number = channel.plans.known[channel.dispatch.running], channel.dispatch.number
    channel.watchdog.record(number, lane.plan.signature)
    try:
        PlanRun(channel, lane.plan, number, status=status).finish(timeout, sendbuf, recvbuf)
    finally:
        channel.dispatch.end_known()
    if lane.outbox is not None:
        np.copyto(recvbuf.reshape(-1).view(lane.outbox.dtype), lane.outbox)
