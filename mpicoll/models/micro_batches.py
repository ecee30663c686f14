"""Execution of a step: forward and backward passes over micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpicoll.models.layers import RandomKey
from mpicoll.models.sequential import Model, ParameterStore


class MicroBatch(NamedTuple):
    """Samples that go through the model together.

    Attributes
    ----------
    x, y
        Features and targets, a row for each sample, as the data set returns them.
    key
        Key of random numbers; None for none.
    """

    x: Any
    y: Any
    key: RandomKey | None = None


class GradientStore(ParameterStore, Protocol):
    """Parameter store that receives gradients."""

    def begin(self, scale: float, *, last: bool, compress: bool) -> None:
        """See :class:`~mpicoll.parallel.strategy.Strategy`."""


class StepExecutor(Protocol):
    """Interface of engines, which compute the gradients of samples and write them to a strategy."""

    @property
    def waited(self) -> float:
        """Seconds spent so far on messages within its methods, those of the strategy excluded."""

    def gradients(
        self, strategy: GradientStore, parts: Sequence[tuple[Any, ...]], scale: float, *, compress: bool
    ) -> tuple[float, int]:
        """Compute the gradients of all parts, times `scale`; return summed loss and hits of this rank.

        Every rank that shares the model calls it with equally many parts, each a :class:`MicroBatch` or the pair of
        its first two elements; a part may have no rows.
        """

    def loss(self, strategy: GradientStore, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
        """Return summed loss and hits on one of the ranks that share the model, zeros on the others."""


class SequentialMicroBatches:
    """Engine that runs the whole model on this rank, part after part; a :class:`StepExecutor`."""

    def __init__(self, model: Model) -> None:
        self._model = model

    @property
    def waited(self) -> float:
        """See :class:`StepExecutor`."""
        return sum(layer.waited for layer in self._model.layers)

    def gradients(
        self, strategy: GradientStore, parts: Sequence[tuple[Any, ...]], scale: float, *, compress: bool
    ) -> tuple[float, int]:
        """See :class:`StepExecutor`."""
        loss, correct = 0.0, 0
        for number, part in enumerate(parts):
            x, y, key = MicroBatch(*part)
            strategy.begin(scale, last=number == len(parts) - 1, compress=compress)
            found = self._model.loss_and_gradient(strategy, x, y, add=number > 0, key=key)
            loss, correct = loss + found[0], correct + found[1]
        return loss, correct

    def loss(self, strategy: GradientStore, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
        """See :class:`StepExecutor`."""
        return self._model.loss(strategy, x, y)
