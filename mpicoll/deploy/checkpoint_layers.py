"""Layers of the trainer's checkpoints, whose parameters are read by ranges of the flat vector."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from mpicoll.checkpoint import Checkpoint
from mpicoll.deploy.deployed_model import LayerForm
from mpicoll.errors import CheckpointFailed
from mpicoll.models.layers import BatchNorm, Convolution, Dense, Relu, batch_norms
from mpicoll.models.sequential import Model
from mpicoll.optim.update_rule import ParameterSpan
from mpicoll.parallel.running_statistics import PREFIX

Read = Callable[[int, int], np.ndarray]
"""Function that returns elements ``start`` to ``stop - 1`` of a model's flat vector, of float32."""


@dataclass(frozen=True)
class FlatLayer:
    """Layer of a flat vector; a :class:`~mpicoll.deploy.layer_sources.LayerSource`.

    Attributes
    ----------
    read
        Function that reads the vector.
    weight_span, bias_span
        Elements of the vector.
    norms
        Batch normalisations that follow: factor and shift of each output, two (outputs,) arrays of float64.
    """

    form: LayerForm
    read: Read
    weight_span: ParameterSpan
    bias_span: ParameterSpan
    norms: tuple[tuple[np.ndarray, np.ndarray], ...] = ()

    def weights(self, start: int, stop: int) -> np.ndarray:
        """See :class:`~mpicoll.deploy.layer_sources.LayerSource`."""
        weights = self.read(self.weight_span.start + start, self.weight_span.start + stop)
        for factor, _ in self.norms:
            by_weight = np.resize(np.roll(factor, -start), weights.size)  # the output changes fastest
            weights = (weights * by_weight).astype(np.float32)
        return weights

    def bias(self) -> np.ndarray:
        """See :class:`~mpicoll.deploy.layer_sources.LayerSource`."""
        bias = self.read(self.bias_span.start, self.bias_span.stop)
        for factor, shift in self.norms:
            bias = (bias * factor + shift).astype(np.float32)
        return bias

    def scales(self) -> None:
        """Return None: weights are real numbers."""


def flat_layers(model: Model, read: Read) -> tuple[FlatLayer, ...]:
    """Return the layers; a batch normalisation and a ReLU become part of the dense layer before them."""
    made: list[FlatLayer] = []
    for layer, spans in zip(model.layers, model.layout.spans, strict=True):
        if isinstance(layer, BatchNorm):
            arrays = [read(span.start, span.stop) for span in spans]
            made[-1] = replace(made[-1], norms=(*made[-1].norms, layer.affine(arrays)))
        elif isinstance(layer, Relu):
            made[-1] = replace(made[-1], form=replace(made[-1].form, relu=True))
        else:
            weight, bias = spans
            made.append(FlatLayer(_form(layer), read, weight, bias))
    return tuple(made)


def _form(layer: object) -> LayerForm:
    if isinstance(layer, Convolution):
        return LayerForm((layer.shapes[0][0], layer.shapes[0][1]), True, layer.image)
    assert isinstance(layer, Dense)
    return LayerForm((layer.shapes[0][0], layer.shapes[0][1]), layer.relu)


def checkpoint_layers(found: Checkpoint, model: Model, name: str) -> tuple[FlatLayer, ...]:
    """Return the layers of a checkpoint; fills the running statistics of `model`. Not collective.

    Parameters
    ----------
    name
        Name of the checkpoint, for messages.

    Raises
    ------
    CheckpointFailed
        If the checkpoint does not fit the model, or what is read now or later is not finite.
    """

    def read(vector: str, count: int, start: int, stop: int) -> np.ndarray:
        dtype, shape = found.description(vector)
        if math.prod(shape) != count or dtype.kind != "f":
            raise CheckpointFailed(
                f"{name}: {vector} are {math.prod(shape)} numbers of {dtype}, but a model for this dataset needs "
                f"{count}; was it trained with samples of as many features and classes?"
            )
        array = found.read(vector, start, stop)
        if not np.isfinite(array).all():
            raise CheckpointFailed(f"{name}: {vector} are not finite")
        return array

    _read_statistics(model, lambda vector, count: read(vector, count, 0, count), name)
    total = model.parameter_count
    return flat_layers(model, lambda start, stop: read("parameters", total, start, stop).astype(np.float32))


def _read_statistics(model: Model, read: Callable[[str, int], np.ndarray], name: str) -> None:
    """Fill the running statistics of batch normalisation."""
    for number, layer in enumerate(batch_norms(model.layers)):
        layer.running[:] = read(f"{PREFIX}{number}", layer.running.size)
        if (layer.running[layer.running.size // 2 :] < 0).any():
            raise CheckpointFailed(f"{name}: {PREFIX}{number} has negative variances")
