"""Checkpoints of a run in which nobody waits: the chief writes them, from what it can ask the others for."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.train.agreement import all_succeed, share
from mpicoll.train.checkpoints import Checkpoint, Store, Whole
from mpicoll.train.config import TrainConfig
from mpicoll.train.modes.exchange import State
from mpicoll.train.modes.momentum import is_fed_back
from mpicoll.train.saving import check_same_run, refuse_what_is_not_finite
from mpicoll.train.tally import EpochRecord

if TYPE_CHECKING:
    from mpicoll.train.modes.loop import AsynchronousLoop


class ChiefSaver:
    """Writes checkpoints when they are due, on rank 0; nothing where none are wanted.

    A checkpoint has the parameters and what the servers' optimizers, or the chief's own, keep, and a velocity (see
    :class:`~mpicoll.train.modes.momentum.Momentum`). Residuals begin anew with a resumed run, and shares of batches
    that were under way are taken again or left out. On another number of workers the run goes on after the last whole
    step.

    Collective over `comm`: construction and `resume`.

    Attributes
    ----------
    done : int
        Shares that had been taken when the checkpoint was written from which the run goes on; 0 without.
    state : State or None
        What is in it.
    epochs : list of EpochRecord
        Those before.
    anew : str or None
        What could not be taken over, and why.
    """

    def __init__(self, config: TrainConfig, comm: MPI.Intracomm) -> None:
        self._config, self._comm = config, comm
        self._store: Store | None = None
        self.state: State | None = None
        self.epochs: list[EpochRecord] = []
        self.done = self._saved_at = self._offset = 0
        self.anew: str | None = None
        all_succeed(comm, self._open)

    def _open(self) -> None:
        if self._config.checkpoint is not None and self._comm.Get_rank() == 0:
            self._store = Store(self._config.checkpoint, Intracomm(MPI.COMM_SELF))

    def resume(self) -> Checkpoint | None:
        """Take over the newest checkpoint, if that is wanted and there is one; return it, on rank 0.

        Raises
        ------
        CheckpointFailed
            On every rank: it is damaged, or of another run.
        """
        found: Checkpoint | None = all_succeed(self._comm, self._read)
        facts = None if self._comm.Get_rank() else self._told(found)
        told = share(self._comm, facts)
        if not told["vectors"]:
            return None
        state = self.state or {name: np.empty(count, kind) for name, (count, kind) in told["vectors"].items()}
        for vector in state.values():
            self._comm.Bcast(vector)
        self.state = state
        self.done = self._saved_at = self._shares(told["done"], told["workers"])
        self.anew = "residuals, which each worker keeps for itself" if is_fed_back(self._config) else None
        if found is not None:
            self._offset = found.step - self.done
        self.epochs = [EpochRecord(**record) for record in told["epochs"]]
        return found

    def _read(self) -> Checkpoint | None:
        wanted = self._config.resume
        if self._store is None or wanted == "no" or not self._store.steps():
            return None
        found = self._store.open(fallback=wanted == "fallback")
        check_same_run(self._config, found.facts)
        self.state = {name: np.empty(count, kind) for name, (count, kind) in found.facts["vectors"].items()}
        found.restore({name: Whole(vector) for name, vector in self.state.items()})
        return found

    def _told(self, found: Checkpoint | None) -> dict[str, Any]:
        if found is None:
            return {"vectors": {}}
        told = {name: found.facts[name] for name in ("vectors", "done", "epochs")}
        return {**told, "workers": found.facts["ranks"] - found.facts["config"]["servers"]}

    def _shares(self, done: int, workers_before: int) -> int:
        """Return how many shares make up the steps that so many made up, where there may be other workers."""
        workers = self._comm.Get_size() - self._config.servers
        if workers == workers_before and self._config.staleness != 0:
            return done
        return done // workers_before * workers

    def after(self, trainer: AsynchronousLoop, number: int) -> None:
        """Save if so many shares are a reason: the steps that were asked for, or an epoch."""
        every = self._config.checkpoint_every or trainer.course.steps_per_epoch
        if self._store is not None and number // trainer.workers // every > self._saved_at // trainer.workers // every:
            self.save(trainer, number)

    def save(self, trainer: AsynchronousLoop, number: int) -> None:
        """Write the state as it is now.

        Raises
        ------
        NonFiniteLoss, CheckpointFailed
            Here only; the others go on.
        """
        if self._store is None or trainer.has_failed():
            return
        with trainer.clock.spent_on("checkpoints"):
            state, shares = trainer.exchange.state()
            self._saved_at = number
            number = number if shares is None else self.done + shares
            refuse_what_is_not_finite(state.values(), number // trainer.workers)
            facts = {
                "config": asdict(self._config),
                "ranks": self._comm.Get_size(),
                "done": number,
                "epochs": [record._asdict() for record in trainer.pieces.with_means(trainer.epochs)],
                "vectors": {name: (vector.size, vector.dtype.str) for name, vector in state.items()},
            }
            self._store.save(number + self._offset, {name: Whole(vector) for name, vector in state.items()}, facts)

    def close(self) -> None:
        """Let others have the folder."""
        if self._store is not None:
            self._store.close()
