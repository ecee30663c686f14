"""Deployed models: layers with their weights, as real numbers or integer codes, and where the model comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from mpicoll.models.layers import Convolution, Dense, Layer
from mpicoll.models.sequential import FlatParameters, Model

BITS = {8: 127, 4: 7}
"""Largest code of a weight by its number of bits; the smallest is its negative."""
Image = tuple[int, int, int]


class ActivationCode(NamedTuple):
    """Representation of a layer's input by uint8: a code q means ``scale * (q - zero)``."""

    scale: float
    zero: int


@dataclass(frozen=True)
class LayerForm:
    """Shape and representation of a layer, without its parameters.

    Attributes
    ----------
    shape
        Inputs and outputs of the weights.
    relu, image, bits, activation
        As in :class:`DeployedLayer`.
    """

    shape: tuple[int, int]
    relu: bool
    image: Image | None = None
    bits: int = 32
    activation: ActivationCode | None = None

    @property
    def weight_count(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def has_codes(self) -> bool:
        """True if weights are integer codes, with a scale for each output."""
        return self.bits < 32

    @property
    def input_count(self) -> int:
        """Number of features of a sample that the layer takes."""
        return self.shape[0] if self.image is None else math.prod(self.image)

    @property
    def output_count(self) -> int:
        """Number of features of a sample that the layer returns."""
        if self.image is None:
            return self.shape[1]
        return self.image[0] // 2 * (self.image[1] // 2) * self.shape[1]

    @property
    def positions(self) -> int:
        """Number of times that a sample multiplies with the weights: the pixels of a convolution's input."""
        return 1 if self.image is None else self.image[0] * self.image[1]


@dataclass(frozen=True)
class DeployedLayer:
    """Layer of a deployed model.

    Attributes
    ----------
    weight : (inputs, outputs) array
        Real numbers (float32), or codes (int8). Of a convolution, (9 * channels, filters): rows run over row offset,
        column offset, channel.
    bias : (outputs,) of float32
    relu
        True if ReLU follows; always of a convolution, after which 2 x 2 pooling follows as well.
    image
        Height, width and channels of a convolution's input; None for a dense layer.
    bits
        Bits of a code, 8 or 4; 32 for real numbers.
    scales : (outputs,) of float32
        Scale of each output's codes; None for real numbers.
    activation
        Representation of the input, with which products are computed in integers; None for float32.
    """

    weight: np.ndarray
    bias: np.ndarray
    relu: bool
    image: Image | None = None
    bits: int = 32
    scales: np.ndarray | None = None
    activation: ActivationCode | None = None

    @property
    def real_weight(self) -> np.ndarray:
        """Weights as float32, (inputs, outputs)."""
        return self.weight if self.scales is None else self.weight * self.scales

    @property
    def form(self) -> LayerForm:
        """Shape and representation."""
        return LayerForm(
            (self.weight.shape[0], self.weight.shape[1]), self.relu, self.image, self.bits, self.activation
        )

    @property
    def input_count(self) -> int:
        """Number of features of a sample that the layer takes."""
        return self.form.input_count

    @property
    def output_count(self) -> int:
        """Number of features of a sample that the layer returns."""
        return self.form.output_count

    @property
    def nonzero_count(self) -> int:
        """Number of weights that are not 0."""
        return int(np.count_nonzero(self.weight))

    def trainable(self) -> Layer:
        """Return the trainer's layer of this shape."""
        if self.image is not None:
            return Convolution(self.image, self.weight.shape[1])
        return Dense(*self.weight.shape, relu=self.relu)


class ModelProperties:
    """Properties of a model, whoever holds its parameters; most of them follow from its layers.

    Attributes
    ----------
    data : dict
        See :class:`DeployedModel`.
    """

    data: dict[str, Any]

    @property
    def forms(self) -> tuple[LayerForm, ...]:
        """Shapes and representations of the layers."""
        raise NotImplementedError

    @property
    def nonzero_counts(self) -> tuple[int, ...]:
        """Number of weights of each layer that are not 0."""
        raise NotImplementedError

    @property
    def input_count(self) -> int:
        """Number of features of a sample."""
        return self.forms[0].input_count

    @property
    def class_count(self) -> int:
        """Number of classes."""
        return self.forms[-1].output_count

    @property
    def is_quantised(self) -> bool:
        """True if any layer has codes in place of real numbers."""
        return any(form.has_codes for form in self.forms)

    @property
    def parameter_count(self) -> int:
        """Number of weights and biases."""
        return sum(form.weight_count + form.shape[1] for form in self.forms)

    @property
    def operations(self) -> tuple[int, int]:
        """Multiply-accumulate operations of a sample: of all weights, and of those that are not 0."""
        forms = self.forms
        every = sum(form.weight_count * form.positions for form in forms)
        return every, sum(n * form.positions for n, form in zip(self.nonzero_counts, forms, strict=True))


@dataclass(frozen=True)
class DeployedModel(ModelProperties):
    """Sequence of layers, of which the last one returns logits.

    Attributes
    ----------
    data : dict
        Data set on which the model was trained: ``dataset``, ``labels``, ``target``, ``test_fraction`` and ``seed``;
        empty if unknown.
    history : tuple of str
        Steps by which the model was made.
    """

    layers: tuple[DeployedLayer, ...]
    data: dict[str, Any] = field(default_factory=dict)
    history: tuple[str, ...] = ()

    @property
    def forms(self) -> tuple[LayerForm, ...]:
        """Shapes and representations of the layers."""
        return tuple(layer.form for layer in self.layers)

    @property
    def nonzero_counts(self) -> tuple[int, ...]:
        """Number of weights of each layer that are not 0."""
        return tuple(layer.nonzero_count for layer in self.layers)

    def with_layers(self, layers: tuple[DeployedLayer, ...], step: str) -> DeployedModel:
        """Return a model of the same origin with other layers, and `step` added to its history."""
        return replace(self, layers=layers, history=(*self.history, step))

    def flat(self) -> np.ndarray:
        """Return real weights and biases in the order of the trainer's flat vector, of float32."""
        parts = [array.ravel() for layer in self.layers for array in (layer.real_weight, layer.bias)]
        return np.concatenate(parts).astype(np.float32, copy=False)

    def with_parameters(self, flat: np.ndarray, step: str) -> DeployedModel:
        """Return a model of real numbers with the parameters of a flat vector, which are copied."""
        model = Model([layer.trainable() for layer in self.layers], np.float32)
        store = FlatParameters(model.layout, flat.astype(np.float32))
        arrays = (store.parameters(number) for number in range(len(self.layers)))
        layers = (
            replace(layer, weight=weight.copy(), bias=bias.copy(), bits=32, scales=None, activation=None)
            for layer, (weight, bias) in zip(self.layers, arrays, strict=True)
        )
        return self.with_layers(tuple(layers), step)
