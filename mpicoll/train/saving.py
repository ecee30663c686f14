"""Checkpoints of a run: when they are written, what is in them, and how a run goes on from one."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from mpicoll.train.checkpoints import Checkpoint, PerRank, Piece, Store, Tensors, Whole
from mpicoll.train.config import TrainConfig
from mpicoll.train.failures import CheckpointFailed
from mpicoll.train.mesh import Mesh
from mpicoll.train.tally import EpochRecord, StepRecord

if TYPE_CHECKING:
    from mpicoll.train.loop import Trainer

_FREE = ("epochs", "steps", "timeout", "json", "log_steps", "progress", "quiet", "checkpoint", "checkpoint_every",
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
        if name not in _FREE and there.get(name) != _plain(value)
    ]
    if odd:
        raise CheckpointFailed(f"{config.checkpoint}: the checkpoint is of another run: {'; '.join(odd)}")


def _plain(value: Any) -> Any:
    """Return a value as JSON gives it back."""
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


class Saver:
    """Writes checkpoints when they are due, and nothing where none are wanted. Collective over the mesh."""

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        self._config, self._mesh = config, mesh
        self._store = None if config.checkpoint is None else Store(config.checkpoint, mesh.world)

    def after_step(self, trainer: Trainer, steps: int) -> None:
        """Save if that many steps are a reason."""
        every = self._config.checkpoint_every
        if every is not None and steps % every == 0:
            self.save(trainer, steps)

    def after_epoch(self, trainer: Trainer, steps: int) -> None:
        """Save if an epoch is a reason, or this is the end."""
        if self._config.checkpoint_every is None or steps == trainer.course.total_steps:
            self.save(trainer, steps)

    def save(self, trainer: Trainer, steps: int) -> None:
        """Write the state after so many steps.

        Raises
        ------
        CheckpointFailed
            On every rank; the state is as it was.
        """
        if self._store is None:
            return
        with trainer.clock.spent_on("checkpoints"):
            trainer.tally.settle(0.0)
            self._store.save(steps, self._tensors(trainer), self._facts(trainer, steps))

    def resume(self, trainer: Trainer) -> Checkpoint | None:
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

    def _shared(self, trainer: Trainer, *, writes: bool) -> Tensors:
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

    def _tensors(self, trainer: Trainer) -> Tensors:
        own = {f"own.{name}": PerRank(array) for name, array in trainer.strategy.own_state().items()}
        return {**self._shared(trainer, writes=True), **own, "records": Whole(_table(trainer.records))}

    def _facts(self, trainer: Trainer, steps: int) -> dict[str, Any]:
        return {
            "config": asdict(self._config),
            "step": steps,
            "ranks": self._mesh.world.Get_size(),
            "epochs": [record._asdict() for record in trainer.epochs],
        }

    def _take_over(self, found: Checkpoint, trainer: Trainer) -> None:
        """Give this rank what was its own, where there are as many ranks as before; else residuals begin anew."""
        if found.facts["ranks"] != self._mesh.world.Get_size():
            return
        names = [name for name in found.per_rank_names if name.startswith("own.")]
        state = {name[len("own.") :]: arrays[0] for name in names if (arrays := found.per_rank(name))}
        trainer.strategy.load_own_state(state)


def _table(records: list[StepRecord]) -> np.ndarray:
    return np.array(records, np.float64).reshape(len(records), len(StepRecord._fields))


def _record(row: list[float]) -> StepRecord:
    return StepRecord(int(row[0]), int(row[1]), *row[2:])
