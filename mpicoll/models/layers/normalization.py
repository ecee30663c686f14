"""Normalisation layers."""

from __future__ import annotations

import numpy as np

from mpicoll.models.layers.layer_interface import Arrays, Constant, Initial, Shape, Workspace, sum_of_rows


class LayerNorm:
    """Layer normalisation: mean 0 and variance 1 along the last axis, then a gain and a bias for each element.

    Each sample is normalised by itself. (Ba, Kiros and Hinton, "Layer normalization", 2016, section 3.)

    Parameters
    ----------
    shape
        Shape of a sample.
    epsilon
        Number added to the variance.
    """

    waited = 0.0

    def __init__(self, shape: Shape, epsilon: float = 1e-5) -> None:
        self.shapes: tuple[Shape, ...] = ((shape[-1],), (shape[-1],))
        self.decays: tuple[bool, ...] = (False, False)
        self.initials: tuple[Initial, ...] = (Constant(1.0), Constant(0.0))
        self.output, self.epsilon = shape, epsilon

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """See :class:`Layer`."""
        normal, out = (room.rows(name, len(x), self.output, x.dtype) for name in ("normal", "out"))
        factor = room.rows("factor", len(x), (*self.output[:-1], 1), x.dtype)
        np.subtract(x, x.mean(axis=-1, keepdims=True), out=normal)
        np.mean(np.multiply(normal, normal, out=out), axis=-1, keepdims=True, out=factor)
        factor += x.dtype.type(self.epsilon)
        np.divide(1, np.sqrt(factor, out=factor), out=factor)
        normal *= factor
        np.multiply(normal, arrays[0], out=out)
        out += arrays[1]
        return out

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """See :class:`Layer`."""
        normal, into = (room.rows(name, len(delta), self.output, delta.dtype) for name in ("normal", "out"))
        width = self.output[-1]
        np.multiply(delta, normal, out=into)
        sum_of_rows(into.reshape(-1, width), gradients[0], add=add)
        sum_of_rows(delta.reshape(-1, width), gradients[1], add=add)
        if not below:
            return None
        np.multiply(delta, arrays[0], out=delta)
        np.multiply(delta, normal, out=into)
        normal *= into.mean(axis=-1, keepdims=True)
        np.subtract(delta, delta.mean(axis=-1, keepdims=True), out=into)
        into -= normal
        into *= room.rows("factor", len(delta), (*self.output[:-1], 1), delta.dtype)
        return into
