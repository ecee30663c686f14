"""Coordination interface: assignment of shares of steps to ranks, and propagation of stop requests and failures.

:class:`~mpicoll.train.lockstep.Lockstep` lets all ranks take every step together;
:class:`~mpicoll.train.asynchronous.work_sharing.WorkSharing` lets each worker take shares independently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from mpicoll.checkpoint import Tensors
from mpicoll.train.metrics import EpochRecord, StepRecord
from mpicoll.train.step_plan import StepPlan


class LeftBehind(Exception):
    """Error on a rank that the other ranks have dropped; they continue without it."""


class Share(NamedTuple):
    """Share number `part` of the `parts` into which the batch of a step is divided.

    `done` counts the shares of the run that were taken, or drawn by a worker, before this one.
    """

    step: int
    part: int
    parts: int
    done: int


class ShareResult(NamedTuple):
    """Outcome of a share on this rank.

    Attributes
    ----------
    rate
        Learning rate of the step.
    batch, rows
        Samples of the whole batch, and of this share.
    loss, correct
        Summed over the share.
    seconds, computed
        Seconds that the share took on this rank, and these seconds without waits for messages.
    """

    rate: float
    batch: int
    rows: int
    loss: float
    correct: int
    seconds: float
    computed: float


class SavedState(NamedTuple):
    """Content of a checkpoint: its number, tensors, and facts in addition to those that every run saves."""

    step: int
    tensors: Tensors
    facts: dict[str, Any]


class Coordination(Protocol):
    """One rank's view of a run: its shares of the steps, requests to stop, failures, and the state to save.

    A *share* is what one worker takes of a step; where all ranks take a step together, a step counts as one share.

    Collective over all ranks: construction, `finish` and `facts`.

    Attributes
    ----------
    step_plan
        Steps of the run.
    first
        Shares that earlier runs took, up to the checkpoint from which this one resumes; 0 for a new run.
    done
        Shares that are known to be taken, those of earlier runs included.
    shares_per_step
        Shares that make up a step.
    attends
        True if callbacks are called on this rank while steps are taken.
    together
        True while all ranks are at the same place, so that collectives are allowed between two steps.
    averages_at_end
        True if `finish` averages the ranks' replicas, so that the state is final only then.
    stopped
        True if the run ended early because some rank was asked to stop.
    records
        Steps whose loss is known on this rank.
    anew
        State that could not be restored from the checkpoint, and the reason; None if all was restored.
    """

    step_plan: StepPlan
    first: int
    done: int
    shares_per_step: int
    attends: bool
    together: bool
    averages_at_end: bool
    stopped: bool
    anew: str | None

    @property
    def records(self) -> list[StepRecord]:
        """Steps whose loss is known on this rank, in order."""

    @property
    def taken(self) -> int:
        """Shares of steps that this rank has taken in this run."""

    @property
    def samples_seen(self) -> float:
        """Training samples that all ranks have taken in this run, as far as this rank knows."""

    @property
    def samples_per_second(self) -> float:
        """Training samples of all ranks a second, so far."""

    def shares(self) -> Iterator[Share]:
        """Yield this rank's shares, until there are none left or a rank has asked to stop."""

    def check(self, step: int, loss: float) -> None:
        """Check the loss of a share before its gradient is used.

        Raises
        ------
        NonFiniteLoss
            If the loss is not finite, in strategies in which the ranks do not find that together later.
        """

    def record(self, share: Share, result: ShareResult) -> None:
        """Record the result of a share."""

    def ask_to_stop(self) -> None:
        """Request that all ranks stop; may be called from a signal handler."""

    def beat(self) -> None:
        """Give a sign of life, where other ranks do not wait for this one but have to know that it lives."""

    def lagging(self) -> int | None:
        """Return the rank that the others have been waiting for lately; None if there is none."""

    def epochs_over(self, done: int) -> int:
        """Return the number of epochs that have ended after `done` shares."""

    def epoch_pace(self) -> float:
        """Return samples per second of all ranks: of the steps since the last call, or of all steps."""

    def state(self, done: int) -> SavedState | None:
        """Return the state for a checkpoint after `done` shares; None if it has failed, or done nothing yet."""

    def settle(self) -> int:
        """Wait until the state is final, and return the number of shares taken; on ranks where `attends` is true."""

    def fail(self, error: Exception) -> None:
        """End the run on all ranks because of `error`; synchronous training raises it at once."""

    def finish(self, epochs: Sequence[EpochRecord]) -> list[EpochRecord]:
        """Make the model equal on all ranks; return the epochs that rank 0 has recorded.

        Raises
        ------
        TrainingError
            On every rank, if one of them has failed.
        """

    def facts(self) -> dict[str, Any]:
        """Return ``"slowest_rank"``, ``"mode"``, ``"shares"`` and ``"loss_scale"`` of the report."""
