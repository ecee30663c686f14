"""Units of a model of the user's own: their layout in a flat vector, and their initial parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpicoll.models.initial_parameters import InitialParameters
from mpicoll.models.layers import Shape
from mpicoll.models.sequential import Model

_DTYPES = ("float32", "float64")
Unit: TypeAlias = "Sequence[np.ndarray] | Callable[[], Sequence[np.ndarray]]"
"""Initial parameters of a unit, or a function that returns them."""


class UnitModel(NamedTuple):
    """Model without computations, whose layers are the units, with initial parameters and a digest of 32 bytes."""

    model: Model
    initial: InitialParameters
    digest: bytes


class _UnitLayer:
    """Stand-in for a :class:`~mpicoll.models.layers.Layer` with the arrays of a unit; computes nothing."""

    def __init__(self, shapes: tuple[Shape, ...]) -> None:
        self.shapes = shapes
        self.decays = tuple(len(shape) > 1 for shape in shapes)


class _GivenParameters:
    """Initial parameters that the user gives; an :class:`InitialParameters` that holds one unit at a time."""

    def __init__(self, units: Sequence[Unit], model: Model) -> None:
        self._units, self._layout, self._dtype = units, model.layout, model.dtype
        self._shapes = [layer.shapes for layer in model.layers]

    def fill(self, start: int, into: np.ndarray) -> None:
        """See :class:`InitialParameters`."""
        stop, bounds = start + len(into), self._layout.bounds
        for number, unit in enumerate(self._units):
            if bounds[number] >= stop or bounds[number + 1] <= start:
                continue
            arrays = list(_arrays_of(unit, number))
            if [array.shape for array in arrays] != list(self._shapes[number]):
                raise ValueError(f"units: unit {number} has other shapes when it is asked for again")
            for span, array in zip(self._layout.spans[number], arrays, strict=True):
                low, high = max(span.start, start), min(span.stop, stop)
                if low < high:
                    into[low - start : high - start] = array.reshape(-1)[low - span.start : high - span.start]


def described(units: Iterable[Any], dtype: Any, seed: int) -> UnitModel:
    """Return the units as a model, or raise TypeError or ValueError, which name the first unit that is wrong.

    Parameters
    ----------
    units
        All :class:`Unit`; or all layers of :mod:`mpicoll.models.layers`, whose parameters `seed` determines.
    dtype
        Type of the parameters of layers; None for float32.
    """
    if isinstance(units, np.ndarray) or not isinstance(units, Iterable):
        raise TypeError(f"units: a list of units is needed, not {type(units).__name__}")
    found = list(units)
    if not found:
        raise ValueError("units: there are none")
    if all(hasattr(unit, "initials") for unit in found):
        return _of_layers(found, np.dtype(dtype or np.float32), seed)
    if dtype is not None:
        raise TypeError("dtype: only for units that are layers; arrays have one")
    return _of_arrays(found)


def _of_layers(layers: Sequence[Any], dtype: np.dtype, seed: int) -> UnitModel:
    _check_dtype(dtype)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed: {seed!r} is not a whole number of at least 0")
    for number, layer in enumerate(layers):
        if not sum(map(np.prod, layer.shapes)):
            raise ValueError(f"units: unit {number} ({type(layer).__name__}) has no parameters; leave it out")
    model = Model(layers, dtype)
    facts = model.shapes, [layer.initials for layer in layers], seed
    return UnitModel(model, model.initial_parameters(seed), hashlib.sha256(repr(facts).encode()).digest())


def _of_arrays(units: Sequence[Unit]) -> UnitModel:
    digest, layers, dtypes = hashlib.sha256(), [], set()
    for number, unit in enumerate(units):
        arrays = list(_arrays_of(unit, number))
        if not sum(array.size for array in arrays):
            raise ValueError(f"units: unit {number} has no elements")
        for array in arrays:
            digest.update(repr((array.shape, array.dtype.str)).encode() + np.ascontiguousarray(array).tobytes())
        dtypes |= {array.dtype for array in arrays}
        layers.append(_UnitLayer(tuple(array.shape for array in arrays)))
    if len(dtypes) > 1:
        raise ValueError(f"units: one dtype is needed, these have {', '.join(sorted(map(str, dtypes)))}")
    (dtype,) = dtypes
    _check_dtype(dtype)
    stand_ins: list[Any] = layers
    model = Model(stand_ins, dtype)
    return UnitModel(model, _GivenParameters(units, model), digest.digest())


def _check_dtype(dtype: np.dtype) -> None:
    if dtype.name not in _DTYPES or not dtype.isnative:
        raise ValueError(f"units: parameters are {' or '.join(_DTYPES)} in native byte order, not {dtype}")


def _arrays_of(unit: Any, number: int) -> Iterator[np.ndarray]:
    """Yield the arrays of a unit."""
    if isinstance(unit, np.ndarray):
        raise TypeError(f"units: unit {number} is one array; a unit is a list of arrays")
    arrays = unit() if callable(unit) else unit
    if isinstance(arrays, np.ndarray) or not isinstance(arrays, Iterable):
        raise TypeError(f"units: unit {number} gives {type(arrays).__name__}, not a list of arrays")
    for array in arrays:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"units: unit {number} has {type(array).__name__} among its arrays")
        yield array
