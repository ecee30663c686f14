"""Checkpoints of a run: their schedule, and the choice of the one from which a run resumes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.checkpoint import BackgroundSaves, Checkpoint, CheckpointStore, PerRank, Piece, Tensors, Whole
from mpicoll.consensus import all_succeed
from mpicoll.data.user_paths import expanded
from mpicoll.errors import CheckpointFailed, NonFiniteLoss, UsageError
from mpicoll.quantities import counted
from mpicoll.train.config import WITH_MOMENTUM, TrainConfig
from mpicoll.train.loop import Loop, LoopCallback
from mpicoll.train.option_checks import DEFAULTS
from mpicoll.train.strategies import strategy_name

FREE = ("epochs", "steps", "timeout", "json", "log_steps", "progress", "quiet", "checkpoint", "checkpoint_every",
         "background_checkpoints", "resume", "algorithm", "overlap", "bucket_bytes", "shard", "offload", "recompute",
         "prefetch", "share_data", "pipeline_schedule", "evaluate_every", "tensorboard", "run", "plot", "trace",
         "trace_steps", "servers", "replicas", "staleness", "backup", "damping", "pull_compression",
         "on_silence", "on_failure", "spares", "balance", "slow", "jitter", "step_seconds")  # fmt: skip
"""Options that may differ between a run and the one that resumes it."""

_OF_MODELS = ("hidden", "filters", "layers", "heads", "width", "context", "dropout", "batch_norm")
"""Options whose defaults depend on the model."""
_BEAT_SECONDS = 0.2
"""Seconds between two signs of life while a checkpoint is written."""


class Saver(LoopCallback):
    """Callback that writes checkpoints when they are due; does nothing without ``--checkpoint``.

    In synchronous training all ranks write; in asynchronous training rank 0 alone does. With
    ``--background-checkpoints`` a thread of each rank that writes does so while training goes on.

    Collective over `comm`: construction and `find`.
    """

    def __init__(self, config: TrainConfig, comm: MPI.Intracomm) -> None:
        self._config, self._saved_at = config, 0
        self._everywhere, alone = comm, config.is_asynchronous
        self._comm = Intracomm(MPI.COMM_SELF) if alone else comm
        self._store: CheckpointStore | None = None
        self._background: BackgroundSaves | None = None
        self._under_way: int | None = None
        writes = not (alone and comm.Get_rank())
        if config.background_checkpoints and writes:  # a thread makes the calls
            self._comm = self._comm.Dup()
        all_succeed(comm, lambda: None if comm.Get_rank() else self._check_folder())
        all_succeed(comm, lambda: self._open() if writes else None)

    def _check_folder(self) -> None:
        """Refuse a folder that cannot be made, before ranks wait for each other to open it."""
        if self._config.checkpoint is None:
            return
        folder, named = (
            expanded(self._config.checkpoint, UsageError).absolute(),
            f"--checkpoint {self._config.checkpoint}",
        )
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{named}: is not a folder")
        if not folder.parent.is_dir():
            raise UsageError(f"{named}: there is no folder {folder.parent} to make it in")

    def _open(self) -> None:
        if self._config.checkpoint is not None:
            if self._config.background_checkpoints and MPI.Query_thread() != MPI.THREAD_MULTIPLE:
                raise UsageError("--background-checkpoints: this MPI library does not allow calls from several threads")
            self._store = CheckpointStore(self._config.checkpoint, self._comm)
            if self._config.background_checkpoints:
                self._background = BackgroundSaves(self._store)

    def find(self) -> Checkpoint | None:
        """Return the checkpoint to resume from on the ranks that write; None without ``--resume`` or a checkpoint.

        Raises
        ------
        UsageError
            On every rank: there are checkpoints, but no ``--resume``. Those of this run would take their places.
        CheckpointFailed
            On every rank: it is damaged, or of another run.
        """
        found: Checkpoint | None = all_succeed(self._everywhere, self._find)
        return found

    def _find(self) -> Checkpoint | None:
        wanted = self._config.resume
        if self._store is None or not (steps := self._store.steps()):
            return None
        if wanted == "no":
            raise UsageError(
                f"--checkpoint {self._config.checkpoint}: holds checkpoints already, the newest of step {steps[-1]}; "
                "add --resume to continue from it, or use another folder"
            )
        found = self._store.open(fallback=wanted == "fallback")
        _check_same_run(self._config, found.facts)
        return found

    def keep_newest(self) -> None:
        """Take the newest checkpoint, which ranks that are left of this run have written, for one of this saver's own.

        Collective over `comm`. A damaged one, which was cut off, is passed over; the next save replaces it.

        Raises
        ------
        CheckpointFailed
            On every rank: there are checkpoints, and all are damaged.
        """
        if self._store is not None and self._store.steps():
            self._store.open(fallback=True)

    def at_rest(self, loop: Loop, done: int) -> None:
        """Save a checkpoint if one is due after `done` shares: every ``--checkpoint-every`` steps, or every epoch."""
        every = (self._config.checkpoint_every or loop.step_plan.steps_per_epoch) * loop.coordination.shares_per_step
        if self._store is not None and done // every > max(self._saved_at, loop.coordination.first) // every:
            self._save(loop, done)

    def at_end(self, loop: Loop, done: int) -> None:
        """Save the final state, unless it is saved already, and close the folder."""
        if not (loop.coordination.together and done == self._saved_at):
            self._save(loop, done)
        self._settle(loop)
        self.close()
        if self._background is not None:
            self._comm.Free()

    def _save(self, loop: Loop, done: int) -> None:
        """Write the state after `done` shares.

        Raises
        ------
        NonFiniteLoss, CheckpointFailed
            On every rank that writes.
        """
        if self._store is None:
            return
        self._settle(loop)
        with loop.clock.spent_on("checkpoints"):
            state = loop.coordination.state(done)
            if state is None:
                return
            self._saved_at, steps = done, done // loop.coordination.shares_per_step
            all_succeed(self._comm, lambda: _refuse_what_is_not_finite(state.tensors, steps))
            facts = {
                "config": asdict(self._config),
                "ranks": self._everywhere.Get_size(),
                "epochs": [record._asdict() for record in loop.epochs],
                "schedule_steps": loop.step_plan.schedule_steps,
            }
            store = self._background or self._store
            self._beating(loop, lambda: store.save(state.step, state.tensors, {**facts, **state.facts}))
        if self._background is None:
            loop.announce_checkpoint(steps)
        else:
            self._under_way = steps

    def _settle(self, loop: Loop) -> None:
        """Wait until the checkpoint that is being written is complete.

        Raises
        ------
        CheckpointFailed
            On every rank that writes.
        """
        if self._background is None or self._under_way is None:
            return
        with loop.clock.spent_on("checkpoints"):
            self._beating(loop, self._background.wait)
        steps, self._under_way = self._under_way, None
        loop.announce_checkpoint(steps)

    def _beating(self, loop: Loop, action: Callable[[], None]) -> None:
        """Call `action`, in a thread where other ranks would take this one for dead if it took long."""
        if loop.coordination.together or MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            action()
            return
        with ThreadPoolExecutor(max_workers=1) as executor:
            call = executor.submit(action)
            while not wait([call], _BEAT_SECONDS).done:
                loop.coordination.beat()
            call.result()

    def close(self) -> None:
        """Release the folder for other runs; save no more checkpoints.

        After an error elsewhere, what is being written is waited for and may be complete.
        """
        if self._background is not None:
            with contextlib.suppress(CheckpointFailed):
                self._background.wait()
        if self._store is not None:
            self._store.close()
            self._store = None


def _check_same_run(config: TrainConfig, facts: dict[str, Any]) -> None:
    """Refuse a checkpoint of a run whose options would have led to other results.

    Raises
    ------
    CheckpointFailed
        Naming the options that differ.
    """
    if "config" not in facts:
        raise CheckpointFailed(f"{config.checkpoint}: the checkpoint is not one of the trainer")
    there, here = facts["config"], asdict(config)
    # Earlier versions took --momentum, and ignored it, where it is refused now.
    free = FREE if config.optimizer in WITH_MOMENTUM else (*FREE, "momentum")
    other = [
        name
        for name, value in here.items()
        if name not in free and there.get(name, _plain(DEFAULTS[name])) != _plain(value)
    ]
    if "model" in other:
        other = [name for name in other if name not in _OF_MODELS]
    odd = [_difference(name, {**DEFAULTS, **there}, here) for name in other]
    if odd:
        raise CheckpointFailed(f"{config.checkpoint}: the checkpoint is of another run: {'; '.join(odd)}")


def _difference(name: str, there: dict[str, Any], here: dict[str, Any]) -> str:
    """Return how an option of a checkpoint's run differs from this run's."""
    if name == "mode":
        was, now = (strategy_name(options["mode"], options["shard"]) for options in (there, here))
        return f"--strategy was {was}, is {now}"
    return f"--{name.replace('_', '-')} was {_shown(there[name])}, is {_shown(here[name])}"


def _shown(value: Any) -> Any:
    """Return a value as a command line has it."""
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    """Return a value as it is after a round trip through JSON."""
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _refuse_what_is_not_finite(tensors: Tensors, steps: int) -> None:
    """Refuse to save a state from which training could not continue.

    Raises
    ------
    NonFiniteLoss
        If an array holds a NaN or infinity.
    """
    if not all(np.isfinite(array).all() for array in _arrays_of(tensors)):
        raise NonFiniteLoss(
            f"parameters or optimizer state became infinite or NaN within {counted(steps, 'step')}, and are not saved; "
            "try a lower --lr or a longer --warmup"
        )


def _arrays_of(tensors: Tensors) -> Iterator[np.ndarray]:
    """Yield the arrays of a rank's tensors."""
    for entry in tensors.values():
        entries: Iterable[Any] = [entry] if isinstance(entry, (Whole, PerRank, Piece)) else entry
        yield from (each.array for each in entries)
