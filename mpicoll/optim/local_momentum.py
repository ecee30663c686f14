"""Momentum before the sum over ranks, for lossy compression."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpicoll.optim.optimizers import ParameterSpan


class LocalMomentum:
    """Momentum with a velocity on each rank, for gradients with error feedback.

    A step is ``own = local(own gradient)``, the sum of that over the ranks, and ``step(sum)``. Momentum is linear:
    without compression this is :class:`~mpicoll.optim.optimizers.Momentum`. With compression, the velocities are
    compressed, and their sum is the step. If momentum were applied after the sum, it would repeat residuals of many
    steps that arrive at once, ten times at 0.9: training with ``"sign"`` and error feedback diverges. (Momentum
    correction: Lin et al., "Deep gradient compression", ICLR 2018; Zheng et al., "Communication-efficient distributed
    blockwise momentum SGD with error-feedback", NeurIPS 2019.)

    The velocity of weight decay, which all ranks know, is not sent. Parameters as for
    :class:`~mpicoll.optim.optimizers.Momentum`.
    """

    def __init__(
        self,
        parameters: np.ndarray,
        *,
        momentum: float,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        spans: Sequence[ParameterSpan] | None = None,
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
        """Return the arrays of the state, not copies, that are equal on all ranks, besides the parameters."""
        return {"decay_velocity": self._decay_velocity}

    def own_state(self) -> dict[str, np.ndarray]:
        """Return the arrays of the state, not copies, of this rank alone."""
        return {"velocity": self.velocity}

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return self.velocity.nbytes + self._decay_velocity.nbytes + self._decay.nbytes

    def step(self, total: np.ndarray, rate: float) -> None:
        """Move the parameters along ``-rate`` times the sum of all ranks' velocities and that of the decay."""
        direction = self._decay * self.parameters
        self._push(self._decay_velocity, direction)
        direction += total
        direction *= direction.dtype.type(rate)
        self.parameters -= direction

    def _push(self, velocity: np.ndarray, gradient: np.ndarray) -> None:
        """Add a gradient to its velocity, and replace it with the direction in which to go."""
        velocity *= self._momentum
        velocity += gradient
        if self._nesterov:
            gradient += self._momentum * velocity
        else:
            gradient[:] = velocity
