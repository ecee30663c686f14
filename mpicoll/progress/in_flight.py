"""Collectives in flight: one at a time is advanced, waited for with a deadline, and abandoned if it fails."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from mpicoll.communicator.channel import Channel
from mpicoll.progress import progress_engine
from mpicoll.progress.call_signature import Waiting
from mpicoll.progress.driver_thread import DriverThread
from mpicoll.progress.progress_engine import Advancing, with_progress
from mpicoll.progress.waiting import LOOK_AFTER_SECONDS, wait_until


class InFlight(ABC):
    """A collective in flight.

    Attributes
    ----------
    number
        The number of the collective on its communicator.
    outlasts
        Whether the MPI library may access the caller's memory after the collective was abandoned: it sends what was
        announced to a rank that is late, and does not cancel a receive whose message is under way.
    driven_by
        The thread that advances it, None if only calls of the program do.
    is_nonblocking
        Whether a request of the program stands for it.
    """

    __slots__ = ("_tested", "channel", "driven_by", "is_nonblocking", "number")
    outlasts: ClassVar[bool] = True

    def __init__(self, channel: Channel, number: int) -> None:
        self.channel, self.number = channel, number
        self.driven_by: DriverThread | None = None
        self.is_nonblocking = False
        self._tested: _Tested | None = None

    @abstractmethod
    def advance(self) -> bool:
        """Advance as far as messages have arrived, without waiting; return whether the collective is complete."""

    @abstractmethod
    def waiting(self) -> Waiting:
        """Return the state of the wait."""

    @abstractmethod
    def abandon(self, error: BaseException) -> None:
        """Abandon the collective; the channel is broken afterwards."""

    def fail(self, error: BaseException, *owners: Any) -> None:
        """Abandon the collective because of `error`; the owners of the caller's memory live on if need be."""
        try:
            self.abandon(error)
        finally:
            if self.outlasts:
                self.channel.break_off(error, *owners)

    def resume(self, status: int) -> None:  # noqa: B027 - most are advanced from here only
        """Go on with the `status` that compiled code has returned elsewhere, at the next :meth:`advance`."""

    def be_patient(self) -> None:  # noqa: B027 - most have no choice
        """Wait longer in :meth:`advance` from now on, since no other operation is in flight."""

    def note_request(self, request: Advancing | None) -> None:  # noqa: B027 - most do not sleep
        """Note the request by which a thread waits for this collective, and may sleep in :meth:`advance`; or None."""

    def finish(self, timeout: float, *owners: Any) -> None:
        """Wait until the collective is complete, at most `timeout` seconds for each step.

        Parameters
        ----------
        owners
            Objects that own the caller's memory.

        Raises
        ------
        MismatchError, RemoteError, CollectiveTimeout
            The channel is broken after them.
        """
        try:
            if not self.advance():
                self.wait_until(with_progress(self.advance), timeout)
        except BaseException as error:
            self.fail(error, *owners)
            raise

    def wait_until(self, done: Callable[[], bool], timeout: float) -> None:
        """Wait until `done` returns True, at most `timeout` seconds for each step of this collective."""
        wait_until(done, self.polls, self.watch(timeout))

    def watch(self, timeout: float) -> Callable[[float], float]:
        """Return the watchdog of a long wait for this collective, which raises after `timeout` seconds in a step."""
        return _Watch(self, timeout)

    def look_while_tested(self) -> None:
        """Exchange control messages, if the program has tested this collective for a while; there is no deadline.

        Raises
        ------
        MismatchError, RemoteError, CollectiveTimeout
            If the collective cannot complete; the deadline is that of another rank.
        """
        if self._tested is None:
            self._tested = _Tested(self.watch(math.inf))
        self._tested.look()

    @property
    def is_queued(self) -> bool:
        """True while an operation before it has to end first."""
        return False

    @property
    def polls(self) -> int:
        """Number of calls of :meth:`advance` before the core is yielded."""
        return self.channel.polls


class _Tested:
    """Watchdog of a collective that a program tests instead of waiting for it."""

    __slots__ = ("_began", "_look_at", "_watch")

    def __init__(self, watch: Callable[[float], float]) -> None:
        self._watch, self._began = watch, time.monotonic()
        self._look_at = self._began + LOOK_AFTER_SECONDS

    def look(self) -> None:
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = self._began + self._watch(now - self._began)


class _Watch:
    """Watchdog of a long wait; its time counts from the last step that was completed.

    While the collective waits for its turn, that is the end of an operation.
    """

    def __init__(self, flight: InFlight, timeout: float) -> None:
        self._flight, self._timeout = flight, timeout
        self._seen: tuple[tuple[str, int], float] = ("", 0), 0.0

    def __call__(self, waited: float) -> float:
        waiting = self._flight.waiting()._replace(is_nonblocking=self._flight.is_nonblocking)
        seen, since = self._seen
        found = waiting.progress, progress_engine.ended() if self._flight.is_queued else 0
        if found != seen:
            since = waited if seen[0] else 0.0
            self._seen = found, since
        return since + self._flight.channel.watchdog.look(waiting, waited - since, self._timeout)
