"""Communicators of one rank: they have no channel before they are used, and use those of others that were freed."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

MAX_KEPT = 16
"""The largest number of spare channels; each holds a communicator of MPI."""


class ChannelsOfOneRank:
    """Home of the spare channels of one rank, which a communicator of one rank can use wherever it comes from.

    It is what :class:`~mpicoll.communicator.spare_channels.Origin` needs of a channel and of its spares.
    """

    broken = None

    def __init__(self) -> None:
        self.spares = self
        self._kept: list[tuple[Hashable, Any]] = []
        self._lock = threading.RLock()  # the garbage collector may free a communicator anywhere

    def has_room(self, key: Hashable) -> bool:
        """Return True: the oldest spare makes room for a new one."""
        return True

    def keep(self, key: Hashable, channel: Any) -> bool:
        """Keep a spare, and free the oldest one if there are too many; local. Return True."""
        with self._lock:
            self._kept.append((key, channel))
            dropped = self._kept.pop(0) if len(self._kept) > MAX_KEPT else None
        if dropped is not None:
            dropped[1].close()
        return True

    def take(self, key: Hashable) -> Any:
        """Return the newest spare with this key, None if there is none; it is no spare any more."""
        with self._lock:
            for entry in reversed(tuple(self._kept)):
                if entry[0] == key and entry in self._kept:
                    self._kept.remove(entry)
                    return entry[1]
            return None
