"""Layers without parameters that keep their input's size: ReLU, GELU, dropout, and another shape."""

from __future__ import annotations

import math

import numpy as np

from mpicoll.kernels.codecs.counter_random import key as random_key
from mpicoll.kernels.network_layers import dropout
from mpicoll.models.layers.layer_interface import Arrays, Shape, WithoutParameters, Workspace

_ROOT, _CUBIC = math.sqrt(2 / math.pi), 0.044715


class Relu(WithoutParameters):
    """Rectified linear unit, ``max(x, 0)``."""

    def __init__(self, shape: Shape) -> None:
        self.output = shape

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """See :class:`Layer`."""
        return np.maximum(x, 0, out=room.rows("out", len(x), self.output, x.dtype))

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """See :class:`Layer`."""
        out = room.rows("out", len(delta), self.output, delta.dtype)
        passed = np.greater(out, 0, out=room.rows("passed", len(delta), self.output, np.dtype(bool)))
        return np.multiply(delta, passed, out=delta) if below else None


class Gelu(WithoutParameters):
    """Gaussian error linear unit, in the approximation by tanh.

    ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))`` (Hendrycks and Gimpel, "Gaussian error linear units",
    2016, section 2).
    """

    def __init__(self, shape: Shape) -> None:
        self.output = shape

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """See :class:`Layer`."""
        room.x, one = x, x.dtype.type(1)
        tanh, out = (room.rows(name, len(x), self.output, x.dtype) for name in ("tanh", "out"))
        np.multiply(x, x, out=tanh)
        tanh *= x.dtype.type(_CUBIC)
        tanh += one
        tanh *= x
        tanh *= x.dtype.type(_ROOT)
        np.tanh(tanh, out=tanh)
        np.add(tanh, one, out=out)
        out *= x
        out *= x.dtype.type(0.5)
        return out

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """See :class:`Layer`."""
        if not below:
            return None
        x, real = room.x, delta.dtype.type
        tanh, slope = (room.rows(name, len(delta), self.output, delta.dtype) for name in ("tanh", "out"))
        np.multiply(x, x, out=slope)  # in the output's memory, which nobody needs any more
        slope *= real(3 * _CUBIC * _ROOT / 2)
        slope += real(_ROOT / 2)
        slope *= x
        slope *= real(1) - tanh * tanh
        tanh += real(1)
        tanh *= real(0.5)
        slope += tanh
        return np.multiply(delta, slope, out=delta)


class Dropout(WithoutParameters):
    """Dropout: in training each element is 0 with probability `rate`, and others are divided by ``1 - rate``.

    An element's fate is a hash of the run's seed, the step, the sample's number in the data set, `stream` and the
    element's place, so that it does not depend on the number of ranks. (Srivastava et al., "Dropout: a simple way to
    prevent neural networks from overfitting", JMLR 15, 2014, section 10, in the inverted form.)

    Parameters
    ----------
    shape
        Shape of a sample.
    rate
        From 0, below 1.
    stream
        Number of this dropout among those of a model, which makes their random numbers differ.
    first
        Place of the first element, for a part of a layer.
    """

    def __init__(self, shape: Shape, rate: float, stream: int, first: int = 0) -> None:
        if not 0 <= rate < 1:
            raise ValueError(f"rate: {rate} is not from 0 on and below 1")
        self.output, self.rate, self.stream, self._first = shape, rate, stream, first

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """See :class:`Layer`; returns `x` itself in an evaluation."""
        if room.key is None or self.rate == 0:
            return x
        out = room.rows("out", len(x), self.output, x.dtype)
        out[...] = x
        return self._thin(out, room)

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """See :class:`Layer`; draws the same numbers again instead of keeping them."""
        return None if not below else delta if room.key is None or self.rate == 0 else self._thin(delta, room)

    def _thin(self, values: np.ndarray, room: Workspace) -> np.ndarray:
        assert room.key is not None
        seed, step, samples = room.key
        if len(samples) != len(values):
            raise ValueError(f"samples: {len(samples)} numbers for {len(values)} rows")
        flat = values.reshape(-1, math.prod(self.output))
        dropout(flat, samples, random_key(seed, self.stream, step), self._first, self.rate, 1 / (1 - self.rate))
        return flat.reshape(values.shape)


class Reshape(WithoutParameters):
    """Another shape of the same elements in the same order, such as an image's from a vector's."""

    def __init__(self, shape: Shape) -> None:
        self.output = shape

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """See :class:`Layer`."""
        room.x = x
        return x.reshape(len(x), *self.output)

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """See :class:`Layer`."""
        return delta.reshape(room.x.shape) if below else None
