"""Optimizers of a server, with their state."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from mpicoll.kernels import updates


class Optimizer(ABC):
    """Moves a vector of parameters, in one compiled pass for each gradient.

    Parameters
    ----------
    parameters : (count,) of float32 or float64
        Updated in place by :meth:`apply`.
    hyper
        Values of all names in `defaults`.

    Attributes
    ----------
    steps
        How often it was applied, and ``state`` the vectors that it keeps: all that there is to save.
    """

    defaults: ClassVar[Mapping[str, float]] = {}
    slots: ClassVar[tuple[str, ...]] = ()
    """Names of vectors that it keeps, zeros at first."""

    def __init__(self, parameters: np.ndarray, hyper: Mapping[str, float]) -> None:
        self.parameters, self.steps = parameters, 0
        self.state = {name: np.zeros_like(parameters) for name in self.slots}
        self.hyper = dict(hyper)
        self._scalar = parameters.dtype.type

    def apply(self, gradient: np.ndarray, rate: float, first: int = 0) -> None:
        """Take a step at this learning rate, by the elements from `first` on of which there is a gradient.

        The gradient, of the parameters' dtype, is left as it is; so are all other elements and what is kept of them.
        """
        self.steps += 1
        self._apply(slice(first, first + gradient.size), gradient, rate)

    @abstractmethod
    def _apply(self, part: slice, gradient: np.ndarray, rate: float) -> None:
        """Take step number `steps`, from 1, by a part of the elements."""


class SGD(Optimizer):
    """See :func:`mpicoll.kernels.updates.sgd`."""

    def _apply(self, part: slice, gradient: np.ndarray, rate: float) -> None:
        updates.sgd(self.parameters[part], gradient, self._scalar(rate))


class Momentum(Optimizer):
    """See :func:`mpicoll.kernels.updates.momentum`. Late gradients act like momentum of their own: take less of it."""

    defaults: ClassVar[Mapping[str, float]] = {"momentum": 0.9}
    slots = ("velocity",)

    def _apply(self, part: slice, gradient: np.ndarray, rate: float) -> None:
        momentum = self._scalar(self.hyper["momentum"])
        updates.momentum(self.parameters[part], gradient, self.state["velocity"][part], self._scalar(rate), momentum)


class Adagrad(Optimizer):
    """See :func:`mpicoll.kernels.updates.adagrad`."""

    defaults: ClassVar[Mapping[str, float]] = {"epsilon": 1e-10}
    slots = ("total",)

    def _apply(self, part: slice, gradient: np.ndarray, rate: float) -> None:
        epsilon = self._scalar(self.hyper["epsilon"])
        updates.adagrad(self.parameters[part], gradient, self.state["total"][part], self._scalar(rate), epsilon)


class Adam(Optimizer):
    """See :func:`mpicoll.kernels.updates.adam`; with the corrections for moments that began as zeros."""

    defaults: ClassVar[Mapping[str, float]] = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
    slots = ("mean", "square")

    def _apply(self, part: slice, gradient: np.ndarray, rate: float) -> None:
        beta1, beta2 = self.hyper["beta1"], self.hyper["beta2"]
        root = math.sqrt(1 - beta2**self.steps)
        corrected, epsilon = rate * root / (1 - beta1**self.steps), self.hyper["epsilon"] * root
        scalars = (corrected, beta1, 1 - beta1, beta2, 1 - beta2, epsilon)
        mean, square = self.state["mean"][part], self.state["square"][part]
        updates.adam(self.parameters[part], gradient, mean, square, np.array(scalars, self.parameters.dtype))


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "momentum": Momentum, "adagrad": Adagrad, "adam": Adam}


def checked_settings(optimizer: str, given: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """Return all of an optimizer's settings, sorted; raise TypeError or ValueError if it has none of that name.

    Decays are in [0, 1), an epsilon is positive.
    """
    defaults = OPTIMIZERS[optimizer].defaults
    for name, value in given.items():
        if name not in defaults:
            raise TypeError(f"{name}: {optimizer!r} has no such setting; there are {_listed(defaults)}")
        if isinstance(value, bool) or not isinstance(value, (int, float, np.floating)):
            raise TypeError(f"{name}: {value!r} is not a number")
        if not (0 < value < math.inf if name == "epsilon" else 0 <= value < 1):
            raise ValueError(f"{name}: {value!r} is not {'positive' if name == 'epsilon' else 'in [0, 1)'}")
    return tuple(sorted({**defaults, **{name: float(value) for name, value in given.items()}}.items()))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
