"""Layerwise optimizers: LARS and LAMB, whose updates depend on norms of whole arrays."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from mpicoll.kernels import optimizer_updates
from mpicoll.optim.update_rule import Optimizer, adam_moments


class LayerwiseOptimizer(Optimizer):
    """Base of rules that scale the update of each array by a ratio of norms, its *trust ratio*.

    It is 1 for arrays without weight decay, which are biases as a rule, and where a norm is zero. A vector may hold
    parts of arrays, each a span: :meth:`prepare` returns squares of their norms, which are added up over the ranks that
    hold the other parts, and :meth:`finish` takes the step. :meth:`apply` does both for whole arrays.
    """

    layerwise = True

    def apply(self, gradient: np.ndarray, rate: float, first: int = 0, *, scale: float = 1.0) -> None:
        """Update all parameters; see :meth:`Optimizer.apply`.

        Raises
        ------
        ValueError
            If `gradient` is that of a part of the vector.
        """
        if first or gradient.size != self.parameters.size:
            count = self.parameters.size
            raise ValueError(f"gradient: {gradient.size} elements from {first} on; norms need all {count}")
        self.steps += 1
        for start, stop, decays in self._spans:
            part, own = slice(start, stop), gradient[start:stop]
            squares, direction = self._prepare(part, own, scale, decays)
            self._finish(part, own, rate, scale, decays, squares, direction)

    def prepare(self, gradient: np.ndarray, scale: float) -> np.ndarray:
        """Begin a step; return two sums of squares of each span, ``(spans, 2)`` of float64.

        Parameters
        ----------
        gradient : (count,) of the parameters' dtype
            Gradient of all elements of the vector; the step's gradient is ``scale * gradient``.
        """
        self.steps += 1
        squares = np.zeros((len(self._spans), 2))
        self._directions = []
        for number, (start, stop, decays) in enumerate(self._spans):
            found, direction = self._prepare(slice(start, stop), gradient[start:stop], scale, decays)
            squares[number] = found
            self._directions.append(direction)
        return squares

    def finish(self, gradient: np.ndarray, rate: float, scale: float, squares: np.ndarray) -> None:
        """End the step that :meth:`prepare` has begun, with the same gradient.

        Parameters
        ----------
        squares : (spans, 2) of float64
            Sums of squares of the whole arrays of which the spans are parts.
        """
        rows = zip(self._spans, squares.tolist(), self._directions, strict=True)
        for (start, stop, decays), (first, second), direction in rows:
            self._finish(slice(start, stop), gradient[start:stop], rate, scale, decays, (first, second), direction)
        self._directions = []

    _directions: list[np.ndarray | None]

    @abstractmethod
    def _prepare(
        self, part: slice, gradient: np.ndarray, scale: float, decays: bool
    ) -> tuple[tuple[float, float], np.ndarray | None]:
        """Return the squares of both norms of a span, and its update before it is scaled, if that is known."""

    @abstractmethod
    def _finish(
        self,
        part: slice,
        gradient: np.ndarray,
        rate: float,
        scale: float,
        decays: bool,
        squares: tuple[float, float],
        direction: np.ndarray | None,
    ) -> None:
        """Update a span with gradient ``scale * gradient``."""

    def _scalars(self, rate: float, scale: float, decay: float) -> tuple[float, ...]:
        return rate, scale, decay

    def _apply(self, part: slice, gradient: np.ndarray, scalars: tuple[float, ...]) -> None:
        rate, scale, decay = scalars
        squares, direction = self._prepare(part, gradient, scale, decay != 0)
        self._finish(part, gradient, rate, scale, decay != 0, squares, direction)


class LARS(LayerwiseOptimizer):
    """Momentum whose rate for each array is scaled by ``trust * |w| / (|g| + weight_decay * |w|)``.

    For gradients g and parameters w: ``v = momentum * v + rate * ratio * (g + weight_decay * w)``, ``w -= v``. (You,
    Gitman and Ginsburg, "Large batch training of convolutional networks", arXiv:1708.03888, 2017, algorithm 1.)
    """

    defaults: ClassVar[Mapping[str, float]] = {"momentum": 0.9, "trust": 0.001}
    slots = ("velocity",)

    def _prepare(
        self, part: slice, gradient: np.ndarray, scale: float, decays: bool
    ) -> tuple[tuple[float, float], np.ndarray | None]:
        return (_squares(self.parameters[part]), _squares(gradient)) if decays else (0.0, 0.0), None

    def _finish(
        self,
        part: slice,
        gradient: np.ndarray,
        rate: float,
        scale: float,
        decays: bool,
        squares: tuple[float, float],
        direction: np.ndarray | None,
    ) -> None:
        parameters, velocity = self.parameters[part], self.state["velocity"][part]
        decay, ratio = self._weight_decay if decays else 0.0, 1.0
        if decays:
            norm, slope = map(math.sqrt, squares)
            ratio = _ratio(self.settings["trust"] * norm, abs(scale) * slope + decay * norm)
        # The rate is part of the velocity, so that a lower one does not shorten steps that were taken before.
        scalars = self._array((1.0, rate * ratio * scale, rate * ratio * decay, self.settings["momentum"]))
        optimizer_updates.momentum(parameters, gradient, velocity, scalars, False)


class LAMB(LayerwiseOptimizer):
    """Adam whose update r of each array is scaled by ``|w| / |r + weight_decay * w|``.

    For parameters w and Adam's corrected moments: ``r = mean / (sqrt(square) + epsilon)``, ``w -= rate * ratio * (r +
    weight_decay * w)``. (You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR
    2020, algorithm 2, with the identity for phi.)
    """

    defaults: ClassVar[Mapping[str, float]] = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6}
    slots = ("mean", "square")
    depends_on_steps = True

    def _prepare(
        self, part: slice, gradient: np.ndarray, scale: float, decays: bool
    ) -> tuple[tuple[float, float], np.ndarray | None]:
        parameters, direction = self.parameters[part], np.zeros_like(gradient)
        mean, square = self.state["mean"][part], self.state["square"][part]
        corrected, *moments = adam_moments(self.settings, self.steps, -1.0)
        scalars = self._array((corrected, *moments, scale, 0.0, 0.0))
        optimizer_updates.adam(direction, gradient, mean, square, scalars)  # from zeros, at a rate of -1
        if not decays:
            return (0.0, 0.0), direction
        direction += parameters.dtype.type(self._weight_decay) * parameters
        return (_squares(parameters), _squares(direction)), direction

    def _finish(
        self,
        part: slice,
        gradient: np.ndarray,
        rate: float,
        scale: float,
        decays: bool,
        squares: tuple[float, float],
        direction: np.ndarray | None,
    ) -> None:
        assert direction is not None
        ratio = _ratio(math.sqrt(squares[0]), math.sqrt(squares[1])) if decays else 1.0
        direction *= direction.dtype.type(rate * ratio)
        self.parameters[part] -= direction


def _squares(x: np.ndarray) -> float:
    """Return the sum of squares of a vector, added up in float64."""
    return float(np.einsum("i,i->", x, x, dtype=np.float64))


def _ratio(above: float, below: float) -> float:
    """Return a trust ratio; 1 where a norm is zero or not finite."""
    return above / below if above > 0 and 0 < below < math.inf else 1.0
