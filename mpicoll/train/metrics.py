"""Metrics of the steps, summed over the ranks every few steps.

The same Allreduce carries the seconds that each rank computed, and requests to stop.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.errors import NonFiniteLoss
from mpicoll.train.step_plan import StepPlan
from mpicoll.train.straggler_detection import StragglerDetector

MOST_STEPS = 8
"""Largest number of steps whose sums are in one Allreduce; each step keeps sums of its own."""
_PATIENCE_SECONDS = 0.5
"""Slow steps are summed sooner, so that a signal takes effect after about this time."""


class StepRecord(NamedTuple):
    """Metrics of a step, the same on all ranks; `loss` and `accuracy` are means over the whole batch."""

    step: int
    epoch: int
    learning_rate: float
    loss: float
    accuracy: float

    def scalars(self) -> dict[str, float]:
        """Return the values to plot by step, by name."""
        return {"loss/batch": self.loss, "accuracy/batch": self.accuracy, "learning_rate": self.learning_rate}


class EpochRecord(NamedTuple):
    """Metrics after an epoch, or after its part that came before the last step.

    `train_loss` and `train_accuracy` were measured while it ran, None if this rank knows none of its steps; `steps`
    counts from the beginning of the run. Rank 0's are `seconds`, wall time since training began or was resumed,
    everything included, and `samples_per_second`, of the epoch's training steps.
    """

    epoch: int
    steps: int
    train_loss: float | None
    train_accuracy: float | None
    test_loss: float | None
    test_accuracy: float | None
    seconds: float
    samples_per_second: float


class Metrics:
    """Loss and hits of the steps, in float64, summed over the ranks every few steps.

    Attributes
    ----------
    records : list of StepRecord
        The steps that have been summed over the ranks.
    stop : bool
        Whether some rank has asked to stop, by :meth:`ask_to_stop`; known on all ranks since the last `settle`.
    pace : StragglerDetector
        The time that each rank computed; equal on all ranks.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.records: list[StepRecord] = []
        self.stop = False
        self._comm, self._wants_to_stop = comm, False
        self.pace = StragglerDetector(comm.Get_size())
        # Each rank has a column of its own, zero on the others, for its seconds: a sum that is exact.
        self._sums = np.zeros((MOST_STEPS + 1, 2 + comm.Get_size()))
        self._column = 2 + comm.Get_rank()
        self._open: list[tuple[int, int, float, int]] = []
        self._steps = MOST_STEPS

    def ask_to_stop(self) -> None:
        """Request that all ranks stop; may be called from a signal handler."""
        self._wants_to_stop = True

    def add(
        self, step: int, epoch: int, rate: float, count: int, loss_sum: float, correct: int, seconds: float
    ) -> bool:
        """Add this rank's sums of a step over `count` samples of all ranks; return whether :meth:`settle` is due.

        Parameters
        ----------
        seconds
            Time that this rank computed.
        """
        row = self._sums[1 + len(self._open)]
        row[:2], row[self._column] = (loss_sum, correct), seconds
        self._open.append((step, epoch, rate, count))
        return len(self._open) == self._steps

    def settle(self, step_seconds: float) -> None:
        """Sum the steps since the last call over the ranks. Collective.

        Parameters
        ----------
        step_seconds
            Approximate time of a step on this rank.

        Raises
        ------
        NonFiniteLoss
            On every rank, naming the first step whose loss is not finite.
        """
        if not self._open:
            return
        sums = self._sums[: 1 + len(self._open)]
        sums[0, :2] = self._wants_to_stop, step_seconds
        self._comm.Allreduce(MPI.IN_PLACE, sums, MPI.SUM)
        (stop, seconds), *found = sums[:, :2].tolist()
        self.pace.add(sums[1:, 2:])
        sums[:] = 0
        self.stop = stop > 0
        often = _PATIENCE_SECONDS * self._comm.Get_size() / max(seconds, 1e-9)
        self._steps = max(1, min(MOST_STEPS, int(often)))
        for (step, epoch, rate, count), (loss, correct) in zip(self._open, found, strict=True):
            if not math.isfinite(loss):
                raise NonFiniteLoss(f"the loss became {loss} in step {step}; try a lower --lr or a longer --warmup")
            self.records.append(StepRecord(step, epoch, rate, loss / count, correct / count))
        self._open.clear()


def epoch_means(plan: StepPlan, records: Sequence[StepRecord], epoch: int) -> tuple[float | None, float | None]:
    """Return mean loss and accuracy over the samples of an epoch's steps, None if none of them is in `records`.

    Parameters
    ----------
    records
        Records in the order of steps.
    """
    first, stop = (
        bisect.bisect_left(records, number, key=lambda record: record.epoch) for number in (epoch, epoch + 1)
    )
    found = records[first:stop]
    if not found:
        return None, None
    counts = [plan.batch_count(record.step) for record in found]
    loss = sum(record.loss * count for record, count in zip(found, counts, strict=True)) / sum(counts)
    accuracy = sum(record.accuracy * count for record, count in zip(found, counts, strict=True)) / sum(counts)
    return loss, accuracy
