"""Wall-clock time of a rank, by phase of the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from mpi4py import MPI

from mpicoll import tracing

PHASES = ("start-up", "data", "compute", "communication", "evaluation", "checkpoints")


class Clock:
    """Wall seconds of this rank, by phase.

    Attributes
    ----------
    seconds : dict of str to float
        One entry for each of :data:`PHASES`. Communication includes waiting for slower ranks.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def spent_on(self, phase: str, span: str | None = None) -> Iterator[None]:
        """Add the body's wall time to `phase`; a trace records it as `span`, by default the phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.seconds[phase] += end - start
            tracing.note(span or phase, start, end)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Move `seconds` from the phase `source` to the phase `target`."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    @property
    def stepping(self) -> float:
        """Seconds of training steps: data, compute and communication."""
        return sum(self.seconds[phase] for phase in ("data", "compute", "communication"))

    @property
    def communication_share(self) -> float:
        """Fraction of :attr:`stepping` that is communication, 0 to 1."""
        return self.seconds["communication"] / self.stepping if self.stepping else 0.0

    def by_rank(self, comm: MPI.Intracomm) -> dict[str, list[float]]:
        """Return the seconds of each phase on each rank. Collective over `comm`."""
        table = np.empty((comm.Get_size(), len(PHASES)))
        comm.Allgather(np.array([self.seconds[phase] for phase in PHASES]), table)
        return dict(zip(PHASES, table.T.tolist(), strict=True))

    def mean(self, comm: MPI.Intracomm) -> Clock:
        """Return a clock with the mean seconds of all ranks. Collective over `comm`."""
        clock = Clock()
        clock.seconds = {phase: float(np.mean(seconds)) for phase, seconds in self.by_rank(comm).items()}
        return clock
