"""A small convolutional network: 3 x 3 convolution, ReLU, 2 x 2 pooling, dense layer, softmax cross entropy."""

from __future__ import annotations

import math

import numpy as np

from mpicoll.kernels.layers import patches_3x3, relu_pool_2x2, relu_pool_2x2_backward, softmax_cross_entropy
from mpicoll.train.models import Layout, Workspace


class ConvolutionalNetwork:
    """See the module; images keep their size in the convolution, with zeros around them.

    Parameters
    ----------
    image_shape
        Height, width and channels; a sample's features are its pixels in that order.
    filters
        How many 3 x 3 filters.
    classes
        How many classes.
    dtype
        float32 or float64.
    """

    def __init__(
        self, image_shape: tuple[int, int, int], filters: int, classes: int, dtype: np.dtype | type | str
    ) -> None:
        height, width, channels = self._image = image_shape
        self._pooled = (height // 2, width // 2, filters)
        self.dtype = np.dtype(dtype)
        weights = [(9 * channels, filters), (math.prod(self._pooled), classes)]
        self._layout = Layout(weights, [(filters,), (classes,)])
        self.parameter_count = self._layout.parameter_count
        self.weight_count = self._layout.weight_count
        self._workspace = Workspace()

    def initial(self, seed: int) -> np.ndarray:
        """Draw filters with variance 2 / inputs and the dense layer with 1 / inputs; biases are zero."""
        random = np.random.default_rng(seed)
        flat = np.zeros(self.parameter_count, self.dtype)
        for weight, gain in zip(self._layout.views(flat)[0], (2, 1), strict=True):
            weight[...] = random.standard_normal(weight.shape) * math.sqrt(gain / len(weight))
        return flat

    def loss(self, parameters: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
        """Return summed loss and number of hits, see :class:`~mpicoll.train.models.Model`."""
        return softmax_cross_entropy(self._forward(parameters, x)[-1], y)

    def loss_and_gradient(
        self, parameters: np.ndarray, x: np.ndarray, y: np.ndarray, gradient: np.ndarray
    ) -> tuple[float, int]:
        """Return summed loss and number of hits and write the gradient, see :class:`~mpicoll.train.models.Model`."""
        patches, taken, features, delta = self._forward(parameters, x)
        result = softmax_cross_entropy(delta, y)
        (_, dense), _ = self._layout.views(parameters)
        (filter_gradient, dense_gradient), (map_bias, dense_bias) = self._layout.views(gradient)
        np.matmul(features.T, delta, out=dense_gradient)
        np.sum(delta, axis=0, out=dense_bias)
        into = self._rows("into", len(x), features.shape[1:])
        np.matmul(delta, dense.T, out=into)
        maps = self._rows("maps", len(x), (*self._image[:2], self._pooled[2]))
        relu_pool_2x2_backward(into.reshape(taken.shape), taken, maps)
        by_pixel = maps.reshape(-1, self._pooled[2])
        np.matmul(patches.T, by_pixel, out=filter_gradient)
        np.sum(by_pixel, axis=0, out=map_bias)
        return result

    def _rows(self, name: str, rows: int, tail: tuple[int, ...]) -> np.ndarray:
        return self._workspace.rows(name, rows, tail, self.dtype)

    def _forward(self, parameters: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return patches, the places that pooling took, the dense layer's input, and logits."""
        (kernel, dense), (map_bias, dense_bias) = self._layout.views(parameters)
        rows, (height, width, channels), filters = len(x), self._image, self._pooled[2]
        patches = self._rows("patches", rows, (height * width, 9 * channels)).reshape(-1, 9 * channels)
        patches_3x3(x.reshape(rows, height, width, channels), patches)
        maps = self._rows("maps", rows, (height, width, filters))
        np.matmul(patches, kernel, out=maps.reshape(-1, filters))
        pooled = self._rows("pooled", rows, self._pooled)
        taken = self._workspace.rows("taken", rows, self._pooled, np.dtype(np.int8))
        relu_pool_2x2(maps, map_bias, pooled, taken)
        features = pooled.reshape(rows, math.prod(self._pooled))
        logits = self._rows("logits", rows, dense_bias.shape)
        np.matmul(features, dense, out=logits)
        np.add(logits, dense_bias, out=logits)
        return patches, taken, features, logits
