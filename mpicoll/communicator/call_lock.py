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
