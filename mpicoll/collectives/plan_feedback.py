"""Error feedback as plans see it, which are kept for later calls and must not keep it alive."""

from __future__ import annotations

import weakref

import numpy as np

from mpicoll.compression import ErrorFeedback
from mpicoll.compression.aggregatable import Memory


class PlanFeedback:
    """Weak reference to an :class:`~mpicoll.compression.ErrorFeedback`, with the methods that plans call.

    A plan runs only in calls that have been given the object, or for requests that hold it. A part is held by the error
    feedback of the whole vector.
    """

    __slots__ = ("_given",)

    def __init__(self, feedback: ErrorFeedback) -> None:
        self._given = weakref.ref(feedback)

    @property
    def _there(self) -> ErrorFeedback:
        found = self._given()
        assert found is not None, "a plan outlives its ErrorFeedback, but is not run any more"
        return found

    @property
    def memory(self) -> Memory:
        """State of the compressor or algorithm between vectors."""
        return self._there.memory

    def begin(self, x: np.ndarray) -> np.ndarray:
        """See :meth:`~mpicoll.compression.ErrorFeedback.begin`."""
        return self._there.begin(x)

    def open(self, count: int) -> np.ndarray:
        """See :meth:`~mpicoll.compression.ErrorFeedback.open`."""
        return self._there.open(count)

    def open_result(self) -> np.ndarray:
        """See :meth:`~mpicoll.compression.ErrorFeedback.open_result`."""
        return self._there.open_result()

    def update(self, sent: np.ndarray) -> None:
        """See :meth:`~mpicoll.compression.ErrorFeedback.update`."""
        self._there.update(sent)

    def end(self) -> None:
        """See :meth:`~mpicoll.compression.ErrorFeedback.end`."""
        self._there.end()


def feedback_of(compression: object) -> PlanFeedback | None:
    """Return the error feedback of a ``compression=``, None if it has none."""
    return PlanFeedback(compression) if isinstance(compression, ErrorFeedback) else None


def in_key(compression: object) -> object:
    """Return what stands for a ``compression=`` in the key of a plan, which must not keep error feedback alive."""
    return weakref.ref(compression) if isinstance(compression, ErrorFeedback) else compression
