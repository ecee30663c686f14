"""Strategy of asynchronous workers, which read parameters and send gradients through an exchange."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from mpicoll import tracing
from mpicoll.models.sequential import Model
from mpicoll.parallel.gradient_norm import clipping, norm_of, sum_of_squares
from mpicoll.parallel.strategy import CommunicationStatistics
from mpicoll.train.asynchronous.gradient_exchange import Exchange
from mpicoll.train.asynchronous.replica import Replica
from mpicoll.train.config import TrainConfig


class AsynchronousStrategy(Replica):
    """Replica of a worker, updated through an exchange; a :class:`~mpicoll.parallel.strategy.Strategy`.

    Parameters
    ----------
    parameters : (model.parameter_count,) of model.dtype
        The replica that `exchange` is bound to; updated in place.
    exchange
        Gradient exchange with the other ranks.
    workers
        Number of ranks that take steps.

    Attributes
    ----------
    vector : (model.parameter_count,) of model.dtype
        `parameters`.
    is_left
        True once the exchange has ended and `vector` is the final model.
    """

    def __init__(
        self, config: TrainConfig, model: Model, parameters: np.ndarray, exchange: Exchange, workers: int
    ) -> None:
        self._gradient = np.zeros_like(parameters)
        super().__init__(model.layout, parameters, self._gradient, self._show)
        self.vector, self.exchange, self.is_left = parameters, exchange, False
        self._decay, self._part = config.weight_decay, exchange.scale / workers
        self._decayed = [
            slice(start, stop) for start, stop, decays in model.layout.decayed(0, parameters.size) if decays
        ]
        self._scale, self._waited = 1.0, 0.0

    def _show(self) -> None:
        if not self.is_left:  # the last model is evaluated when nobody listens any more
            self.exchange.beat()

    def begin_step(self, step: int) -> None:
        """Do nothing: compressors count the gradients that this rank has sent."""

    def fetch(self) -> None:
        """Bring the replica up to date for the next step."""
        with self._waiting("pull"):
            self.exchange.before()

    @contextmanager
    def _waiting(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        self._waited += end - start
        tracing.note(name, start, end)

    def begin(self, scale: float, *, last: bool, compress: bool) -> None:
        """See :class:`~mpicoll.parallel.strategy.Strategy`; the exchange knows what is compressed."""
        self._scale = scale

    def reduce(self) -> None:
        """Do nothing: each worker sends its own gradient in :meth:`update`."""

    def update(self, rate: float, clip: float | None) -> float:
        """Send the gradient, after clipping and weight decay; return the norm, NaN without `clip`.

        The gradient is that of a share of the batch. Its norm is divided by the share's part before it is compared with
        `clip`, as an estimate of the whole batch's norm. It gets the same part of the weight decay.
        """
        gradient, norm = self._gradient, math.nan
        gradient *= gradient.dtype.type(self.exchange.scale * self._scale)
        if clip is not None:
            norm = norm_of(sum_of_squares(gradient)) / self._part
            gradient *= gradient.dtype.type(clipping(norm, clip))
        if self._decay:
            for span in self._decayed:
                gradient[span] += gradient.dtype.type(self._part * self._decay) * self.vector[span]
        with self._waiting("push"):
            self.exchange.after(gradient, rate)
        return norm

    def meet(self) -> None:
        """Update the replica to the newest model available without waiting for a worker."""
        if not self.is_left:
            self.exchange.snapshot()

    def digest(self) -> bytes:
        """Return the SHA-256 of the parameters."""
        return hashlib.sha256(self.vector.data).digest()

    def nbytes(self) -> dict[str, int]:
        """See :class:`~mpicoll.parallel.strategy.Strategy`."""
        return {"parameters": self.vector.nbytes, "gradients": self._gradient.nbytes, **self.exchange.nbytes()}

    def traffic(self) -> CommunicationStatistics:
        """See :class:`~mpicoll.parallel.strategy.Strategy`."""
        sent = self.exchange.sent()
        return CommunicationStatistics(sent.sent, sent.dense, 0.0, self._waited)
