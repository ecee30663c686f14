"""User-defined models, treated as sequences of layers with one parameter array each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from mpicoll import tracing
from mpicoll.errors import DataError
from mpicoll.models.initial_parameters import StoredParameters
from mpicoll.models.layers import RandomKey, Shape
from mpicoll.models.sequential import FlatParameters, Model, ParameterStore


class TrainableModel(Protocol):
    """User-defined model: a pure function of parameters and a batch, with its derivative.

    Parameters and gradients are sequences of arrays, all float32 or all float64. The model does not store them; the
    strategy does.
    """

    def initial(self, seed: int) -> Sequence[np.ndarray]:
        """Return initial parameters, which depend on `seed` only."""

    def forward(self, parameters: Sequence[np.ndarray], x: Any, y: Any) -> tuple[float, float, Any]:
        """Return loss and correct predictions, each summed over the batch, and an object for :meth:`backward`.

        Parameters
        ----------
        x, y
            Features and targets as returned by the data set's ``batch``, or some rows of them.

        Returns
        -------
        tuple
            The loss (float); the number of correct predictions, 0 if there is no such count; and any object.
        """

    def backward(self, parameters: Sequence[np.ndarray], saved: Any) -> Sequence[np.ndarray]:
        """Return the gradients of the summed loss, with shapes and dtype of the parameters.

        Parameters
        ----------
        saved
            The object that :meth:`forward` returned.
        """


class _Parameter:
    """Stand-in for a :class:`~mpicoll.models.layers.Layer` with one array of parameters; computes nothing."""

    def __init__(self, shape: Shape) -> None:
        self.shapes = (shape,)
        self.decays = (len(shape) > 1,)
        self.output: Shape = ()
        self.waited = 0.0


class OwnModel(Model):
    """Adapter of a :class:`TrainableModel` to the :class:`Model` interface of strategies and loops.

    Weight decay applies to arrays of two and more dimensions.

    Raises
    ------
    TypeError
        If the model lacks a method.
    DataError
        If the parameters are not arrays of one type, float32 or float64.
    """

    def __init__(self, model: TrainableModel, seed: int) -> None:
        missing = [name for name in ("initial", "forward", "backward") if not hasattr(model, name)]
        if missing:
            raise TypeError(f"model: {model!r} has no method {missing[0]}; see TrainableModel")
        self._model, arrays = model, [np.asarray(array) for array in model.initial(seed)]
        dtypes = sorted({str(array.dtype) for array in arrays})
        if len(dtypes) != 1 or dtypes[0] not in ("float32", "float64"):
            raise DataError(f"model: initial({seed}) gives {dtypes}; parameters are all float32 or all float64")
        layers: list[Any] = [_Parameter(array.shape) for array in arrays]
        super().__init__(layers, dtypes[0])
        whole = np.empty(self.parameter_count, self.dtype)
        self._copies = FlatParameters(self.layout, whole)

    def initial(self, seed: int) -> np.ndarray:
        """Return the initial parameters in one vector, ``(parameter_count,)`` of dtype.

        Raises
        ------
        DataError
            If the model returns other shapes than before.
        """
        arrays = [np.asarray(array) for array in self._model.initial(seed)]
        if [array.shape for array in arrays] != self.shapes:
            raise DataError(f"model: initial({seed}) gives other shapes than before")
        return np.concatenate([array.reshape(-1) for array in arrays]).astype(self.dtype, copy=False)

    def initial_parameters(self, seed: int) -> StoredParameters:
        """Return the initial parameters, all of which the model makes at once."""
        return StoredParameters(self.initial(seed))

    def arrays(self, storage: ParameterStore) -> list[np.ndarray]:
        """Return copies of all parameters. Collective for sharded parameters."""
        return [array.copy() for array in self._gather(storage)]

    def loss(self, storage: ParameterStore, x: Any, y: Any) -> tuple[float, int]:
        """Return summed loss and number of hits."""
        parameters = self._gather(storage)
        return self._forward(parameters, x, y)[:2] if len(x) else (0.0, 0)

    def loss_and_gradient(
        self, storage: ParameterStore, x: Any, y: Any, *, add: bool = False, key: RandomKey | None = None
    ) -> tuple[float, int]:
        """Return summed loss and number of hits; write, or add, the sum of the samples' gradients."""
        parameters = self._gather(storage)
        if not len(x):
            self._give(storage, [np.zeros((), self.dtype)] * len(parameters), add)
            return 0.0, 0
        loss, correct, saved = self._forward(parameters, x, y)
        with tracing.span("backward"):
            gradients = self._checked(self._model.backward(parameters, saved))
        self._give(storage, gradients, add)
        return loss, correct

    def _forward(self, parameters: Sequence[np.ndarray], x: Any, y: Any) -> tuple[float, int, Any]:
        with tracing.span("forward"):
            found = self._model.forward(parameters, x, y)
        if not isinstance(found, (tuple, list)) or len(found) != 3:
            raise DataError(f"model: forward gives {_described(found)}, not a tuple of loss, hits and saved object")
        loss, hits, saved = found
        return _number(loss, "loss"), _number(hits, "number of hits"), saved  # type: ignore[return-value]

    def _checked(self, found: Any) -> list[np.ndarray]:
        """Return the gradients as a list.

        Raises
        ------
        DataError
            If their number, shapes or element types do not fit the parameters; names the first that does not.
        """
        if isinstance(found, np.ndarray) or not isinstance(found, Iterable):
            raise DataError(f"model: backward gives {_described(found)}, not a list of {len(self.shapes)} gradients")
        gradients = list(found)
        shapes = [np.shape(gradient) for gradient in gradients]
        if shapes != self.shapes:
            raise DataError(f"model: backward gives shapes {shapes}, the parameters have {self.shapes}")
        for number, gradient in enumerate(gradients):
            dtype = gradient.dtype if isinstance(gradient, np.ndarray) else np.asarray(gradient).dtype
            if dtype != self.dtype and dtype.kind != "f":
                raise DataError(
                    f"model: backward gives {_described(gradient)} for parameter {number}, not an array of {self.dtype}"
                )
        return gradients

    def _gather(self, storage: ParameterStore) -> list[np.ndarray]:
        """Copy the parameters layer by layer: a strategy may hold only some of them at a time."""
        found = []
        for number in range(len(self.layers)):
            (array,), (copy,) = storage.parameters(number), self._copies.parameters(number)
            np.copyto(copy, array)
            storage.release(number)
            found.append(copy)
        return found

    def _give(self, storage: ParameterStore, gradients: Sequence[np.ndarray], add: bool) -> None:
        for number in range(len(self.layers) - 1, -1, -1):
            (into,) = storage.gradients(number)
            if add:
                into += gradients[number]
            else:
                into[...] = gradients[number]
            storage.complete(number)


def _described(found: Any) -> str:
    """Return the type of a result for a message, with length, or dtype and shape."""
    if isinstance(found, (np.ndarray, np.generic)):
        return f"an array of {found.dtype} and shape {found.shape}"
    length = f" of {len(found)}" if isinstance(found, (list, tuple)) else ""
    return f"a {type(found).__name__}{length}"


def _number(found: Any, name: str) -> float:
    """Return a real number that `forward` returned as a float.

    Raises
    ------
    DataError
        If it is not a real number.
    """
    if type(found) is float or type(found) is int:
        return found
    if np.shape(found) or np.asarray(found).dtype.kind not in "fiub":
        raise DataError(f"model: forward gives {_described(found)} as {name}, not a number summed over the batch")
    return float(found)
