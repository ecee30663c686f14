"""Progress reports of rank 0 during a run: the progress bar, TensorBoard's files, and the callbacks of a trainer."""

from __future__ import annotations

import math
import time

from mpicoll.train.config import TrainConfig
from mpicoll.train.loop import Loop, LoopCallback
from mpicoll.train.metrics import EpochRecord, StepRecord
from mpicoll.train.run_report import Progress, described_loss
from mpicoll.train.tensorboard import EventLog

_FLUSH_SECONDS = 2.0


class ProgressReport(LoopCallback):
    """Reports steps and epochs on rank 0 as they become known; base of every kind of report."""

    _told = 0

    def skip(self, told: int) -> None:
        """Leave out the first `told` records, those of the checkpoint."""
        self._told = told

    def on_step(self, loop: Loop, done: int) -> None:
        """Report new records, if there are any; in synchronous training they arrive every few steps."""
        records = loop.records
        if len(records) != self._told:
            self.report(loop, records[self._told :])
            self._told = len(records)

    def report(self, loop: Loop, records: list[StepRecord]) -> None:
        """Report steps whose loss has become known."""


class ProgressBar(ProgressReport):
    """Progress bar on standard error; does nothing where none is wanted."""

    def __init__(self, config: TrainConfig, loop: Loop, told: int) -> None:
        self.skip(told)
        self._steps = loop.first_step
        self._bar = Progress(config, loop.step_plan.total_steps, 0, self._steps)

    def on_step(self, loop: Loop, done: int) -> None:
        """Advance the bar."""
        steps = done // loop.coordination.shares_per_step
        self._bar.advance(steps - self._steps)
        self._steps = steps
        super().on_step(loop, done)

    def report(self, loop: Loop, records: list[StepRecord]) -> None:
        """Change the figures beside the bar."""
        coordination = loop.coordination
        share, pace = loop.clock.communication_share, coordination.samples_per_second
        loss = described_loss(records[-1].loss, loop.step_plan.config)
        self._bar.show(records[-1], loss, pace, share, coordination.lagging())

    def close(self) -> None:
        """Leave the bar's last state on the screen."""
        self._bar.close()


class Scalars(ProgressReport):
    """Writes scalars to TensorBoard's event files, which `close` ends."""

    def __init__(self, events: EventLog, told: int) -> None:
        self.skip(told)
        self._events, self._flushed = events, time.monotonic()

    def report(self, loop: Loop, records: list[StepRecord]) -> None:
        """Write loss, accuracy and learning rate of each step; with the last one throughput and gradient norm."""
        for record in records[:-1]:
            self._events.add(record.step, record.scalars())
        self._events.add(records[-1].step, records[-1].scalars() | _pace(loop))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._events.flush()
            self._flushed = time.monotonic()

    def on_epoch(self, loop: Loop, record: EpochRecord) -> None:
        """Write loss and accuracy over the test samples."""
        tested = {
            "loss/test": record.test_loss,
            "accuracy/test": record.test_accuracy,
            "perplexity/test": record.test_perplexity,
        }
        if record.test_loss is not None:
            self._events.add(record.steps - 1, {name: value for name, value in tested.items() if value is not None})

    def close(self) -> None:
        """Close the files."""
        self._events.close()


def _pace(loop: Loop) -> dict[str, float]:
    values = {
        "samples_per_second": loop.coordination.samples_per_second,
        "communication_share": loop.clock.communication_share,
    }
    if math.isfinite(loop.gradient_norm):
        values["gradient_norm"] = loop.gradient_norm
    return values
