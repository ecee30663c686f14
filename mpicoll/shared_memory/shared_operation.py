"""Operations on shared memory in flight, and the comparison of the ranks' records."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpicoll.communicator.channel import Channel
from mpicoll.errors import MpicollError, OperationError, RemoteError
from mpicoll.kernels import counted_parts, executor, withdrawal
from mpicoll.kernels import operation_words as words
from mpicoll.kernels.dispatch_table import SINGLE_COPY_BIT
from mpicoll.kernels.reduce import DTYPES
from mpicoll.progress import progress_engine
from mpicoll.progress.call_signature import Signature, Waiting
from mpicoll.progress.driver_thread import DriverThread, driver
from mpicoll.progress.in_flight import InFlight
from mpicoll.shared_memory.domain import SharedMemoryDomain
from mpicoll.shared_memory.nonblocking_lanes import Ending
from mpicoll.shared_memory.packed_calls import describe

_SETTLE_SECONDS = 10.0
"""Longer than a rank needs for its share of any vector, even where ranks take turns on a core."""
_STATES = (
    "ended",
    "step 0 of 2 (the operation before must end)",
    "step 1 of 2 (all must begin)",
    "step 2 of 2 (at work)",
    "step 2 of 2 (all must end)",
)


def _seen(job: np.ndarray, size: int) -> list[list[int]]:
    """Return each rank's stage, call and count; those of the operation before if this one has not started."""
    seen, rows = np.zeros(3, np.int64), []
    for rank in range(size):
        withdrawal.recorded(job.ctypes.data, rank, seen)
        rows.append(seen.tolist())
    return rows


def calls_of(job: np.ndarray, numbers: Sequence[int]) -> tuple[dict[str, list[int]], list[int]]:
    """Return the ranks that make each call, by its text, and those of them that have withdrawn.

    Parameters
    ----------
    numbers
        By rank on shared memory, the number to return for it.
    """
    calls: dict[str, list[int]] = {}
    gone = []
    for number, (stage, call, count) in zip(numbers, _seen(job, len(numbers)), strict=True):
        if stage >= 0:
            calls.setdefault(describe(call, count), []).append(number)
            gone += [number] * (call < 0)
    return calls, gone


def progress_of(job: np.ndarray, size: int) -> tuple[str, tuple[int, ...]]:
    """Return the progress of an operation, for messages, and the ranks that are waited for."""
    state = int(job[words.STATE])
    if state in (words.WORKING, words.LEAVING) and (awaited := counted_parts.awaited.run(job.ctypes.data)) >= 0:
        return _STATES[state], (int(awaited),)
    missing = (rank for rank, row in enumerate(_seen(job, size)) if row[0] < (state == words.LEAVING))
    return _STATES[state], tuple(missing)


def _differing_parts(job: np.ndarray) -> dict[str, list[int]]:
    """Return the calls of a Gatherv or Scatterv in which this rank has found a difference to another one's part."""
    own, root, peer = int(job[words.RANK]), int(job[words.ROOT]), int(job[words.WRONG_PART]) - 1
    seen = np.zeros(4, np.int64)
    counted_parts.part_of_rank.run(job.ctypes.data, peer, seen)
    gathers, given, expected = job[words.COLLECTIVE] == words.GATHER, seen[:2].tolist(), seen[2:].tolist()
    rank, by_rank, by_root = (peer, given, expected) if gathers else (own, expected, given)
    name, direction = ("Gatherv", "from") if gathers else ("Scatterv", "for")
    return {
        f"{name}(root={root}, {_elements(*by_root)} {direction} rank {rank})": [root],
        f"{name}(root={root}, {_elements(*by_rank)})": [rank],
    }


def _elements(nbytes: int, number: int) -> str:
    dtype = DTYPES[number]
    return f"{nbytes // dtype.itemsize} elements of {dtype}"


def raise_failure(status: int, number: int, op_name: str) -> None:
    """Raise the exception for a status after which an operation cannot complete, except MISMATCH.

    Raises
    ------
    OperationError
        If the operation's function raised an exception here.
    RemoteError
        If another process has ended.
    """
    if status == words.LOST:
        raise RemoteError(f"collective {number}: the memory of another rank can no longer be accessed")
    if status == words.RAISED:
        raise OperationError(f"collective {number}: op: {op_name} raised an exception")


def wait_for_others(job: np.ndarray, node: SharedMemoryDomain, number: int) -> None:
    """Wait until no other rank accesses this rank's buffers, which has withdrawn from an operation.

    Warns
    -----
    RuntimeWarning
        If a rank that is stopped or very slow still does after 10 s.
    """
    until = time.monotonic() + _SETTLE_SECONDS
    while (rank := withdrawal.at_work(job.ctypes.data)) >= 0 and node.is_running(rank):
        if time.monotonic() > until:
            text = f"rank {rank}, which is stopped or very slow, may still use the buffers of collective {number}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return
        time.sleep(1e-4)


def start_through_stages(job: np.ndarray, node: SharedMemoryDomain) -> int:
    """Start an operation again, since the system does not copy all ranks' memory between processes; return a status.

    All ranks do so, since all of them see whose memory it is.
    """
    job[words.METHOD] = node.method
    job[words.CALL] &= ~(1 << SINGLE_COPY_BIT)
    return int(executor.begin.run(job.ctypes.data))


class SharedOperation(InFlight):
    """An operation on shared memory in flight.

    Parameters
    ----------
    patient
        Whether compiled code waits some microseconds for other ranks; a rank that advances several operations waits for
        none of them.
    call
        The call as all ranks know it, where an earlier run of the job may have been started through stages; by default
        what the job says.

    Attributes
    ----------
    may_fall_back
        Whether the caller can make the call in another way if some buffer cannot be accessed by other ranks.
    falls_back
        True after the end if nothing was done because some buffer could not be accessed; equal on all ranks.
    """

    __slots__ = (
        "_address",
        "_call",
        "_is_patient",
        "_job",
        "_op_name",
        "_request",
        "_status",
        "falls_back",
        "may_fall_back",
    )
    outlasts = False

    def __init__(
        self,
        channel: Channel,
        job: np.ndarray,
        number: int,
        status: int,
        op_name: str = "",
        *,
        patient: bool = False,
        call: int | None = None,
    ) -> None:
        super().__init__(channel, number)
        self._job, self._status, self._op_name, self._is_patient = job, status, op_name, patient
        self._request: progress_engine.Advancing | None = None  # by which a thread waits for it
        self._address = 0  # found where it is needed: NumPy takes a microsecond to tell it
        self._call = call
        self.may_fall_back = self.falls_back = False

    def advance(self) -> bool:
        """Advance as far as the other ranks have; return whether the operation has ended.

        Raises
        ------
        MismatchError
            If another rank makes another call; all ranks are told.
        OperationError
            If the operation's function raised an exception here.
        RemoteError
            If another process has ended, or its buffers cannot be accessed and the call cannot be made in another way.
        """
        thread = self.driven_by
        if thread is not None:
            if not self._is_patient and thread.is_at(self._address):
                return False
            self._take_back(thread)
        status, self._status = self._status, words.WAITING
        if status == words.WAITING:
            self._address = self._address or self._job.ctypes.data
            status = self._kernel().run(self._address)
        if status == words.MISMATCH:
            self._raise_mismatch()
        raise_failure(status, self.number, self._op_name)
        assert self.channel.node is not None
        if status == words.FALLBACK and self._job[words.METHOD] != self.channel.node.method:
            self._call = int(self._job[words.CALL]) if self._call is None else self._call
            self._status = start_through_stages(self._job, self.channel.node)
            return False
        self.falls_back = status == words.FALLBACK
        if self.falls_back and not self.may_fall_back:
            raise RemoteError(
                f"collective {self.number}: the system does not copy the memory of all ranks between processes; "
                "MPICOLL_TRANSFER=off does without"
            )
        return status in (words.DONE, words.FALLBACK)

    def restart(self, status: int) -> SharedOperation:
        """Return the operation as it is when its job has been started again with `status`."""
        self._status, self._is_patient, self._tested, self.driven_by = status, False, None, None
        return self

    def resume(self, status: int) -> None:
        """Go on with the `status` that compiled code has returned elsewhere."""
        self._status = status

    def be_patient(self) -> None:
        """Let compiled code wait some microseconds before it returns, as in blocking calls."""
        self._is_patient = True

    def note_request(self, request: progress_engine.Advancing | None) -> None:
        """See :meth:`InFlight.note_request`."""
        self._request = request

    def _kernel(self) -> Any:
        """Return the kernel that advances the operation: one that sleeps, waits some microseconds, or only looks."""
        is_waited_for = self._is_patient or (self._request is not None and self._job[words.SLEEP_LIMIT])
        if is_waited_for and progress_engine.may_sleep(self._request):
            return executor.await_others
        return executor.advance if self._is_patient else executor.look

    def let_drive(self, address: int) -> bool:
        """Let the driver thread, if there is one, advance the operation, whose job is at `address`; return False.

        No other thread may advance the operation meanwhile, and whoever calls this must have stored the operation where
        it is abandoned if an exception of a signal handler is raised.
        """
        thread = driver()
        if thread is not None and self._status == words.WAITING:
            self._address, self.driven_by = address, thread
            if not thread.offer(address):
                self.driven_by = None
        return False

    def _take_back(self, thread: DriverThread) -> None:
        """Advance the operation by calls of the program from now on, if it has not ended."""
        status = thread.take_back(self._address)
        self.driven_by = None
        if status != words.OTHER:
            self._status = status

    def _raise_mismatch(self) -> None:
        self.waiting()  # records the call: what others say of this number concerns this rank
        if self._job[words.WRONG_PART]:
            self.channel.watchdog.raise_difference(self.number, _differing_parts(self._job))
        calls, gone = calls_of(self._job, range(self.channel.size))
        number = self.number - int(self._job[words.SEQUENCE] - self._job[words.AWAITED])
        if len(calls) == 1:
            self.channel.watchdog.raise_departure(number, gone)
        self.channel.watchdog.raise_difference(number, calls)

    def waiting(self) -> Waiting:
        """Return the state of the wait."""
        progress, missing = progress_of(self._job, self.channel.size)
        # As it was made: other ranks know it by this before and after a start through stages.
        call = int(self._job[words.CALL]) if self._call is None else self._call
        signature = Signature.of(describe(call, int(self._job[words.COUNT])))
        self.channel.watchdog.record(self.number, signature)
        return Waiting(self.number, signature, progress, missing, only_peers_missing=bool(missing))

    def abandon(self, error: BaseException) -> None:
        """Withdraw from the operation, and return when no other rank accesses this rank's buffers any more."""
        self._address = self._job.ctypes.data
        thread = self.driven_by or driver()  # another object may have let it drive the job, see `interrupted_calls`
        if thread is not None:
            self._take_back(thread)
        withdrawal.withdraw(self._address)
        self.channel.break_off(error, self._job)
        if not isinstance(error, MpicollError) or isinstance(error, OperationError):
            self.channel.watchdog.give_up(self.number, error)
        assert self.channel.node is not None
        wait_for_others(self._job, self.channel.node, self.number)


class QueuedOperation(SharedOperation):
    """An operation in a lane that an earlier operation may still use on this rank."""

    __slots__ = ("_before", "_signature", "_start")

    def __init__(self, channel: Channel, job: np.ndarray, number: int, signature: Signature, op_name: str) -> None:
        super().__init__(channel, job, number, words.WAITING, op_name)
        self._signature = signature
        self._before: Ending | None = None
        self._start: Callable[[], int] | None = None

    @property
    def is_queued(self) -> bool:
        """True while an operation before it has to end first."""
        return self._start is not None

    @property
    def may_start(self) -> bool:
        """True unless the operation before it is known to be in flight still."""
        return self._start is None or self._before is None or self._before.has_ended

    def begins_after(self, before: Ending | None, start: Callable[[], int]) -> None:
        """Set the function that starts the operation and returns a status, to be called when `before` has ended."""
        self._before, self._start = before, start

    def advance(self) -> bool:
        """Start if the lane is free, then advance; see :meth:`SharedOperation.advance`."""
        if not self.may_start:
            return False
        if self._start is not None:
            self.channel.ensure_usable()
            self._before, start, self._start = None, self._start, None
            self._status = start()
        return super().advance()

    def waiting(self) -> Waiting:
        """Return the state of the wait."""
        if not self.is_queued:
            return super().waiting()
        return Waiting(self.number, self._signature, "step 0 of 2: an operation before it in its lane", ())

    def abandon(self, error: BaseException) -> None:
        """Withdraw; if the operation has not started, no rank uses this rank's buffers."""
        if self._start is None:
            super().abandon(error)
            return
        self._start = None
        self.channel.break_off(error, self._job)
        if not isinstance(error, MpicollError):
            self.channel.watchdog.give_up(self.number, error)
