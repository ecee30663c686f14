"""Plans composed of kernels, messages and whole schedules, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpicoll.buffers.reduction_ops import Reducer
from mpicoll.collectives import select
from mpicoll.messages.calls import Allocate, KernelCall
from mpicoll.messages.lowering import Message, Phase, Vector, lower
from mpicoll.schedules import chunk_bounds, find


class CompositePlan:
    """Builder of a plan's phases; each addition starts when all earlier ones are complete."""

    def __init__(self) -> None:
        self._stages: list[Phase] = []
        self._exchanges = 0
        self._last: int | None = None

    def stages(self) -> tuple[Phase, ...]:
        """Return the phases added so far, followed by a wait for the last messages."""
        self.call()
        return tuple(self._stages)

    def call(self, *functions: Callable[[], Any]) -> None:
        """Add functions without arguments."""
        if functions or self._last is not None:
            self._stages.append(Phase(self._last, tuple(KernelCall(function, ()) for function in functions), None))
            self._last = None

    def exchange(self, messages: Sequence[Message], *functions: Callable[[], Any]) -> None:
        """Add messages that are posted together, after a call of the functions."""
        self._stages.append(
            Phase(self._last, tuple(KernelCall(function, ()) for function in functions), tuple(messages))
        )
        self._last = self._exchanges
        self._exchanges += 1

    def add_allreduce(
        self, x: np.ndarray, reducer: Reducer, algorithm: str, size: int, rank: int, scratch: Allocate
    ) -> None:
        """Add an allreduce of `x`, in place, by the schedule of `algorithm`; `scratch` returns working memory."""
        if size == 1:
            return
        self.call()
        row = find("allreduce", algorithm)
        schedule = row.schedule(size, rank, root=0, segments=select.segments(row, x.nbytes, size))
        vector = Vector(None, x, chunk_bounds(x.size, schedule.chunks))
        for stage in lower(schedule, vector, reducer, lambda count: scratch(count, x.dtype)):
            waits_for = None if stage.waits_for is None else stage.waits_for + self._exchanges
            self._stages.append(stage._replace(waits_for=waits_for))
        self._exchanges += len(schedule.steps)
