"""Calls that compiled code has begun, and that an exception of a signal handler has kept from being completed.

Python raises such an exception, KeyboardInterrupt for instance, as soon as compiled code has returned: before the
caller gets to know that its operation is under way. The operation is then abandoned as if the exception had been raised
in the wait for its end: this rank withdraws, and tells the others. Blocking calls look for it at the begin of the next
call, since a handler for it in each of them would be written a dozen times; and at the end of the process.
"""

from __future__ import annotations

import atexit
import sys
import threading
from types import FrameType
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.communicator.channel import Channel, live_channels
from mpicoll.errors import CommunicatorBusy, RemoteError
from mpicoll.kernels.operation_words import IDLE, STATE, WAITING
from mpicoll.messages.p2p import Plan, PlanRun
from mpicoll.shared_memory.shared_operation import SharedOperation

_INTERFACE = "mpicoll.interface."
_INTERRUPTED = "an exception, of a signal handler for instance, was raised while it was being begun"


def refuse_if_running(channel: Channel) -> None:
    """Raise CommunicatorBusy if compiled code makes a call on this communicator, or has begun one that goes on.

    Raises
    ------
    CommunicatorBusy
        If another thread makes the call, or this one in a function that the call or a signal handler calls.
    RemoteError
        If nobody completes the call any more; the communicator is broken then.
    """
    if channel.broken is None and channel.dispatch.is_at_work:
        if _is_being_made():
            raise CommunicatorBusy
        raise abandon_call(channel)


def abandon_call(channel: Channel) -> RemoteError:
    """Abandon the blocking call that compiled code has begun, and return the exception to be raised."""
    number = channel.dispatch.number
    interrupted = InterruptedError(_INTERRUPTED)
    if channel.dispatch.running:
        lane = channel.plans.known[channel.dispatch.running]
        PlanRun(channel, lane.plan, number, status=WAITING).fail(interrupted, lane)
    else:
        assert channel.node is not None
        SharedOperation(channel, channel.node.blocking, number, WAITING).fail(interrupted)
    return RemoteError(f"collective {number} was abandoned: {_INTERRUPTED}")


def abandon_start(channel: Channel, job: np.ndarray, number: int, error: BaseException) -> None:
    """Abandon an operation on shared memory, if compiled code has begun it in this job."""
    if channel.broken is None and job[STATE] != IDLE:
        SharedOperation(channel, job, number, WAITING).fail(error)


def abandon_turn(channel: Channel, job: np.ndarray | None, number: int, error: BaseException) -> None:
    """Break the channel after an exception that came while a nonblocking call took its turn in a lane.

    An operation that compiled code has begun in `job` is abandoned; None stands for no job.
    """
    if job is not None:
        abandon_start(channel, job, number, error)
    if channel.broken is None:
        channel.break_off(error)  # it is not known which lane is next
        channel.watchdog.give_up(number, error)


def abandon_plan(channel: Channel, plan: Plan, number: int, error: BaseException, owner: Any) -> None:
    """Abandon a persistent operation by messages, if compiled code has begun it; `owner` is that of its memory."""
    if channel.broken is None and plan.table.is_running:
        PlanRun(channel, plan, number, patient=False, status=WAITING).fail(error, owner)


def _is_being_made() -> bool:
    """Return whether a call of a communicator is in the stack of another thread, or below this one in its own."""
    own = threading.get_ident()
    return any(
        _calls(frame) > (thread == own)  # this one is on top of its stack
        for thread, frame in sys._current_frames().items()
    )


def _calls(frame: FrameType | None) -> int:
    """Return how many methods of communicators are in a stack."""
    found = 0
    while frame is not None:
        found += frame.f_globals.get("__name__", "").startswith(_INTERFACE)
        frame = frame.f_back
    return found


@atexit.register
def _tell_others() -> None:
    """Abandon what was interrupted, so that the other ranks do not wait for a rank that has ended."""
    if MPI.Is_initialized() and not MPI.Is_finalized():
        for channel in list(live_channels):
            if channel.broken is None and channel.dispatch.is_at_work:
                abandon_call(channel)
