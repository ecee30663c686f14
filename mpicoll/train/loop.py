"""Training loop: gradient of a share of a batch, update, callbacks, and evaluation after epochs."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll import tracing
from mpicoll.consensus import all_succeed
from mpicoll.data.datasets import Dataset, Samples
from mpicoll.errors import MpicollError, NonFiniteLoss, TrainingError
from mpicoll.models.micro_batches import StepExecutor
from mpicoll.parallel.common_arrays import CommonArrays
from mpicoll.parallel.mesh import Mesh
from mpicoll.parallel.strategy import CommunicationStatistics, Strategy
from mpicoll.quantities import counted
from mpicoll.train.asynchronous.placed_optimizer import is_fed_back
from mpicoll.train.batch_prefetch import BatchReader
from mpicoll.train.clock import Clock
from mpicoll.train.config import NOOP, TrainConfig
from mpicoll.train.coordination import Coordination, LeftBehind, Share, ShareResult
from mpicoll.train.metrics import EpochRecord, StepRecord, epoch_means, perplexity
from mpicoll.train.process_facts import process_age
from mpicoll.train.replica_check import compared
from mpicoll.train.run_report import complain
from mpicoll.train.run_start import RunStart
from mpicoll.train.step_plan import shares_for_evaluation


class LoopCallback:
    """Base class of a loop's callbacks; this one does nothing.

    In synchronous training, callbacks are called on all ranks; in asynchronous training on rank 0, the chief, and at
    the end on all. `done` counts shares, of which `loop.coordination.shares_per_step` make up a step.
    """

    def on_step(self, loop: Loop, done: int) -> None:
        """Called between two steps of this rank, after `done` shares of the run."""

    def on_epoch(self, loop: Loop, record: EpochRecord) -> None:
        """Called when an epoch has ended, and was evaluated if that was due."""

    def on_checkpoint(self, loop: Loop, steps: int) -> None:
        """Called after a checkpoint of `steps` steps has been written."""

    def at_rest(self, loop: Loop, done: int) -> None:
        """Called after `on_step` and `on_epoch`: no operation is in flight on this rank, so its state may be saved."""

    def at_end(self, loop: Loop, done: int) -> None:
        """Called after the last step or a stop, when the state is final; not after a failure."""


class Loop:
    """Steps of one rank, in any strategy.

    The *strategy* holds the parameters, and computes the next ones from gradients. The *coordination* assigns shares of
    steps to this rank, and propagates requests to stop and failures between ranks. The *common* arrays are those that
    other ranks of the same replica hold, too.

    Collective over the mesh: construction, `train`, `facts`, `check_replicas`; and `evaluate`, where ranks take steps
    together and after the end.

    Attributes
    ----------
    epochs : list of EpochRecord
        A record for each epoch that has ended.
    resumed_after : int
        Steps up to the checkpoint from which the run resumed; 0 for a new run.
    gradient_norm : float
        Norm of all gradients in the last step; NaN if the strategy does not compute it.
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        dataset: Dataset,
        engine: StepExecutor,
        strategy: Strategy,
        coordination: Coordination,
        clock: Clock,
        common: CommonArrays,
        epochs: Sequence[EpochRecord] = (),
    ) -> None:
        self._config, self._mesh, self._dataset, self._engine, self._common = config, mesh, dataset, engine, common
        self.strategy, self.coordination, self.clock = strategy, coordination, clock
        self.step_plan = coordination.step_plan
        self._reader = BatchReader(config, dataset.train)
        self.epochs = list(epochs)
        self.gradient_norm, self.seconds_to_first_step = math.nan, 0.0
        self._callbacks: tuple[LoopCallback, ...] = ()
        self._attended = coordination.first
        self._first_epoch = self.first_step // self.step_plan.steps_per_epoch
        self.resumed_after = self.first_step

    @property
    def steps(self) -> int:
        """Steps of the run that are known to be taken, those before a checkpoint included."""
        return self.coordination.done // self.coordination.shares_per_step

    @property
    def start(self) -> RunStart:
        """Facts of the start of the run."""
        return RunStart(self._first_epoch, self.resumed_after, self.seconds_to_first_step)

    def take_over(self, start: RunStart, epochs: Sequence[EpochRecord]) -> None:
        """Go on from a loop on other ranks, of which `epochs` have been recorded; the coordination has gone on.

        Callbacks are called again for its last step, since it may have been cut off in their midst.
        """
        self.epochs, self._attended = list(epochs), -1
        self._first_epoch, self.resumed_after = int(start.first_epoch), int(start.resumed_after)
        self.seconds_to_first_step = start.seconds_to_first_step

    @property
    def records(self) -> list[StepRecord]:
        """Steps whose loss is known on this rank; at the end all of them, on all ranks."""
        return self.coordination.records

    @property
    def is_chief(self) -> bool:
        """True on the rank that reports of the run."""
        return self._mesh.world.Get_rank() == 0

    @property
    def first_step(self) -> int:
        """Steps that earlier runs took, up to the checkpoint from which this one resumed."""
        return self.coordination.first // self.coordination.shares_per_step

    def ask_to_stop(self) -> None:
        """Request that all ranks stop soon; may be called from a signal handler."""
        self.coordination.ask_to_stop()

    # ---- steps ------------------------------------------------------------------------------------------------------

    def train(self, callbacks: Sequence[LoopCallback]) -> None:
        """Take all remaining steps; all ranks have the same model afterwards.

        Raises
        ------
        NonFiniteLoss, ReplicasDiffer, CheckpointFailed
            On every rank.
        """
        self._callbacks, self._began = tuple(callbacks), time.perf_counter()
        coordination = self.coordination
        try:
            self._take_steps()
        except LeftBehind as error:
            complain(str(error))
        except TrainingError as error:
            coordination.fail(error)
        except (MpicollError, MPI.Exception):  # of communication, which does not work any more
            raise
        except Exception as error:  # of the user's model, data set or callback
            coordination.fail(error)
        finally:
            self.close()
        self.epochs = coordination.finish(self.epochs)
        self._note_epochs(coordination.done)
        if coordination.averages_at_end:
            all_succeed(self._mesh.world, lambda: self._call_at_end(coordination.done))

    def close(self) -> None:
        """End the thread that makes batches ahead, if there is one; :meth:`train` does so itself."""
        self._reader.close()

    def _take_steps(self) -> None:
        coordination = self.coordination
        for share in coordination.shares():
            if coordination.attends:
                self._attend(share.done)
            self.take_step(share)
        if coordination.attends:
            self._end(coordination.settle())

    def _end(self, done: int) -> None:
        if self.coordination.together:
            self._attend(done)
        else:  # the last epochs are evaluated with the model that all workers have in the end
            self._report(done)
        if not self.coordination.averages_at_end:
            self._call_at_end(done)

    def _call_at_end(self, done: int) -> None:
        for callback in self._callbacks if self.coordination.attends else ():
            callback.at_end(self, done)

    def _attend(self, done: int) -> None:
        """Call callbacks, if any step was taken since the last time."""
        if done == self._attended:
            return
        self._report(done)
        self._note_epochs(done)
        for callback in self._callbacks:
            callback.at_rest(self, done)

    def _report(self, done: int) -> None:
        self._attended = done
        for callback in self._callbacks:
            callback.on_step(self, done)

    def announce_checkpoint(self, steps: int) -> None:
        """Call `on_checkpoint` of all callbacks."""
        for callback in self._callbacks:
            callback.on_checkpoint(self, steps)

    def _note_epochs(self, done: int) -> None:
        """Record the epochs that have ended since the last time."""
        known = self.epochs[-1].epoch + 1 if self.epochs else self._first_epoch
        ended = self.coordination.epochs_over(done)
        for epoch in range(known, ended):
            self._note_epoch(epoch, is_newest=epoch == ended - 1)

    def take_step(self, share: Share) -> None:
        """Take one step, of this rank's share of the samples; collective where ranks take steps together."""
        clock, strategy, step = self.clock, self.strategy, share.step
        began, waited = time.perf_counter(), self._waited()
        tracing.at_step(step)
        with clock.spent_on("data"):
            indices, count = self.step_plan.samples(step, share.parts, share.part)
            parts = self._reader.parts(indices, share)
        with self._computing():
            strategy.begin_step(step)
            strategy.fetch()
            compress = step >= self._config.warmup_dense
            loss, correct = self._engine.gradients(strategy, parts, 1 / count, compress=compress)
        self.coordination.check(step, loss)
        with clock.spent_on("communication"):
            strategy.reduce()
        rate = self.step_plan.rate(step)
        with self._computing("update"):
            self.gradient_norm = strategy.update(rate, self._config.clip)
        seconds = time.perf_counter() - began
        computed = seconds - (self._waited() - waited)
        self.coordination.record(share, ShareResult(rate, count, len(indices), loss, correct, seconds, computed))
        if self.seconds_to_first_step == 0:
            self.seconds_to_first_step = process_age()

    @contextlib.contextmanager
    def _computing(self, name: str | None = None) -> Iterator[None]:
        """Count the body's time as computation, except for waits for messages, which count as communication."""
        before = self._waited()
        with self.clock.spent_on("compute", name):
            yield
        self.clock.move(self._waited() - before, "compute", "communication")

    def _waited(self) -> float:
        """Return the seconds that this rank has spent on messages so far."""
        return self.strategy.traffic().waited + self._engine.waited

    # ---- epochs -----------------------------------------------------------------------------------------------------

    def _note_epoch(self, epoch: int, *, is_newest: bool) -> None:
        """Record an epoch that has ended; evaluate if it is the newest one and due for evaluation."""
        plan = self.step_plan
        with self.clock.spent_on("communication"):
            self.strategy.meet()
        pace, steps = self.coordination.epoch_pace(), min((epoch + 1) * plan.steps_per_epoch, plan.total_steps)
        due = is_newest and ((epoch + 1) % self._config.evaluate_every == 0 or steps == plan.total_steps)
        loss, accuracy = (self.evaluate() if due else None) or (None, None)
        means, seconds = epoch_means(plan, self.records, epoch), time.perf_counter() - self._began
        perplexities = perplexity(means[0], self._config), perplexity(loss, self._config)
        self.epochs.append(EpochRecord(epoch, steps, *means, loss, accuracy, seconds, pace, *perplexities))
        for callback in self._callbacks:
            callback.on_epoch(self, self.epochs[-1])
        if self.coordination.together:
            with self.clock.spent_on("evaluation"):
                self.check_replicas()

    def evaluate(self) -> tuple[float, float | None] | None:
        """Return mean loss and accuracy over the test samples; None without samples, or if replicas differ.

        The accuracy is None for tasks without one.

        Collective if all ranks are at the same step; otherwise this rank alone evaluates its strategy's parameters.

        Raises
        ------
        NonFiniteLoss
            On every rank that takes part.
        """
        samples = self._dataset.test
        if self._config.algorithm == NOOP or samples.count == 0:
            return None
        with self.clock.spent_on("evaluation"):
            loss, correct = (self._test_sums(samples) / samples.count).tolist()
        if not math.isfinite(loss):
            raise NonFiniteLoss(f"the loss over the test samples became {loss} after {counted(self.steps, 'step')}")
        return loss, correct if self._config.counts_hits else None

    def _test_sums(self, samples: Samples) -> np.ndarray:
        mesh, together, sums = self._mesh, self.coordination.together, np.zeros(2)
        share = (mesh.replicas, mesh.replica) if together else (1, 0)
        for x, y in shares_for_evaluation(samples, *share):
            sums += self._engine.loss(self.strategy, x, y)
        if together:
            if not mesh.speaks:
                sums[:] = 0
            mesh.world.Allreduce(MPI.IN_PLACE, sums, MPI.SUM)
        return sums

    def check_replicas(self) -> str | None:
        """Return the SHA-256 of the parameters, of all parts of the model, as hexadecimal digits. Collective.

        Returns None with ``--algorithm noop``: gradients are not exchanged, and replicas differ.

        Raises
        ------
        ReplicasDiffer
            On every rank, naming the ranks whose parameters are not those that most ranks hold.
        NonFiniteLoss
            On every rank, if a parameter is not finite, of which the loss of the next step would tell.
        """
        if self._config.algorithm == NOOP:
            return None
        if not self._common.all_finite(self.strategy, self._mesh.world):
            raise NonFiniteLoss(
                f"parameters became infinite or NaN within {counted(len(self.records), 'step')}; "
                "try a lower --lr or a longer --warmup"
            )
        return compared(self._mesh, self.strategy.digest(), self._common.digest(self.strategy))

    # ---- report -----------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return the facts of strategy and coordination for the report. Collective."""
        world, coordination = self._mesh.world, self.coordination
        sums = np.array([*self.strategy.traffic(), coordination.taken])
        world.Allreduce(MPI.IN_PLACE, sums, MPI.SUM)
        traffic = CommunicationStatistics(*sums[:-1].tolist())
        return {
            "sent_nbytes_per_step": traffic.sent / max(1, sums[-1]),
            "compression_ratio": traffic.dense / traffic.sent if traffic.sent else None,
            "overlap": 1 - traffic.waited / traffic.under_way if traffic.under_way else None,
            "error_feedback": is_fed_back(self._config),
            "nbytes": self.strategy.nbytes(),
            **coordination.facts(),
        }
