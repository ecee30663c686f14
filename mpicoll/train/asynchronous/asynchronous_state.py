"""Content of an asynchronous run's checkpoint: vectors that rank 0, the chief, holds or reads from the servers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.checkpoint import Checkpoint, Whole
from mpicoll.consensus import all_succeed, share
from mpicoll.errors import CheckpointFailed
from mpicoll.train.asynchronous.gradient_exchange import State
from mpicoll.train.asynchronous.placed_optimizer import is_fed_back
from mpicoll.train.config import TrainConfig


class ResumedState(NamedTuple):
    """State from which a run resumes.

    A checkpoint holds the parameters, the state of the servers' optimizers or of the chief's own, and a velocity (see
    :class:`~mpicoll.train.asynchronous.placed_optimizer.PlacedOptimizer`). It does not hold residuals, which are zero
    in a resumed run. Shares of batches that were in flight are taken again or left out. A run on another number of
    workers, or with synchronous steps (staleness 0), resumes after the last complete step.

    Attributes
    ----------
    state
        The vectors; None for a new run.
    done
        Shares that had been taken.
    offset
        Number of the checkpoint less `done`, which is added to the shares to number the next checkpoints.
    anew
        State that could not be restored; None if all was.
    servers
        With parameter servers, their number from now on where ranks have died; else None.
    is_stopped, has_failed
        Whether a rank had asked to stop before others died, and whether one had failed.
    """

    state: State | None = None
    done: int = 0
    offset: int = 0
    anew: str | None = None
    servers: int | None = None
    is_stopped: bool = False
    has_failed: bool = False


def read_state(config: TrainConfig, comm: MPI.Intracomm, found: Checkpoint | None) -> ResumedState:
    """Return the state of a checkpoint on all ranks; `found` is read on rank 0 only. Collective over `comm`.

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
    done = whole_shares(config, comm.Get_size() - config.servers, told["done"], told["workers"])
    anew = "residuals, which each worker keeps for itself" if is_fed_back(config) else None
    return ResumedState(state, done, told["step"] - done, anew)


def _read(found: Checkpoint) -> State:
    state = {}
    for name, (count, kind) in found.facts["vectors"].items():
        dtype, shape = found.description(name)  # which is that of a file whose length has been checked
        if (shape, dtype) != ((count,), np.dtype(kind)):
            raise CheckpointFailed(f"{name}: {dtype}{list(shape)} in the checkpoint, described as {kind}[{count}]")
        state[name] = np.empty(shape, dtype)
    found.restore({name: Whole(vector) for name, vector in state.items()})
    return state


def _facts(found: Checkpoint | None) -> dict[str, Any]:
    if found is None:
        return {"vectors": {}}
    facts = found.facts
    workers = facts.get("workers", facts["ranks"] - facts["config"]["servers"])
    return {"vectors": facts["vectors"], "done": facts["done"], "workers": workers, "step": found.step}


def whole_shares(config: TrainConfig, workers: int, done: int, workers_before: int) -> int:
    """Return the shares of the complete steps among `done` shares of `workers_before` workers, for `workers` workers.

    All of `done` counts if the number of workers is the same and steps are not synchronous.
    """
    if workers == workers_before and config.staleness != 0:
        return done
    return done // workers_before * workers
