"""Local replica of the model's parameters, with signs of life during long steps."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from mpicoll.models.sequential import FlatParameters, ParameterLayout

_BEAT_SECONDS = 0.2


class Replica(FlatParameters):
    """Parameters and gradients of this rank, with the interface that engines use.

    Parameters
    ----------
    beat
        Function that gives a sign of life; called between two layers, at most every 0.2 s.
    """

    def __init__(
        self, layout: ParameterLayout, parameters: np.ndarray, gradient: np.ndarray, beat: Callable[[], None]
    ) -> None:
        super().__init__(layout, parameters, gradient)
        self._beat, self._beaten = beat, time.monotonic()

    def release(self, layer: int) -> None:
        """Give a sign of life if one is due; see :class:`~mpicoll.models.sequential.ParameterStore`."""
        if time.monotonic() - self._beaten > _BEAT_SECONDS:
            self._beat()
            self._beaten = time.monotonic()

    def begin(self, scale: float, *, last: bool, compress: bool) -> None:
        """Do nothing; see :class:`~mpicoll.parallel.strategy.Strategy`."""
