"""Residual blocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from mpicoll.models.layers.layer_interface import Arrays, Layer, Workspace


class Residual:
    """Residual block: its input plus the output of layers that follow each other, ``x + f(x)``.

    The block is one layer of a model, and holds the parameters of all its layers. (He et al., "Deep residual learning
    for image recognition", CVPR 2016, section 3.)

    Parameters
    ----------
    layers
        Layers whose last output has the shape of the first input.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = tuple(layers)
        self.shapes = tuple(shape for layer in self.layers for shape in layer.shapes)
        self.decays = tuple(decays for layer in self.layers for decays in layer.decays)
        self.initials = tuple(initial for layer in self.layers for initial in layer.initials)
        self.output = self.layers[-1].output
        ends = itertools.accumulate((len(layer.shapes) for layer in self.layers), initial=0)
        self._parts = [slice(*pair) for pair in itertools.pairwise(ends)]

    @property
    def waited(self) -> float:
        """See :class:`Layer`."""
        return sum(layer.waited for layer in self.layers)

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """See :class:`Layer`."""
        inner = x
        for number, (layer, part) in enumerate(zip(self.layers, self._parts, strict=True)):
            inner = layer.forward(arrays[part], inner, room.inner(number))
        return np.add(x, inner, out=room.rows("out", len(x), self.output, x.dtype))

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """See :class:`Layer`."""
        inner: np.ndarray | None = room.rows("out", len(delta), self.output, delta.dtype)
        assert inner is not None
        inner[...] = delta  # the layers may overwrite it
        for number in range(len(self.layers) - 1, -1, -1):
            assert inner is not None
            part = self._parts[number]
            inner = self.layers[number].backward(
                arrays[part], inner, room.inner(number), gradients[part], below=below or number > 0, add=add
            )
        return None if inner is None else np.add(delta, inner, out=delta)
