"""Interface of optimizers: an update rule of a flat vector of parameters, and its state."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np


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


def adam_moments(settings: Mapping[str, float], steps: int, rate: float) -> tuple[float, ...]:
    """Return the first numbers that the kernel of Adam takes, with corrections for step number `steps`, from 1."""
    beta1, beta2 = settings["beta1"], settings["beta2"]
    root = math.sqrt(1 - beta2**steps)
    corrected, epsilon = rate * root / (1 - beta1**steps), settings["epsilon"] * root
    return corrected, beta1, 1 - beta1, beta2, 1 - beta2, epsilon
