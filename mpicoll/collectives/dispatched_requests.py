"""Nonblocking calls on shared memory that one compiled function starts, from the caller's objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpicoll.buffers.held_memory import held
from mpicoll.collectives.call_context import CallContext
from mpicoll.collectives.interrupted_calls import abandon_turn
from mpicoll.collectives.requests import JobRequest
from mpicoll.communicator.channel import Channel
from mpicoll.errors import CommunicatorBusy
from mpicoll.kernels import nonblocking_calls
from mpicoll.kernels.operation_words import AT_ONCE_NBYTES, DONE, OTHER, TOO_LONG
from mpicoll.kernels.packed_views import PACKED
from mpicoll.progress import progress_engine
from mpicoll.progress.driver_thread import driver
from mpicoll.shared_memory.nonblocking_lanes import NonblockingLane
from mpicoll.shared_memory.shared_operation import SharedOperation


class DispatchedRequest(JobRequest):
    """The request of a nonblocking call that one compiled function has started."""

    __slots__ = ("_kept", "_unpack")
    _tries = 20  # short ones: see `SharedMemoryDomain.nonblocking_job`

    def __init__(self, timeout: float, address: int) -> None:  # not super's: many calls take a microsecond
        self.active, self._timeout, self._address = True, timeout, address
        self._flight = self._error = self._kept = None
        self._unpack: Callable[[], None] | None = None

    def go_on_later(
        self, channel: Channel, lane: NonblockingLane, status: int, kept: Any, unpack: Callable[[], None] | None
    ) -> None:
        """Let the operation progress in calls of the program, or beside it; see :func:`start_quickly`."""
        if status >= PACKED:
            status, unpack = status - PACKED, lane.unpack
        flight = self._flight = SharedOperation(channel, lane.job, channel.dispatch.number, status)
        self._kept, self._unpack = kept, unpack
        flight.is_nonblocking = True
        progress_engine.add(self)
        if driver() is not None:
            self._let_drive()

    def _complete(self) -> None:
        if self._unpack is not None:
            self._unpack()
        self._kept = self._unpack = self._flight = None


def start_quickly(
    scope: CallContext,
    table: int,
    collective: int,
    sendbuf: Any,
    recvbuf: Any,
    op: Any = None,
    root: Any = 0,
    *,
    kept: Any = None,
    unpack: Callable[[], None] | None = None,
    was_packed: bool = False,
    kernel: Any = nonblocking_calls.call_in,
) -> DispatchedRequest | None:
    """Start a plain nonblocking call; None, having done nothing, if it is not plain; CommunicatorBusy as elsewhere.

    Parameters
    ----------
    kept
        An object that lives until the end of the call.
    unpack
        What copies the result to its places, called at the end of the call.
    was_packed
        Whether Python has made arrays of the arguments, as compiled code tries to from then on.
    kernel
        What starts it, with the arguments of :func:`mpicoll.kernels.nonblocking_calls.call_in`.
    """
    channel, node = scope.channel, scope.channel.node
    assert node is not None
    lanes, request, call = node.nonblocking, None, (collective, sendbuf, recvbuf, op, root)
    lane = None
    if lanes.is_busy:
        raise CommunicatorBusy
    lanes.is_busy = True
    try:
        lane = lanes.take_turn(node, 0)
        status = kernel.run(table, lane.address, *call) if lane.is_free() else OTHER
        if status == TOO_LONG:
            lanes.undo_turn(lane)
            lane = lanes.take_turn(node, AT_ONCE_NBYTES + 1)
            status = kernel.run(table, lane.address, *call) if lane.is_free() else OTHER
        if was_packed:
            lane.begin_packing()
        if status == OTHER:
            lanes.undo_turn(lane)
            return None
        request = DispatchedRequest(scope.timeout, lane.address)
        if status != DONE:
            request.go_on_later(channel, lane, status, (held(sendbuf), held(recvbuf), kept), unpack)
        elif unpack is not None:
            unpack()
        lanes.end_turn(lane, request)
    except BaseException as error:  # of a signal handler
        if request is not None:
            request.give_up(error)
        abandon_turn(channel, None if lane is None else lane.job, channel.dispatch.number, error)
        raise
    finally:
        lanes.is_busy = False
    return request
