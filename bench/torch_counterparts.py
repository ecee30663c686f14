"""PyTorch modules with the layers and the parameters of mpicoll's models.

Images are height x width x channels in mpicoll and channels x height x width in PyTorch. The parameters are the same
numbers in another order, and so are their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from mpicoll.models.layers import (
    ByteEmbedding,
    CausalSelfAttention,
    Conv2d,
    Convolution,
    Dense,
    Dropout,
    Gelu,
    Layer,
    LayerNorm,
    MaxPool,
    Reshape,
    Residual,
)
from mpicoll.models.sequential import FlatParameters, Model

Arrays = Sequence[np.ndarray]
Image = tuple[int, int, int]


class Part(nn.Module):
    """A layer, and its parameters in PyTorch's order.

    Attributes
    ----------
    parameters_of
        Function of the layer's arrays, or of their gradients, that returns those of the module's parameters.
    """

    def __init__(self, module: nn.Module, parameters_of: Callable[[Arrays], list[np.ndarray]] = list) -> None:
        super().__init__()
        self.module, self.parameters_of = module, parameters_of

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        out: torch.Tensor = self.module(x)
        return out


class _Image(nn.Module):
    """Samples, rows of pixels, as images."""

    def __init__(self, image: Image) -> None:
        super().__init__()
        self.image = image

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(len(x), *self.image).permute(0, 3, 1, 2).contiguous()


class _Embedding(nn.Module):
    """Embedding of bytes and of positions."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(256, width)
        self.places = nn.Parameter(torch.empty(context, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.letters(x.int()) + self.places


class _Attention(nn.Module):
    """Causal attention of several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.inward, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, context, width = x.shape
        split = self.inward(x).reshape(rows, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind()
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(rows, context, width))
        return out


class _Residual(nn.Module):
    """Layers, and the sum of their output and their input."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.parts(x)
        return out


class Counterpart(nn.Module):
    """PyTorch module that computes what a model of mpicoll does.

    Parameters
    ----------
    model
        A model of dense, convolutional, pooling and dropout layers, or a transformer.
    seed
        Seed of the initial parameters.

    Raises
    ------
    TypeError
        If the model has a layer of another kind.
    """

    def __init__(self, model: Model, seed: int) -> None:
        super().__init__()
        image: Image | None = None
        parts: list[Part] = []
        for layer in model.layers:
            if image is None and isinstance(layer, (Conv2d, Convolution)):
                parts.append(Part(_Image(layer.image)))
            parts.append(_part(layer, image))
            image = _image_after(layer, image)
        self.parts = nn.Sequential(*parts)
        self._of_layers = [part for part in parts if not isinstance(part.module, _Image)]
        self.to(getattr(torch, model.dtype.name))
        storage = FlatParameters(model.layout, model.initial(seed))
        values = self.converted([storage.parameters(number) for number in range(len(model.layers))])
        with torch.no_grad():
            for parameter, value in zip(self.parameters(), values, strict=True):
                parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the model's output for samples as mpicoll has them."""
        out: torch.Tensor = self.parts(x)
        return out

    def converted(self, layers: Sequence[Arrays]) -> list[np.ndarray]:
        """Return parameters or gradients, given layer by layer, in the order and the shapes of :meth:`parameters`."""
        return [
            array for part, arrays in zip(self._of_layers, layers, strict=True) for array in part.parameters_of(arrays)
        ]


def _image_after(layer: Layer, image: Image | None) -> Image | None:
    """Return the shape of a layer's output if it is an image, or the flattened pixels of one."""
    if isinstance(layer, Convolution):
        return layer.pooled
    if isinstance(layer, (Conv2d, MaxPool)):
        height, width, channels = layer.output
        return height, width, channels
    return image if isinstance(layer, (Reshape, Dropout)) else None


def _part(layer: Layer, image: Image | None) -> Part:
    """Return a layer's counterpart; `image` is the shape of the image whose pixels it gets, if they come from one."""
    if isinstance(layer, Dense):
        return _dense(layer, image)
    if isinstance(layer, Convolution):
        module = nn.Sequential(nn.Conv2d(layer.image[2], layer.pooled[2], 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        return Part(nn.Sequential(module, nn.Flatten()), lambda arrays: _filters(arrays, 3))
    if isinstance(layer, Conv2d):
        kernel, stride, padding = layer.window
        convolution = nn.Conv2d(layer.image[2], layer.output[2], kernel, stride, padding)
        module = nn.Sequential(convolution, nn.ReLU()) if layer.relu else convolution
        return Part(module, lambda arrays: _filters(arrays, kernel))
    if isinstance(layer, Residual):
        inner = [_part(each, None) for each in layer.layers]
        return Part(_Residual(inner), lambda arrays: _of_inner(layer, inner, arrays))
    if isinstance(layer, CausalSelfAttention):
        return Part(_Attention(layer.output[1], layer.heads), _of_attention)
    if isinstance(layer, ByteEmbedding):
        return Part(_Embedding(*layer.output), lambda arrays: [arrays[1], arrays[0]])  # own parameters come first
    return Part(_without_order(layer))


def _without_order(layer: Layer) -> nn.Module:
    """Return the counterpart of a layer whose parameters, if any, are the same in PyTorch."""
    if isinstance(layer, MaxPool):
        return nn.MaxPool2d(*layer.window)
    if isinstance(layer, LayerNorm):
        return nn.LayerNorm(layer.output[-1], eps=layer.epsilon)
    if isinstance(layer, Gelu):
        return nn.GELU(approximate="tanh")
    if isinstance(layer, Dropout):
        return nn.Dropout(layer.rate)
    if isinstance(layer, Reshape):
        return nn.Flatten()
    raise TypeError(f"layer: {type(layer).__name__} has no counterpart here")


def _dense(layer: Dense, image: Image | None) -> Part:
    inputs, outputs = layer.shapes[0]
    module: nn.Module = nn.Linear(inputs, outputs, bias=len(layer.shapes) > 1)

    def parameters_of(arrays: Arrays) -> list[np.ndarray]:
        weight = arrays[0].T
        if image is not None:  # its pixels come channel by channel
            weight = weight.reshape(outputs, *image).transpose(0, 3, 1, 2).reshape(outputs, inputs)
        return [weight, *arrays[1:]]

    return Part(nn.Sequential(module, nn.ReLU()) if layer.relu else module, parameters_of)


def _filters(arrays: Arrays, kernel: int) -> list[np.ndarray]:
    inputs, filters = arrays[0].shape
    return [arrays[0].reshape(kernel, kernel, inputs // kernel**2, filters).transpose(3, 2, 0, 1), arrays[1]]


def _of_attention(arrays: Arrays) -> list[np.ndarray]:
    width = len(arrays[0])
    return [arrays[0].reshape(width, -1).T, arrays[1].reshape(-1), arrays[2].reshape(-1, width).T, arrays[3]]


def _of_inner(layer: Residual, parts: Sequence[Part], arrays: Arrays) -> list[np.ndarray]:
    left, found = list(arrays), []
    for inner, part in zip(layer.layers, parts, strict=True):
        found += part.parameters_of(left[: len(inner.shapes)])
        del left[: len(inner.shapes)]
    return found


def loss_of(task: str) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """Return the summed loss of a task's outputs: of its samples, over whose positions it is a mean."""

    def language_modeling(scores: torch.Tensor, following: torch.Tensor) -> Any:
        flat = scores.reshape(-1, scores.shape[-1])
        return functional.cross_entropy(flat, following.reshape(-1), reduction="sum") / following.shape[1]

    def classification(scores: torch.Tensor, labels: torch.Tensor) -> Any:
        return functional.cross_entropy(scores, labels, reduction="sum")

    return language_modeling if task == "language_modeling" else classification
