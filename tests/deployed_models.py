"""Layers of deployed models with random weights, for tests of files, exports and inference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpicoll.deploy.deployed_model import ActivationCode, DeployedLayer
from mpicoll.deploy.quantization import quantised_layer


def dense(inputs: int, outputs: int, *, relu: bool = True, zeros: float = 0.0) -> DeployedLayer:
    """Return a dense layer; about the fraction `zeros` of its weights is 0."""
    random = np.random.default_rng(inputs)
    weight = random.standard_normal((inputs, outputs)).astype(np.float32)
    weight[random.random(weight.shape) < zeros] = 0
    return DeployedLayer(weight, random.standard_normal(outputs).astype(np.float32), relu)


def convolution(outputs: int) -> DeployedLayer:
    """Return a convolution of images of 5 x 4 pixels with 2 channels."""
    random = np.random.default_rng(1)
    weight = random.standard_normal((18, outputs)).astype(np.float32)
    return DeployedLayer(weight, random.standard_normal(outputs).astype(np.float32), True, (5, 4, 2))


def quantised(
    layers: Sequence[DeployedLayer], bits: int, activation: ActivationCode | None
) -> tuple[DeployedLayer, ...]:
    """Return the layers with integer weights, and inputs if `activation` is given."""
    return tuple(quantised_layer(layer, bits, activation) for layer in layers)
