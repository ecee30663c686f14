"""Metrics of the steps, summed over the ranks every few steps.

The same Allreduce carries the seconds that each rank computed and the requests to stop.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.errors import NonFiniteLoss
from mpicoll.train.config import TrainConfig
from mpicoll.train.step_plan import StepPlan
from mpicoll.train.straggler_detection import StragglerDetector

MOST_STEPS = 8
"""Largest number of steps whose sums are in one Allreduce; each step keeps sums of its own."""
_MAX_EXPONENT = 700.0
_PATIENCE_SECONDS = 0.5
"""Approximate seconds between sums of slow steps, and so the delay of a request to stop."""


def wrong_loss(loss: float, step: int) -> NonFiniteLoss:
    """Return the error of a step whose loss is not finite."""
    return NonFiniteLoss(
        f"the loss became {loss} in step {step}; try a lower --lr or a longer --warmup, "
        "or look for numbers in the data that are not finite"
    )


class StepRecord(NamedTuple):
    """Metrics of a step, the same on all ranks in synchronous training.

    Attributes
    ----------
    step, epoch
        Numbers of the step and its epoch, from 0.
    learning_rate
        Learning rate of the step.
    loss, accuracy
        Means over the samples of the step, of all its ranks; in asynchronous training, until training ends, over those
        of one worker. Accuracy is the fraction of correct predictions, 0 to 1; None for tasks without such a count.
    """

    step: int
    epoch: int
    learning_rate: float
    loss: float
    accuracy: float | None

    def scalars(self) -> dict[str, float]:
        """Return the values to plot by step, by name."""
        accuracy = {} if self.accuracy is None else {"accuracy/batch": self.accuracy}
        return {"loss/batch": self.loss, **accuracy, "learning_rate": self.learning_rate}


class EpochRecord(NamedTuple):
    """Metrics after an epoch, or after its part before the last step of the run.

    Attributes
    ----------
    epoch
        Number of the epoch, from 0.
    steps
        Steps of the run so far, those before a checkpoint included.
    train_loss, train_accuracy
        Means over the epoch's samples, each computed in its own step; in an asynchronous run that has resumed, over
        those since then. None if this rank knows none of the steps.
    test_loss, test_accuracy
        Means over the test samples after the epoch; None if they were not evaluated. Both accuracies are None for
        tasks whose predictions are not correct or wrong; the loss of language modelling is in nats per byte.
    seconds
        Wall seconds on rank 0 since training began or resumed, everything included.
    samples_per_second
        Training samples of all ranks per second of the epoch's training steps, as seen by rank 0; in asynchronous
        training, per second since training began.
    train_perplexity, test_perplexity
        Exponentials of the losses, for language modelling; None for other tasks.
    """

    epoch: int
    steps: int
    train_loss: float | None
    train_accuracy: float | None
    test_loss: float | None
    test_accuracy: float | None
    seconds: float
    samples_per_second: float
    train_perplexity: float | None = None
    test_perplexity: float | None = None


class Metrics:
    """Sums of loss and correct predictions of the steps, in float64, over the ranks; summed every few steps.

    Parameters
    ----------
    comm
        The ranks.
    observers
        Functions that get the seconds that each rank computed in each step, ``(steps, ranks)``, the same on all ranks.

    Attributes
    ----------
    records : list of StepRecord
        The steps that have been summed over the ranks.
    stop : bool
        True if a rank had called :meth:`ask_to_stop` before the last :meth:`settle`; the same on all ranks.
    pace : StragglerDetector
        Seconds that each rank computed; the same on all ranks.
    """

    def __init__(
        self, comm: MPI.Intracomm, observers: Sequence[Callable[[np.ndarray], None]] = (), *, counts_hits: bool = True
    ) -> None:
        self._counts_hits = counts_hits
        self.records: list[StepRecord] = []
        self.stop = False
        self._comm, self._wants_to_stop = comm, False
        self.pace = StragglerDetector(comm.Get_size())
        self._observers = (self.pace.add, *observers)
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
        """Add this rank's sums of a step; return True if :meth:`settle` is due, the same on all ranks.

        Parameters
        ----------
        count
            Samples of the step on all ranks.
        loss_sum, correct
            Sums over this rank's samples.
        seconds
            Seconds that this rank computed.
        """
        row = self._sums[1 + len(self._open)]
        row[:2], row[self._column] = (loss_sum, correct), seconds
        self._open.append((step, epoch, rate, count))
        return len(self._open) == self._steps

    @property
    def wants_to_stop(self) -> bool:
        """True if :meth:`ask_to_stop` was called on this rank."""
        return self._wants_to_stop

    def open_sums(self) -> dict[int, tuple[float, float]]:
        """Return this rank's sums of losses and of correct predictions, of steps not summed over the ranks yet."""
        rows = self._sums[1:, :2].tolist()
        return {step: (loss, correct) for (step, *_), (loss, correct) in zip(self._open, rows, strict=False)}

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
        totals = sums.copy()  # this rank's own sums are needed if another rank dies meanwhile
        self._comm.Allreduce(MPI.IN_PLACE, totals, MPI.SUM)
        (stop, seconds), *found = totals[:, :2].tolist()
        for observe in self._observers:
            observe(totals[1:, 2:].copy())
        sums[:] = 0
        self.stop = stop > 0
        often = _PATIENCE_SECONDS * self._comm.Get_size() / max(seconds, 1e-9)
        self._steps = max(1, min(MOST_STEPS, int(often)))
        for (step, epoch, rate, count), (loss, correct) in zip(self._open, found, strict=True):
            if not math.isfinite(loss):
                raise wrong_loss(loss, step)
            accuracy = correct / count if self._counts_hits else None
            self.records.append(StepRecord(step, epoch, rate, loss / count, accuracy))
        self._open.clear()


def epoch_means(plan: StepPlan, records: Sequence[StepRecord], epoch: int) -> tuple[float | None, float | None]:
    """Return mean loss and accuracy over the samples of an epoch's steps; (None, None) if `records` has none of them.

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
    if found[0].accuracy is None:
        return loss, None
    hits = sum((record.accuracy or 0.0) * count for record, count in zip(found, counts, strict=True))
    return loss, hits / sum(counts)


def perplexity(loss: float | None, config: TrainConfig) -> float | None:
    """Return the exponential of a loss in nats per byte, for language modelling; None for other tasks."""
    if loss is None or config.task != "language_modeling":
        return None
    return math.exp(min(loss, _MAX_EXPONENT))
