"""Attention layer."""

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
    sum_of_rows,
)


class CausalSelfAttention:
    """Multi-head self-attention, in which a position attends to itself and to earlier ones.

    Vaswani et al., "Attention is all you need", NIPS 2017, section 3.2, with biases. Parameters are the weights
    (width, 3, heads, width / heads) and biases of queries, keys and values, and those of the output, which turn the
    heads' results (heads, width / heads) into `width` elements.

    Parameters
    ----------
    context, width
        Shape of a sample: positions, and elements of each.
    heads
        Number of heads; a divisor of `width`.
    deviation
        Standard deviation of the initial weights of queries, keys and values.
    out_deviation
        Standard deviation of the initial weights of the output.
    own_heads
        Number of heads that this layer has; fewer than `heads` for a part of it, whose outputs are partial sums.

    Raises
    ------
    ValueError
        If `heads` does not divide `width`.
    """

    waited = 0.0

    def __init__(
        self,
        context: int,
        width: int,
        heads: int,
        *,
        deviation: float = 0.02,
        out_deviation: float = 0.02,
        own_heads: int | None = None,
    ) -> None:
        if heads < 1 or width % heads:
            raise ValueError(f"heads: {heads} does not divide the width {width}")
        own, size = heads if own_heads is None else own_heads, width // heads
        self.heads, self._own, self._size = heads, own, size
        self.shapes: tuple[Shape, ...] = ((width, 3, own, size), (3, own, size), (own, size, width), (width,))
        self.decays: tuple[bool, ...] = (True, False, True, False)
        self.initials: tuple[Initial, ...] = (Normal(deviation), Constant(0), Normal(out_deviation), Constant(0))
        self.output: Shape = (context, width)
        self._hidden = np.triu(np.ones((context, context), bool), 1)

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """See :class:`Layer`."""
        out = self.mix(arrays, x, room)
        np.add(out, arrays[3], out=out)
        return out

    def mix(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """Return the output without its bias, the sum of this layer's heads."""
        rows, (context, width), (own, size) = len(x), self.output, (self._own, self._size)
        room.x = x
        flat = room.rows("flat", rows, (context, 3, own, size), x.dtype)
        np.matmul(x.reshape(-1, width), arrays[0].reshape(width, -1), out=flat.reshape(-1, 3 * own * size))
        flat += arrays[1]
        heads = room.rows("heads", rows, (3, own, context, size), x.dtype)
        heads[...] = flat.transpose(0, 2, 3, 1, 4)
        weights = self._weights(heads, room)
        mixed = room.rows("mixed", rows, (own, context, size), x.dtype)
        np.matmul(weights, heads[:, 2], out=mixed)
        joined = room.rows("joined", rows, (context, own, size), x.dtype)
        joined[...] = mixed.transpose(0, 2, 1, 3)
        out = room.rows("out", rows, self.output, x.dtype)
        np.matmul(joined.reshape(-1, own * size), arrays[2].reshape(-1, width), out=out.reshape(-1, width))
        return out

    def _weights(self, heads: np.ndarray, room: Workspace) -> np.ndarray:
        """Return the softmax of the scores, (rows, heads, positions, positions)."""
        context = self.output[0]
        weights = room.rows("weights", len(heads), (self._own, context, context), heads.dtype)
        np.matmul(heads[:, 0], heads[:, 1].swapaxes(-1, -2), out=weights)
        weights *= heads.dtype.type(1 / math.sqrt(self._size))
        weights[..., self._hidden] = -np.inf
        weights -= weights.max(axis=-1, keepdims=True)
        np.exp(weights, out=weights)
        weights /= weights.sum(axis=-1, keepdims=True)
        return weights

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """See :class:`Layer`."""
        rows, (context, width), (own, size) = len(delta), self.output, (self._own, self._size)
        flat, into_heads = delta.reshape(-1, width), own * size
        joined = room.rows("joined", rows, (context, own, size), delta.dtype).reshape(-1, into_heads)
        product(joined.T, flat, gradients[2].reshape(into_heads, width), room, add=add, name=" out")
        sum_of_rows(flat, gradients[3], add=add)
        np.matmul(flat, arrays[2].reshape(into_heads, width).T, out=joined)
        mixed = room.rows("mixed", rows, (own, context, size), delta.dtype)
        mixed[...] = joined.reshape(rows, context, own, size).transpose(0, 2, 1, 3)
        together = self._through_softmax(mixed, room).reshape(-1, 3 * into_heads)
        product(room.x.reshape(-1, width).T, together, gradients[0].reshape(width, -1), room, add=add)
        sum_of_rows(together, gradients[1].reshape(-1), add=add)
        if not below:
            return None
        into = room.rows("into", rows, self.output, delta.dtype)
        np.matmul(together, arrays[0].reshape(width, -1).T, out=into.reshape(-1, width))
        return into

    def _through_softmax(self, mixed: np.ndarray, room: Workspace) -> np.ndarray:
        """Return the gradients of queries, keys and values from those of the heads' results."""
        rows, own, context, size = mixed.shape
        heads, back = (room.rows(name, rows, (3, own, context, size), mixed.dtype) for name in ("heads", "back"))
        weights, slope = (room.rows(name, rows, (own, context, context), mixed.dtype) for name in ("weights", "slope"))
        np.matmul(weights.swapaxes(-1, -2), mixed, out=back[:, 2])
        np.matmul(mixed, heads[:, 2].swapaxes(-1, -2), out=slope)
        slope -= np.einsum("...ij,...ij->...i", slope, weights)[..., None]
        slope *= weights
        slope *= mixed.dtype.type(1 / math.sqrt(self._size))
        np.matmul(slope, heads[:, 1], out=back[:, 0])
        np.matmul(slope.swapaxes(-1, -2), heads[:, 0], out=back[:, 1])
        flat = room.rows("flat", rows, (context, 3, own, size), mixed.dtype)
        flat[...] = back.transpose(0, 3, 1, 2, 4)
        return flat
