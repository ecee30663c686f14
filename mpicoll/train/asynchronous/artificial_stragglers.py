"""Artificial stragglers: delays of computation, to measure their effect on a strategy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicoll.models.micro_batches import GradientStore, StepExecutor
from mpicoll.train.config import TrainConfig


class Delayed:
    """Engine that sleeps after computing gradients; a :class:`~mpicoll.models.micro_batches.StepExecutor`.

    Parameters
    ----------
    engine
        The engine that computes.
    least
        Shortest time in seconds of the gradients of an equal part of a step, as if the model were larger; of a part
        with more or fewer samples, in proportion.
    parts
        Number of parts of a step.
    factor
        Factor on the time of this rank's gradients, `least` included.
    jitter
        Mean of a further, exponentially distributed delay in seconds.
    seed
        Seed of the delays.
    """

    def __init__(
        self, engine: StepExecutor, least: float, parts: int, factor: float, jitter: float, seed: tuple[int, int]
    ) -> None:
        self._engine, self._least, self._factor, self._jitter = engine, least * parts, factor, jitter
        self._random = np.random.default_rng(seed)

    @property
    def waited(self) -> float:
        """See :class:`~mpicoll.models.micro_batches.StepExecutor`."""
        return self._engine.waited

    def gradients(
        self, strategy: GradientStore, parts: Sequence[tuple[Any, ...]], scale: float, *, compress: bool
    ) -> tuple[float, int]:
        """See :class:`~mpicoll.models.micro_batches.StepExecutor`."""
        began = time.perf_counter()
        found = self._engine.gradients(strategy, parts, scale, compress=compress)
        took = time.perf_counter() - began
        least = self._least * scale * sum(len(part[0]) for part in parts)  # scale: one over the samples of the step
        end = max(took, least) * self._factor + self._random.exponential(self._jitter)
        time.sleep(max(0.0, end - took))
        return found

    def loss(self, strategy: GradientStore, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
        """See :class:`~mpicoll.models.micro_batches.StepExecutor`."""
        return self._engine.loss(strategy, x, y)


def delayed(engine: StepExecutor, config: TrainConfig, rank: int, parts: int) -> StepExecutor:
    """Return the engine with the delays of the options for `rank`; the engine itself if there are none.

    Parameters
    ----------
    parts
        Number of parts of a step.
    """
    factor = dict(config.slow).get(rank, 1.0)
    if factor == 1.0 and config.jitter == 0 and config.step_seconds == 0:
        return engine
    return Delayed(engine, config.step_seconds, parts, factor, config.jitter, (config.seed, rank))
