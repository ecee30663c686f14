"""Plan cache: repeated calls skip the checks of arguments and the choice of the algorithm.

Both cost several microseconds of Python, more than a short message takes. A call with the same key (collective,
element type, count, op, root, algorithm, and for long vectors addresses) uses the cached plan; only the arrays are
checked to be contiguous. The cache is for whole NumPy arrays; other calls take the general path. For default arguments
compiled code has a cache of its own (:mod:`mpicoll.collectives.compiled_calls`), so that this one serves calls with
``algorithm=``, ``compression=`` or an operation of :func:`mpicoll.op`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.buffers.reduction_ops import UserOperation
from mpicoll.collectives.call_context import AnyOp, AnyTask, CallContext
from mpicoll.collectives.checked_arguments import VectorPart
from mpicoll.collectives.operation import CheckedOperation
from mpicoll.communicator.channel import Channel
from mpicoll.compression import Compressor
from mpicoll.kernels.dispatch_table import STAGED_NBYTES
from mpicoll.messages.call_agreement import agree
from mpicoll.messages.p2p import Plan, PlanRun

MAX_LANES_PER_PLAN = 8
"""Keys that lead to one plan: calls may differ in details such as IN_PLACE for a short vector."""
_COUNTED = ("reduce_scatter", "allgatherv", "gatherv", "scatterv", "alltoallv")
"""Collectives whose counts per rank would have to be part of the key, or are sent by the root in each call."""
_address = MPI.buffer.frombuffer


class CachedPlan(NamedTuple):
    """A cached plan with its inbox and outbox in the caller's element type (None: nothing to copy)."""

    plan: Plan
    inbox: np.ndarray | None
    outbox: np.ndarray | None


def key_of(
    scope: CallContext,
    collective: str,
    sendbuf: Any,
    recvbuf: Any,
    op: AnyOp,
    root: Any,
    algorithm: str | None,
    recvcounts: Any = None,
    compression: Any = None,
) -> Hashable | None:
    """Return the key of a call, or None for a call that has to take the general path.

    Short arrays must own their memory, so that two of them cannot overlap; keys of long ones have addresses.
    """
    if type(recvbuf) is not np.ndarray or not recvbuf.flags.carray or recvcounts is not None:
        return None
    if collective in _COUNTED:
        return None
    what: Any = op.handle if isinstance(op, MPI.Op) else op
    if (
        type(root) is not int
        or not isinstance(what, (int, UserOperation))
        or not isinstance(algorithm, (str, type(None)))
    ):
        return None  # the general path says what is wrong with them
    if not isinstance(compression, (str, Compressor, type(None))):
        return None
    key: tuple[Any, ...] = (
        collective,
        recvbuf.dtype,
        recvbuf.size,
        what,
        root,
        algorithm,
        scope.algorithm,
        compression,
    )
    # In a scatter the vector, whose length decides, is longer than recvbuf.
    long = recvbuf.nbytes > STAGED_NBYTES or collective == "scatter"
    if type(sendbuf) is np.ndarray:
        if not sendbuf.flags.c_contiguous or sendbuf is recvbuf:
            return None
        key += (sendbuf.dtype, sendbuf.size)
        if long or sendbuf.nbytes > STAGED_NBYTES:
            return (*key, _address(sendbuf, readonly=True).address, _address(recvbuf).address)
        return key if recvbuf.flags.owndata and sendbuf.flags.owndata else None
    if sendbuf is not None and sendbuf is not MPI.IN_PLACE:
        return None
    return (*key, sendbuf is None, _address(recvbuf).address) if long else (*key, sendbuf is None)


def note(channel: Channel, key: Hashable, task: AnyTask, plan: Plan) -> None:
    """Enter a plan in the cache, if the buffers are used as a whole."""
    if not isinstance(task, CheckedOperation) or not (whole(task.given) and whole(task.result)):
        return
    if len(plan.lanes) >= MAX_LANES_PER_PLAN:
        del channel.plans.lanes[plan.lanes.pop(0)]
    plan.lanes.append(key)
    ends = [end if end is None else end.view(task.dtype) for end in (plan.inbox, plan.outbox)]
    channel.plans.lanes[key] = CachedPlan(plan, *ends)


def whole(part: VectorPart | None) -> bool:
    """Return whether a part is all of its buffer, which is neither a copy nor reinterpreted as another type."""
    if part is None:
        return True
    whole = part.displ == 0 and part.stop - part.start == part.buffer.count
    return whole and part.buffer.destination is None and not part.buffer.is_recast


def repeat(channel: Channel, lane: CachedPlan, sendbuf: Any, recvbuf: np.ndarray, timeout: float) -> None:
    """Make a call with its cached plan."""
    plan = lane.plan
    plan.used = number = channel.enter(plan.signature)
    if channel.check == "full":
        agree(channel, plan.signature, number, timeout)
    if lane.inbox is not None:
        source = sendbuf if type(sendbuf) is np.ndarray else recvbuf
        np.copyto(lane.inbox, source if source.ndim == 1 else source.reshape(-1))
    PlanRun(channel, plan, number).finish(timeout, sendbuf, recvbuf)
    if lane.outbox is not None:
        np.copyto(recvbuf if recvbuf.ndim == 1 else recvbuf.reshape(-1), lane.outbox)
