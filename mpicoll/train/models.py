"""Models with hand-derived gradients, all parameters in one flat vector: weights first, biases behind them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mpicoll.kernels.layers import softmax_cross_entropy

Shape = tuple[int, ...]


class Model(Protocol):
    """What the trainer needs.

    Attributes
    ----------
    parameter_count
        Length of the flat parameter vector.
    weight_count
        The leading part of it that weight decay applies to.
    dtype
        Of parameters, gradients and features.
    """

    parameter_count: int
    weight_count: int
    dtype: np.dtype

    def initial(self, seed: int) -> np.ndarray:
        """Return initial parameters, ``(parameter_count,)`` of dtype, that depend on nothing but `seed`."""

    def loss_and_gradient(
        self, parameters: np.ndarray, x: np.ndarray, y: np.ndarray, gradient: np.ndarray
    ) -> tuple[float, int]:
        """Return summed loss and number of hits; write the *sum* of the samples' gradients.

        Parameters
        ----------
        parameters : (parameter_count,) of dtype
        x : (rows, features) of dtype, C-contiguous
        y : (rows,) of int64, in 0 .. classes - 1
        gradient : (parameter_count,) of dtype
            Overwritten; zero where there are no rows.
        """

    def loss(self, parameters: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
        """Return summed loss and number of hits."""


class Layout:
    """Where each array stands in the flat vector."""

    def __init__(self, weights: Sequence[Shape], biases: Sequence[Shape]) -> None:
        self._places: list[tuple[int, int, Shape]] = []
        start = 0
        for shape in (*weights, *biases):
            stop = start + math.prod(shape)
            self._places.append((start, stop, shape))
            start = stop
        self.parameter_count = start
        self.weight_count = sum(math.prod(shape) for shape in weights)
        self._split = len(weights)

    def views(self, flat: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return weights and biases as views into `flat`."""
        arrays = [flat[start:stop].reshape(shape) for start, stop, shape in self._places]
        return arrays[: self._split], arrays[self._split :]


class Workspace:
    """Arrays that are kept from step to step, so that a step allocates nothing once the largest batch was seen."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}

    def rows(self, name: str, rows: int, tail: Shape, dtype: np.dtype) -> np.ndarray:
        """Return the first `rows` rows of the array `name`, contents undefined, shape ``(rows, *tail)``."""
        kept = self._arrays.get(name)
        if kept is None or len(kept) < rows:
            kept = self._arrays[name] = np.empty((rows, *tail), dtype)
        return kept[:rows]


class MultilayerPerceptron:
    """Dense layers with ReLU between them and softmax cross entropy behind the last.

    Parameters
    ----------
    widths
        Features, hidden widths and classes; without hidden ones this is logistic regression.
    dtype
        float32 or float64.
    """

    def __init__(self, widths: Sequence[int], dtype: np.dtype | type | str) -> None:
        shapes = list(itertools.pairwise(widths))
        self.dtype = np.dtype(dtype)
        self._layout = Layout(shapes, [(out,) for _, out in shapes])
        self.parameter_count = self._layout.parameter_count
        self.weight_count = self._layout.weight_count
        self._workspace = Workspace()

    def initial(self, seed: int) -> np.ndarray:
        """Draw weights with variance 2 / inputs before a ReLU, 1 / inputs in the last layer; biases are zero."""
        random = np.random.default_rng(seed)
        flat = np.zeros(self.parameter_count, self.dtype)
        weights, _ = self._layout.views(flat)
        for depth, weight in enumerate(weights):
            gain = 1 if depth == len(weights) - 1 else 2
            weight[...] = random.standard_normal(weight.shape) * math.sqrt(gain / len(weight))
        return flat

    def loss(self, parameters: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
        """Return summed loss and number of hits, see :class:`Model`."""
        weights, biases = self._layout.views(parameters)
        return softmax_cross_entropy(self._forward(weights, biases, x)[-1], y)

    def loss_and_gradient(
        self, parameters: np.ndarray, x: np.ndarray, y: np.ndarray, gradient: np.ndarray
    ) -> tuple[float, int]:
        """Return summed loss and number of hits and write the gradient, see :class:`Model`."""
        weights, biases = self._layout.views(parameters)
        outputs = self._forward(weights, biases, x)
        result = softmax_cross_entropy(outputs[-1], y)
        self._backward(weights, outputs, gradient)
        return result

    def _forward(self, weights: list[np.ndarray], biases: list[np.ndarray], x: np.ndarray) -> list[np.ndarray]:
        """Return `x` and what each layer puts out; the last are logits, the others are clipped at zero."""
        outputs = [x]
        for depth, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            out = self._workspace.rows(f"out{depth}", len(x), weight.shape[1:], self.dtype)
            np.matmul(outputs[-1], weight, out=out)
            np.add(out, bias, out=out)
            if depth < len(weights) - 1:
                np.maximum(out, 0, out=out)
            outputs.append(out)
        return outputs

    def _backward(self, weights: list[np.ndarray], outputs: list[np.ndarray], gradient: np.ndarray) -> None:
        """Go back through the layers; ``outputs[-1]`` holds the loss's gradient by then."""
        weight_gradients, bias_gradients = self._layout.views(gradient)
        delta = outputs[-1]
        for depth in range(len(weights) - 1, -1, -1):
            below = outputs[depth]
            np.matmul(below.T, delta, out=weight_gradients[depth])
            np.sum(delta, axis=0, out=bias_gradients[depth])
            if depth:
                into = self._workspace.rows(f"delta{depth}", len(delta), below.shape[1:], self.dtype)
                np.matmul(delta, weights[depth].T, out=into)
                passed = self._workspace.rows(f"passed{depth}", len(delta), below.shape[1:], np.dtype(bool))
                np.greater(below, 0, out=passed)
                delta = np.multiply(into, passed, out=into)
