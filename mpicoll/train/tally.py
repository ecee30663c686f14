"""Losses of the steps, added up over the ranks every few steps; with them travels whether somebody wants to stop."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.train.failures import NonFiniteLoss

MOST_STEPS = 8
"""Losses of so many steps travel in one Allreduce; the sums of each step are exact and its number is kept."""
_PATIENCE_SECONDS = 0.5
"""Slow steps are settled sooner: nobody waits much longer than this for an answer to a signal."""


class StepRecord(NamedTuple):
    """What is known of a step, the same on all ranks; `loss` and `accuracy` are means over the whole batch."""

    step: int
    epoch: int
    learning_rate: float
    loss: float
    accuracy: float


class Tally:
    """Collect loss and hits of the steps, in float64, and add them up over ranks every few steps.

    Attributes
    ----------
    records : list of StepRecord
        The steps whose sums have been added up.
    stop : bool
        Whether some rank has asked to stop, by :meth:`ask_to_stop`; known on all ranks since the last `settle`.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.records: list[StepRecord] = []
        self.stop = False
        self._comm, self._wants_to_stop = comm, False
        self._sums = np.zeros((MOST_STEPS + 1, 2))
        self._open: list[tuple[int, int, float, int]] = []
        self._steps = MOST_STEPS

    def ask_to_stop(self) -> None:
        """Let all ranks stop soon; may be called from a signal handler."""
        self._wants_to_stop = True

    def add(self, step: int, epoch: int, rate: float, count: int, loss_sum: float, correct: int) -> bool:
        """Note this rank's sums of a step over `count` samples of all ranks; return whether :meth:`settle` is due."""
        self._sums[1 + len(self._open)] = loss_sum, correct
        self._open.append((step, epoch, rate, count))
        return len(self._open) == self._steps

    def settle(self, step_seconds: float) -> None:
        """Add up what is open. Collective.

        Parameters
        ----------
        step_seconds
            About how long a step takes on this rank.

        Raises
        ------
        NonFiniteLoss
            On every rank, naming the first step whose loss is not finite.
        """
        if not self._open:
            return
        sums = self._sums[: 1 + len(self._open)]
        sums[0] = self._wants_to_stop, step_seconds
        self._comm.Allreduce(MPI.IN_PLACE, sums, MPI.SUM)
        (stop, seconds), *found = sums.tolist()
        self.stop = stop > 0
        often = _PATIENCE_SECONDS * self._comm.Get_size() / max(seconds, 1e-9)
        self._steps = max(1, min(MOST_STEPS, int(often)))
        for (step, epoch, rate, count), (loss, correct) in zip(self._open, found, strict=True):
            if not math.isfinite(loss):
                raise NonFiniteLoss(f"the loss became {loss} in step {step}; try a lower --lr or a longer --warmup")
            self.records.append(StepRecord(step, epoch, rate, loss / count, correct / count))
        self._open.clear()
