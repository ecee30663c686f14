"""Lock of the calls on a communicator, of which one is made at a time."""

from __future__ import annotations

import threading

from mpicoll.errors import CommunicatorBusy


class Alone:
    """A lock without waiting: `with` raises CommunicatorBusy if a collective is being called, by any thread.

    Parameters
    ----------
    busy
        A word that is 1 while the lock is held, for compiled code to see.
    """

    __slots__ = ("_busy", "_lock")
    _lock: threading.Lock | threading.RLock

    def __init__(self, busy: memoryview) -> None:
        self._lock = threading.Lock()
        self._busy = busy

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise CommunicatorBusy
        self._busy[0] = 1

    def wait(self) -> None:
        """Wait for the lock, for a call that compiled code has started; the present holder will be refused."""
        self._lock.acquire()
        self._busy[0] = 1

    def release(self, *error: object) -> None:
        """Give the lock back."""
        self._busy[0] = 0
        self._lock.release()

    __exit__ = release


class Nested(CommunicatorBusy):
    """A call on a communicator of one rank from a signal handler or finaliser that interrupts another one."""


class InTurn(Alone):
    """The lock of a communicator with one rank, for which other threads wait: its calls end without other ranks.

    `with` raises :class:`Nested` in the thread that holds it.
    """

    __slots__ = ()

    def __init__(self, busy: memoryview) -> None:
        self._lock = threading.RLock()
        self._busy = busy

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._busy[0]:
            self._lock.release()
            raise Nested
        self._busy[0] = 1


def lock_of_calls(busy: memoryview, size: int) -> Alone:
    """Return the lock for a communicator of `size` ranks."""
    return Alone(busy) if size > 1 else InTurn(busy)
