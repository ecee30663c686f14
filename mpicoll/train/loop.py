"""The training loop: shard, compute, add up, update; then evaluate and check that all replicas agree."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from mpi4py import MPI

from mpicoll.train.clock import Clock
from mpicoll.train.config import TrainConfig
from mpicoll.train.data import Dataset, Samples
from mpicoll.train.engine import Engine, Part
from mpicoll.train.environment import process_age
from mpicoll.train.failures import ReplicasDiffer
from mpicoll.train.mesh import Mesh
from mpicoll.train.optimizer import learning_rate
from mpicoll.train.report import Progress
from mpicoll.train.sharding import batch_of_rank, epoch_order, part, steps_per_epoch
from mpicoll.train.strategy import Strategy
from mpicoll.train.tally import MOST_STEPS, StepRecord, Tally

_EVALUATION_ROWS = 1024


class Saving(Protocol):
    """What is told of the course of the training, and may save it; collective."""

    def after_step(self, trainer: Trainer, steps: int) -> None:
        """So many steps are done."""

    def after_epoch(self, trainer: Trainer, steps: int) -> None:
        """So are they, and with them an epoch."""

    def save(self, trainer: Trainer, steps: int) -> None:
        """They are, and the run ends early."""


class Trainer:
    """One rank's part of the model and what it needs to take steps.

    Collective over the mesh: construction and every method.

    Attributes
    ----------
    epoch_losses : list of float
        Mean training loss of each epoch, measured while it ran.
    stopped : bool
        Whether it ended early because some rank was asked to stop.
    """

    def __init__(
        self, config: TrainConfig, mesh: Mesh, dataset: Dataset, engine: Engine, strategy: Strategy, clock: Clock
    ) -> None:
        self._config, self._mesh, self._dataset = config, mesh, dataset
        self._engine, self.strategy, self.clock = engine, strategy, clock
        rows = max(part(min(config.step_batch, dataset.train.count), mesh.replicas, 0)[1], 1)
        self._x = np.empty((rows, dataset.feature_count), config.dtype)
        self._y = np.empty(rows, np.int64)
        self.tally = Tally(mesh.world)
        self.epoch_losses: list[float] = []
        self.seconds_to_first_step = 0.0
        self.first_step, self.samples_seen, self.stopped = 0, 0, False

    @property
    def records(self) -> list[StepRecord]:
        """One record for each step taken, those before a checkpoint included."""
        return self.tally.records

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch; the last may take fewer samples."""
        return steps_per_epoch(self._dataset.train.count, self._config.step_batch)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        steps = self._config.epochs * self.steps_per_epoch
        return steps if self._config.steps is None else min(steps, self._config.steps)

    @property
    def samples_per_second(self) -> float:
        """Training samples of all ranks a second of training steps, so far."""
        stepping = self.clock.stepping
        return self.samples_seen / stepping if stepping else 0.0

    def train(self, progress: Progress, saver: Saving) -> None:
        """Take all steps that are left.

        Raises
        ------
        NonFiniteLoss, ReplicasDiffer, CheckpointFailed
            On every rank.
        """
        for epoch, steps in self._epochs():
            self._train_epoch(epoch, steps, progress, saver)
            if self.stopped:
                return
            records = self.records[epoch * self.steps_per_epoch :]
            losses = [record.loss * self._batch_count(record.step) for record in records]
            self.epoch_losses.append(sum(losses) / sum(self._batch_count(record.step) for record in records))
            with self.clock.spent_on("evaluation"):
                self.check_replicas()
            saver.after_epoch(self, steps.stop)

    def _epochs(self) -> Iterator[tuple[int, range]]:
        for epoch, start in enumerate(range(0, self.total_steps, self.steps_per_epoch)):
            stop = min(start + self.steps_per_epoch, self.total_steps)
            if stop > self.first_step:
                yield epoch, range(max(start, self.first_step), stop)

    def _batch_count(self, step: int) -> int:
        count, batch = self._dataset.train.count, self._config.step_batch
        return min(count - step % self.steps_per_epoch * batch, batch)

    def _train_epoch(self, epoch: int, steps: range, progress: Progress, saver: Saving) -> None:
        config, mesh, count = self._config, self._mesh, self._dataset.train.count
        with self.clock.spent_on("data"):
            order = epoch_order(count, config.seed, epoch)
        for step in steps:
            number = step - epoch * self.steps_per_epoch
            indices, samples = batch_of_rank(order, number, config.step_batch, mesh.replicas, mesh.replica)
            self._take_step(step, epoch, indices, samples, last=step == steps[-1])
            progress.advance()
            if self.records and (step + 1) % MOST_STEPS == 0:
                latest = self.records[-1]
                share = self.clock.communication_share
                progress.show(epoch, latest.loss, latest.accuracy, self.samples_per_second, share)
            if self.tally.stop:
                saver.save(self, step + 1)
                self.stopped = True
                return
            saver.after_step(self, step + 1)

    def _take_step(self, step: int, epoch: int, indices: np.ndarray, count: int, last: bool) -> None:
        config, clock, began = self._config, self.clock, time.perf_counter()
        with clock.spent_on("data"):
            parts = self._parts(indices)
        with clock.spent_on("compute"):
            compress = step >= config.warmup_dense
            loss, correct = self._engine.gradients(self.strategy, parts, 1 / count, compress=compress)
        with clock.spent_on("communication"):
            self.strategy.reduce()
        rate = learning_rate(step, self.total_steps, config.lr, config.warmup, config.schedule)
        with clock.spent_on("compute"):
            self.strategy.update(rate, config.clip)
        self.samples_seen += count
        told = (loss, correct) if self._mesh.speaks else (0.0, 0)
        due = self.tally.add(step, epoch, rate, count, *told)
        if due or last or step == self.first_step:
            with clock.spent_on("communication"):
                self.tally.settle(time.perf_counter() - began)
        if step == self.first_step:
            self.seconds_to_first_step = process_age()

    def _parts(self, indices: np.ndarray) -> list[Part]:
        """Return this rank's samples, cut as the options say; parts may be empty."""
        x, y = self._x[: len(indices)], self._y[: len(indices)]
        self._dataset.train.fill(indices, x, y)
        count = self._config.accumulate * self._config.microbatches
        return [
            (x[slice(*part(len(x), count, number))], y[slice(*part(len(x), count, number))]) for number in range(count)
        ]

    def check_replicas(self) -> str:
        """Return the SHA-256 of the parameters, of all parts of the model, as hexadecimal digits.

        Raises
        ------
        ReplicasDiffer
            On every rank, naming the ranks whose parameters are not those that most replicas hold.
        """
        world, digest = self._mesh.world, np.frombuffer(self.strategy.digest(), np.uint8)
        table = np.empty((world.Get_size(), digest.size), np.uint8)
        world.Allgather(digest.copy(), table)
        rows, places = [row.tobytes() for row in table], world.Get_size() // self._mesh.replicas
        common = [max(rows[place::places], key=rows[place::places].count) for place in range(places)]
        if differing := [rank for rank, row in enumerate(rows) if row != common[rank % places]]:
            ranks = ", ".join(map(str, differing))
            raise ReplicasDiffer(f"the parameters of rank {ranks} differ from those of the other ranks")
        return (common[0] if places == 1 else hashlib.sha256(b"".join(common)).digest()).hex()

    def evaluate(self) -> tuple[float, float] | None:
        """Return mean loss and accuracy over the test samples, None where there are none."""
        with self.clock.spent_on("evaluation"):
            return self._evaluate(self._dataset.test)

    def _evaluate(self, samples: Samples) -> tuple[float, float] | None:
        if samples.count == 0:
            return None
        mesh, features = self._mesh, self._dataset.feature_count
        start, stop = part(samples.count, mesh.replicas, mesh.replica)
        x, y = np.empty((_EVALUATION_ROWS, features), self._config.dtype), np.empty(_EVALUATION_ROWS, np.int64)
        sums = np.zeros(2)
        # As many batches on all ranks: where layers are shared they have to meet.
        batches = -(-part(samples.count, mesh.replicas, 0)[1] // _EVALUATION_ROWS)
        for first in itertools.islice(itertools.count(start, _EVALUATION_ROWS), batches):
            indices = np.arange(min(first, stop), min(first + _EVALUATION_ROWS, stop))
            samples.fill(indices, x[: len(indices)], y[: len(indices)])
            sums += self._engine.loss(self.strategy, x[: len(indices)], y[: len(indices)])
        if not mesh.speaks:
            sums[:] = 0
        mesh.world.Allreduce(MPI.IN_PLACE, sums, MPI.SUM)
        loss, correct = (sums / samples.count).tolist()
        return loss, correct
