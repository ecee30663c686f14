"""Content of an asynchronous run's checkpoint: vectors that rank 0, the chief, can ask the others for."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.checkpoint import Checkpoint, Whole
from mpicoll.consensus import all_succeed, share
from mpicoll.train.asynchronous.gradient_exchange import State
from mpicoll.train.asynchronous.placed_momentum import is_fed_back
from mpicoll.train.config import TrainConfig


class ResumedState(NamedTuple):
    """State from which a run goes on.

    A checkpoint has the parameters and what the servers' optimizers, or the chief's own, keep, and a velocity (see
    :class:`~mpicoll.train.asynchronous.placed_momentum.PlacedMomentum`). Residuals begin anew with a resumed run, and
    shares of batches that were under way are taken again or left out. On another number of workers the run goes on
    after the last whole step.

    Attributes
    ----------
    state
        The vectors; None for a run that begins.
    done
        Shares that had been taken.
    offset
        What the number of the next checkpoint has to be above its shares.
    anew
        What could not be taken over, and why.
    """

    state: State | None = None
    done: int = 0
    offset: int = 0
    anew: str | None = None


def read_state(config: TrainConfig, comm: MPI.Intracomm, found: Checkpoint | None) -> ResumedState:
    """Return the state in a checkpoint that rank 0 has found, on all ranks. Collective over `comm`.

    Raises
    ------
    CheckpointFailed
        On every rank: it is damaged.
    """
    state: State = all_succeed(comm, lambda: {} if found is None else _read(found))
    told = share(comm, None if comm.Get_rank() else _facts(found))
    if not told["vectors"]:
        return ResumedState()
    state = state or {name: np.empty(count, kind) for name, (count, kind) in told["vectors"].items()}
    for vector in state.values():
        comm.Bcast(vector)
    done = _shares(config, comm.Get_size() - config.servers, told["done"], told["workers"])
    anew = "residuals, which each worker keeps for itself" if is_fed_back(config) else None
    return ResumedState(state, done, told["step"] - done, anew)


def _read(found: Checkpoint) -> State:
    state = {name: np.empty(count, kind) for name, (count, kind) in found.facts["vectors"].items()}
    found.restore({name: Whole(vector) for name, vector in state.items()})
    return state


def _facts(found: Checkpoint | None) -> dict[str, Any]:
    if found is None:
        return {"vectors": {}}
    facts = found.facts
    workers = facts["ranks"] - facts["config"]["servers"]
    return {"vectors": facts["vectors"], "done": facts["done"], "workers": workers, "step": found.step}


def _shares(config: TrainConfig, workers: int, done: int, workers_before: int) -> int:
    """Return how many shares make up the steps that so many made up, where there may be other workers."""
    if workers == workers_before and config.staleness != 0:
        return done
    return done // workers_before * workers
