"""Trace of this process: time spans in a ring buffer, recorded only between :func:`keep` and :func:`stop`.

    with tracing.span("forward"):
        ...

Times are those of ``time.perf_counter()``, in seconds. Only one thread may record spans.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np

NAMES = ("data", "compute", "forward", "backward", "update", "communication", "tally", "pull", "push", "evaluation",
         "checkpoints", "bucket")  # fmt: skip
BUCKET = NAMES.index("bucket")
"""The allreduce of a bucket, from its start to when its completion was seen; it may overlap all other spans."""
_NUMBERS = {name: number for number, name in enumerate(NAMES)}
_SPAN = np.dtype(
    [("start", np.float64), ("end", np.float64), ("step", np.int64), ("number", np.int32), ("name", np.int32)]
)


class Ring:
    """Ring buffer of the latest `capacity` spans.

    Attributes
    ----------
    step : int
        The step to which new spans belong.
    """

    def __init__(self, capacity: int) -> None:
        self.step = -1
        self._table, self._count = np.empty(capacity, _SPAN), 0

    def note(self, name: str, start: float, end: float, number: int) -> None:
        """Record a span, in place of the oldest one if the buffer is full."""
        self._table[self._count % len(self._table)] = (start, end, self.step, number, _NUMBERS[name])
        self._count += 1

    def latest(self, steps: int) -> np.ndarray:
        """Return the spans of the last `steps` steps, in the order of their ends, without a step that lost some.

        Returns
        -------
        array
            With the fields `start` and `end` in seconds, `step`, `number`, and `name`, an index into :data:`NAMES`.
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
    """Record spans of this process from now on; return the ring buffer, which holds the last `capacity` ones."""
    global _ring
    _ring = Ring(capacity)
    return _ring


def stop() -> None:
    """Record no spans from now on."""
    global _ring
    _ring = None


def wanted() -> bool:
    """True if spans are recorded."""
    return _ring is not None


def at_step(step: int) -> None:
    """Set the step to which new spans belong."""
    if _ring is not None:
        _ring.step = step


def note(name: str, start: float, end: float, number: int = -1) -> None:
    """Record a span if spans are recorded; `name` is one of :data:`NAMES`, `number` that of a bucket, for instance."""
    if _ring is not None:
        _ring.note(name, start, end, number)


_NOTHING = contextlib.nullcontext()


def span(name: str, number: int = -1) -> contextlib.AbstractContextManager[None]:
    """Record the time of the ``with`` body as a span, if spans are recorded."""
    return _NOTHING if _ring is None else _timed(name, number)


@contextlib.contextmanager
def _timed(name: str, number: int) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        note(name, start, time.perf_counter(), number)
