"""Clock for deadlines: it stops while the process or the whole machine is stopped."""

from __future__ import annotations

import time

_LONGEST_GAP_SECONDS = 5.0
"""Far longer than a busy machine lets a process wait for a core."""


class RunningClock:
    """Seconds since its creation in which this process ran.

    Time between two readings that are more than 5 s apart does not count: the process was stopped, or the machine was
    suspended, as virtual machines are while they are saved or moved. Deadlines that counted it would pass for all ranks
    at the moment when everything goes on.
    """

    __slots__ = ("_seen", "_started")

    def __init__(self) -> None:
        self._started = self._seen = time.monotonic()

    def read(self) -> float:
        """Return the seconds; to be called more often than every 5 s."""
        now = time.monotonic()
        if now - self._seen > _LONGEST_GAP_SECONDS:
            self._started += now - self._seen
        self._seen = now
        return now - self._started
