"""Operations on shared memory in flight, and the comparison of the ranks' records."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import numpy as np

from mpicoll.communicator.channel import Channel
from mpicoll.errors import MpicollError, OperationError, RemoteError
from mpicoll.kernels import executor, withdrawal
from mpicoll.kernels import operation_words as words
from mpicoll.progress.call_signature import Signature, Waiting
from mpicoll.progress.progress_engine import InFlight
from mpicoll.shared_memory.domain import YIELDS, Ending, SharedMemoryDomain
from mpicoll.shared_memory.fast_dispatch import describe

_SETTLE_SECONDS = 10.0
"""Longer than a rank needs for its share of any vector, even where ranks take turns on a core."""
_STATES = (
    "ended",
    "step 0 of 2 (the operation before must end)",
    "step 1 of 2 (all must begin)",
    "step 2 of 2 (at work)",
    "step 2 of 2 (all must end)",
)


class SharedOperation(InFlight):
    """An operation on shared memory in flight.

    Attributes
    ----------
    may_fall_back
        Whether the caller can make the call in another way if some buffer cannot be accessed by other ranks.
    falls_back
        True after the end if nothing was done because some buffer could not be accessed; equal on all ranks.
    """

    __slots__ = ("_job", "_op_name", "_status", "falls_back", "may_fall_back")

    def __init__(self, channel: Channel, job: np.ndarray, number: int, status: int, op_name: str = "") -> None:
        super().__init__(channel, number)
        self._job, self._status, self._op_name = job, status, op_name
        self.may_fall_back = self.falls_back = False

    def advance(self) -> bool:
        """Advance as far as the other ranks have, waiting some microseconds; return whether the operation has ended.

        Raises
        ------
        MismatchError
            If another rank makes another call; all ranks are told.
        OperationError
            If the operation's function raised an exception here.
        RemoteError
            If another process has ended, or its buffers cannot be accessed and the call cannot be made in another way.
        """
        status, self._status = self._status, words.WAITING
        if status == words.WAITING:
            status = executor.advance.run(self._job.ctypes.data)
        if status == words.MISMATCH:
            self._raise_mismatch()
        if status == words.LOST:
            raise RemoteError(f"collective {self.number}: the memory of another rank can no longer be accessed")
        if status == words.RAISED:
            raise OperationError(f"collective {self.number}: op: {self._op_name} raised an exception")
        self.falls_back = status == words.FALLBACK
        if self.falls_back and not self.may_fall_back:
            raise RemoteError(
                f"collective {self.number}: the system does not copy the memory of all ranks between processes; "
                "MPICOLL_TRANSFER=off does without"
            )
        return status in (words.DONE, words.FALLBACK)

    def be_patient(self) -> None:
        """Let compiled code yield the core before it returns, as in blocking calls, where ranks share cores."""
        if self.channel.polls == 1:
            self._job[words.YIELDS] = YIELDS

    def _seen(self) -> list[list[int]]:
        """Return each rank's stage, call and count; those of the operation before if this one has not started."""
        seen, rows = np.zeros(3, np.int64), []
        for rank in range(self.channel.size):
            withdrawal.recorded(self._job.ctypes.data, rank, seen)
            rows.append(seen.tolist())
        return rows

    def _raise_mismatch(self) -> None:
        calls: dict[str, list[int]] = {}
        gone = []
        for rank, (stage, call, count) in enumerate(self._seen()):
            if stage >= 0:
                calls.setdefault(describe(call, count), []).append(rank)
                gone += [rank] * (call < 0)
        number = self.number - int(self._job[words.STATE] == words.ENTERING)
        if len(calls) == 1:
            self.channel.watchdog.raise_departure(number, gone)
        self.channel.watchdog.raise_difference(number, calls)

    def waiting(self) -> Waiting:
        """Return the state of the wait."""
        state, job = int(self._job[words.STATE]), self._job
        missing = tuple(rank for rank, row in enumerate(self._seen()) if row[0] < (state == words.LEAVING))
        signature = Signature.of(describe(int(job[words.CALL]), int(job[words.COUNT])))
        self.channel.watchdog.record(self.number, signature)
        return Waiting(self.number, signature, _STATES[state], missing)

    def abandon(self, error: BaseException) -> None:
        """Withdraw from the operation, and return when no other rank accesses this rank's buffers any more."""
        job = self._job.ctypes.data
        withdrawal.withdraw(job)
        self.channel.break_off(f"{type(error).__name__}: {error}", self._job)
        if not isinstance(error, MpicollError) or isinstance(error, OperationError):
            self.channel.watchdog.give_up(self.number, error)
        until = time.monotonic() + _SETTLE_SECONDS
        while (rank := withdrawal.at_work(job)) >= 0 and self._node.is_running(rank):
            if time.monotonic() > until:
                text = (
                    f"rank {rank}, which is stopped or very slow, may still use the buffers of collective {self.number}"
                )
                warnings.warn(text, RuntimeWarning, stacklevel=2)
                return
            time.sleep(1e-4)

    @property
    def _node(self) -> SharedMemoryDomain:
        assert self.channel.node is not None
        return self.channel.node


class QueuedOperation(SharedOperation):
    """An operation in a lane that an earlier operation may still use on this rank."""

    __slots__ = ("_before", "_signature", "_start")

    def __init__(self, channel: Channel, job: np.ndarray, number: int, signature: Signature, op_name: str) -> None:
        super().__init__(channel, job, number, words.WAITING, op_name)
        self._signature = signature
        self._before: Ending | None = None
        self._start: Callable[[], int] | None = None

    def begins_after(self, before: Ending | None, start: Callable[[], int]) -> None:
        """Set the function that starts the operation and returns a status, to be called when `before` has ended."""
        self._before, self._start = before, start

    def advance(self) -> bool:
        """Start if the lane is free, then advance; see :meth:`SharedOperation.advance`."""
        if self._start is not None:
            if self._before is not None and not self._before.has_ended:
                return False
            self.channel.ensure_usable()
            self._before, start, self._start = None, self._start, None
            self._status = start()
        return super().advance()

    def waiting(self) -> Waiting:
        """Return the state of the wait."""
        if self._start is None:
            return super().waiting()
        return Waiting(self.number, self._signature, "step 0 of 2: an operation before it in its lane", ())

    def abandon(self, error: BaseException) -> None:
        """Withdraw; if the operation has not started, no rank uses this rank's buffers."""
        if self._start is None:
            super().abandon(error)
            return
        self._start = None
        self.channel.break_off(f"{type(error).__name__}: {error}", self._job)
        if not isinstance(error, MpicollError):
            self.channel.watchdog.give_up(self.number, error)
