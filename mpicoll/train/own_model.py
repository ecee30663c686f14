"""Models of the user's own, seen as a row of layers with an array of parameters each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mpicoll import spans
from mpicoll.train.failures import DataError
from mpicoll.train.layers import Shape
from mpicoll.train.models import Flat, Model, Storage


class TrainableModel(Protocol):
    """Model of the user's own: a pure function of parameters and a batch, with its derivative.

    Parameters and gradients are sequences of arrays, all of float32 or all of float64. The model holds none of them:
    a strategy decides where they live.
    """

    def initial(self, seed: int) -> Sequence[np.ndarray]:
        """Return initial parameters that depend on nothing but `seed`."""

    def forward(self, parameters: Sequence[np.ndarray], x: Any, y: Any) -> tuple[float, float, Any]:
        """Return the loss and the number of hits, each summed over the batch, and what `backward` needs.

        ``x`` and ``y`` are what the data set's ``batch`` returned, or rows of it. Where there is nothing to count, the
        number of hits is 0.
        """

    def backward(self, parameters: Sequence[np.ndarray], saved: Any) -> Sequence[np.ndarray]:
        """Return the gradients of the summed loss, shaped like the parameters."""


class _Parameter:
    """One array of parameters, in the place of a :class:`~mpicoll.train.layers.Layer`; it computes nothing itself."""

    def __init__(self, shape: Shape) -> None:
        self.shapes = (shape,)
        self.decays = (len(shape) > 1,)
        self.output: Shape = ()
        self.waited = 0.0


class OwnModel(Model):
    """A :class:`TrainableModel` as strategies and loops see models.

    Weight decay applies to arrays of two and more dimensions.

    Raises
    ------
    DataError
        If the parameters are not arrays of one type, float32 or float64.
    """

    def __init__(self, model: TrainableModel, seed: int) -> None:
        self._model, arrays = model, [np.asarray(array) for array in model.initial(seed)]
        dtypes = sorted({str(array.dtype) for array in arrays})
        if len(dtypes) != 1 or dtypes[0] not in ("float32", "float64"):
            raise DataError(f"model: initial({seed}) gives {dtypes}; parameters are all float32 or all float64")
        layers: list[Any] = [_Parameter(array.shape) for array in arrays]
        super().__init__(layers, dtypes[0])
        whole = np.empty(self.parameter_count, self.dtype)
        self._copies = Flat(self.layout, whole)

    def initial(self, seed: int) -> np.ndarray:
        """Return the initial parameters in one vector, ``(parameter_count,)`` of dtype."""
        arrays = [np.asarray(array) for array in self._model.initial(seed)]
        if [array.shape for array in arrays] != self.shapes:
            raise DataError(f"model: initial({seed}) gives other shapes than before")
        return np.concatenate([array.reshape(-1) for array in arrays]).astype(self.dtype, copy=False)

    def arrays(self, storage: Storage) -> list[np.ndarray]:
        """Return copies of all parameters. Collective where ranks hold parts of them."""
        return [array.copy() for array in self._gather(storage)]

    def loss(self, storage: Storage, x: Any, y: Any) -> tuple[float, int]:
        """Return summed loss and number of hits."""
        parameters = self._gather(storage)
        return self._forward(parameters, x, y)[:2] if len(x) else (0.0, 0)

    def loss_and_gradient(self, storage: Storage, x: Any, y: Any, *, add: bool = False) -> tuple[float, int]:
        """Return summed loss and number of hits; write, or add, the sum of the samples' gradients."""
        parameters = self._gather(storage)
        if not len(x):
            self._give(storage, [np.zeros((), self.dtype)] * len(parameters), add)
            return 0.0, 0
        loss, correct, saved = self._forward(parameters, x, y)
        with spans.span("backward"):
            gradients = list(self._model.backward(parameters, saved))
        found = [np.shape(gradient) for gradient in gradients]
        if found != self.shapes:
            raise DataError(f"model: backward gives shapes {found}, the parameters have {self.shapes}")
        self._give(storage, gradients, add)
        return loss, correct

    def _forward(self, parameters: Sequence[np.ndarray], x: Any, y: Any) -> tuple[float, int, Any]:
        with spans.span("forward"):
            loss, correct, saved = self._model.forward(parameters, x, y)
        return float(loss), correct, saved  # type: ignore[return-value]

    def _gather(self, storage: Storage) -> list[np.ndarray]:
        """Copy the parameters layer by layer: a strategy may hold only some of them at a time."""
        found = []
        for number in range(len(self.layers)):
            (array,), (copy,) = storage.parameters(number), self._copies.parameters(number)
            np.copyto(copy, array)
            storage.release(number)
            found.append(copy)
        return found

    def _give(self, storage: Storage, gradients: Sequence[np.ndarray], add: bool) -> None:
        for number in range(len(self.layers) - 1, -1, -1):
            (into,) = storage.gradients(number)
            if add:
                into += gradients[number]
            else:
                into[...] = gradients[number]
            storage.complete(number)
