"""Polling back-off of ranks that wait for memory or messages of others."""

from __future__ import annotations

import os
import time

_YIELDS = 5
_FIRST_SLEEP, _LONGEST_SLEEP = 20e-6, 1e-3


class Pause:
    """Polling back-off: yield the core first, then sleep with exponential delay, for at most `longest` seconds."""

    def __init__(self, longest: float = _LONGEST_SLEEP) -> None:
        self._longest = longest
        self.reset()

    def reset(self) -> None:
        """Start again with yielding, since there was progress."""
        self._yields, self._seconds = _YIELDS, _FIRST_SLEEP

    def rest(self) -> None:
        """Yield or sleep once."""
        if self._yields:
            self._yields -= 1
            os.sched_yield()
            return
        time.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, self._longest)
