"""Lock of the calls on a communicator, of which one is made at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

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

    @contextmanager
    def after_others(self) -> Iterator[None]:
        """Wait for the lock, for a call that compiled code has started; its present holder will be refused."""
        with self._lock:
            self._busy[0] = 1
            try:
                yield
            finally:
                self._busy[0] = 0

    def __exit__(self, *error: object) -> None:
        self._busy[0] = 0
        self._lock.release()
