"""Interface of coordination: which share of which step this rank takes next, and how ranks learn of each other.

:class:`~mpicoll.train.lockstep.Lockstep` lets all ranks take every step together;
:class:`~mpicoll.train.asynchronous.work_sharing.WorkSharing` lets each worker go on by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from mpicoll.checkpoint import Tensors
from mpicoll.train.metrics import EpochRecord, StepRecord
from mpicoll.train.step_plan import StepPlan


class LeftBehind(Exception):
    """The others have gone on without this rank, and will do so to the end."""


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
        Seconds that it took, and the part of them in which this rank waited for no message.
    """

    rate: float
    batch: int
    rows: int
    loss: float
    correct: int
    seconds: float
    computed: float


class SavedState(NamedTuple):
    """Content of a checkpoint: its number, tensors, and facts beside those that every run saves."""

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
        Shares that were taken before this run, by the one from which it goes on.
    done
        Shares that are known to be taken.
    shares_per_step
        Shares that make up a step.
    attends
        True if callbacks are called on this rank while steps are taken.
    together
        True while all ranks are at the same place, so that collectives are allowed between two steps.
    stopped
        True if the run ended early because some rank was asked to stop.
    records
        Steps whose loss is known on this rank.
    anew
        State of a checkpoint that could not be taken over, and why; None for none.
    """

    step_plan: StepPlan
    first: int
    done: int
    shares_per_step: int
    attends: bool
    together: bool
    stopped: bool
    anew: str | None

    @property
    def records(self) -> list[StepRecord]:
        """See above."""

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
        """Look at the loss of a share before its gradient is used.

        Raises
        ------
        NonFiniteLoss
            Where that is not found later, by all ranks together.
        """

    def record(self, share: Share, result: ShareResult) -> None:
        """Note the outcome of a share."""

    def ask_to_stop(self) -> None:
        """Let all ranks stop soon; may be called from a signal handler."""

    def lagging(self) -> int | None:
        """Return a rank for which the others have waited lately, None where nobody waits."""

    def epochs_over(self, done: int) -> int:
        """Return the number of epochs that have ended when so many shares are taken."""

    def epoch_pace(self) -> float:
        """Return samples a second of the steps since the last call, or of all steps."""

    def state(self, done: int) -> SavedState | None:
        """Return what a checkpoint needs after so many shares; None once the run has failed."""

    def settle(self) -> int:
        """Wait until the state is that of the end, and return the shares that were taken; where `attends`."""

    def fail(self, error: Exception) -> None:
        """End the run on all ranks, by that error; raises it here at once where all ranks have it."""

    def finish(self, epochs: Sequence[EpochRecord]) -> list[EpochRecord]:
        """Bring all ranks to one model; return the epochs that rank 0 has noted.

        Raises
        ------
        TrainingError
            On every rank: one of them has failed.
        """

    def facts(self) -> dict[str, Any]:
        """Return ``"slowest_rank"`` and ``"mode"`` of the report."""
