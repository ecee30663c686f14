"""Optimizers: SGD to Adam, LARS and LAMB, for replicas, shards, local replicas and parameter servers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mpicoll.kernels import optimizer_updates


class ParameterSpan(NamedTuple):
    """Elements ``start`` to ``stop - 1`` of the flat vector; `decays` is True if weight decay applies to them."""

    start: int
    stop: int
    decays: bool


class Optimizer(ABC):
    """Update rule of a flat vector of parameters, one compiled pass for each gradient.

    Parameters
    ----------
    parameters : (count,) of float32 or float64
        Updated in place by :meth:`apply`.
    settings
        Settings by name; missing ones have the values of `defaults`.
    weight_decay
        Factor of the parameters that is added to the gradient (L2 penalty); for decoupled decay see :class:`AdamW`.
    spans
        Spans that make up the vector, in order, each with or without weight decay; None decays the whole vector.
        Biases are usually not decayed. If the rule is `layerwise`, each span is a whole array.

    Attributes
    ----------
    state : dict of (count,) arrays
        State vectors of the rule, zeros at first. Together with :attr:`steps` they are the whole state.
    """

    defaults: ClassVar[Mapping[str, float]] = {}
    slots: ClassVar[tuple[str, ...]] = ()
    """Names of the vectors in `state`."""
    depends_on_steps: ClassVar[bool] = False
    """True if an update depends on `steps`, which then belongs to the state."""
    layerwise: ClassVar[bool] = False
    """True if an update depends on norms of whole arrays, so that no rank can update a part of one."""

    def __init__(
        self,
        parameters: np.ndarray,
        settings: Mapping[str, float] | None = None,
        *,
        weight_decay: float = 0.0,
        spans: Sequence[ParameterSpan] | None = None,
    ) -> None:
        self.parameters, self._steps = parameters, np.zeros(1, np.int64)
        self.state = {name: np.zeros_like(parameters) for name in self.slots}
        self.settings = {**self.defaults, **(settings or {})}
        self._weight_decay = weight_decay
        uniform = spans is None or (not weight_decay and not self.layerwise)
        self._spans = [ParameterSpan(0, parameters.size, True)] if uniform else list(spans or ())

    def apply(self, gradient: np.ndarray, rate: float, first: int = 0, *, scale: float = 1.0) -> None:
        """Update the parameters from `first` on with learning rate `rate` and gradient ``scale * gradient``.

        Parameters
        ----------
        gradient : (n,) of the parameters' dtype
            Gradient of elements ``first`` to ``first + n - 1``; it is not changed, nor are other elements' states.
        """
        self.steps += 1
        last = first + gradient.size
        for span in self._spans:
            start, stop = max(span.start, first), min(span.stop, last)
            if start < stop or not gradient.size:
                decay = self._weight_decay if span.decays else 0.0
                part = gradient[start - first : stop - first]
                self._apply(slice(start, stop), part, self._scalars(rate, scale, decay))

    @property
    def steps(self) -> int:
        """Number of calls of :meth:`apply`."""
        return int(self._steps[0])

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps[0] = steps

    def shared_state(self) -> dict[str, np.ndarray]:
        """Return the arrays of the state, not copies, that are equal on all replicas."""
        return self.state | ({"optimizer_steps": self._steps} if self.depends_on_steps else {})

    def own_state(self) -> dict[str, np.ndarray]:
        """Return an empty dict: no state belongs to one rank alone."""
        return {}

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(vector.nbytes for vector in self.state.values())

    @abstractmethod
    def _scalars(self, rate: float, scale: float, decay: float) -> tuple[float, ...]:
        """Return the numbers that the kernel takes, for step number `steps`, from 1."""

    @abstractmethod
    def _apply(self, part: slice, gradient: np.ndarray, scalars: tuple[float, ...]) -> None:
        """Update a part of the elements."""

    def _array(self, scalars: tuple[float, ...]) -> np.ndarray:
        """Return numbers in the parameters' type, so that a float32 update stays in float32."""
        return np.array(scalars, self.parameters.dtype)


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


def adam_moments(settings: Mapping[str, float], steps: int, rate: float) -> tuple[float, ...]:
    """Return the first numbers that the kernel of Adam takes, with corrections for step number `steps`, from 1."""
    beta1, beta2 = settings["beta1"], settings["beta2"]
    root = math.sqrt(1 - beta2**steps)
    corrected, epsilon = rate * root / (1 - beta1**steps), settings["epsilon"] * root
    return corrected, beta1, 1 - beta1, beta2, 1 - beta2, epsilon


class AdamW(Adam):
    """Adam with decoupled weight decay: ``rate * weight_decay * parameters`` is subtracted before each step.

    (Loshchilov and Hutter, "Decoupled weight decay regularization", ICLR 2019.)
    """

    def _scalars(self, rate: float, scale: float, decay: float) -> tuple[float, ...]:
        return (*self._moments(rate), scale, 0.0, rate * decay)


class LayerwiseOptimizer(Optimizer):
    """Base of rules that scale the update of each array by a ratio of norms, its *trust ratio*.

    It is 1 for arrays without weight decay, which are biases as a rule, and where a norm is zero. Gradients of the
    whole vector are needed.
    """

    layerwise = True

    def apply(self, gradient: np.ndarray, rate: float, first: int = 0, *, scale: float = 1.0) -> None:
        """Update all parameters; see :meth:`Optimizer.apply`.

        Raises
        ------
        ValueError
            If `gradient` is that of a part of the vector.
        """
        if first or gradient.size != self.parameters.size:
            count = self.parameters.size
            raise ValueError(f"gradient: {gradient.size} elements from {first} on; norms need all {count}")
        self.steps += 1
        for start, stop, decays in self._spans:
            self._update(slice(start, stop), gradient[start:stop], rate, scale, decays)

    @abstractmethod
    def _update(self, part: slice, gradient: np.ndarray, rate: float, scale: float, decays: bool) -> None:
        """Update an array with gradient ``scale * gradient``."""

    def _scalars(self, rate: float, scale: float, decay: float) -> tuple[float, ...]:
        return rate, scale, decay

    def _apply(self, part: slice, gradient: np.ndarray, scalars: tuple[float, ...]) -> None:
        rate, scale, decay = scalars
        self._update(part, gradient, rate, scale, decay != 0)


class LARS(LayerwiseOptimizer):
    """Momentum whose rate for each array is scaled by ``trust * |w| / (|g| + weight_decay * |w|)``.

    For gradients g and parameters w: ``v = momentum * v + rate * ratio * (g + weight_decay * w)``, ``w -= v``. (You,
    Gitman and Ginsburg, "Large batch training of convolutional networks", arXiv:1708.03888, 2017, algorithm 1.)
    """

    defaults: ClassVar[Mapping[str, float]] = {"momentum": 0.9, "trust": 0.001}
    slots = ("velocity",)

    def _update(self, part: slice, gradient: np.ndarray, rate: float, scale: float, decays: bool) -> None:
        parameters, velocity = self.parameters[part], self.state["velocity"][part]
        decay, ratio = self._weight_decay if decays else 0.0, 1.0
        if decays:
            norm = _norm(parameters)
            ratio = _ratio(self.settings["trust"] * norm, abs(scale) * _norm(gradient) + decay * norm)
        # The rate is part of the velocity, so that a lower one does not shorten steps that were taken before.
        scalars = self._array((1.0, rate * ratio * scale, rate * ratio * decay, self.settings["momentum"]))
        optimizer_updates.momentum(parameters, gradient, velocity, scalars, False)


class LAMB(LayerwiseOptimizer):
    """Adam whose update r of each array is scaled by ``|w| / |r + weight_decay * w|``.

    For parameters w and Adam's corrected moments: ``r = mean / (sqrt(square) + epsilon)``, ``w -= rate * ratio * (r +
    weight_decay * w)``. (You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", ICLR
    2020, algorithm 2, with the identity for phi.)
    """

    defaults: ClassVar[Mapping[str, float]] = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6}
    slots = ("mean", "square")
    depends_on_steps = True

    def _update(self, part: slice, gradient: np.ndarray, rate: float, scale: float, decays: bool) -> None:
        parameters, direction = self.parameters[part], np.zeros_like(gradient)
        mean, square = self.state["mean"][part], self.state["square"][part]
        corrected, *moments = adam_moments(self.settings, self.steps, -1.0)
        scalars = self._array((corrected, *moments, scale, 0.0, 0.0))
        optimizer_updates.adam(direction, gradient, mean, square, scalars)  # from zeros, at a rate of -1
        ratio = 1.0
        if decays:
            direction += parameters.dtype.type(self._weight_decay) * parameters
            ratio = _ratio(_norm(parameters), _norm(direction))
        direction *= direction.dtype.type(rate * ratio)
        parameters -= direction


def _norm(x: np.ndarray) -> float:
    """Return the norm of a vector, added up in float64."""
    return math.sqrt(np.einsum("i,i->", x, x, dtype=np.float64))


def _ratio(above: float, below: float) -> float:
    """Return a trust ratio; 1 where a norm is zero or not finite."""
    return above / below if above > 0 and 0 < below < math.inf else 1.0


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
