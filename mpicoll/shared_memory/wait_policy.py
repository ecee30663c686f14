"""Polls, yields and sleeps of compiled code that waits for other ranks, before it returns to Python."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpicoll.kernels import futex
from mpicoll.kernels import operation_words as words

SPINS, _YIELDS = 2000, 100
"""Polls, of some tens of microseconds in all, and then polls with yielding the core, for about as long."""
_START_SPINS = 100
"""Polls of a rank that starts an operation, about a microsecond, for ranks that start it at the same time."""
_SLEEP_LIMIT = np.array([0, 500_000], np.int64)
"""Seconds and nanoseconds after which a rank that sleeps lets the MPI library progress, and Python see signals."""


def of_calls(size: int, oversubscribed: bool) -> Iterator[tuple[int, int]]:
    """Yield words of a job of blocking or persistent operations, and what they say; the same on all ranks."""
    sleeps = oversubscribed and futex.AVAILABLE
    yield words.SPINS, 1 if oversubscribed else SPINS
    yield words.YIELDS, _YIELDS
    yield words.START_SPINS, 1 if oversubscribed else _START_SPINS
    yield words.START_YIELDS, size if oversubscribed else 0
    yield words.SLEEP_LIMIT, _SLEEP_LIMIT.ctypes.data if sleeps else 0


def of_nonblocking(oversubscribed: bool) -> Iterator[tuple[int, int]]:
    """Yield those that differ in a job of nonblocking operations."""
    yield words.SPINS, 1 if oversubscribed else _START_SPINS
    if not oversubscribed:
        yield words.YIELDS, 0
