"""Synchronous training: all ranks take every step together, and agree on its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mpicoll.checkpoint import Checkpoint
from mpicoll.errors import DataError
from mpicoll.parallel.mesh import Mesh
from mpicoll.parallel.strategy import SynchronousStrategy
from mpicoll.train.clock import Clock
from mpicoll.train.coordination import SavedState, Share, ShareResult
from mpicoll.train.load_balance import LoadBalance
from mpicoll.train.metrics import EpochRecord, Metrics, StepRecord
from mpicoll.train.step_plan import StepPlan
from mpicoll.train.synchronous_state import restore, tensors_of


class Lockstep:
    """Coordination of ranks that take each step together; a :class:`~mpicoll.train.coordination.Coordination`.

    Losses, requests to stop and NaN become known on all ranks by an Allreduce every few steps
    (:class:`~mpicoll.train.metrics.Metrics`). Every rank saves its part of the state. With `balance`, the parts of the
    steps change with the pace of the replicas, on all ranks after the same step.

    Collective over the mesh: construction and every method.

    Attributes
    ----------
    applied
        Steps whose update this rank has applied.
    """

    shares_per_step, attends, together, averages_at_end = 1, True, True, False

    def __init__(
        self,
        mesh: Mesh,
        step_plan: StepPlan,
        strategy: SynchronousStrategy,
        clock: Clock,
        balance: LoadBalance | None = None,
    ) -> None:
        self.mesh, self.step_plan, self.strategy = mesh, step_plan, strategy
        self._balance = step_plan.balance = balance
        observers = () if balance is None else (balance.add,)
        self.metrics = Metrics(mesh.world, observers, counts_hits=step_plan.config.counts_hits)
        self.first = self.done = self.applied = self._seen = 0
        self.stopped = False
        self.anew: str | None = None
        self._clock, self._mark = clock, (0.0, 0)

    def go_on(self, found: Checkpoint) -> None:
        """Restore strategy and records from a checkpoint.

        Raises
        ------
        CheckpointFailed
            On every rank: it is damaged, or of another model.
        """
        self.metrics.records[:], self.anew = restore(found, self.mesh, self.strategy)
        if self._balance is not None:
            self._balance.load(found.facts.get("shares"))
        self.first = self.done = self.applied = found.step

    def start_after(self, epochs: int) -> None:
        """Begin with the step after so many epochs, without their records; the strategy has its state already."""
        self.first = self.done = self.applied = epochs * self.step_plan.steps_per_epoch

    def take_over(self, before: Lockstep, steps: int, records: Sequence[StepRecord]) -> None:
        """Go on after `steps` steps of a run on more ranks; the strategy has its state already."""
        self.first = self.done = self.applied = steps
        self.metrics.records[:], self._seen, self._mark = records, before._seen, before._mark
        if before.metrics.wants_to_stop:
            self.ask_to_stop()

    @property
    def records(self) -> list[StepRecord]:
        """One record for each step taken, those before a checkpoint included."""
        return self.metrics.records

    @property
    def taken(self) -> int:
        """See :class:`~mpicoll.train.coordination.Coordination`."""
        return self.done - self.first

    @property
    def samples_seen(self) -> int:
        """See :class:`~mpicoll.train.coordination.Coordination`."""
        return self._seen

    @property
    def samples_per_second(self) -> float:
        """Training samples of all ranks a second of training steps, so far."""
        stepping = self._clock.stepping
        return self._seen / stepping if stepping else 0.0

    def shares(self) -> Iterator[Share]:
        """Yield this replica's part of every step that is left."""
        for step in range(self.first, self.step_plan.total_steps):
            yield Share(step, self.mesh.replica, self.mesh.replicas, step)
            self.done = step + 1
            if self.metrics.stop:
                self.stopped = True
                return

    def check(self, step: int, loss: float) -> None:
        """Accept any loss: all ranks find one that is not finite in the sum over the ranks."""

    def record(self, share: Share, result: ShareResult) -> None:
        """Add the step to the metrics; every few steps and at the end of an epoch, sum them over the ranks.

        Collective in the steps in which metrics are summed.

        Raises
        ------
        NonFiniteLoss
            On every rank.
        """
        step, plan = share.step, self.step_plan
        self.applied = step + 1
        self._seen += result.batch
        told = (result.loss, result.correct) if self.mesh.speaks else (0.0, 0)
        due = self.metrics.add(step, step // plan.steps_per_epoch, result.rate, result.batch, *told, result.computed)
        if due or step == self.first or plan.ends_epoch(step):
            with self._clock.spent_on("communication", "tally"):
                self.metrics.settle(result.seconds)

    def ask_to_stop(self) -> None:
        """See :class:`~mpicoll.train.coordination.Coordination`."""
        self.metrics.ask_to_stop()

    def beat(self) -> None:
        """Do nothing: ranks wait for each other in every step."""

    def lagging(self) -> int | None:
        """See :class:`~mpicoll.train.coordination.Coordination`."""
        return self.metrics.pace.lagging()

    def epochs_over(self, done: int) -> int:
        """Return the number of epochs that have ended; the last one ends with the last step."""
        plan = self.step_plan
        return plan.epoch_count if done == plan.total_steps else done // plan.steps_per_epoch

    def epoch_pace(self) -> float:
        """Return samples per second of the steps since the last call."""
        (stepping, seen), self._mark = self._mark, (self._clock.stepping, self._seen)
        return (self._seen - seen) / max(self._mark[0] - stepping, 1e-9)

    def state(self, done: int) -> SavedState:
        """Return this rank's part of the state; sums open metrics over the ranks first."""
        self.metrics.settle(0.0)
        facts = {"step": done} if self._balance is None else {"step": done, "shares": self._balance.state()}
        return SavedState(done, tensors_of(self.mesh, self.strategy, self.records), facts)

    def settle(self) -> int:
        """Return the number of steps taken, the same on all ranks."""
        return self.done

    def fail(self, error: Exception) -> None:
        """Raise the error, which all ranks have, but for a DataError: of a user's model, on one rank."""
        if isinstance(error, DataError):
            error.of_one_rank = True
        raise error

    def finish(self, epochs: Sequence[EpochRecord]) -> list[EpochRecord]:
        """Make the replicas equal where they differ (local SGD); return `epochs`, which all ranks have."""
        with self._clock.spent_on("communication"):
            self.strategy.meet()
        return list(epochs)

    def facts(self) -> dict[str, Any]:
        """See :class:`~mpicoll.train.coordination.Coordination`."""
        slowest = self.metrics.pace.slowest()
        shares = None if self._balance is None else self._balance.state()
        scale = self.strategy.loss_scale
        scaling = None if scale is None else {"factor": scale.factor, "skipped_steps": scale.skipped}
        return {
            "slowest_rank": slowest and slowest._asdict(),
            "mode": None,
            "shares": shares,
            "loss_scale": scaling,
        }
