"""Inference of deployed models in NumPy, with integer products where layers have integer weights and activations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from mpicoll.deploy.deployed_model import ActivationCode, DeployedLayer, DeployedModel
from mpicoll.kernels.network import relu_pool_2x2
from mpicoll.kernels.quantized_layers import dequantise, patches_of_codes, product_of_codes, quantise_rows, requantise
from mpicoll.models.layers import Workspace

_F32, _U8, _I32 = np.dtype(np.float32), np.dtype(np.uint8), np.dtype(np.int32)


class Stage(Protocol):
    """Layer at inference."""

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return the layer's output, valid until the next call."""


class _RealStage:
    """Layer in float32."""

    def __init__(self, layer: DeployedLayer) -> None:
        self._layer, self._room = layer.trainable(), Workspace()
        self._arrays = [np.ascontiguousarray(layer.real_weight, np.float32), layer.bias]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return self._layer.forward(self._arrays, x, self._room)


class _IntegerProduct:
    """Products of codes with a layer's integer weights.

    Attributes
    ----------
    bias : (outputs,) of int32
        Bias in units of the sums, less the zero point times the sum of the weights.
    scales : (outputs,) of float32
        Scale of the sums.
    """

    def __init__(self, layer: DeployedLayer, room: Workspace) -> None:
        assert layer.activation is not None
        assert layer.scales is not None
        self.code, self._room = layer.activation, room
        self._scale, self._zero = np.float32(self.code.scale), np.float32(self.code.zero)
        self._weights = np.ascontiguousarray(layer.weight.T)
        self.scales = (np.float32(self.code.scale) * layer.scales).astype(np.float32)
        shift = self.code.zero * self._weights.sum(axis=1, dtype=np.int64)
        self.bias = (np.rint(layer.bias / self.scales.astype(np.float64)).astype(np.int64) - shift).astype(np.int32)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return sums of products of activations' codes, (rows, inputs) of uint8: (rows, outputs) of int32."""
        sums = self._room.rows("sums", len(x), self.bias.shape, _I32)
        product_of_codes.run(x, self._weights, sums)
        return sums

    def codes(self, x: np.ndarray) -> np.ndarray:
        """Return the codes of activations, (rows, features) of float32; those that are codes already as they are."""
        if x.dtype == _U8:
            return x
        codes = self._room.rows("codes", len(x), x.shape[1:], _U8)
        quantise_rows.run(np.ascontiguousarray(x), self._scale, self._zero, codes)
        return codes


class _IntegerDense:
    """Dense layer of integer products; returns codes if the next layer takes codes.

    Parameters
    ----------
    following
        Representation of the next layer's input, if that is a dense layer of integer products; else None.
    """

    def __init__(self, layer: DeployedLayer, following: ActivationCode | None) -> None:
        self._room, self._relu, self._following = Workspace(), layer.relu, following
        self.product, self._shape = _IntegerProduct(layer, self._room), layer.bias.shape
        if following is not None:
            self._factors, self._zero = self.product.scales / np.float32(following.scale), np.float32(following.zero)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        product = self.product
        sums = product(product.codes(x))
        if self._following is not None:
            zero, codes = self._zero, self._room.rows("next", len(sums), self._shape, _U8)
            requantise.run(sums, product.bias, self._factors, zero, zero if self._relu else np.float32(0), codes)
            return codes
        out = self._room.rows("out", len(sums), self._shape, _F32)
        dequantise.run(sums, product.bias, product.scales, out)
        return np.maximum(out, 0, out=out) if self._relu else out


class _IntegerConvolution:
    """Convolution of integer products; bias, ReLU and pooling in float32."""

    def __init__(self, layer: DeployedLayer) -> None:
        assert layer.image is not None
        self._room, self._image, self._filters = Workspace(), layer.image, layer.weight.shape[1]
        self._outputs = layer.output_count
        self.product, self._no_bias = _IntegerProduct(layer, self._room), np.zeros(self._filters, np.float32)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        rows, (height, width, channels), filters = len(x), self._image, self._filters
        inside = height * width
        patches = self._room.rows("patches", rows, (inside, 9 * channels), _U8).reshape(-1, 9 * channels)
        codes = self.product.codes(x).reshape(rows, *self._image)
        patches_of_codes.run(codes, self.product.code.zero, patches)
        sums = self.product(patches)
        maps = self._room.rows("maps", rows, (height, width, filters), _F32)
        dequantise.run(sums, self.product.bias, self.product.scales, maps.reshape(-1, filters))
        half = (height // 2, width // 2, filters)
        pooled = self._room.rows("pooled", rows, half, _F32)
        relu_pool_2x2(maps, self._no_bias, pooled, self._room.rows("taken", rows, half, np.dtype(np.int8)))
        return pooled.reshape(rows, self._outputs)  # -1 is refused where there are no rows


class Inference:
    """Inference of a sequence of layers; base of classes that hold, or get, the parameters.

    Not safe for several threads at once, since memory is reused from call to call.

    Parameters
    ----------
    features
        Number of features of a sample.
    """

    def __init__(self, features: int) -> None:
        self._features = features

    def _layers(self) -> Iterator[Stage]:
        """Yield the layers; each is used before the next one is asked for."""
        raise NotImplementedError

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Return the logits of samples, (rows, classes) of float32, valid until the next call.

        Parameters
        ----------
        x : (rows, features) of float32

        Raises
        ------
        ValueError
            If `x` has another dtype or shape.
        """
        if x.ndim != 2 or x.shape[1] != self._features or x.dtype != _F32:
            raise ValueError(f"x: dtype {x.dtype} and shape {x.shape}, not float32 and (rows, {self._features})")
        for stage in self._layers():
            x = stage(x)
        return x

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Return the most likely class of each sample, (rows,) of int64; see :meth:`logits`."""
        return np.argmax(self.logits(x), axis=1)


class Runtime(Inference):
    """Inference of a deployed model.

    Layers with integer activations multiply uint8 by int8 and add in int32; neighbours among them exchange codes. Other
    layers compute in float32. Not safe for several threads at once, since memory is reused from call to call.

    Parameters
    ----------
    model
        The model; its arrays are not copied where they need no conversion.
    """

    def __init__(self, model: DeployedModel) -> None:
        super().__init__(model.input_count)
        following = [layer.activation for layer in model.layers[1:]]
        self._stages = [stage_of(*pair) for pair in zip(model.layers, [*following, None], strict=True)]

    def _layers(self) -> Iterator[Stage]:
        return iter(self._stages)

    def inputs(self, x: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the input of each layer for the samples `x`: float32, or codes; each valid until the next one."""
        for stage in self._stages:
            yield x
            x = stage(x)

    def codes(self, number: int, x: np.ndarray) -> np.ndarray:
        """Return the codes of `x`, the input of integer layer `number`; valid until the next call."""
        stage = self._stages[number]
        assert isinstance(stage, (_IntegerDense, _IntegerConvolution))
        return stage.product.codes(x)

    def output(self, number: int, x: np.ndarray) -> np.ndarray:
        """Return the output of layer `number`, float32 or the next layer's codes; valid until the next call."""
        return self._stages[number](x)


def stage_of(layer: DeployedLayer, following: ActivationCode | None) -> Stage:
    """Return a layer at inference.

    Parameters
    ----------
    following
        Representation of the next layer's input; None for float32, or if there is no next layer.
    """
    if layer.activation is None:
        return _RealStage(layer)
    if layer.image is not None:
        return _IntegerConvolution(layer)
    return _IntegerDense(layer, following)
