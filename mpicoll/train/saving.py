"""Checkpoints of a run: when they are written, what is in them, and how a run goes on from one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpicoll.train.agreement import all_succeed
from mpicoll.train.checkpoints import Checkpoint, PerRank, Piece, Store, Tensors, Whole
from mpicoll.train.config import TrainConfig
from mpicoll.train.failures import CheckpointFailed, NonFiniteLoss
from mpicoll.train.mesh import Mesh
from mpicoll.train.strategy import OWED
from mpicoll.train.tally import EpochRecord, StepRecord

if TYPE_CHECKING:
    from mpicoll.train.loop import SynchronousLoop

_OWN = "own."
FREE = ("epochs", "steps", "timeout", "json", "log_steps", "progress", "quiet", "checkpoint", "checkpoint_every",
         "resume", "algorithm", "overlap", "bucket_bytes", "shard", "pipeline_schedule", "evaluate_every",
         "tensorboard", "run", "plot", "trace", "trace_steps", "servers", "staleness", "backup", "damping",
         "on_silence", "slow", "jitter", "step_seconds")  # fmt: skip
"""Options that may differ between a run and one that goes on with it."""


def check_same_run(config: TrainConfig, facts: dict[str, Any]) -> None:
    """Refuse a checkpoint of a run that would have taken another course.

    Raises
    ------
    CheckpointFailed
        Naming the options that differ.
    """
    there, here = facts["config"], asdict(config)
    odd = [
        f"--{name.replace('_', '-')} was {there.get(name)}, is {value}"
        for name, value in here.items()
        if name not in FREE and there.get(name) != _plain(value)
    ]
    if odd:
        raise CheckpointFailed(f"{config.checkpoint}: the checkpoint is of another run: {'; '.join(odd)}")


def _plain(value: Any) -> Any:
    """Return a value as JSON gives it back."""
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def refuse_what_is_not_finite(arrays: Iterable[np.ndarray], steps: int) -> None:
    """Let no state be saved from which nobody can go on.

    Raises
    ------
    NonFiniteLoss
        If there is a NaN or inf in an array.
    """
    if not all(np.isfinite(array).all() for array in arrays):
        raise NonFiniteLoss(
            f"parameters or velocities became infinite or NaN within {steps} steps, and are not saved; "
            "try a lower --lr or a longer --warmup"
        )


class Saver:
    """Writes checkpoints when they are due, and nothing where none are wanted. Collective over the mesh.

    Attributes
    ----------
    anew : str or None
        What could not be taken over from a checkpoint, and why.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        self.anew: str | None = None
        self._config, self._mesh = config, mesh
        self._store = None if config.checkpoint is None else Store(config.checkpoint, mesh.world)

    def after_step(self, trainer: SynchronousLoop, steps: int) -> None:
        """Save if that many steps are a reason."""
        every = self._config.checkpoint_every
        if every is not None and steps % every == 0:
            self.save(trainer, steps)

    def after_epoch(self, trainer: SynchronousLoop, steps: int) -> None:
        """Save if an epoch is a reason, or this is the end."""
        if self._config.checkpoint_every is None or steps == trainer.course.total_steps:
            self.save(trainer, steps)

    def save(self, trainer: SynchronousLoop, steps: int) -> None:
        """Write the state after so many steps.

        Raises
        ------
        NonFiniteLoss, CheckpointFailed
            On every rank; the state is as it was.
        """
        if self._store is None:
            return
        with trainer.clock.spent_on("checkpoints"):
            trainer.tally.settle(0.0)
            tensors = self._tensors(trainer)
            all_succeed(self._mesh.world, lambda: refuse_what_is_not_finite(_arrays_of(tensors), steps))
            self._store.save(steps, tensors, self._facts(trainer, steps))

    def resume(self, trainer: SynchronousLoop) -> Checkpoint | None:
        """Go on from the newest checkpoint, if that is wanted and there is one; return it.

        Raises
        ------
        CheckpointFailed
            On every rank: it is damaged, or of another run.
        """
        wanted = self._config.resume
        if self._store is None or wanted == "no" or not self._store.steps():
            return None
        found = self._store.open(fallback=wanted == "fallback")
        check_same_run(self._config, found.facts)
        records = np.empty((found.step, len(StepRecord._fields)))
        found.restore({**self._shared(trainer, writes=False), "records": Whole(records)})
        trainer.strategy.meet()
        trainer.tally.records[:] = [_record(row) for row in records.tolist()]
        # An epoch that --steps cut short is told of again when it is whole.
        epochs = [EpochRecord(**record) for record in found.facts["epochs"]]
        trainer.epochs[:] = [epoch for epoch in epochs if epoch.epoch < found.step // trainer.course.steps_per_epoch]
        trainer.first_step = found.step
        self._take_over(found, trainer)
        return found

    def close(self) -> None:
        """Let others have the folder."""
        if self._store is not None:
            self._store.close()

    def _shared(self, trainer: SynchronousLoop, *, writes: bool) -> Tensors:
        """Return what replicas hold together; where a model has several parts, each under names of its own."""
        mesh, tensors = self._mesh, trainer.strategy.tensors()
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

    def _tensors(self, trainer: SynchronousLoop) -> Tensors:
        own = {_OWN + name: PerRank(array) for name, array in trainer.strategy.own_state().items()}
        return {**self._shared(trainer, writes=True), **own, "records": Whole(_table(trainer.records))}

    def _facts(self, trainer: SynchronousLoop, steps: int) -> dict[str, Any]:
        return {
            "config": asdict(self._config),
            "step": steps,
            "ranks": self._mesh.world.Get_size(),
            "epochs": [record._asdict() for record in trainer.epochs],
        }

    def _take_over(self, found: Checkpoint, trainer: SynchronousLoop) -> None:
        """Give this rank what was its own; on another number of ranks, or with other buckets, residuals begin anew."""
        world, strategy = self._mesh.world, trainer.strategy
        names = [name for name in found.per_rank_names if name.startswith(_OWN)]
        before, now = found.facts["ranks"], world.Get_size()
        if before != now:
            kept = [name for name in names if not name.startswith(_OWN + OWED)]
            strategy.adopt({name[len(_OWN) :]: found.per_rank(name) for name in kept}, before)
            why = f"the checkpoint is of {before} ranks, these are {now}"
        else:
            state = {name[len(_OWN) :]: arrays[0] for name in names if (arrays := found.per_rank(name))}
            fits = np.array([strategy.load_own_state(state)], np.int8)
            world.Allreduce(MPI.IN_PLACE, fits, MPI.MIN)
            if fits[0]:
                return
            strategy.owe_nothing()
            why = "they are of other buckets, see --bucket-bytes"
        if any(name.startswith(_OWN + OWED) for name in names):
            self.anew = f"residuals: {why}"


def _arrays_of(tensors: Tensors) -> Iterator[np.ndarray]:
    """Yield the arrays of a rank's tensors."""
    for entry in tensors.values():
        if isinstance(entry, (Whole, PerRank, Piece)):
            yield entry.array
        else:
            yield from (piece.array for piece in entry)


def _table(records: list[StepRecord]) -> np.ndarray:
    return np.array(records, np.float64).reshape(len(records), len(StepRecord._fields))


def _record(row: list[float]) -> StepRecord:
    return StepRecord(int(row[0]), int(row[1]), *row[2:])
