"""Layers with hand-derived gradients. A layer holds no parameters: they are arguments of its methods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mpicoll.kernels.network import patches_3x3, relu_pool_2x2, relu_pool_2x2_backward

Shape = tuple[int, ...]
Arrays = Sequence[np.ndarray]


class Workspace:
    """State of a layer between forward and backward pass; its arrays are reused from step to step.

    Attributes
    ----------
    x : (rows, ...) array
        Input of the layer.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        self.x = np.empty((0, 0))

    def rows(self, name: str, rows: int, tail: Shape, dtype: np.dtype) -> np.ndarray:
        """Return the first `rows` rows of the array `name`, contents undefined, shape ``(rows, *tail)``."""
        kept = self._arrays.get(name)
        if kept is None or len(kept) < rows:
            kept = self._arrays[name] = np.empty((rows, *tail), dtype)
        return kept[:rows]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays that are kept."""
        return sum(array.nbytes for array in self._arrays.values())


class Layer(Protocol):
    """Layer interface.

    Attributes
    ----------
    shapes
        Shapes of the parameter arrays.
    decays
        For each of them, True if weight decay applies.
    output
        Shape of the layer's output for one sample.
    waited
        Seconds spent so far on messages to ranks that share the layer.
    """

    shapes: tuple[Shape, ...]
    decays: tuple[bool, ...]
    output: Shape
    waited: float

    def initial(self, random: np.random.Generator, arrays: Arrays) -> None:
        """Draw initial parameters; `arrays` are zero."""

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """Return the layer's output for `x` of shape (rows, features); `room` may keep references to both."""

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """Write the sum of the samples' gradients to `gradients`, or add it if `add`.

        Parameters
        ----------
        delta : array of the output's shape
            Derivative of the loss with respect to the output; may be overwritten.
        below
            True to return the derivative with respect to `x`, False to return None.
        """


def product(a: np.ndarray, b: np.ndarray, out: np.ndarray, room: Workspace, *, add: bool) -> None:
    """Write ``a @ b`` to `out`, or add it."""
    if add:
        scratch = room.rows("product", len(out), out.shape[1:], out.dtype)
        out += np.matmul(a, b, out=scratch)
    else:
        np.matmul(a, b, out=out)


def sum_of_rows(delta: np.ndarray, out: np.ndarray, *, add: bool) -> None:
    """Write the sum over rows to `out`, or add it."""
    if add:
        out += np.sum(delta, axis=0)
    else:
        np.sum(delta, axis=0, out=out)


class Dense:
    """Dense layer, ``x @ W + b``, with an optional ReLU.

    Initial weights are normal with variance 2 / inputs before a ReLU (He et al., "Delving deep into rectifiers", ICCV
    2015), else 1 / inputs; biases are 0.
    """

    waited = 0.0

    def __init__(self, inputs: int, outputs: int, *, relu: bool) -> None:
        self.shapes: tuple[Shape, ...] = ((inputs, outputs), (outputs,))
        self.decays: tuple[bool, ...] = (True, False)
        self.output: Shape = (outputs,)
        self.relu = relu

    def initial(self, random: np.random.Generator, arrays: Arrays) -> None:
        """See :class:`Layer`."""
        weight = arrays[0]
        weight[...] = random.standard_normal(weight.shape) * math.sqrt((1 + self.relu) / len(weight))

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """See :class:`Layer`."""
        return self.finish(arrays, self.multiply(arrays, x, room))

    def multiply(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """Return ``x @ W``, the first half of `forward`."""
        room.x = x
        return np.matmul(x, arrays[0], out=room.rows("out", len(x), self.output, x.dtype))

    def finish(self, arrays: Arrays, out: np.ndarray) -> np.ndarray:
        """Add the bias, then apply ReLU, in place: the second half of `forward`."""
        np.add(out, arrays[1], out=out)
        return np.maximum(out, 0, out=out) if self.relu else out

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """See :class:`Layer`."""
        if self.relu:
            out = room.rows("out", len(delta), self.output, delta.dtype)
            passed = room.rows("passed", len(delta), self.output, np.dtype(bool))
            np.multiply(delta, np.greater(out, 0, out=passed), out=delta)
        product(room.x.T, delta, gradients[0], room, add=add)
        sum_of_rows(delta, gradients[1], add=add)
        if not below:
            return None
        into = room.rows("into", len(delta), room.x.shape[1:], delta.dtype)
        return np.matmul(delta, arrays[0].T, out=into)


class Convolution:
    """Convolutional layer: 3 x 3 filters with zero padding, ReLU, and 2 x 2 max pooling.

    Parameters
    ----------
    image
        Height, width and channels; a sample's features are its pixels in that order.
    filters
        Number of filters.

    Attributes
    ----------
    image : tuple of int
        Height, width and channels.
    """

    waited = 0.0

    def __init__(self, image: tuple[int, int, int], filters: int) -> None:
        self._height, self._width, channels = self.image = image
        self._pooled = (self._height // 2, self._width // 2, filters)
        self.shapes: tuple[Shape, ...] = ((9 * channels, filters), (filters,))
        self.decays: tuple[bool, ...] = (True, False)
        self.output: Shape = (math.prod(self._pooled),)

    def initial(self, random: np.random.Generator, arrays: Arrays) -> None:
        """See :class:`Layer`."""
        weight = arrays[0]
        weight[...] = random.standard_normal(weight.shape) * math.sqrt(2 / len(weight))

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """See :class:`Layer`."""
        rows, filters, dtype = len(x), self._pooled[2], x.dtype
        patches = self._patches(rows, room, dtype)
        patches_3x3(x.reshape(rows, *self.image), patches)
        maps = self._maps(rows, room, dtype)
        np.matmul(patches, arrays[0], out=maps.reshape(-1, filters))
        pooled = room.rows("pooled", rows, self._pooled, dtype)
        relu_pool_2x2(maps, arrays[1], pooled, room.rows("taken", rows, self._pooled, np.dtype(np.int8)))
        return pooled.reshape(rows, *self.output)

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """See :class:`Layer`; NotImplementedError with `below`: a convolution can only be a model's first layer."""
        if below:
            raise NotImplementedError("a convolution is the first layer of a model")
        rows = len(delta)
        maps = self._maps(rows, room, delta.dtype)
        taken = room.rows("taken", rows, self._pooled, np.dtype(np.int8))
        relu_pool_2x2_backward(delta.reshape(taken.shape), taken, maps)
        by_pixel = maps.reshape(-1, self._pooled[2])
        product(self._patches(rows, room, delta.dtype).T, by_pixel, gradients[0], room, add=add)
        sum_of_rows(by_pixel, gradients[1], add=add)
        return None

    def _patches(self, rows: int, room: Workspace, dtype: np.dtype) -> np.ndarray:
        width = self.shapes[0][0]
        return room.rows("patches", rows, (self._height * self._width, width), dtype).reshape(-1, width)

    def _maps(self, rows: int, room: Workspace, dtype: np.dtype) -> np.ndarray:
        return room.rows("maps", rows, (self._height, self._width, self._pooled[2]), dtype)
