"""Momentum and other optimizers of asynchronous training, where each gradient is an update of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicoll.compression import error_feedback
from mpicoll.optim.optimizers import OPTIMIZERS
from mpicoll.train.asynchronous.gradient_exchange import State
from mpicoll.train.config import FEEDBACK, TrainConfig

_UPDATES = "updates_per_step"
"""Name in a checkpoint of the number of updates that stand for a step of synchronous training."""


class PlacedOptimizer:
    """Optimizer that applies the gradients, and placement of a momentum's velocity: there, or in each worker.

    A worker with a velocity sends it in place of its gradient, and the optimizer is plain SGD. This is so with error
    feedback (:class:`~mpicoll.optim.local_momentum.LocalMomentum` explains why), and with parameter servers whose steps
    are not synchronous, where the first epochs converge better.

    Otherwise the optimizer has one velocity for the gradients of all workers. An update multiplies it by ``momentum **
    (at_once / workers)``, so that it decays in `workers` gradients as in one step of synchronous training. The learning
    rate is multiplied by `factor`, so that in the long run a gradient moves the parameters by ``rate / (1 - momentum)``
    times itself, as in synchronous training.

    The updates of Adam do not depend on the length of gradients, and those of Adagrad hardly do, so that each gradient
    would be a whole step. With ``u = workers / at_once`` updates in place of a step, Adam's moments therefore decay by
    ``beta ** (1 / u)``, its rate is divided by `u`, and gradients are multiplied by `u`; with Adagrad rates are divided
    and gradients multiplied by the square root of `u`. State vectors are then in units of synchronous training, and in
    the long run `u` updates are as long as one step there if gradients are alike.

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
    factor, scale
        Factors on the learning rate, and on gradients before :meth:`applied`.

    Notes
    -----
    A checkpoint holds the velocity in units of synchronous training, for the gradients of all workers together, and
    with Adam the number of updates in a step, since its corrections depend on it. A run can resume from it with either
    placement and on any number of workers. If each worker has a velocity, rank 0's is saved for all: all workers draw
    their shares from the same batches.
    """

    def __init__(self, config: TrainConfig, replica: np.ndarray, workers: int, at_once: int = 1) -> None:
        self.optimizer, self.factor, self.scale = config.optimizer, 1.0, 1.0
        self.hyper: dict[str, Any] = {}
        self._velocity: np.ndarray | None = None
        self._units, self._updates = float(workers), workers // at_once
        if config.optimizer != "momentum":
            self._adapt(config.optimizer_settings)
            return
        if is_fed_back(config) or (config.mode == "ps" and config.staleness != 0):
            self.optimizer, self._velocity = "sgd", np.zeros_like(replica)
            self._decay = replica.dtype.type(config.momentum)
            return
        decay: float = config.momentum ** (at_once / workers)
        self.hyper, self.factor = {"momentum": decay}, (1 - decay) / (1 - config.momentum)
        self._units *= self.factor / at_once

    def _adapt(self, settings: dict[str, float]) -> None:
        """Take the settings of an optimizer without momentum, so that several updates are as long as one step."""
        kind, updates = OPTIMIZERS[self.optimizer], self._updates
        self.hyper = {**kind.defaults, **settings}
        if self.optimizer == "adam":
            self.factor, self.scale = 1 / updates, float(updates)
            for name in ("beta1", "beta2"):
                self.hyper[name] **= 1 / updates
        elif self.optimizer == "adagrad":
            self.factor, self.scale = updates**-0.5, updates**0.5

    def applied(self, gradient: np.ndarray) -> np.ndarray:
        """Return the vector to send for a gradient: the gradient, or this worker's velocity, not to be changed."""
        if self._velocity is None:
            return gradient
        self._velocity *= self._decay
        self._velocity += gradient
        return self._velocity

    def saved(self, state: State) -> State:
        """Return the optimizer's state with the velocity in a checkpoint's units, the worker's if it has one."""
        if OPTIMIZERS[self.optimizer].depends_on_steps:
            state = {**state, _UPDATES: np.array([self._updates])}
        own = state.get("velocity") if self._velocity is None else self._velocity
        return state if own is None else {**state, "velocity": own * own.dtype.type(self._units)}

    def restored(self, state: State) -> State:
        """Restore this worker's velocity, if it has one, from a checkpoint's state; return the optimizer's state."""
        if _UPDATES in state:
            steps = state["steps"] * self._updates // state[_UPDATES]
            state = {**{name: vector for name, vector in state.items() if name != _UPDATES}, "steps": steps}
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
