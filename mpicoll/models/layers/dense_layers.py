"""Dense layers."""

from __future__ import annotations

import math

import numpy as np

from mpicoll.models.layers.layer_interface import (
    Arrays,
    Constant,
    Initial,
    Normal,
    Shape,
    Workspace,
    product,
    relu_backward,
    sum_of_rows,
)


class Dense:
    """Dense layer, ``x @ W + b``, with an optional ReLU.

    Initial weights are normal with variance 2 / inputs before a ReLU (He et al., "Delving deep into rectifiers", ICCV
    2015), else 1 / inputs; biases are 0.

    Parameters
    ----------
    inputs, outputs
        Lengths of the last axis of the layer's input and output.
    relu
        True to apply a ReLU.
    bias
        False for a layer without `b`.
    positions
        Shape of the axes between the rows and the last one, to each element of which the layer is applied.
    deviation
        Standard deviation of the initial weights, None for the one above.
    """

    waited = 0.0

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        relu: bool = False,
        bias: bool = True,
        positions: Shape = (),
        deviation: float | None = None,
    ) -> None:
        deviation = math.sqrt((1 + relu) / inputs) if deviation is None else deviation
        self.shapes: tuple[Shape, ...] = ((inputs, outputs), (outputs,))[: 1 + bias]
        self.decays: tuple[bool, ...] = (True, False)[: 1 + bias]
        self.initials: tuple[Initial, ...] = (Normal(deviation), Constant(0.0))[: 1 + bias]
        self.output: Shape = (*positions, outputs)
        self.relu = self.needs_output = relu

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """See :class:`Layer`."""
        return self.finish(arrays, self.multiply(arrays, x, room))

    def multiply(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """Return ``x @ W``, the first half of `forward`."""
        room.x, (inputs, outputs) = x, arrays[0].shape
        out = room.rows("out", len(x), self.output, x.dtype)
        np.matmul(x.reshape(-1, inputs), arrays[0], out=out.reshape(-1, outputs))
        return out

    def finish(self, arrays: Arrays, out: np.ndarray) -> np.ndarray:
        """Add the bias, then apply ReLU, in place: the second half of `forward`."""
        if len(self.shapes) > 1:
            np.add(out, arrays[1], out=out)
        return np.maximum(out, 0, out=out) if self.relu else out

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """See :class:`Layer`."""
        if self.relu:
            relu_backward(delta, self.output, room)
        inputs, outputs = arrays[0].shape
        flat = delta.reshape(-1, outputs)
        product(room.x.reshape(-1, inputs).T, flat, gradients[0], room, add=add)
        if len(self.shapes) > 1:
            sum_of_rows(flat, gradients[1], add=add)
        if not below:
            return None
        into = room.rows("into", len(delta), room.x.shape[1:], delta.dtype)
        np.matmul(flat, arrays[0].T, out=into.reshape(-1, inputs))
        return into
