"""Clock for deadlines: it stops while the process or the whole machine is stopped."""

from __future__ import annotations

import time

_LONGEST_GAP_SECONDS = 5.0
"""Far longer than a busy machine lets a process wait for a core."""


class RunningClock:
    """Seconds since its creation in which this process ran.

    Time between two readings that are further apart than `longest_gap` seconds does not count: the process was stopped,
    or the machine was suspended, as virtual machines are while they are saved or moved. Deadlines that counted it would
    pass for all ranks at the moment when everything goes on.
    """

    __slots__ = ("_longest_gap", "_seen", "_started")

    def __init__(self, longest_gap: float = _LONGEST_GAP_SECONDS) -> None:
        self._longest_gap = longest_gap
        self._started = self._seen = time.monotonic()

    def read(self) -> float:
        """Return the seconds; to be called more often than every `longest_gap` seconds."""
        now = time.monotonic()
        if now - self._seen > self._longest_gap:
            self._started += now - self._seen
        self._seen = now
        return now - self._started
