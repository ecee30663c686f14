"""Where the time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from mpi4py import MPI

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
    def spent_on(self, phase: str) -> Iterator[None]:
        """Add the time that the body takes to `phase`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    @property
    def stepping(self) -> float:
        """Seconds of training steps: data, compute and communication."""
        return sum(self.seconds[phase] for phase in ("data", "compute", "communication"))

    @property
    def communication_share(self) -> float:
        """The part of :attr:`stepping` that is communication, 0 to 1."""
        return self.seconds["communication"] / self.stepping if self.stepping else 0.0

    def mean(self, comm: MPI.Intracomm) -> Clock:
        """Return the mean over all ranks. Collective over `comm`."""
        values = np.array([self.seconds[phase] for phase in PHASES])
        comm.Allreduce(MPI.IN_PLACE, values, MPI.SUM)
        clock = Clock()
        clock.seconds = dict(zip(PHASES, (values / comm.Get_size()).tolist(), strict=True))
        return clock
