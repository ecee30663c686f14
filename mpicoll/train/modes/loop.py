"""The loop of ranks that go on without each other: draw a share of a batch, pull, compute, push."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll import spans
from mpicoll.parameter_server.peers import Counter
from mpicoll.train.agreement import all_succeed, share, wait_politely
from mpicoll.train.clock import Clock
from mpicoll.train.config import TrainConfig
from mpicoll.train.course import Course, Reader, shares_for_evaluation
from mpicoll.train.data import Dataset
from mpicoll.train.engine import Engine
from mpicoll.train.environment import process_age
from mpicoll.train.failures import NonFiniteLoss, TrainingError
from mpicoll.train.models import Flat, Layout, Model, Storage
from mpicoll.train.modes.exchange import Exchange, LeftBehind
from mpicoll.train.modes.momentum import is_fed_back
from mpicoll.train.modes.pieces import Piece, Pieces
from mpicoll.train.modes.saving import ChiefSaver
from mpicoll.train.monitor import Monitor
from mpicoll.train.report import complain
from mpicoll.train.strategy import clipping, norm_of, sum_of_squares
from mpicoll.train.tally import EpochRecord, StepRecord

_STOP = 1 << 40
"""Drawn from the counter, so many numbers leave none for anybody."""
_BEAT_SECONDS = 0.2


class Replica(Flat):
    """Parameters and gradients of this rank, for an engine.

    Parameters
    ----------
    beat
        Called between two layers, but not more often than every 0.2 s: a step may take long.
    """

    def __init__(self, layout: Layout, parameters: np.ndarray, gradient: np.ndarray, beat: Callable[[], None]) -> None:
        super().__init__(layout, parameters, gradient)
        self._beat, self._beaten = beat, time.monotonic()

    def release(self, layer: int) -> None:
        """Show that this rank is alive; see :class:`~mpicoll.train.models.Storage`."""
        if time.monotonic() - self._beaten > _BEAT_SECONDS:
            self._beat()
            self._beaten = time.monotonic()

    def begin(self, scale: float, *, last: bool, compress: bool) -> None:
        """See :class:`~mpicoll.train.strategy.Strategy`; what counts how often is decided behind the engine."""


class AsynchronousLoop:
    """One rank of a run in which nobody takes steps together.

    A batch is divided among the workers as in synchronous training, but a worker takes the next share that nobody has
    taken, whoever it was meant for: faster ones take more, and every sample is taken once in an epoch. Rank 0, the
    chief, is a worker that looks after the others as well: between two steps of its own it evaluates, tells of the
    progress and saves checkpoints. Other workers do not wait for that.

    Collective over all ranks: construction and `train`.

    Parameters
    ----------
    replica : (model.parameter_count,) of model.dtype
        The same on all ranks at first; known to `exchange`.
    done
        Shares that a checkpoint says have been taken.
    """

    def __init__(
        self,
        config: TrainConfig,
        comm: MPI.Intracomm,
        dataset: Dataset,
        model: Model,
        engine: Engine,
        exchange: Exchange,
        replica: np.ndarray,
        clock: Clock,
        done: int,
    ) -> None:
        self._config, self._comm, self._dataset, self._engine = config, comm, dataset, engine
        self.exchange, self.clock = exchange, clock
        self.rank, self.workers = comm.Get_rank(), comm.Get_size() - config.servers
        self.course = Course(config, dataset.train.count)
        self._total = self.course.total_steps * self.workers
        self._counter = Counter(MPI.Intracomm(comm), owner=comm.Get_size() - 1)
        self._first, self._reached = done, done
        if self.is_chief:
            self._counter.draw(done)
        self._reader = Reader(config, dataset)
        self._vector, self._gradient = replica, np.zeros_like(replica)
        self._replica = Replica(model.layout, replica, self._gradient, self._beat)
        self._decayed = [slice(start, stop) for start, stop, decays in model.layout.decayed(0, replica.size) if decays]
        self.pieces = Pieces(self.course, self.workers)
        self.epochs: list[EpochRecord] = []
        self.gradient_norm, self.seconds_to_first_step = math.nan, 0.0
        self._stop, self.stopped = False, False
        self._failure: TrainingError | None = None
        self.wall_seconds = 0.0

    @property
    def is_chief(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @property
    def is_worker(self) -> bool:
        """True if this rank takes steps."""
        return self.rank < self.workers

    @property
    def first_step(self) -> int:
        """Steps of the run that had been taken before."""
        return self._first // self.workers

    @property
    def storage(self) -> Storage:
        """Parameter store of the model."""
        return self._replica

    @property
    def records(self) -> list[StepRecord]:
        """One for each step of which this rank knows a share; at the end of `train`, of all of them on all ranks."""
        return self.pieces.records

    @property
    def samples_per_second(self) -> float:
        """Training samples of all ranks a second, so far as this rank knows."""
        per_share = self._config.step_batch / self.workers
        return (self._reached - self._first) * per_share / max(self._seconds(), 1e-9)

    def lagging(self) -> int | None:
        """Return None: nobody waits for the slowest."""
        return None

    def ask_to_stop(self) -> None:
        """Let all ranks stop soon; may be called from a signal handler."""
        self._stop = True
        if not self.is_worker:  # it serves, and looks at nothing else
            self._counter.draw(_STOP)

    def train(self, monitor: Monitor, saver: ChiefSaver) -> None:
        """Take steps until there are none left, then wait for the others and take over the last model.

        Raises
        ------
        NonFiniteLoss, CheckpointFailed
            On every rank, when all have left.
        """
        self._began = time.perf_counter()
        if self.is_worker:
            self._work(monitor, saver)
        if self.is_chief and self._failure is None:
            self.exchange.settle()
            self._try(saver.save, self, self._reached if self._is_cut_short() else self._total)
        self.exchange.finish()
        self.wall_seconds = time.perf_counter() - self._began
        self._close()
        if self.is_chief:
            self._note_epochs(self._reached, monitor)
        self._share_epochs()

    def _work(self, monitor: Monitor, saver: ChiefSaver) -> None:
        try:
            for number in self._numbers():
                if self.is_chief:
                    self._attend(number, monitor, saver)
                self._take_step(number)
        except LeftBehind:
            complain(f"rank {self.rank} was silent for longer than --timeout; the others have gone on without it")

    def _try(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do something of which a failure ends the run, for all ranks alike."""
        try:
            action(*arguments)
        except TrainingError as error:
            self._fail(error)

    def _fail(self, error: TrainingError) -> None:
        """End the run, for all ranks; what it has come to is not saved."""
        self._failure, self._stop = error, True
        self._counter.tell_failure()

    def has_failed(self) -> bool:
        """Return whether some rank has found a reason to end the run by an error."""
        return self._counter.is_failed()

    def _numbers(self) -> Iterator[int]:
        """Yield the numbers of shares for this worker: whatever comes next, or its own where steps go together."""
        together = self._config.staleness == 0 and not self._config.backup
        own = self._first + self.rank
        while True:
            if self._stop:
                self._counter.draw(_STOP)
            number = self._counter.draw(0 if together else 1)
            if together:
                number, own = max(number, own) if number >= _STOP else own, own + self.workers
            if number >= self._total:
                return
            self._reached = number
            yield number

    def _take_step(self, number: int) -> None:
        step, share = divmod(number, self.workers)
        began, clock = time.perf_counter(), self.clock
        spans.at_step(step)
        with clock.spent_on("data"):
            indices, count = self.course.samples(step, self.workers, share)
            parts = self._reader.parts(indices)
        with clock.spent_on("communication", "pull"):
            self.exchange.before()
        with clock.spent_on("compute"):
            loss, correct = self._engine.gradients(self._replica, parts, 1.0, compress=True)
            self._prepare(self.exchange.scale / count)
        if not math.isfinite(loss):
            text = f"the loss became {loss} in step {step}; try a lower --lr or a longer --warmup"
            self._fail(NonFiniteLoss(text))
            return
        rate = self.course.rate(step)
        with clock.spent_on("communication", "push"):
            self.exchange.after(self._gradient, rate)
        self.pieces.add(Piece(number, rate, loss, correct, len(indices), time.perf_counter() - began))
        if self.seconds_to_first_step == 0:
            self.seconds_to_first_step = process_age()

    def _prepare(self, scale: float) -> None:
        """Let the gradient be that of this share: its part of the batch's mean, of weight decay and of the clip."""
        gradient, config = self._gradient, self._config
        gradient *= gradient.dtype.type(scale)
        part = self.exchange.scale / self.workers
        if config.weight_decay:
            for span in self._decayed:
                gradient[span] += gradient.dtype.type(part * config.weight_decay) * self._vector[span]
        if config.clip is not None:
            self.gradient_norm = norm_of(sum_of_squares(gradient)) / part
            gradient *= gradient.dtype.type(clipping(self.gradient_norm, config.clip))

    # ---- the chief's business ---------------------------------------------------------------------------------------

    def _attend(self, number: int, monitor: Monitor, saver: ChiefSaver) -> None:
        monitor.follow(self, number // self.workers)
        self._note_epochs(number, monitor)
        self._try(saver.after, self, number)

    def _note_epochs(self, reached: int, monitor: Monitor) -> None:
        """Note the epochs that have ended, all workers together; evaluate behind the last of them."""
        course, epochs = self.course, -(-self.course.total_steps // self.course.steps_per_epoch)
        over = self.wall_seconds and not self.stopped
        ended = epochs if over else min(epochs, reached // self.workers // course.steps_per_epoch)
        known = self.epochs[-1].epoch + 1 if self.epochs else self.first_step // course.steps_per_epoch
        for epoch in range(known, ended):
            due = epoch == ended - 1 and ((epoch + 1) % self._config.evaluate_every == 0 or bool(over))
            loss, accuracy = (self.evaluate() if due else None) or (None, None)
            steps, seconds = min((epoch + 1) * course.steps_per_epoch, course.total_steps), self._seconds()
            pace = self.samples_per_second
            self.epochs.append(EpochRecord(epoch, steps, None, None, loss, accuracy, seconds, pace))
            monitor.after_epoch(self.epochs[-1])

    def _seconds(self) -> float:
        """Return how long training has gone on."""
        return self.wall_seconds or time.perf_counter() - self._began

    def evaluate(self) -> tuple[float, float] | None:
        """Return mean loss and accuracy over the test samples; not collective. None where there are none."""
        samples = self._dataset.test
        if samples.count == 0:
            return None
        with self.clock.spent_on("evaluation"):
            if not self.wall_seconds:
                self.exchange.snapshot()
            sums = np.zeros(2)
            for x, y in shares_for_evaluation(samples, 1, 0):
                sums += self._engine.loss(self._replica, x, y)
        loss, correct = (sums / samples.count).tolist()
        return loss, correct

    def _beat(self) -> None:
        if not self.wall_seconds:  # the last model is evaluated when nobody listens any more
            self.exchange.beat()

    def _is_cut_short(self) -> bool:
        return self._counter.draw(0) >= _STOP

    # ---- the end ----------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """Learn how it went for all; free what is common."""
        self.exchange.close()
        all_succeed(self._comm, self._raise)
        facts = np.array([self._is_cut_short(), self._reached, self.wall_seconds], np.float64)
        self._comm.Allreduce(MPI.IN_PLACE, facts, MPI.MAX)
        self.stopped, self._reached = bool(facts[0]), int(facts[1]) if facts[0] else self._total
        self.wall_seconds = float(facts[2])
        self._comm.Bcast(self._vector)
        self._counter.close()
        self.pieces.share(self._comm)

    def _share_epochs(self) -> None:
        """Let all ranks know what the chief does."""
        wait_politely(self._comm)
        told = {"epochs": [record._asdict() for record in self.pieces.with_means(self.epochs)]}
        found = share(self._comm, told if self.is_chief else None)
        self.epochs = [EpochRecord(**record) for record in found["epochs"]]

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def check_replicas(self) -> str:
        """Return the SHA-256 of the parameters, as hexadecimal digits; not collective."""
        return hashlib.sha256(self._vector.data).hexdigest()

    def facts(self) -> dict[str, Any]:
        """Return what a report has to say of how the ranks work together. Collective."""
        sums = np.array([*self.exchange.sent(), len(self.pieces.own)], np.float64)
        by_rank = np.empty(self._comm.Get_size())
        self._comm.Allgather(sums[3:].copy(), by_rank)
        self._comm.Allreduce(MPI.IN_PLACE, sums, MPI.SUM)
        sent, read, dense, taken = sums.tolist()
        mode = {
            "read_nbytes_per_step": read / max(1, taken),
            "steps_by_rank": by_rank.astype(int).tolist(),
            "steps_per_second": taken / self.wall_seconds,
            **self.exchange.facts(),
        }
        return {
            "sent_nbytes_per_step": sent / max(1, taken),
            "compression_ratio": dense / sent if sent else None,
            "overlap": None,
            "error_feedback": is_fed_back(self._config),
            "nbytes": {
                "parameters": self._vector.nbytes,
                "gradients": self._gradient.nbytes,
                **self.exchange.nbytes(),
            },
            "slowest_rank": None,
            "mode": mode,
        }
