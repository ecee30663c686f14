"""Progress engine: every wait of this process advances all nonblocking operations in flight.

MPI progresses long messages only inside MPI calls, and the kernels run on the caller's core. A nonblocking collective
therefore progresses while any mpicoll call of this process waits, and in Test and Wait of any request. Where there is
none of these for a while, :mod:`mpicoll.progress.progress_thread` advances it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from mpicoll.communicator.channel import Channel
from mpicoll.progress.call_signature import Waiting
from mpicoll.progress.progress_thread import ProgressThread
from mpicoll.progress.waiting import wait_until


class Advancing(Protocol):
    """An operation that the progress engine can advance."""

    def step(self) -> bool:
        """Advance without waiting; return whether the operation has ended, successfully or not."""
        ...

    def complete_on(self, channel: Channel) -> None:
        """If the operation is one of `channel`, wait until it has ended; an exception is kept for Wait or Test."""
        ...


class InFlight(ABC):
    """A collective in flight.

    Attributes
    ----------
    number
        The number of the collective on its communicator.
    """

    __slots__ = ("channel", "number")

    def __init__(self, channel: Channel, number: int) -> None:
        self.channel, self.number = channel, number

    @abstractmethod
    def advance(self) -> bool:
        """Advance as far as messages have arrived, without waiting; return whether the collective is complete."""

    @abstractmethod
    def waiting(self) -> Waiting:
        """Return the state of the wait."""

    @abstractmethod
    def abandon(self, error: BaseException) -> None:
        """Abandon the collective: no message reaches the caller's memory afterwards, and the channel is broken."""

    def resume(self, status: int) -> None:  # noqa: B027 - most are advanced from here only
        """Go on with the `status` that compiled code has returned elsewhere, at the next :meth:`advance`."""

    def be_patient(self) -> None:  # noqa: B027 - most have no choice
        """Wait longer in :meth:`advance` from now on, since no other operation is in flight."""

    def finish(self, timeout: float) -> None:
        """Wait until the collective is complete, at most `timeout` seconds for each step.

        Raises
        ------
        MismatchError, RemoteError, CollectiveTimeout
            The channel is broken after them.
        """
        try:
            if not self.advance():
                self.wait_until(with_progress(self.advance), timeout)
        except BaseException as error:
            self.abandon(error)
            raise

    def wait_until(self, done: Callable[[], bool], timeout: float) -> None:
        """Wait until `done` returns True, at most `timeout` seconds for each step of this collective."""
        wait_until(done, self.polls, self.watch(timeout))

    def watch(self, timeout: float) -> Callable[[float], float]:
        """Return the watchdog of a long wait for this collective, which raises after `timeout` seconds in a step."""
        return _Watch(self, timeout)

    @property
    def polls(self) -> int:
        """Number of calls of :meth:`advance` before the core is yielded."""
        return self.channel.polls


class _Watch:
    """Watchdog of a long wait; its time counts from the last step that was completed."""

    def __init__(self, flight: InFlight, timeout: float) -> None:
        self._flight, self._timeout = flight, timeout
        self._seen = ("", 0.0)

    def __call__(self, waited: float) -> float:
        waiting = self._flight.waiting()
        progress, since = self._seen
        if waiting.progress != progress:
            since = waited if progress else 0.0
            self._seen = (waiting.progress, since)
        return since + self._flight.channel.watchdog.look(waiting, waited - since, self._timeout)


_active: list[Advancing] = []
_lock = threading.RLock()
"""Held by the thread that advances operations; these, and signal handlers, may start operations meanwhile."""
_driving = False
_turns = 0
_thread: ProgressThread | None = None


def add(operation: Advancing) -> None:
    """Advance `operation` in every wait from now on."""
    with _lock:
        _active.append(operation)
    if _thread is None or not _thread.awake:
        _wake_thread()


def _wake_thread() -> None:
    global _thread
    with _lock:
        if _thread is None:
            _thread = ProgressThread(progress, pending, turns)
        if not _thread.awake:
            _thread.notice()


def remove(operation: Advancing) -> None:
    """Stop advancing `operation`."""
    with _lock:
        if operation in _active:
            _active.remove(operation)


def complete_on(channel: Channel) -> None:
    """Wait until this rank's operations on a channel have ended: a communicator may be freed before them."""
    if channel.broken is None:
        for operation in tuple(_active):
            operation.complete_on(channel)


def advance_alone(operation: Advancing, advance: Callable[[], bool]) -> bool:
    """Call `advance`, which advances `operation` only, unless another thread is advancing operations.

    Return whether `operation` has ended in this call.
    """
    if not _begin_driving():
        return False
    try:
        ended = operation in _active and advance()
        if ended:
            _active.remove(operation)
        return ended
    finally:
        _end_driving()


def progress() -> None:
    """Advance all operations in flight, unless another thread is doing so."""
    if not _active or not _begin_driving():
        return
    try:
        for operation in [operation for operation in tuple(_active) if operation.step()]:
            remove(operation)
    finally:
        _end_driving()


def _begin_driving() -> bool:
    """Return whether this thread may advance operations: no thread is doing so, not even this one."""
    global _driving, _turns
    if not _lock.acquire(blocking=False):
        return False
    if _driving:
        _lock.release()
        return False
    _driving = True
    _turns += 1
    return True


def _end_driving() -> None:
    global _driving
    _driving = False
    _lock.release()


def with_progress(done: Callable[[], bool]) -> Callable[[], bool]:
    """Return a function that advances all operations in flight and calls `done`; `done` itself if there are none."""
    if not _active:
        return done

    def test() -> bool:
        progress()
        return done()

    return test


def pending() -> int:
    """Return how many nonblocking operations have not ended."""
    return len(_active)


def turns() -> int:
    """Return how often operations were advanced in this process."""
    return _turns
