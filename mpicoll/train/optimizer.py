"""Stochastic gradient descent with momentum, and the learning rate's course."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mpicoll.kernels.layers import momentum_update
from mpicoll.train.models import Span


def learning_rate(step: int, total: int, peak: float, warmup: int, schedule: str) -> float:
    """Return the learning rate of a step.

    Parameters
    ----------
    step, total
        This step, from 0, and the number of steps of the run.
    peak
        The highest rate.
    warmup
        The rate rises linearly and reaches `peak` after so many steps.
    schedule
        ``"constant"``; ``"cosine"``, falling to 0 at the end of the run; or ``"step"``, a tenth from one half of the
        run on and a hundredth from three quarters on.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    if schedule == "step":
        return peak * 0.1 ** ((2 * step >= total) + (4 * step >= 3 * total))
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


class MomentumSGD:
    """Momentum as in most libraries: ``v = momentum * v + d``, ``p -= rate * v``.

    Parameters
    ----------
    parameters : (count,) of float32 or float64
        Updated in place by :meth:`step`.
    momentum
        0 for plain gradient descent.
    nesterov
        Step along ``d + momentum * v`` instead of ``v``.
    weight_decay
        ``d = gradient + weight_decay * p`` for weights. Biases are left alone, because keeping them small regularises
        nothing.
    spans
        Which elements decay; by default all.
    """

    def __init__(
        self,
        parameters: np.ndarray,
        *,
        momentum: float,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        spans: Sequence[Span] | None = None,
    ) -> None:
        self.parameters = parameters
        self.velocity = np.zeros_like(parameters)
        scalar = parameters.dtype.type
        self._momentum, self._decay = scalar(momentum), scalar(weight_decay)
        self._nesterov = nesterov
        self._spans = [Span(0, parameters.size, True)] if spans is None else list(spans)

    def step(self, gradient: np.ndarray, rate: float, scale: float = 1.0) -> None:
        """Move the parameters along ``-rate * scale * gradient``, momentum and decay taken into account."""
        scalar = self.parameters.dtype.type
        for start, stop, decays in self._spans:
            momentum_update(
                self.parameters[start:stop],
                self.velocity[start:stop],
                gradient[start:stop],
                scalar(scale),
                scalar(rate),
                self._momentum,
                self._decay,
                stop - start if decays else 0,
                self._nesterov,
            )
