"""Convolutional layers, as matrix products of the pixels' neighbourhoods."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from mpicoll.kernels.network import patches_3x3, relu_pool_2x2, relu_pool_2x2_backward
from mpicoll.kernels.network_layers import patches, patches_backward
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

_PATCHES_NBYTES = 1 << 21
"""Bytes of the neighbourhoods that are made at a time: they stay in the cache until they are multiplied."""


def window_positions(side: int, kernel: int, stride: int, padding: int) -> int:
    """Return the number of positions of a window along an axis of `side` pixels and `padding` more at both ends.

    Raises
    ------
    ValueError
        If there are none, or an argument is out of range.
    """
    if kernel < 1 or stride < 1 or not 0 <= padding < kernel:
        raise ValueError(f"kernel {kernel}, stride {stride}, padding {padding}: at least 1, 1, 0; padding below kernel")
    if side + 2 * padding < kernel:
        raise ValueError(f"kernel: {kernel} is more than the {side} pixels with padding {padding}")
    return (side + 2 * padding - kernel) // stride + 1


class Conv2d:
    """Convolutional layer of square filters, with zero padding, a bias, and an optional ReLU.

    The output has shape (height', width', filters). Initial weights are those of a :class:`Dense` layer.

    Parameters
    ----------
    image
        Height, width and channels of a sample.
    filters
        Number of filters.
    kernel, stride, padding
        Side of the filters, distance between their positions, and width of the border of zeros, in pixels.
    relu
        True to apply a ReLU.

    Raises
    ------
    ValueError
        If the filters are larger than the image with its border, or an argument is out of range.

    Attributes
    ----------
    image, window : tuple of int
        Height, width and channels of a sample; kernel, stride and padding.
    relu : bool
        True if a ReLU is applied.
    """

    waited = 0.0

    def __init__(
        self,
        image: tuple[int, int, int],
        filters: int,
        *,
        kernel: int,
        stride: int = 1,
        padding: int = 0,
        relu: bool = False,
    ) -> None:
        height, width = (window_positions(side, kernel, stride, padding) for side in image[:2])
        inputs = kernel * kernel * image[2]
        self.shapes: tuple[Shape, ...] = ((inputs, filters), (filters,))
        self.decays: tuple[bool, ...] = (True, False)
        self.initials: tuple[Initial, ...] = (Normal(math.sqrt((1 + relu) / inputs)), Constant(0.0))
        self.output: Shape = (height, width, filters)
        self.image, self.window, self.relu = image, (kernel, stride, padding), relu

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """See :class:`Layer`; the samples may also be vectors of the image's pixels."""
        room.x = x
        out = room.rows("out", len(x), self.output, x.dtype)
        for part, near in self._near(x, room):
            np.matmul(near, arrays[0], out=out[part].reshape(-1, self.output[2]))
        np.add(out, arrays[1], out=out)
        return np.maximum(out, 0, out=out) if self.relu else out

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """See :class:`Layer`."""
        if self.relu:
            relu_backward(delta, self.output, room)
        sum_of_rows(delta.reshape(-1, self.output[2]), gradients[1], add=add)
        if not len(delta) and not add:
            gradients[0][:] = 0
        into = room.rows("into", len(delta), self.image, delta.dtype) if below else None
        for part, near in self._near(room.x, room):
            by_pixel = delta[part].reshape(-1, self.output[2])
            product(near.T, by_pixel, gradients[0], room, add=add or part.start > 0)
            if into is not None:
                np.matmul(by_pixel, arrays[0].T, out=near)  # in the patches' memory, which nobody needs any more
                patches_backward(near.reshape(-1, *self.output[:2], near.shape[-1]), into[part], *self.window)
        return None if into is None else into.reshape(room.x.shape)

    def _near(self, x: np.ndarray, room: Workspace) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield the neighbourhoods of the pixels of some samples at a time, in memory that is used again."""
        images, width = np.ascontiguousarray(x).reshape(len(x), *self.image), self.shapes[0][0]
        rows = max(1, _PATCHES_NBYTES // (math.prod(self.output[:2]) * width * x.dtype.itemsize))
        kept = room.rows("patches", min(rows, len(x)), (*self.output[:2], width), x.dtype)
        for start in range(0, len(x), rows):
            part = slice(start, min(start + rows, len(x)))
            near = kept[: part.stop - start]
            patches(images[part], near, *self.window)
            yield part, near.reshape(-1, width)


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
    image, pooled : tuple of int
        Height, width and channels of a sample, and of the output.
    """

    waited = 0.0

    def __init__(self, image: tuple[int, int, int], filters: int) -> None:
        self._height, self._width, channels = self.image = image
        self.pooled = (self._height // 2, self._width // 2, filters)
        self.shapes: tuple[Shape, ...] = ((9 * channels, filters), (filters,))
        self.decays: tuple[bool, ...] = (True, False)
        self.initials: tuple[Initial, ...] = (Normal(math.sqrt(2 / (9 * channels))), Constant(0.0))
        self.output: Shape = (math.prod(self.pooled),)

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """See :class:`Layer`."""
        rows, filters, dtype = len(x), self.pooled[2], x.dtype
        patches = self._patches(rows, room, dtype)
        patches_3x3(x.reshape(rows, *self.image), patches)
        maps = self._maps(rows, room, dtype)
        np.matmul(patches, arrays[0], out=maps.reshape(-1, filters))
        pooled = room.rows("pooled", rows, self.pooled, dtype)
        relu_pool_2x2(maps, arrays[1], pooled, room.rows("taken", rows, self.pooled, np.dtype(np.int8)))
        return pooled.reshape(rows, *self.output)

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """See :class:`Layer`; NotImplementedError with `below`: a convolution can only be a model's first layer."""
        if below:
            raise NotImplementedError("a convolution is the first layer of a model")
        rows = len(delta)
        maps = self._maps(rows, room, delta.dtype)
        taken = room.rows("taken", rows, self.pooled, np.dtype(np.int8))
        relu_pool_2x2_backward(delta.reshape(taken.shape), taken, maps)
        by_pixel = maps.reshape(-1, self.pooled[2])
        product(self._patches(rows, room, delta.dtype).T, by_pixel, gradients[0], room, add=add)
        sum_of_rows(by_pixel, gradients[1], add=add)
        return None

    def _patches(self, rows: int, room: Workspace, dtype: np.dtype) -> np.ndarray:
        width = self.shapes[0][0]
        return room.rows("patches", rows, (self._height * self._width, width), dtype).reshape(-1, width)

    def _maps(self, rows: int, room: Workspace, dtype: np.dtype) -> np.ndarray:
        return room.rows("maps", rows, (self._height, self._width, self.pooled[2]), dtype)
