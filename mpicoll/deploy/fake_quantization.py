"""Quantisation-aware training: forward passes with quantised values, gradients straight through the rounding.

(Jacob et al., "Quantization and training of neural networks for efficient integer-arithmetic-only inference", CVPR
2018, section 3; straight-through gradients after Bengio, Leonard and Courville, arXiv:1308.3432, 2013.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpicoll.deploy.deployed_model import BITS, ActivationCode, DeployedModel
from mpicoll.deploy.fine_tuning import PretrainedModel
from mpicoll.deploy.quantization import weight_scales
from mpicoll.models.layers import Arrays, Layer, Workspace

_F32, _BOOL = np.dtype(np.float32), np.dtype(bool)


def fake_weight(weight: np.ndarray, bits: int) -> np.ndarray:
    """Return the real numbers that the codes of a weight mean, (inputs, outputs) of float32."""
    scales = weight_scales(weight, bits)
    return np.clip(np.rint(weight / scales), -BITS[bits], BITS[bits]).astype(np.float32) * scales


def fake_activation(x: np.ndarray, code: ActivationCode, out: np.ndarray) -> np.ndarray:
    """Write the real numbers that the codes of activations mean to `out`, and return it."""
    np.divide(x, np.float32(code.scale), out=out)
    np.rint(out, out=out)
    np.clip(out, -code.zero, 255 - code.zero, out=out)
    return np.multiply(out, np.float32(code.scale), out=out)


class QuantisedLayer:
    """Layer that computes with quantised weights and inputs, and trains the real ones; a :class:`Layer`.

    The gradient of rounding is taken as 1. That of an input beyond the range of its codes is 0.

    Parameters
    ----------
    inner
        The layer.
    bits
        Bits of a weight, 8 or 4.
    code
        Representation of the input; None for real numbers.
    """

    waited = 0.0

    def __init__(self, inner: Layer, bits: int, code: ActivationCode | None) -> None:
        self._inner, self._bits, self._code = inner, bits, code
        self.shapes, self.decays, self.initials = inner.shapes, inner.decays, inner.initials
        self.output = inner.output
        self._arrays: Arrays = ()

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """See :class:`~mpicoll.models.layers.Layer`."""
        self._arrays = (fake_weight(arrays[0], self._bits), arrays[1])
        if self._code is not None:
            low, high = self._ends(self._code)
            inside = room.rows("inside", len(x), x.shape[1:], _BOOL)
            np.logical_and(x >= low, x <= high, out=inside)
            x = fake_activation(x, self._code, room.rows("fake", len(x), x.shape[1:], _F32))
        return self._inner.forward(self._arrays, x, room)

    @staticmethod
    def _ends(code: ActivationCode) -> tuple[np.float32, np.float32]:
        return np.float32((-code.zero - 0.5) * code.scale), np.float32((255.5 - code.zero) * code.scale)

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """See :class:`~mpicoll.models.layers.Layer`."""
        into = self._inner.backward(self._arrays, delta, room, gradients, below=below, add=add)
        if into is not None and self._code is not None:
            np.multiply(into, room.rows("inside", len(into), into.shape[1:], _BOOL), out=into)
        return into


def quantisation_aware(model: DeployedModel, bits: int, codes: list[ActivationCode] | None) -> PretrainedModel:
    """Return a model to train whose layers compute with quantised values; it begins with the parameters of `model`.

    Parameters
    ----------
    bits
        Bits of a weight, 8 or 4.
    codes
        Representation of each layer's input; None for real numbers.
    """
    every: Sequence[ActivationCode | None] = codes or [None] * len(model.layers)
    layers = [QuantisedLayer(layer.trainable(), bits, code) for layer, code in zip(model.layers, every, strict=True)]
    return PretrainedModel(layers, model.flat())
