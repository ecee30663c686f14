"""Embedding layer."""

from __future__ import annotations

import numpy as np

from mpicoll.kernels.network_layers import add_rows
from mpicoll.models.layers.layer_interface import Arrays, Initial, Normal, Shape, Workspace, sum_of_rows


class ByteEmbedding:
    """Embedding of bytes: a vector for each of 256 values, plus one for each position, both learned.

    Initial values are normal with standard deviation 0.02 (Radford et al., "Improving language understanding by
    generative pre-training", 2018, section 4.1).

    Parameters
    ----------
    context
        Number of bytes of a sample, which are of uint8.
    width
        Length of the vectors.
    """

    waited = 0.0

    def __init__(self, context: int, width: int) -> None:
        self.shapes: tuple[Shape, ...] = ((256, width), (context, width))
        self.decays: tuple[bool, ...] = (True, True)
        self.initials: tuple[Initial, ...] = (Normal(0.02), Normal(0.02))
        self.output: Shape = (context, width)

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """See :class:`Layer`; `x` is (rows, context) of uint8."""
        room.x = x
        out = room.rows("out", len(x), self.output, arrays[0].dtype)
        # With "raise", the default, NumPy would copy the result once more; a byte is never out of range.
        np.take(arrays[0], x, axis=0, out=out, mode="clip")
        out += arrays[1]
        return out

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """See :class:`Layer`; NotImplementedError with `below`: bytes have no derivative."""
        if below:
            raise NotImplementedError("an embedding is the first layer of a model")
        if not add:
            gradients[0][...] = 0
        flat = np.ascontiguousarray(delta).reshape(-1, delta.shape[-1])
        add_rows(flat, np.ascontiguousarray(room.x).reshape(-1), gradients[0])
        sum_of_rows(delta, gradients[1], add=add)
        return None
