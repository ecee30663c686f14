"""Training through parameter servers; see :class:`mpicoll.ParameterServer`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll import ParameterServer
from mpicoll.errors import CollectiveTimeout, RemoteError, TrainingError
from mpicoll.train.asynchronous.gradient_exchange import Sent, State
from mpicoll.train.asynchronous.placed_optimizer import PlacedOptimizer, is_fed_back
from mpicoll.train.config import FEEDBACK, TrainConfig
from mpicoll.train.coordination import LeftBehind
from mpicoll.train.run_report import complain


class ServerExchange:
    """Exchange through parameter servers; an :class:`~mpicoll.train.asynchronous.gradient_exchange.Exchange`.

    With compressed pulls workers do not wait for the effect of their own pushes, so that a delta serves several pushes.

    Workers pull and push; the last ``config.servers`` ranks serve in :meth:`finish`. For momentum see
    :class:`~mpicoll.train.asynchronous.placed_optimizer.PlacedOptimizer`.
    """

    has_result = averages_at_end = False

    def __init__(self, config: TrainConfig, comm: MPI.Intracomm, replica: np.ndarray, state: State | None) -> None:
        self._replica, self._direct = replica, config.push == "direct"
        self._rank, workers = comm.Get_rank(), comm.Get_size() - config.servers
        self._counts = not config.backup
        self._placed = PlacedOptimizer(config, replica, workers, workers if config.staleness == 0 else 1)
        # Each step is that of the mean of the gradients that count; with error feedback the others count later.
        left_out = 0 if is_fed_back(config) else config.backup
        self.scale = self._placed.scale * workers / (workers - left_out)
        state = state and self._placed.restored(state)
        self._before = int(state["version"].min()) if state else 0
        self.ps = ParameterServer(
            replica,
            comm=comm,
            servers=config.servers,
            optimizer=self._placed.optimizer,
            lr=config.lr,
            staleness=config.staleness,
            backup=config.backup,
            damping=config.damping,
            compression=config.compression,
            error_feedback=FEEDBACK[config.error_feedback],
            read_own=config.pull_compression is None,
            pull_compression=config.pull_compression,
            push=config.push,
            timeout=config.timeout,
            on_silence=config.on_silence,
            transport=transport(config),
            replicas=min(config.replicas, config.servers),
            state=state,
            **self._placed.hyper,
        )

    def before(self) -> None:
        """Pull the parameters.

        Raises
        ------
        LeftBehind
            If the servers have dropped this rank.
        """
        with self._noticing():
            self.ps.pull(self._replica)

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except CollectiveTimeout:
            if self.ps.is_dropped:
                name = f"rank {self._rank} gave no sign of life for longer than --timeout"
                raise LeftBehind(f"{name}; the other ranks continue without it") from None
            raise

    def after(self, gradient: np.ndarray, rate: float) -> None:
        """Push the gradient, or this worker's velocity; raises LeftBehind as :meth:`before` does."""
        with self._noticing():
            self.ps.push(self._placed.applied(gradient), rate * self._placed.factor)

    def beat(self) -> None:
        """See :class:`~mpicoll.train.asynchronous.gradient_exchange.Exchange`."""
        with self._noticing():
            self.ps.beat()

    def snapshot(self) -> None:
        """Pull the parameters, each shard at one version; with direct pushes, which have no versions, as they are."""
        with self._noticing():
            self.ps.pull(self._replica, snapshot=not self._direct)

    def state(self) -> tuple[State, int | None]:
        """See :class:`~mpicoll.train.asynchronous.gradient_exchange.Exchange`; residuals are not in it.

        With backup workers the number of shares is None, since the version does not count those left out.
        """
        with self._noticing():
            state = self.ps.state()
        shares = int(state["version"].min()) - self._before if self._counts else None
        return self._placed.saved(state), shares

    def rescue(self, comm: MPI.Intracomm) -> tuple[State, int | None]:
        """Return what :meth:`state` does on all ranks of `comm`, those that are left after others have died.

        Velocities of workers are replaced with that of the lowest rank, as by a checkpoint. Collective over `comm`.

        Raises
        ------
        TrainingError
            On every rank: all copies of a part of the parameters are lost.
        """
        try:
            state = self.ps.rescue(comm)
        except RemoteError as error:
            raise TrainingError(str(error)) from None
        shares = int(state["version"].min()) - self._before if self._counts else None
        state = self._placed.saved(state)
        for vector in state.values():
            comm.Bcast(vector)
        return state, shares

    def settle(self) -> None:
        """See :class:`~mpicoll.train.asynchronous.gradient_exchange.Exchange`."""
        with self._noticing():
            self.ps.settle()

    def finish(self) -> None:
        """Wait for the last gradient of all workers and pull the result; on servers, serve until then."""
        if self.ps.is_server:
            self.ps.serve()
        elif self.ps.is_dropped:
            self.ps.finish()
        else:
            try:
                with self._noticing():
                    self.ps.result(self._replica)
                self.has_result = True
            except LeftBehind as error:
                complain(str(error))
                self.ps.finish()

    def close(self) -> None:
        """See :class:`~mpicoll.train.asynchronous.gradient_exchange.Exchange`.

        Raises
        ------
        CollectiveTimeout
            If dropped ranks have not arrived; names them.
        """
        self.ps.close()
        if self.ps.missing:
            named = ", ".join(map(str, self.ps.missing))
            raise CollectiveTimeout(
                f"rank {named} was dropped and did not reach the end of the run; checkpoints hold the others' model",
                self.ps.missing,
            )

    def sent(self) -> Sent:
        """See :class:`~mpicoll.train.asynchronous.gradient_exchange.Exchange`."""
        steps = self.ps.steps
        return Sent(self.ps.sent_nbytes, self.ps.read_nbytes, steps * self.ps.count * self.ps.dtype.itemsize)

    def nbytes(self) -> dict[str, int]:
        """See :class:`~mpicoll.train.asynchronous.gradient_exchange.Exchange`."""
        return {"optimizer": self._placed.nbytes, "server": self.ps.held_nbytes}

    def facts(self) -> dict[str, Any]:
        """Return the staleness of gradients, in updates of the parameters, and the number of gradients left out."""
        histogram = self.ps.staleness
        return {"staleness": spread_of(histogram), "left_out": self.ps.late}


def transport(config: TrainConfig) -> str:
    """Return the transport of remote memory in a run: messages where ranks go on when others die."""
    return "messages" if config.goes_on else "windows"


def spread_of(histogram: np.ndarray) -> dict[str, float] | None:
    """Return mean, 99th percentile and maximum of a histogram over 0, 1, 2, ...; None if it is empty."""
    total = int(histogram.sum())
    if total == 0:
        return None
    numbers, below = np.arange(histogram.size), np.cumsum(histogram)
    return {
        "mean": float(numbers @ histogram / total),
        "p99": int(np.searchsorted(below, 0.99 * total)),
        "most": int(np.flatnonzero(histogram)[-1]),
    }
