"""Content of a synchronous run's checkpoint: tensors that the ranks share, and tensors of each rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.checkpoint import Checkpoint, PerRank, Piece, Tensors, Whole
from mpicoll.checkpoint.collective_reads import attempt
from mpicoll.errors import CheckpointFailed
from mpicoll.parallel.mesh import Mesh
from mpicoll.parallel.strategy import RESIDUAL, SynchronousStrategy
from mpicoll.quantities import counted
from mpicoll.train.metrics import StepRecord

_OWN = "own."
_NO_ACCURACY = -1.0
"""Accuracy in the table of a task that has none: a checkpoint holds finite numbers only."""


def tensors_of(mesh: Mesh, strategy: SynchronousStrategy, records: list[StepRecord]) -> Tensors:
    """Return the tensors that this rank saves: its part of the shared state, its own state, and the steps' records."""
    own = {_OWN + name: PerRank(array) for name, array in strategy.own_state().items()}
    rows = [record if record.accuracy is not None else record._replace(accuracy=_NO_ACCURACY) for record in records]
    table = np.array(rows, np.float64).reshape(len(records), len(StepRecord._fields))
    return {**_shared(mesh, strategy, writes=True), **own, "records": Whole(table)}


def restore(found: Checkpoint, mesh: Mesh, strategy: SynchronousStrategy) -> tuple[list[StepRecord], str | None]:
    """Restore a strategy from a checkpoint. Collective.

    Returns
    -------
    records, anew
        Records of the steps, and a note on state that could not be restored, None if all was.

    Raises
    ------
    CheckpointFailed
        On every rank: it is damaged, or of another model.
    """
    records = np.empty(_shape_of_records(found))
    found.restore({**_shared(mesh, strategy, writes=False), "records": Whole(records)})
    strategy.meet()
    anew = _take_over(found, mesh.world, strategy)
    return [_record_of(row) for row in records.tolist()], anew


def _shape_of_records(found: Checkpoint) -> tuple[int, int]:
    """Return the shape of the table of records, checked before memory is allocated for it."""
    _, shape = found.description("records")
    if shape != (found.step, len(StepRecord._fields)):
        raise CheckpointFailed(f"records: {list(shape)} in the checkpoint of step {found.step}")
    return found.step, len(StepRecord._fields)


def _record_of(row: list[float]) -> StepRecord:
    """Return a step's record from its row of the table."""
    step, epoch, rate, loss, accuracy = row
    return StepRecord(int(step), int(epoch), rate, loss, None if accuracy == _NO_ACCURACY else accuracy)


def state_in_memory(strategy: SynchronousStrategy) -> dict[str, np.ndarray]:
    """Return the state of a strategy on this rank: arrays that the strategy goes on to use, and copies of its own."""
    shared = dict(_arrays(strategy))
    return shared | {_OWN + name: array for name, array in strategy.own_state().items()}


def load_from_memory(strategy: SynchronousStrategy, state: dict[str, np.ndarray]) -> None:
    """Restore a strategy from what :func:`state_in_memory` returned on a rank with the same place. Collective.

    Raises
    ------
    ValueError
        If names, element types or shapes differ; nothing has been changed then.
    """
    wanted = dict(_arrays(strategy))
    for name, array in wanted.items():
        found = state.get(name)
        if found is None or found.shape != array.shape or found.dtype != array.dtype:
            here = "nothing" if found is None else f"{found.dtype}{list(found.shape)}"
            raise ValueError(f"state: {name} is {here}, and {array.dtype}{list(array.shape)} is wanted")
    for name, array in wanted.items():
        array[...] = state[name]
    strategy.meet()
    own = {name.removeprefix(_OWN): array for name, array in state.items() if name.startswith(_OWN)}
    if not strategy.load_own_state(own):
        strategy.clear_residuals()


def _arrays(strategy: SynchronousStrategy) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of the shared state on this rank with their names."""
    for name, entry in strategy.tensors().items():
        entries: Any = [entry] if isinstance(entry, Whole | PerRank | Piece) else entry
        for number, each in enumerate(entries):
            yield (name if not number else f"{name}.{number}"), each.array


def _shared(mesh: Mesh, strategy: SynchronousStrategy, *, writes: bool) -> Tensors:
    """Return the tensors of the replicas' shared state; of a model in several parts, with each part's number in names.

    Parameters
    ----------
    writes
        True for writing, where only the first replica writes a whole tensor of a part.
    """
    tensors = strategy.tensors()
    places = mesh.world.Get_size() // mesh.replicas
    if places == 1:
        return tensors
    own, named = mesh.world.Get_rank() % places, {}
    for name, entry in tensors.items():
        for place in range(places):
            mine = place == own and not (writes and mesh.replica and isinstance(entry, Whole))
            whole = [Piece(entry.array, 0, entry.array.size)] if isinstance(entry, Whole) else entry
            named[f"part{place}.{name}"] = whole if mine else []
    return named


def _take_over(found: Checkpoint, world: MPI.Intracomm, strategy: SynchronousStrategy) -> str | None:
    """Restore this rank's own state; return a note if residuals were reset, None otherwise. Collective.

    Residuals are reset on another number of ranks, or with other buckets.
    """
    own = {_as_named_now(name[len(_OWN) :]): name for name in found.per_rank_names if name.startswith(_OWN)}
    before, now = found.facts["ranks"], world.Get_size()
    if before != now:
        kept = {name: there for name, there in own.items() if not name.startswith(RESIDUAL)}
        states = attempt(world, lambda: {name: found.per_rank(there) for name, there in kept.items()})
        strategy.adopt(states, before)
        why = f"the checkpoint is of {counted(before, 'rank')}, these are {now}"
    else:
        read = attempt(world, lambda: {name: found.per_rank(there) for name, there in own.items()})
        state = {name: arrays[0] for name, arrays in read.items() if arrays}
        fits = np.array([strategy.load_own_state(state)], np.int8)
        world.Allreduce(MPI.IN_PLACE, fits, MPI.MIN)
        if fits[0]:
            return None
        strategy.clear_residuals()
        why = "they are of other buckets, see --bucket-bytes"
    return f"residuals: {why}" if any(name.startswith(RESIDUAL) for name in own) else None


def _as_named_now(name: str) -> str:
    """Return the name of a rank's own state; older checkpoints call residuals ``owed``."""
    return RESIDUAL + name.removeprefix("owed.") if name.startswith("owed.") else name
