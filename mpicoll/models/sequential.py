"""Sequential models: layers followed by a loss, over one flat vector of parameters.

The vector contains the layers in order, in each the weights before the biases. A :class:`ParameterStore` holds it: the
whole vector on every rank, or chunks that are gathered layer by layer. A model asks the store for the parameters of
each layer that it uses, and marks each layer's gradients as ready, so that they can be sent while those of lower layers
are computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mpicoll import tracing
from mpicoll.models.initial_parameters import DrawnParameters, InitialParameters
from mpicoll.models.layers import Arrays, Layer, RandomKey, Workspace
from mpicoll.models.tasks import LossFunction, classification
from mpicoll.optim.update_rule import ParameterSpan


class ParameterStore(Protocol):
    """Parameter store of a model; layers are numbered from 0."""

    def parameters(self, layer: int) -> Arrays:
        """Return the parameter arrays of a layer, valid until :meth:`release`."""

    def release(self, layer: int) -> None:
        """Release the layer's parameters until they are asked for again."""

    def gradients(self, layer: int) -> Arrays:
        """Return arrays for the gradients of a layer."""

    def complete(self, layer: int) -> None:
        """Mark the layer's gradients as ready."""


class ParameterShapes(Protocol):
    """Shapes of a layer's parameter arrays, and for each of them whether it decays; see `Layer`."""

    shapes: tuple[tuple[int, ...], ...]
    decays: tuple[bool, ...]


class ParameterLayout:
    """Offsets of each layer's arrays in the flat vector.

    Attributes
    ----------
    spans : list of list of ParameterSpan
        By layer, the spans of its arrays.
    bounds : list of int
        First element of each layer, and the length of the vector.
    """

    def __init__(self, layers: Sequence[ParameterShapes]) -> None:
        self.spans: list[list[ParameterSpan]] = []
        self.bounds = [0]
        for layer in layers:
            ends = list(itertools.accumulate(map(math.prod, layer.shapes), initial=self.bounds[-1]))
            self.spans.append([ParameterSpan(*span) for span in zip(ends, ends[1:], layer.decays, strict=False)])
            self.bounds.append(ends[-1])
        self._shapes = [layer.shapes for layer in layers]

    def views(self, layer: int, part: np.ndarray) -> list[np.ndarray]:
        """Return a layer's arrays as views into `part`, which holds that layer's elements."""
        begin = self.bounds[layer]
        return [
            part[span.start - begin : span.stop - begin].reshape(shape)
            for span, shape in zip(self.spans[layer], self._shapes[layer], strict=True)
        ]

    @property
    def array_count(self) -> int:
        """Number of arrays."""
        return sum(map(len, self.spans))

    def arrays_in(self, start: int, stop: int) -> list[int]:
        """Return the numbers of the arrays of which elements are among ``start`` to ``stop - 1``, in order."""
        spans = itertools.chain.from_iterable(self.spans)
        return [number for number, span in enumerate(spans) if max(span.start, start) < min(span.stop, stop)]

    def decayed(self, start: int, stop: int, *, joined: bool = True) -> list[ParameterSpan]:
        """Return the spans of elements ``start`` to ``stop - 1``, counted from `start`.

        Parameters
        ----------
        joined
            Whether neighbours that are alike are joined; otherwise each span is an array, or a part of one.
        """
        cut = [
            ParameterSpan(max(span.start, start) - start, min(span.stop, stop) - start, span.decays)
            for span in itertools.chain.from_iterable(self.spans)
            if max(span.start, start) < min(span.stop, stop)
        ]
        if not joined:
            return cut
        groups = [list(group) for _, group in itertools.groupby(cut, key=lambda span: span.decays)]
        return [ParameterSpan(group[0].start, group[-1].stop, group[0].decays) for group in groups]


class FlatParameters:
    """All parameters and gradients in two vectors of this process; a :class:`ParameterStore`."""

    def __init__(self, layout: ParameterLayout, parameters: np.ndarray, gradient: np.ndarray | None = None) -> None:
        bounds = list(itertools.pairwise(layout.bounds))
        self._parameters = [layout.views(layer, parameters[a:b]) for layer, (a, b) in enumerate(bounds)]
        self._gradients: list[list[np.ndarray]] = []
        if gradient is not None:
            self._gradients = [layout.views(layer, gradient[a:b]) for layer, (a, b) in enumerate(bounds)]

    def parameters(self, layer: int) -> Arrays:
        """See :class:`ParameterStore`."""
        return self._parameters[layer]

    def release(self, layer: int) -> None:
        """See :class:`ParameterStore`."""

    def gradients(self, layer: int) -> Arrays:
        """See :class:`ParameterStore`."""
        return self._gradients[layer]

    def complete(self, layer: int) -> None:
        """See :class:`ParameterStore`."""


class Tape:
    """State between forward and backward pass; each micro-batch in flight needs its own.

    Attributes
    ----------
    rooms : list of Workspace
        A workspace for each layer.
    inputs : dict of int to (rows, ...) array
        Inputs of segments of layers whose activations are computed again, by their first layer.
    """

    def __init__(self, layers: int) -> None:
        self.rooms = [Workspace() for _ in range(layers)]
        self.inputs: dict[int, np.ndarray] = {}

    def clear(self, layers: range) -> None:
        """Release the activations of some layers."""
        for number in layers:
            self.rooms[number].clear()


class Model:
    """Model: a sequence of layers, and a loss.

    Parameters
    ----------
    layers
        The layers; the loss is a function of the output of the last one.
    dtype
        Type of parameters and gradients, and of features that are not bytes: float32 or float64.
    loss_function
        Loss and its derivative; softmax cross entropy by default.

    Attributes
    ----------
    parameter_count : int
        Length of the flat vector.
    shapes : list of tuple of int
        Shapes of the parameter arrays in the vector, in order.
    layout : ParameterLayout
        Offsets of the arrays in the vector.
    recompute : int or None
        Number of layers in a segment; None for one segment with all layers. The activations of all segments but the
        last are released after the forward pass, except for their inputs, and computed again in the backward pass:
        with n layers in segments of about the root of n, memory for activations grows with the root of n too, for one
        more forward pass. (Chen et al., "Training deep nets with sublinear memory cost", 2016, section 4.)
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        dtype: np.dtype | type | str,
        loss_function: LossFunction = classification,
    ) -> None:
        self.layers, self.loss_function = tuple(layers), loss_function
        self.dtype = np.dtype(dtype)
        self.shapes = [shape for layer in self.layers for shape in layer.shapes]
        self.layout = ParameterLayout(self.layers)
        self.parameter_count = self.layout.bounds[-1]
        self.recompute: int | None = None
        self._tape = self.tape()

    def tape(self) -> Tape:
        """Return a new tape."""
        return Tape(len(self.layers))

    def _segments(self) -> list[range]:
        count = len(self.layers)
        length = self.recompute or count
        return [range(first, min(first + length, count)) for first in range(0, count, length)]

    def initial_parameters(self, seed: int) -> InitialParameters:
        """Return the source of initial parameters, which `seed` determines."""
        bounds = [span.start for spans in self.layout.spans for span in spans]
        initials = [initial for layer in self.layers for initial in layer.initials]
        return DrawnParameters([*bounds, self.parameter_count], initials, seed)

    def initial(self, seed: int) -> np.ndarray:
        """Return all initial parameters, ``(parameter_count,)`` of dtype, determined by `seed`."""
        flat = np.empty(self.parameter_count, self.dtype)
        self.initial_parameters(seed).fill(0, flat)
        return flat

    def forward(self, storage: ParameterStore, x: np.ndarray, tape: Tape, key: RandomKey | None = None) -> np.ndarray:
        """Return the output, (rows, ...), of `x`, (rows, ...).

        Parameters
        ----------
        key
            Key of random numbers, in training; None in an evaluation.
        """
        *released, last = self._segments()
        with tracing.span("forward"):
            for room in tape.rooms:
                room.key, room.again = key, False
            for segment in released:
                tape.inputs[segment.start] = x
                x = self._through(segment, storage, x, tape)
                tape.clear(segment)
            return self._through(last, storage, x, tape)

    def _through(self, segment: range, storage: ParameterStore, x: np.ndarray, tape: Tape) -> np.ndarray:
        """Return the output of some layers."""
        for number in segment:
            x = self.layers[number].forward(storage.parameters(number), x, tape.rooms[number])
            storage.release(number)
        return x

    def backward(
        self, storage: ParameterStore, delta: np.ndarray, tape: Tape, *, below: bool = False, add: bool = False
    ) -> np.ndarray | None:
        """Write the sum of the samples' gradients, or add it, from the last layer to the first.

        Parameters
        ----------
        delta : (rows, ...) array, of the shape that `forward` returned
            Derivative of the loss with respect to the output; overwritten.
        below
            True to return the derivative with respect to the input of the first layer, False to return None.
        """
        *released, last = self._segments()
        with tracing.span("backward"):
            delta = self._back_through(last, storage, delta, tape, below=below, add=add)
            for segment in reversed(released):
                for number in segment:
                    tape.rooms[number].again = True
                self._through(segment, storage, tape.inputs.pop(segment.start), tape)
                delta = self._back_through(segment, storage, delta, tape, below=below, add=add)
                tape.clear(segment)
        return delta if below else None

    def _back_through(
        self, segment: range, storage: ParameterStore, delta: np.ndarray, tape: Tape, *, below: bool, add: bool
    ) -> np.ndarray:
        """Write or add the gradients of some layers; return the derivative with respect to their input."""
        for number in reversed(segment):
            wanted, room = below or number > 0, tape.rooms[number]
            arrays, gradients = storage.parameters(number), storage.gradients(number)
            into = self.layers[number].backward(arrays, delta, room, gradients, below=wanted, add=add)
            storage.release(number)
            storage.complete(number)
            if into is not None:
                delta = into
        return delta

    def loss(self, storage: ParameterStore, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
        """Return summed loss and number of hits; `y` are the targets that the loss takes."""
        return self.loss_function(self.forward(storage, x, self._tape), y)

    def place_of_gradient(self, out: np.ndarray) -> np.ndarray:
        """Return the outputs for the loss to overwrite: a copy if the last layer needs its own later."""
        return out.copy() if getattr(self.layers[-1], "needs_output", True) else out

    def loss_and_gradient(
        self, storage: ParameterStore, x: np.ndarray, y: np.ndarray, *, add: bool = False, key: RandomKey | None = None
    ) -> tuple[float, int]:
        """Return summed loss and number of hits; write, or add, the sum of the samples' gradients.

        Parameters
        ----------
        key
            Key of random numbers; without one there are none, as in an evaluation.
        """
        delta = self.place_of_gradient(self.forward(storage, x, self._tape, key))
        result = self.loss_function(delta, y)
        self.backward(storage, delta, self._tape, add=add)
        return result
