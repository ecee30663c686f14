"""What rank 0 tells of a run while it goes on: the progress bar, and TensorBoard's files."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from mpicoll.train.config import TrainConfig
from mpicoll.train.events import EventLog
from mpicoll.train.report import Progress
from mpicoll.train.tally import EpochRecord

if TYPE_CHECKING:
    from mpicoll.train.loop import Trainer

_FLUSH_SECONDS = 2.0


class Monitor:
    """Follows a trainer; says nothing on ranks other than 0.

    Parameters
    ----------
    total, done
        Steps of the run, and those taken before.
    events
        Where scalars go, closed by `close`; None for nowhere.
    """

    def __init__(
        self, config: TrainConfig, total: int, rank: int, done: int = 0, events: EventLog | None = None
    ) -> None:
        self._bar = Progress(config, total, rank, done)
        self._events, self._told, self._flushed = events, done, time.monotonic()

    def after_step(self, trainer: Trainer) -> None:
        """Note a step; tell what is new, which is known every few steps."""
        self._bar.advance()
        records = trainer.records
        if len(records) == self._told:
            return
        self._bar.show(
            records[-1], trainer.samples_per_second, trainer.clock.communication_share, trainer.tally.pace.lagging()
        )
        if self._events is not None:
            for record in records[self._told : -1]:
                self._events.add(record.step, record.scalars())
            self._events.add(records[-1].step, records[-1].scalars() | _pace(trainer))
            if time.monotonic() - self._flushed > _FLUSH_SECONDS:
                self._events.flush()
                self._flushed = time.monotonic()
        self._told = len(records)

    def after_epoch(self, record: EpochRecord) -> None:
        """Note an evaluation."""
        if self._events is not None and record.test_loss is not None and record.test_accuracy is not None:
            self._events.add(record.steps - 1, {"loss/test": record.test_loss, "accuracy/test": record.test_accuracy})

    def close(self) -> None:
        """Leave the bar's last state on the screen, and end the files."""
        self._bar.close()
        if self._events is not None:
            self._events.close()


def _pace(trainer: Trainer) -> dict[str, float]:
    values = {
        "samples_per_second": trainer.samples_per_second,
        "communication_share": trainer.clock.communication_share,
    }
    if math.isfinite(trainer.gradient_norm):
        values["gradient_norm"] = trainer.gradient_norm
    return values
