"""The training loop: shard, compute, add up, update; then evaluate and check that all replicas agree."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from mpicoll import spans
from mpicoll.train.clock import Clock
from mpicoll.train.config import NOOP, TrainConfig
from mpicoll.train.course import Course, Reader, shares_for_evaluation
from mpicoll.train.data import Dataset, Samples
from mpicoll.train.engine import Engine
from mpicoll.train.environment import process_age
from mpicoll.train.failures import NonFiniteLoss, ReplicasDiffer
from mpicoll.train.mesh import Mesh
from mpicoll.train.models import Storage
from mpicoll.train.monitor import Monitor
from mpicoll.train.strategy import Strategy, Traffic
from mpicoll.train.tally import EpochRecord, StepRecord, Tally


class Saving(Protocol):
    """Callback interface of a training run, which may save it; collective."""

    def after_step(self, trainer: SynchronousLoop, steps: int) -> None:
        """So many steps are done."""

    def after_epoch(self, trainer: SynchronousLoop, steps: int) -> None:
        """So are they, and with them an epoch."""

    def save(self, trainer: SynchronousLoop, steps: int) -> None:
        """They are, and the run ends early."""


class SynchronousLoop:
    """One rank's part of the model and what it needs to take steps.

    Collective over the mesh: construction and every method.

    Attributes
    ----------
    epochs : list of EpochRecord
        What was known after each.
    gradient_norm : float
        Of all gradients in the last step; NaN where the strategy does not know it.
    stopped : bool
        Whether it ended early because some rank was asked to stop.
    """

    def __init__(
        self, config: TrainConfig, mesh: Mesh, dataset: Dataset, engine: Engine, strategy: Strategy, clock: Clock
    ) -> None:
        self._config, self._mesh, self._dataset = config, mesh, dataset
        self._engine, self.strategy, self.clock = engine, strategy, clock
        self.course = Course(config, dataset.train.count)
        self._reader = Reader(config, dataset)
        self.tally = Tally(mesh.world)
        self.epochs: list[EpochRecord] = []
        self.gradient_norm = math.nan
        self.seconds_to_first_step = 0.0
        self.first_step, self.samples_seen, self.stopped = 0, 0, False

    @property
    def storage(self) -> Storage:
        """Parameter store of the model."""
        return self.strategy

    @property
    def records(self) -> list[StepRecord]:
        """One record for each step taken, those before a checkpoint included."""
        return self.tally.records

    def lagging(self) -> int | None:
        """Return a rank for which the others have waited lately, if there is one."""
        return self.tally.pace.lagging()

    def ask_to_stop(self) -> None:
        """Let all ranks stop soon; may be called from a signal handler."""
        self.tally.ask_to_stop()

    @property
    def samples_per_second(self) -> float:
        """Training samples of all ranks a second of training steps, so far."""
        stepping = self.clock.stepping
        return self.samples_seen / stepping if stepping else 0.0

    def train(self, monitor: Monitor, saver: Saving) -> None:
        """Take all steps that are left; evaluate after epochs.

        Raises
        ------
        NonFiniteLoss, ReplicasDiffer, CheckpointFailed
            On every rank.
        """
        began = time.perf_counter()
        for epoch, steps in self.course.epochs(self.first_step):
            stepping, seen = self.clock.stepping, self.samples_seen
            self._train_epoch(epoch, steps, monitor, saver)
            with self.clock.spent_on("communication"):
                self.strategy.meet()
            if self.stopped:
                return
            pace = (self.samples_seen - seen) / max(self.clock.stepping - stepping, 1e-9)
            self.epochs.append(self._evaluated(epoch, steps.stop, began, pace))
            monitor.after_epoch(self.epochs[-1])
            with self.clock.spent_on("evaluation"):
                self.check_replicas()
            saver.after_epoch(self, steps.stop)

    def _evaluated(self, epoch: int, steps: int, began: float, pace: float) -> EpochRecord:
        due = (epoch + 1) % self._config.evaluate_every == 0 or steps == self.course.total_steps
        loss, accuracy = (self.evaluate() if due else None) or (None, None)
        return EpochRecord(epoch, steps, *self._epoch_means(epoch), loss, accuracy, time.perf_counter() - began, pace)

    def _epoch_means(self, epoch: int) -> tuple[float, float]:
        """Return mean loss and accuracy of an epoch, the last one so far, over its samples."""
        records = self.records[epoch * self.course.steps_per_epoch :]
        counts = [self.course.batch_count(record.step) for record in records]
        loss, accuracy = (
            sum(getattr(record, name) * count for record, count in zip(records, counts, strict=True)) / sum(counts)
            for name in ("loss", "accuracy")
        )
        return loss, accuracy

    def _train_epoch(self, epoch: int, steps: range, monitor: Monitor, saver: Saving) -> None:
        for step in steps:
            self._take_step(step, epoch, last=step == steps[-1])
            monitor.after_step(self)
            if self.tally.stop:
                saver.save(self, step + 1)
                self.stopped = True
                return
            saver.after_step(self, step + 1)

    def _take_step(self, step: int, epoch: int, *, last: bool) -> None:
        config, clock = self._config, self.clock
        began, waited = time.perf_counter(), self._waited()
        spans.at_step(step)
        with clock.spent_on("data"):
            indices, count = self.course.samples(step, self._mesh.replicas, self._mesh.replica)
            parts = self._reader.parts(indices)
        with self._computing():
            compress = step >= config.warmup_dense
            loss, correct = self._engine.gradients(self.strategy, parts, 1 / count, compress=compress)
        with clock.spent_on("communication"):
            self.strategy.reduce()
        rate = self.course.rate(step)
        with self._computing("update"):
            self.gradient_norm = self.strategy.update(rate, config.clip)
        seconds = time.perf_counter() - began
        self.samples_seen += count
        told = (loss, correct) if self._mesh.speaks else (0.0, 0)
        computed = seconds - (self._waited() - waited)
        due = self.tally.add(step, epoch, rate, count, *told, computed)
        if due or last or step == self.first_step:
            with clock.spent_on("communication", "tally"):
                self.tally.settle(seconds)
        if step == self.first_step:
            self.seconds_to_first_step = process_age()

    @contextlib.contextmanager
    def _computing(self, name: str | None = None) -> Iterator[None]:
        """Count the body as computation, but for the time in which it waited for messages."""
        before = self._waited()
        with self.clock.spent_on("compute", name):
            yield
        self.clock.move(self._waited() - before, "compute", "communication")

    def _waited(self) -> float:
        """Return the seconds that this rank has spent on messages so far."""
        return self.strategy.traffic().waited + self._engine.waited

    def check_replicas(self) -> str | None:
        """Return the SHA-256 of the parameters, of all parts of the model, as hexadecimal digits.

        None where gradients are not exchanged, and replicas differ.

        Raises
        ------
        ReplicasDiffer
            On every rank, naming the ranks whose parameters are not those that most replicas hold.
        """
        if self._config.algorithm == NOOP:
            return None
        world, digest = self._mesh.world, np.frombuffer(self.strategy.digest(), np.uint8)
        table = np.empty((world.Get_size(), digest.size), np.uint8)
        world.Allgather(digest.copy(), table)
        rows, places = [row.tobytes() for row in table], world.Get_size() // self._mesh.replicas
        common = [max(rows[place::places], key=rows[place::places].count) for place in range(places)]
        if differing := [rank for rank, row in enumerate(rows) if row != common[rank % places]]:
            ranks = ", ".join(map(str, differing))
            raise ReplicasDiffer(f"the parameters of rank {ranks} differ from those of the other ranks")
        return (common[0] if places == 1 else hashlib.sha256(b"".join(common)).digest()).hex()

    def facts(self) -> dict[str, Any]:
        """Return what a report has to say of how the ranks work together. Collective."""
        traffic, taken = self._mean_traffic(), max(1, len(self.records) - self.first_step)
        slowest = self.tally.pace.slowest()
        return {
            "sent_nbytes_per_step": traffic.sent / taken,
            "compression_ratio": traffic.dense / traffic.sent if traffic.sent else None,
            "overlap": 1 - traffic.waited / traffic.under_way if traffic.under_way else None,
            "error_feedback": any(name.startswith("owed.") for name in self.strategy.own_state()),
            "nbytes": self.strategy.nbytes(),
            "slowest_rank": slowest and slowest._asdict(),
            "mode": None,
        }

    def _mean_traffic(self) -> Traffic:
        """Return the mean over all ranks."""
        sums = np.array(self.strategy.traffic())
        self._mesh.world.Allreduce(MPI.IN_PLACE, sums, MPI.SUM)
        return Traffic(*(sums / self._mesh.world.Get_size()).tolist())

    def evaluate(self) -> tuple[float, float] | None:
        """Return mean loss and accuracy over the test samples, None where there are none or there is no one model.

        Raises
        ------
        NonFiniteLoss
            On every rank.
        """
        if self._config.algorithm == NOOP:
            return None
        with self.clock.spent_on("evaluation"):
            return self._evaluate(self._dataset.test)

    def _evaluate(self, samples: Samples) -> tuple[float, float] | None:
        if samples.count == 0:
            return None
        mesh, sums = self._mesh, np.zeros(2)
        for x, y in shares_for_evaluation(samples, mesh.replicas, mesh.replica):
            sums += self._engine.loss(self.strategy, x, y)
        if not mesh.speaks:
            sums[:] = 0
        mesh.world.Allreduce(MPI.IN_PLACE, sums, MPI.SUM)
        loss, correct = (sums / samples.count).tolist()
        if not math.isfinite(loss):
            raise NonFiniteLoss(f"the loss over the test samples became {loss} after {len(self.records)} steps")
        return loss, correct
