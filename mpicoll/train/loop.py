"""The training loop: shard, compute, add up, update; then evaluate and check that all replicas agree."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.gradients import GradientSynchronizer, differing_ranks
from mpicoll.train.clock import Clock
from mpicoll.train.config import FEEDBACK, TrainConfig
from mpicoll.train.data import Dataset, Samples
from mpicoll.train.environment import process_age
from mpicoll.train.failures import NonFiniteLoss, ReplicasDiffer
from mpicoll.train.models import Flat, Model, Storage
from mpicoll.train.optimizer import LocalMomentumSGD, MomentumSGD, learning_rate
from mpicoll.train.report import Progress
from mpicoll.train.sharding import batch_of_rank, epoch_order, part, steps_per_epoch

_TALLY_STEPS = 8
"""Losses of so many steps travel in one Allreduce; the sums of each step are exact and its number is kept."""
_EVALUATION_ROWS = 1024


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
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.records: list[StepRecord] = []
        self._comm = comm
        self._sums = np.zeros((_TALLY_STEPS, 2))
        self._open: list[tuple[int, int, float, int]] = []

    def add(self, step: int, epoch: int, rate: float, count: int, loss_sum: float, correct: int) -> bool:
        """Note this rank's sums of a step over `count` samples of all ranks; return whether :meth:`settle` is due."""
        self._sums[len(self._open)] = loss_sum, correct
        self._open.append((step, epoch, rate, count))
        return len(self._open) == _TALLY_STEPS

    def settle(self) -> None:
        """Add up what is open. Collective.

        Raises
        ------
        NonFiniteLoss
            On every rank, naming the first step whose loss is not finite.
        """
        sums = self._sums[: len(self._open)]
        if len(sums) == 0:
            return
        self._comm.Allreduce(MPI.IN_PLACE, sums, MPI.SUM)
        for (step, epoch, rate, count), (loss, correct) in zip(self._open, sums.tolist(), strict=True):
            if not math.isfinite(loss):
                raise NonFiniteLoss(f"the loss became {loss} in step {step}; try a lower --lr or a longer --warmup")
            self.records.append(StepRecord(step, epoch, rate, loss / count, correct / count))
        self._open.clear()


class Trainer:
    """One rank's replica and what it needs to take steps.

    Collective over `comm`: construction and every method.

    Attributes
    ----------
    parameters : (parameter_count,) of the model's dtype
        The same bits on every rank.
    epoch_losses : list of float
        Mean training loss of each epoch, measured while it ran.
    """

    def __init__(self, config: TrainConfig, comm: MPI.Intracomm, dataset: Dataset, model: Model, clock: Clock) -> None:
        self._config, self._comm, self._dataset, self._model = config, comm, dataset, model
        self._size, self._rank = comm.Get_size(), comm.Get_rank()
        self.clock = clock
        self.parameters = model.initial(config.seed)
        comm.Bcast(self.parameters)
        self._gradients = GradientSynchronizer(
            model.shapes,
            comm=comm,
            compression=config.compression,
            error_feedback=FEEDBACK[config.error_feedback],
            bucket_bytes=config.bucket_bytes,
            average=False,
            dtype=model.dtype,
        )
        compressor = self._gradients.compression
        losing = self.error_feedback or (compressor is not None and compressor.needs_feedback)
        self._optimizer = (LocalMomentumSGD if losing else MomentumSGD)(
            self.parameters,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            spans=model.layout.decayed(0, model.parameter_count),
        )
        self._storage = Flat(model.layout, self.parameters, self._gradients.flat)
        rows = max(part(min(config.batch, dataset.train.count), self._size, 0)[1], 1)
        self._x = np.empty((rows, dataset.feature_count), model.dtype)
        self._y = np.empty(rows, np.int64)
        self._tally = Tally(comm)
        self.epoch_losses: list[float] = []
        self.seconds_to_first_step = 0.0

    @property
    def records(self) -> list[StepRecord]:
        """One record for each step taken."""
        return self._tally.records

    @property
    def error_feedback(self) -> bool:
        """Whether what compression loses comes with the next step."""
        return self._gradients.error_feedback

    def nbytes(self) -> tuple[float, float]:
        """Return bytes that a rank has sent for gradients, and would have without compression; means over ranks."""
        own, size = self._gradients, self._size
        sums = np.array([own.sent_nbytes, 2 * (size - 1) * own.nbytes / size])
        self._comm.Allreduce(MPI.IN_PLACE, sums, MPI.SUM)
        sent, dense = (sums / size).tolist()
        return sent, dense

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        config = self._config
        steps = config.epochs * steps_per_epoch(self._dataset.train.count, config.batch)
        return steps if config.steps is None else min(steps, config.steps)

    @property
    def samples_per_second(self) -> float:
        """Training samples of all ranks a second of training steps, so far."""
        stepping = self.clock.stepping
        return self._samples_seen / stepping if stepping else 0.0

    def train(self, progress: Progress) -> None:
        """Take all steps.

        Raises
        ------
        NonFiniteLoss, ReplicasDiffer
            On every rank.
        """
        self._samples_seen = 0
        for epoch, steps in self._epochs():
            self._train_epoch(epoch, steps, progress)
            losses = [record.loss * self._batch_count(record.step) for record in self.records[-len(steps) :]]
            self.epoch_losses.append(sum(losses) / sum(self._batch_count(step) for step in steps))
            with self.clock.spent_on("evaluation"):
                self.check_replicas()

    def _epochs(self) -> Iterator[tuple[int, range]]:
        per_epoch = steps_per_epoch(self._dataset.train.count, self._config.batch)
        for epoch, start in enumerate(range(0, self.total_steps, per_epoch)):
            yield epoch, range(start, min(start + per_epoch, self.total_steps))

    def _batch_count(self, step: int) -> int:
        count, batch = self._dataset.train.count, self._config.batch
        start = step % steps_per_epoch(count, batch) * batch
        return min(count - start, batch)

    def _train_epoch(self, epoch: int, steps: range, progress: Progress) -> None:
        with self.clock.spent_on("data"):
            order = epoch_order(self._dataset.train.count, self._config.seed, epoch)
        for step in steps:
            indices, count = batch_of_rank(order, step - steps[0], self._config.batch, self._size, self._rank)
            self._take_step(step, epoch, indices, count, last=step == steps[-1])
            progress.advance()
            if self.records and (step + 1) % _TALLY_STEPS == 0:
                latest = self.records[-1]
                share = self.clock.communication_share
                progress.show(epoch, latest.loss, latest.accuracy, self.samples_per_second, share)

    def _take_step(self, step: int, epoch: int, indices: np.ndarray, count: int, last: bool) -> None:
        config, clock = self._config, self.clock
        x, y = self._x[: len(indices)], self._y[: len(indices)]
        with clock.spent_on("data"):
            self._dataset.train.fill(indices, x, y)
        with clock.spent_on("compute"):
            loss, correct = self._model.loss_and_gradient(self._storage, x, y)
            if isinstance(self._optimizer, LocalMomentumSGD):
                self._optimizer.local(self._gradients.flat, 1 / count)
        with clock.spent_on("communication"):
            self._gradients.synchronize(compress=step >= config.warmup_dense)
        rate = learning_rate(step, self.total_steps, config.lr, config.warmup, config.schedule)
        with clock.spent_on("compute"):
            if isinstance(self._optimizer, LocalMomentumSGD):
                self._optimizer.step(self._gradients.flat, rate)
            else:
                self._optimizer.step(self._gradients.flat, rate, 1 / count)
        self._samples_seen += count
        due = self._tally.add(step, epoch, rate, count, loss, correct)
        if due or last or step == 0:
            with clock.spent_on("communication"):
                self._tally.settle()
        if step == 0:
            self.seconds_to_first_step = process_age()

    def check_replicas(self) -> str:
        """Return the SHA-256 of the parameters as hexadecimal digits.

        Raises
        ------
        ReplicasDiffer
            On every rank, naming the ranks whose parameters are not those that most ranks hold.
        """
        digest = hashlib.sha256(self.parameters.tobytes())
        if differing := differing_ranks(self._comm, digest.digest()):
            ranks = ", ".join(map(str, differing))
            raise ReplicasDiffer(f"the parameters of rank {ranks} differ from those of the other ranks")
        return digest.hexdigest()

    def evaluate(self) -> tuple[float, float] | None:
        """Return mean loss and accuracy over the test samples, None where there are none."""
        with self.clock.spent_on("evaluation"):
            return evaluate(self._model, self._storage, self._dataset.test, self._dataset.feature_count, self._comm)


def evaluate(
    model: Model, storage: Storage, samples: Samples, feature_count: int, comm: MPI.Intracomm
) -> tuple[float, float] | None:
    """Return mean loss and accuracy over all `samples`, each rank taking its part; None where there are none."""
    if samples.count == 0:
        return None
    start, stop = part(samples.count, comm.Get_size(), comm.Get_rank())
    x = np.empty((min(_EVALUATION_ROWS, stop - start), feature_count), model.dtype)
    y = np.empty(len(x), np.int64)
    sums = np.zeros(2)
    for first in range(start, stop, _EVALUATION_ROWS):
        indices = np.arange(first, min(first + _EVALUATION_ROWS, stop))
        samples.fill(indices, x[: len(indices)], y[: len(indices)])
        sums += model.loss(storage, x[: len(indices)], y[: len(indices)])
    comm.Allreduce(MPI.IN_PLACE, sums, MPI.SUM)
    loss, correct = (sums / samples.count).tolist()
    return loss, correct
