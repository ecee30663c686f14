"""Built-in models: perceptron, one convolution, an AlexNet-like network, and a decoder-only transformer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from mpicoll.models.layers import (
    BatchNorm,
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
    Relu,
    Reshape,
    Residual,
    Shape,
)
from mpicoll.models.sequential import Model
from mpicoll.models.tasks import LossFunction, classification, language_modeling

Dtype = np.dtype | type | str
_LARGE_SIDE = 64
"""Images of at least this side get AlexNet's own first layer, smaller ones a filter of 5 x 5 without stride."""
_FILTERS = (1, 3, 6, 4, 4)
"""Filters of AlexNet's convolutions, 64, 192, 384, 256 and 256, as multiples of the first."""
_DENSE = 64
"""Width of its dense layers, 4096, as a multiple of the same."""


def perceptron(
    widths: Sequence[int], dtype: Dtype, loss_function: LossFunction = classification, *, batch_norm: str = "none"
) -> Model:
    """Return dense layers with ReLU between them.

    Parameters
    ----------
    widths
        Number of features, widths of hidden layers, number of outputs; without hidden layers, logistic or linear
        regression.
    batch_norm
        ``"synchronized"`` or ``"local"`` for a batch normalisation before each ReLU, ``"none"`` for none.
    """
    layers: list[Layer] = []
    for inputs, out in itertools.pairwise(widths[:-1]):
        if batch_norm == "none":
            layers.append(Dense(inputs, out, relu=True))
        else:
            layers.append(Dense(inputs, out, deviation=math.sqrt(2 / inputs)))
            layers += _normalized((out,), batch_norm)
    layers.append(Dense(widths[-2], widths[-1]))
    return Model(layers, dtype, loss_function)


def _normalized(shape: Shape, batch_norm: str) -> list[Layer]:
    """Return a batch normalisation and a ReLU."""
    return [BatchNorm(shape, synchronized=batch_norm == "synchronized"), Relu(shape)]


def convolutional(
    image: tuple[int, int, int], filters: int, outputs: int, dtype: Dtype, loss_function: LossFunction = classification
) -> Model:
    """Return a model of a 3 x 3 convolution with ReLU and pooling, and a dense layer.

    Parameters
    ----------
    image
        Height, width and channels of a sample.
    """
    first = Convolution(image, filters)
    return Model([first, Dense(first.output[0], outputs)], dtype, loss_function)


def alexnet(
    image: tuple[int, int, int],
    filters: int,
    outputs: int,
    dtype: Dtype,
    *,
    dropout: float,
    batch_norm: str = "none",
    loss_function: LossFunction = classification,
) -> Model:
    """Return an AlexNet-like model: five convolutions, three of them with pooling, and three dense layers.

    As in Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014, without local response
    normalisation; pooling windows of 3 x 3 overlap, and dropout precedes the two hidden dense layers (Krizhevsky,
    Sutskever and Hinton, "ImageNet classification with deep convolutional neural networks", NIPS 2012, sections 3.4
    and 4.2). Images below 64 x 64 have a first filter of 5 x 5 without stride in place of 11 x 11 with stride 4.

    Parameters
    ----------
    image
        Height, width and channels of a sample.
    filters
        Number of filters of the first convolution, 64 in the paper; all other widths are proportional.
    dropout
        Probability with which an element is dropped.
    batch_norm
        ``"synchronized"`` or ``"local"`` for a batch normalisation before the ReLU of each convolution, ``"none"`` for
        none.
    """
    large = min(image[:2]) >= _LARGE_SIDE
    window = {"kernel": 11, "stride": 4, "padding": 2} if large else {"kernel": 5, "stride": 1, "padding": 2}
    layers: list[Layer] = []
    shape = image
    for number, factor in enumerate(_FILTERS):
        window = window if number == 0 else {"kernel": 3, "stride": 1, "padding": 1}
        plain = batch_norm == "none"
        layers.append(Conv2d(shape, factor * filters, **window, relu=plain))
        shape = _image_of(layers[-1])
        layers += [] if plain else _normalized(shape, batch_norm)
        if number in (0, 1, len(_FILTERS) - 1):
            layers.append(MaxPool(shape, kernel=3, stride=2, padding=1))
            shape = _image_of(layers[-1])
    inputs, hidden = math.prod(shape), _DENSE * filters
    layers += [Reshape((inputs,)), Dropout((inputs,), dropout, 1), Dense(inputs, hidden, relu=True)]
    layers += [Dropout((hidden,), dropout, 2), Dense(hidden, hidden, relu=True), Dense(hidden, outputs)]
    return Model(layers, dtype, loss_function)


def _image_of(layer: Layer) -> tuple[int, int, int]:
    height, width, channels = layer.output
    return height, width, channels


def transformer(
    context: int, width: int, heads: int, blocks: int, dtype: Dtype, *, dropout: float, deviation: float = 0.02
) -> Model:
    """Return a decoder-only transformer over bytes, which predicts the next byte at each position.

    Blocks of attention and of two dense layers with GELU, the first 4 times as wide, each after a layer normalisation
    and within a residual connection (Radford et al., "Language models are unsupervised multitask learners", 2019,
    section 2.3): initial weights are normal, and those before an addition are divided by the root of the number of
    additions.

    Parameters
    ----------
    context
        Number of bytes of a sample.
    width, heads, blocks
        Elements of each position, heads of each attention, and number of blocks.
    dropout
        Probability with which an element of an embedding, or of a sum's second operand, is dropped.

    Raises
    ------
    ValueError
        If `heads` does not divide `width`.
    """
    shape, out_deviation = (context, width), deviation / math.sqrt(2 * blocks)
    layers: list[Layer] = [ByteEmbedding(context, width), Dropout(shape, dropout, 0)]
    for number in range(blocks):
        attention = CausalSelfAttention(context, width, heads, deviation=deviation, out_deviation=out_deviation)
        layers.append(Residual([LayerNorm(shape), attention, Dropout(shape, dropout, 2 * number + 1)]))
        wide = Dense(width, 4 * width, positions=(context,), deviation=deviation)
        narrow = Dense(4 * width, width, positions=(context,), deviation=out_deviation)
        drop = Dropout(shape, dropout, 2 * number + 2)
        layers.append(Residual([LayerNorm(shape), wide, Gelu(wide.output), narrow, drop]))
    layers += [LayerNorm(shape), Dense(width, 256, bias=False, positions=(context,), deviation=deviation)]
    return Model(layers, dtype, language_modeling)
