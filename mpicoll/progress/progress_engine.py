"""Progress of nonblocking operations: whoever waits for anything drives all that is on its way.

MPI moves long messages only inside MPI calls, and our kernels run on the caller's core, so a nonblocking collective
advances whenever any mpicoll call of this process waits, and in Test and Wait of any request; never in between.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from mpicoll.communicator.channel import Channel
from mpicoll.progress.call_signature import Waiting
from mpicoll.progress.waiting import wait_until


class Advancing(Protocol):
    """Something that can be driven."""

    def step(self) -> bool:
        """Go on without waiting; return whether it has ended, well or badly."""
        ...


class InFlight(ABC):
    """A collective on its way.

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
        """Go on as far as messages have come, without waiting; return whether the end is reached."""

    @abstractmethod
    def waiting(self) -> Waiting:
        """Describe what it waits for."""

    @abstractmethod
    def abandon(self, error: BaseException) -> None:
        """Give up: no message may reach the caller's memory any more, and nobody may use the channel."""

    def be_patient(self) -> None:  # noqa: B027 - most have no choice
        """Wait longer in :meth:`advance` from now on, since nothing else is on its way."""

    def finish(self, timeout: float) -> None:
        """Wait for the end, at most `timeout` seconds for each step.

        Raises
        ------
        MismatchError, RemoteError, CollectiveTimeout
            After which the channel is broken.
        """
        try:
            if not self.advance():
                self.wait_until(with_progress(self.advance), timeout)
        except BaseException as error:
            self.abandon(error)
            raise

    def wait_until(self, done: Callable[[], bool], timeout: float) -> None:
        """Wait until `done` says that this one has ended, at most `timeout` seconds for each step."""
        wait_until(done, self.polls, self.watch(timeout))

    def watch(self, timeout: float) -> Callable[[float], float]:
        """Return what looks after a wait for this one that has become long: it raises if `timeout` is over."""
        return _Watch(self, timeout)

    @property
    def polls(self) -> int:
        """Number of calls of :meth:`advance` before the core is given away."""
        return self.channel.polls


class _Watch:
    """Looks after a wait that has become long; the time counts from the last step that was completed."""

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
"""Held by the thread that drives; what it drives, and signal handlers, may begin operations meanwhile."""
_driving = False


def add(operation: Advancing) -> None:
    """Drive `operation` from now on."""
    with _lock:
        _active.append(operation)


def remove(operation: Advancing) -> None:
    """Stop driving `operation`."""
    with _lock:
        if operation in _active:
            _active.remove(operation)


def advance_alone(operation: Advancing, advance: Callable[[], bool]) -> bool:
    """Call `advance` unless some thread is driving what is on its way; if it returns True, `operation` has ended.

    Return whether it has ended here.
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
    """Advance everything that is on its way, unless another thread is doing so."""
    if not _active or not _begin_driving():
        return
    try:
        for operation in [operation for operation in tuple(_active) if operation.step()]:
            remove(operation)
    finally:
        _end_driving()


def _begin_driving() -> bool:
    """Return whether this thread may drive: no other does, and it is not called by what it drives."""
    global _driving
    if not _lock.acquire(blocking=False):
        return False
    if _driving:
        _lock.release()
        return False
    _driving = True
    return True


def _end_driving() -> None:
    global _driving
    _driving = False
    _lock.release()


def with_progress(done: Callable[[], bool]) -> Callable[[], bool]:
    """Return a test that also advances the others; the plain test if there are none."""
    if not _active:
        return done

    def test() -> bool:
        progress()
        return done()

    return test


def pending() -> int:
    """Return how many nonblocking operations have not ended."""
    return len(_active)
