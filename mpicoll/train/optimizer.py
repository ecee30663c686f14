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

    def shared_state(self) -> dict[str, np.ndarray]:
        """Return what is the same on all ranks that hold these parameters; the arrays in use."""
        return {"velocity": self.velocity}

    def own_state(self) -> dict[str, np.ndarray]:
        """Return what is this rank's alone: nothing."""
        return {}

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return self.velocity.nbytes


class LocalMomentumSGD:
    """The same on many ranks, with each rank's momentum kept apart, for gradients that lose much on their way.

    A step is ``own = local(own gradient)``, the sum of that over ranks, ``step(sum)``. Momentum is linear: without
    losses this is :class:`MomentumSGD`. But what is compressed is then the velocity, the very step that is to be taken.
    Behind the sum, momentum would repeat what was owed for a long time and comes now all at once, ten times over at
    0.9: with signs and error feedback training diverges. (Momentum correction: Lin et al., "Deep gradient
    compression", ICLR 2018; Zheng et al., "Communication-efficient distributed blockwise momentum SGD with
    error-feedback", NeurIPS 2019.)

    The velocity of weight decay, which all ranks know, is not sent. Parameters as for :class:`MomentumSGD`.
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
        self.velocity, self._decay_velocity = np.zeros_like(parameters), np.zeros_like(parameters)
        self._decay = np.full_like(parameters, weight_decay)
        for start, stop, decays in spans or ():
            self._decay[start:stop] *= decays
        self._momentum, self._nesterov = parameters.dtype.type(momentum), nesterov

    def local(self, gradient: np.ndarray, scale: float, start: int = 0) -> None:
        """Replace ``scale * gradient`` of this rank, for the elements from `start` on, with the velocity, in place."""
        gradient *= gradient.dtype.type(scale)
        self._push(self.velocity[start : start + gradient.size], gradient)

    def shared_state(self) -> dict[str, np.ndarray]:
        """Return what is the same on all ranks, besides the parameters; the arrays in use."""
        return {"decay_velocity": self._decay_velocity}

    def own_state(self) -> dict[str, np.ndarray]:
        """Return what is this rank's alone; the arrays in use."""
        return {"velocity": self.velocity}

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return self.velocity.nbytes + self._decay_velocity.nbytes + self._decay.nbytes

    def step(self, total: np.ndarray, rate: float) -> None:
        """Move the parameters along ``-rate`` times the sum of all ranks' velocities and that of the decay."""
        course = self._decay * self.parameters
        self._push(self._decay_velocity, course)
        course += total
        course *= course.dtype.type(rate)
        self.parameters -= course

    def _push(self, velocity: np.ndarray, gradient: np.ndarray) -> None:
        """Add a gradient to its velocity, and replace it with the direction in which to go."""
        velocity *= self._momentum
        velocity += gradient
        if self._nesterov:
            gradient += self._momentum * velocity
        else:
            gradient[:] = velocity
