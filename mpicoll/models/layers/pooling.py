"""Pooling layers."""

from __future__ import annotations

import numpy as np

from mpicoll.kernels.network_layers import max_pool, max_pool_backward
from mpicoll.models.layers.convolution_layers import window_positions
from mpicoll.models.layers.layer_interface import Arrays, Shape, WithoutParameters, Workspace


class MaxPool(WithoutParameters):
    """Largest element of each square window, channel by channel; windows may overlap.

    Parameters
    ----------
    image
        Height, width and channels of a sample.
    kernel, stride, padding
        Side of the windows, distance between them, and width of the border, whose pixels are never taken.

    Raises
    ------
    ValueError
        If a window is larger than the image with its border, or an argument is out of range.

    Attributes
    ----------
    window : tuple of int
        Kernel, stride and padding.
    """

    def __init__(self, image: tuple[int, int, int], *, kernel: int, stride: int, padding: int = 0) -> None:
        height, width = (window_positions(side, kernel, stride, padding) for side in image[:2])
        if 2 * padding > kernel:
            raise ValueError(f"padding: {padding} is more than half of kernel {kernel}; a window would be empty")
        self.output: Shape = (height, width, image[2])
        self._image, self.window = image, (kernel, stride, padding)

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """See :class:`Layer`."""
        out = room.rows("out", len(x), self.output, x.dtype)
        taken = room.rows("taken", len(x), self.output, np.dtype(np.int32))
        max_pool(np.ascontiguousarray(x).reshape(len(x), *self._image), out, taken, *self.window)
        room.x = x
        return out

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """See :class:`Layer`."""
        if not below:
            return None
        into = room.rows("into", len(delta), self._image, delta.dtype)
        taken = room.rows("taken", len(delta), self.output, np.dtype(np.int32))
        max_pool_backward(np.ascontiguousarray(delta), taken, into)
        return into.reshape(room.x.shape)


class AveragePool(WithoutParameters):
    """Mean of each square window, channel by channel; windows may overlap.

    Parameters
    ----------
    image
        Height, width and channels of a sample.
    kernel, stride
        Side of the windows, and distance between them; a rest at the right and lower end is left out.

    Raises
    ------
    ValueError
        If a window is larger than the image, or an argument is out of range.
    """

    def __init__(self, image: tuple[int, int, int], *, kernel: int, stride: int) -> None:
        height, width = (window_positions(side, kernel, stride, 0) for side in image[:2])
        self.output: Shape = (height, width, image[2])
        self._image, self._kernel, self._stride = image, kernel, stride

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """See :class:`Layer`."""
        room.x = x
        out = room.rows("out", len(x), self.output, x.dtype)
        out[...] = 0
        for place in self._places(x.reshape(len(x), *self._image)):
            out += place
        out /= x.dtype.type(self._kernel**2)
        return out

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """See :class:`Layer`."""
        if not below:
            return None
        into = room.rows("into", len(delta), self._image, delta.dtype)
        into[...] = 0
        delta /= delta.dtype.type(self._kernel**2)
        for place in self._places(into):
            place += delta
        return into.reshape(room.x.shape)

    def _places(self, images: np.ndarray) -> list[np.ndarray]:
        """Return, for each place in a window, a view of that pixel of all windows."""
        height, width, _ = self.output
        stride, kernel = self._stride, self._kernel
        return [
            images[:, i : i + stride * (height - 1) + 1 : stride, j : j + stride * (width - 1) + 1 : stride]
            for i in range(kernel)
            for j in range(kernel)
        ]
