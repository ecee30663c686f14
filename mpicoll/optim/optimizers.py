"""Optimizers: SGD to Adam, LARS and LAMB, for replicas, shards, local replicas and parameter servers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from mpicoll.kernels import optimizer_updates
from mpicoll.optim.layerwise import LAMB, LARS
from mpicoll.optim.update_rule import Optimizer, adam_moments


class SGD(Optimizer):
    """Gradient descent: :func:`mpicoll.kernels.optimizer_updates.sgd`."""

    def _scalars(self, rate: float, scale: float, decay: float) -> tuple[float, ...]:
        return rate, scale, decay

    def _apply(self, part: slice, gradient: np.ndarray, scalars: tuple[float, ...]) -> None:
        optimizer_updates.sgd(self.parameters[part], gradient, self._array(scalars))


class Momentum(Optimizer):
    """Gradient descent with momentum, or Nesterov's: :func:`mpicoll.kernels.optimizer_updates.momentum`.

    On a parameter server stale gradients act like momentum, so that a smaller value suffices (Mitliagkas et al.,
    "Asynchrony begets momentum", Allerton 2016).
    """

    defaults: ClassVar[Mapping[str, float]] = {"momentum": 0.9, "nesterov": 0.0}
    slots = ("velocity",)

    def _scalars(self, rate: float, scale: float, decay: float) -> tuple[float, ...]:
        return rate, scale, decay, self.settings["momentum"]

    def _apply(self, part: slice, gradient: np.ndarray, scalars: tuple[float, ...]) -> None:
        velocity, nesterov = self.state["velocity"][part], bool(self.settings["nesterov"])
        optimizer_updates.momentum(self.parameters[part], gradient, velocity, self._array(scalars), nesterov)


class Adagrad(Optimizer):
    """Adagrad: :func:`mpicoll.kernels.optimizer_updates.adagrad`.

    (Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic optimization", JMLR 12,
    2011.)
    """

    defaults: ClassVar[Mapping[str, float]] = {"epsilon": 1e-10}
    slots = ("total",)

    def _scalars(self, rate: float, scale: float, decay: float) -> tuple[float, ...]:
        return rate, scale, decay, self.settings["epsilon"]

    def _apply(self, part: slice, gradient: np.ndarray, scalars: tuple[float, ...]) -> None:
        optimizer_updates.adagrad(self.parameters[part], gradient, self.state["total"][part], self._array(scalars))


class Adam(Optimizer):
    """Adam with bias correction: :func:`mpicoll.kernels.optimizer_updates.adam`.

    (Kingma and Ba, "Adam: a method for stochastic optimization", ICLR 2015.)
    """

    defaults: ClassVar[Mapping[str, float]] = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
    slots = ("mean", "square")
    depends_on_steps = True

    def _scalars(self, rate: float, scale: float, decay: float) -> tuple[float, ...]:
        return (*self._moments(rate), scale, decay, 0.0)

    def _moments(self, rate: float) -> tuple[float, ...]:
        return adam_moments(self.settings, self.steps, rate)

    def _apply(self, part: slice, gradient: np.ndarray, scalars: tuple[float, ...]) -> None:
        mean, square = self.state["mean"][part], self.state["square"][part]
        optimizer_updates.adam(self.parameters[part], gradient, mean, square, self._array(scalars))


class AdamW(Adam):
    """Adam with decoupled weight decay: ``rate * weight_decay * parameters`` is subtracted before each step.

    (Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.)
    """

    def _scalars(self, rate: float, scale: float, decay: float) -> tuple[float, ...]:
        return (*self._moments(rate), scale, 0.0, rate * decay)


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "momentum": Momentum,
    "adagrad": Adagrad,
    "adam": Adam,
    "adamw": AdamW,
    "lars": LARS,
    "lamb": LAMB,
}


def checked_settings(optimizer: str, given: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """Return all settings of an optimizer, sorted by name, with defaults for those not given.

    Raises
    ------
    TypeError, ValueError
        If there is no such setting, or its value is wrong: decays are in [0, 1), `epsilon` and `trust` are positive,
        `nesterov` is a bool.
    """
    defaults = OPTIMIZERS[optimizer].defaults
    for name, value in given.items():
        if name not in defaults:
            raise TypeError(f"{name}: {optimizer!r} has no such setting; there are {_listed(defaults)}")
        if name == "nesterov":
            if value not in (False, True):
                raise TypeError(f"{name}: {value!r} is not a bool")
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float, np.floating)):
            raise TypeError(f"{name}: {value!r} is not a number")
        positive = name in ("epsilon", "trust")
        if not (0 < value < math.inf if positive else 0 <= value < 1):
            raise ValueError(f"{name}: {value!r} is not {'positive' if positive else 'in [0, 1)'}")
    return tuple(sorted({**defaults, **{name: float(value) for name, value in given.items()}}.items()))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
