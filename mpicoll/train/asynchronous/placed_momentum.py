"""Momentum where every gradient is an update of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicoll.compression import error_feedback
from mpicoll.train.asynchronous.gradient_exchange import State
from mpicoll.train.config import FEEDBACK, TrainConfig


class PlacedMomentum:
    """Place of the velocity: with whoever applies gradients, or with each worker, which then sends its velocity.

    It is the worker's where compression is fed back, for which :class:`~mpicoll.optim.local_momentum.LocalMomentum` has
    the reason, and where servers take gradients as they come, since the first epochs then go better. Otherwise it is
    that of all gradients, and decays with each by so much that it has decayed as in a step of synchronous training when
    every worker's has come once; in the long run a gradient moves the parameters as far, by ``rate / (1 - momentum)``
    times itself.

    Parameters
    ----------
    workers, at_once
        How many there are, and how many of their gradients make up an update.

    Attributes
    ----------
    optimizer, hyper
        What whoever applies gradients has to do with them.
    factor
        Of the learning rate.

    Notes
    -----
    A checkpoint has the velocity in the units of synchronous training, of the gradients of all workers together: so a
    run goes on from it wherever the velocity was kept, and on any number of workers. Of velocities that workers keep it
    is that of rank 0 which stands for all: shares of batches are drawn alike.
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
        """Return what is to be sent for a gradient; not to be changed."""
        if self._velocity is None:
            return gradient
        self._velocity *= self._decay
        self._velocity += gradient
        return self._velocity

    def saved(self, state: State) -> State:
        """Return a state with the velocity as checkpoints have it, given that of whoever applies gradients."""
        own = state.get("velocity") if self._velocity is None else self._velocity
        return state if own is None else {**state, "velocity": own * own.dtype.type(self._units)}

    def restored(self, state: State) -> State:
        """Take over the velocity that is this worker's; return the state of whoever applies gradients."""
        if "velocity" not in state:
            return state
        velocity = state["velocity"] / state["velocity"].dtype.type(self._units)
        if self._velocity is None:
            return {**state, "velocity": velocity}
        self._velocity[:] = velocity
        return {name: vector for name, vector in state.items() if name != "velocity"}

    @property
    def nbytes(self) -> int:
        """Bytes of this worker's velocity."""
        return 0 if self._velocity is None else self._velocity.nbytes


def is_fed_back(config: TrainConfig) -> bool:
    """Return whether what compression loses comes with the next gradient."""
    return error_feedback.chosen(config.compression, FEEDBACK[config.error_feedback], np.dtype(config.dtype))[1]
