"""Execution of a step: forward and backward passes over micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mpicoll.models.sequential import Model, ParameterStore

MicroBatch = tuple[Any, Any]
"""Features, (rows, features), and labels, (rows,) of int64; for user-defined models as their data set returns them."""


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
        self, strategy: GradientStore, parts: Sequence[MicroBatch], scale: float, *, compress: bool
    ) -> tuple[float, int]:
        """Compute the gradients of all parts, times `scale`; return summed loss and hits of this rank.

        Every rank that shares the model calls it with equally many parts; a part may have no rows.
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
        self, strategy: GradientStore, parts: Sequence[MicroBatch], scale: float, *, compress: bool
    ) -> tuple[float, int]:
        """See :class:`StepExecutor`."""
        loss, correct = 0.0, 0
        for number, (x, y) in enumerate(parts):
            strategy.begin(scale, last=number == len(parts) - 1, compress=compress)
            found = self._model.loss_and_gradient(strategy, x, y, add=number > 0)
            loss, correct = loss + found[0], correct + found[1]
        return loss, correct

    def loss(self, strategy: GradientStore, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
        """See :class:`StepExecutor`."""
        return self._model.loss(strategy, x, y)
