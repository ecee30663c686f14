"""Local replica of the model's parameters, with signs of life while a step takes long."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from mpicoll.models.sequential import FlatParameters, ParameterLayout

_BEAT_SECONDS = 0.2


class Replica(FlatParameters):
    """Parameters and gradients of this rank, for an engine.

    Parameters
    ----------
    beat
        Called between two layers, but not more often than every 0.2 s: a step may take long.
    """

    def __init__(
        self, layout: ParameterLayout, parameters: np.ndarray, gradient: np.ndarray, beat: Callable[[], None]
    ) -> None:
        super().__init__(layout, parameters, gradient)
        self._beat, self._beaten = beat, time.monotonic()

    def release(self, layer: int) -> None:
        """Show that this rank is alive; see :class:`~mpicoll.models.sequential.ParameterStore`."""
        if time.monotonic() - self._beaten > _BEAT_SECONDS:
            self._beat()
            self._beaten = time.monotonic()

    def begin(self, scale: float, *, last: bool, compress: bool) -> None:
        """See :class:`~mpicoll.parallel.strategy.Strategy`; what counts how often is decided behind the engine."""
