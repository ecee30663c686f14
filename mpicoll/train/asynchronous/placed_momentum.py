"""Momentum of asynchronous training, where each gradient is an update of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicoll.compression import error_feedback
from mpicoll.train.asynchronous.gradient_exchange import State
from mpicoll.train.config import FEEDBACK, TrainConfig


class PlacedMomentum:
    """Placement of the momentum's velocity: in the optimizer that applies gradients, or in each worker.

    A worker with a velocity sends it in place of its gradient, and the optimizer is plain SGD. This is so with error
    feedback (:class:`~mpicoll.optim.local_momentum.LocalMomentum` explains why), and with parameter servers whose steps
    are not synchronous, where the first epochs converge better.

    Otherwise the optimizer has one velocity for the gradients of all workers. An update multiplies it by ``momentum **
    (at_once / workers)``, so that it decays in `workers` gradients as in one step of synchronous training. The learning
    rate is multiplied by `factor`, so that in the long run a gradient moves the parameters by ``rate / (1 - momentum)``
    times itself, as in synchronous training.

    Parameters
    ----------
    replica : (count,) of float32 or float64
        The parameters, for length and element type.
    workers
        Number of workers.
    at_once
        Number of workers' gradients in an update of the optimizer.

    Attributes
    ----------
    optimizer, hyper
        Name and settings of the optimizer that applies gradients.
    factor
        Factor on the learning rate.

    Notes
    -----
    A checkpoint holds the velocity in units of synchronous training, for the gradients of all workers together. A run
    can resume from it with either placement and on any number of workers. If each worker has a velocity, rank 0's is
    saved for all: all workers draw their shares from the same batches.
    """

    def __init__(self, config: TrainConfig, replica: np.ndarray, workers: int, at_once: int = 1) -> None:
        self.optimizer, self.factor = config.optimizer, 1.0
        self.hyper: dict[str, Any] = {} if config.optimizer == "momentum" else config.optimizer_settings
        self._velocity: np.ndarray | None = None
        self._units = float(workers)
        if config.optimizer != "momentum":
            return
        if is_fed_back(config) or (config.mode == "ps" and config.staleness != 0):
            self.optimizer, self._velocity = "sgd", np.zeros_like(replica)
            self._decay = replica.dtype.type(config.momentum)
            return
        decay: float = config.momentum ** (at_once / workers)
        self.hyper, self.factor = {"momentum": decay}, (1 - decay) / (1 - config.momentum)
        self._units *= self.factor / at_once

    def applied(self, gradient: np.ndarray) -> np.ndarray:
        """Return the vector to send for a gradient: the gradient, or this worker's velocity, not to be changed."""
        if self._velocity is None:
            return gradient
        self._velocity *= self._decay
        self._velocity += gradient
        return self._velocity

    def saved(self, state: State) -> State:
        """Return the optimizer's state with the velocity in a checkpoint's units, the worker's if it has one."""
        own = state.get("velocity") if self._velocity is None else self._velocity
        return state if own is None else {**state, "velocity": own * own.dtype.type(self._units)}

    def restored(self, state: State) -> State:
        """Restore this worker's velocity, if it has one, from a checkpoint's state; return the optimizer's state."""
        if "velocity" not in state:
            return state
        velocity = state["velocity"] / state["velocity"].dtype.type(self._units)
        if self._velocity is None:
            return {**state, "velocity": velocity}
        self._velocity[:] = velocity
        return {name: vector for name, vector in state.items() if name != "velocity"}

    @property
    def nbytes(self) -> int:
        """Bytes of this worker's velocity; 0 if it has none."""
        return 0 if self._velocity is None else self._velocity.nbytes


def is_fed_back(config: TrainConfig) -> bool:
    """Return True if gradients are compressed with error feedback."""
    return error_feedback.chosen(config.compression, FEEDBACK[config.error_feedback], np.dtype(config.dtype))[1]
