"""Lock of the calls on a communicator, of which one is made at a time."""

from __future__ import annotations

import threading

BUSY = "another collective is being called on this communicator, from a thread or a callback"


class Alone:
    """A lock without waiting: `with` raises RuntimeError if a collective is being called, by any thread.

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
            raise RuntimeError(BUSY)
        self._busy[0] = 1

    @property
    def after_others(self) -> AfterOthers:
        """The lock for a call that compiled code has started: `with` waits; the present holder will be refused."""
        return AfterOthers(self)

    def wait(self) -> None:
        """Wait for the lock."""
        self._lock.acquire()
        self._busy[0] = 1

    def __exit__(self, *error: object) -> None:
        self._busy[0] = 0
        self._lock.release()


class AfterOthers:
    """See :attr:`Alone.after_others`."""

    __slots__ = ("_alone",)

    def __init__(self, alone: Alone) -> None:
        self._alone = alone

    def __enter__(self) -> None:
        self._alone.wait()

    def __exit__(self, *error: object) -> None:
        self._alone.__exit__()
