"""Progress reports of rank 0 during a run: the progress bar, and TensorBoard's files."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

from mpicoll.train.clock import Clock
from mpicoll.train.config import TrainConfig
from mpicoll.train.events import EventLog
from mpicoll.train.report import Progress
from mpicoll.train.tally import EpochRecord, StepRecord

_FLUSH_SECONDS = 2.0


class Followed(Protocol):
    """Callback interface of progress reports."""

    clock: Clock
    gradient_norm: float

    @property
    def records(self) -> list[StepRecord]:
        """Steps whose loss is known, in the order in which it became so."""

    @property
    def samples_per_second(self) -> float:
        """Of all ranks together, so far."""

    def lagging(self) -> int | None:
        """Return a rank for which the others wait."""


class Callback:
    """Base class of callbacks of a :class:`mpicoll.train.Trainer`; called on rank 0."""

    def on_step(self, trainer: Any, record: StepRecord) -> None:
        """Called with each step whose loss has become known; in synchronous training that is every few steps."""

    def on_epoch(self, trainer: Any, record: EpochRecord) -> None:
        """Called after an epoch, with its mean loss and accuracy and those over the test samples."""


class Monitor:
    """Follows a trainer; says nothing on ranks other than 0.

    Parameters
    ----------
    total, done
        Steps of the run, and those taken before.
    told
        Records that there are already.
    events
        Where scalars go, closed by `close`; None for nowhere.
    """

    def __init__(
        self, config: TrainConfig, total: int, rank: int, done: int = 0, told: int = 0, events: EventLog | None = None
    ) -> None:
        self._bar = Progress(config, total, rank, done)
        self._events, self._told, self._flushed = events, told, time.monotonic()
        self._steps = done
        self._callbacks: Sequence[Callback] = ()
        self._trainer: Any = None

    def call(self, callbacks: Sequence[Callback], trainer: Any) -> None:
        """Call `callbacks` from now on, with `trainer`."""
        self._callbacks, self._trainer = callbacks, trainer

    def after_step(self, trainer: Followed) -> None:
        """Note a step; tell what is new, which is known every few steps."""
        self._bar.advance()
        self._tell(trainer)

    def follow(self, trainer: Followed, steps: int) -> None:
        """Note that so many steps of the run are done, more or less; tell what is new."""
        self._bar.advance(steps - self._steps)
        self._steps = steps
        self._tell(trainer)

    def _tell(self, trainer: Followed) -> None:
        records = trainer.records
        if len(records) == self._told:
            return
        self._bar.show(records[-1], trainer.samples_per_second, trainer.clock.communication_share, trainer.lagging())
        if self._events is not None:
            for record in records[self._told : -1]:
                self._events.add(record.step, record.scalars())
            self._events.add(records[-1].step, records[-1].scalars() | _pace(trainer))
            if time.monotonic() - self._flushed > _FLUSH_SECONDS:
                self._events.flush()
                self._flushed = time.monotonic()
        for callback in self._callbacks:
            for record in records[self._told :]:
                callback.on_step(self._trainer, record)
        self._told = len(records)

    def after_epoch(self, record: EpochRecord) -> None:
        """Note an evaluation."""
        for callback in self._callbacks:
            callback.on_epoch(self._trainer, record)
        if self._events is not None and record.test_loss is not None and record.test_accuracy is not None:
            self._events.add(record.steps - 1, {"loss/test": record.test_loss, "accuracy/test": record.test_accuracy})

    def close(self) -> None:
        """Leave the bar's last state on the screen, and end the files."""
        self._bar.close()
        if self._events is not None:
            self._events.close()


def _pace(trainer: Followed) -> dict[str, float]:
    values = {
        "samples_per_second": trainer.samples_per_second,
        "communication_share": trainer.clock.communication_share,
    }
    if math.isfinite(trainer.gradient_norm):
        values["gradient_norm"] = trainer.gradient_norm
    return values
