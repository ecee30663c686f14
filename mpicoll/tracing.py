"""Trace of this process: spans of time in a ring of fixed length, recorded only while they are wanted.

    with spans.span("forward"):
        ...

Times are those of ``time.perf_counter()``, in seconds. One thread may note spans.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np

NAMES = ("data", "compute", "forward", "backward", "update", "communication", "tally", "pull", "push", "evaluation",
         "checkpoints", "bucket")  # fmt: skip
BUCKET = NAMES.index("bucket")
"""The sum of a bucket over the ranks, from its begin to when its end was noticed; may go on beside everything else."""
_NUMBERS = {name: number for number, name in enumerate(NAMES)}
_SPAN = np.dtype(
    [("start", np.float64), ("end", np.float64), ("step", np.int64), ("number", np.int32), ("name", np.int32)]
)


class Ring:
    """The latest spans.

    Attributes
    ----------
    step : int
        What is noted belongs to this step.
    """

    def __init__(self, capacity: int) -> None:
        self.step = -1
        self._table, self._count = np.empty(capacity, _SPAN), 0

    def note(self, name: str, start: float, end: float, number: int) -> None:
        """Keep a span, in place of the oldest one where there is no more room."""
        self._table[self._count % len(self._table)] = (start, end, self.step, number, _NUMBERS[name])
        self._count += 1

    def latest(self, steps: int) -> np.ndarray:
        """Return the spans of the last `steps` steps of which all are still there, in the order of their ends.

        An array with the fields `start`, `end`, `step`, `number` and `name`, a place in :data:`NAMES`.
        """
        length = len(self._table)
        if self._count <= length:
            spans = self._table[: self._count]
        else:
            spans = np.roll(self._table, -(self._count % length))
            spans = spans[spans["step"] > spans["step"][0]]  # the oldest step may have lost some
        return spans[spans["step"] > self.step - steps].copy()


_ring: Ring | None = None


def keep(capacity: int) -> Ring:
    """Keep spans of this process from now on, the last `capacity` ones; return where."""
    global _ring
    _ring = Ring(capacity)
    return _ring


def stop() -> None:
    """Keep none from now on."""
    global _ring
    _ring = None


def wanted() -> bool:
    """True if spans are recorded."""
    return _ring is not None


def at_step(step: int) -> None:
    """Say that a step begins."""
    if _ring is not None:
        _ring.step = step


def note(name: str, start: float, end: float, number: int = -1) -> None:
    """Keep a span, one of `NAMES`, if wanted; `number`: of the bucket, for instance."""
    if _ring is not None:
        _ring.note(name, start, end, number)


_NOTHING = contextlib.nullcontext()


def span(name: str, number: int = -1) -> contextlib.AbstractContextManager[None]:
    """Keep the time that the body takes, if wanted."""
    return _NOTHING if _ring is None else _timed(name, number)


@contextlib.contextmanager
def _timed(name: str, number: int) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        note(name, start, time.perf_counter(), number)
