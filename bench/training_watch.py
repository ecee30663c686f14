"""Time and samples of a training run behind its warm-up, and the time to a goal."""

from __future__ import annotations

from bench.training_outcomes import GOAL, WARMUP_STEPS
from mpicoll.train.loop import Loop, LoopCallback
from mpicoll.train.metrics import EpochRecord


class Watch(LoopCallback):
    """Callback that notes when the warm-up ends, and looks at the accuracy after each epoch."""

    def __init__(self) -> None:
        self.seconds_to_goal: float | None = None
        self._warm_seconds, self._warm_samples = 0.0, 0.0

    def on_step(self, loop: Loop, done: int) -> None:
        """Forget what the warm-up took when it is over."""
        if done == WARMUP_STEPS:
            self._warm_seconds, self._warm_samples = loop.clock.stepping, loop.coordination.samples_seen

    def seconds(self, loop: Loop) -> float:
        """Return the seconds of this rank's steps since the warm-up."""
        return loop.clock.stepping - self._warm_seconds

    def samples(self, loop: Loop) -> float:
        """Return the samples of all ranks since the warm-up."""
        return loop.coordination.samples_seen - self._warm_samples

    def on_epoch(self, loop: Loop, record: EpochRecord) -> None:
        """Note when the goal is reached."""
        tested = loop.evaluate()
        if tested is not None and (tested[1] or 0.0) >= GOAL and self.seconds_to_goal is None:
            self.seconds_to_goal = self.seconds(loop)
