"""Writer of checkpoints: a crash at any moment, or a full disk on any rank, leaves the previous checkpoint usable."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from mpi4py import MPI

from mpicoll.checkpoint import durable_files, tensor_file
from mpicoll.checkpoint import manifest as manifests
from mpicoll.checkpoint.collective_reads import attempt, from_root, on_root, to_root
from mpicoll.checkpoint.manifest import Manifest
from mpicoll.checkpoint.reader import Checkpoint, open_checkpoint
from mpicoll.checkpoint.write_assignment import TensorLayout, Tensors, arrays_to_write, layouts, merge
from mpicoll.errors import CheckpointFailed


class CheckpointStore:
    """Store of one run's checkpoints, in a folder that all ranks see and no other run writes to.

    The constructor and every method but :meth:`close` are collective over `comm`. An error on one rank is raised as a
    CheckpointError with the same message on all ranks; the run can continue after it.

    Parameters
    ----------
    folder
        The folder; created if only the last part of its path is missing. Unfinished checkpoints of former runs are
        removed.
    comm
        Communicator of the run's ranks.
    keep
        Number of checkpoints to keep, at least 1. With 1, there is no older one if the last is damaged.
    patience
        Seconds for which a rank looks for a file that another host may just have written.

    Raises
    ------
    CheckpointError
        On every rank, if the folder cannot be written, or another run has locked it.
    ValueError
        If `keep` or `patience` is out of range.
    """

    def __init__(self, folder: str | Path, comm: MPI.Intracomm, *, keep: int = 2, patience: float = 10.0) -> None:
        if keep < 1 or not 0 <= patience < float("inf"):
            raise ValueError(f"keep={keep} must be at least 1, patience={patience} finite and at least 0")
        self.folder = Path(folder).expanduser().absolute()
        self._comm, self._keep, self._patience = comm, keep, patience
        self._opened: int | None = None
        self._saved: list[int] = []
        self._lock = on_root(comm, self._take)

    def _take(self) -> int:
        descriptor = durable_files.take(self.folder)
        try:
            durable_files.clean(self.folder)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def close(self) -> None:
        """Unlock the folder for other runs. Not collective."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints in the folder, damaged ones included, in ascending order."""
        found: list[int] = from_root(self._comm, lambda: durable_files.steps_in(self.folder))
        return found

    def open(self, step: int | None = None, *, fallback: bool = False) -> Checkpoint:
        """Return the newest checkpoint, or that of `step`: see :func:`open_checkpoint`.

        The next save replaces checkpoints that are newer than the one returned.
        """
        found = open_checkpoint(self.folder, self._comm, step=step, fallback=fallback, patience=self._patience)
        self._opened, self._saved = found.step, []
        return found

    def save(self, step: int, tensors: Tensors, facts: Mapping[str, Any]) -> None:
        """Write a checkpoint of `step`, then remove those that are no longer kept. Returns when it is on the disk.

        Does nothing if this run has saved or opened a checkpoint of `step`.

        Parameters
        ----------
        step
            The step, equal on every rank, and higher than that of every checkpoint in the folder, unless one was
            opened.
        tensors
            This rank's tensors. The pieces of a vector on all ranks must cover it exactly once.
        facts
            Data that JSON can represent, with finite numbers only. Those of rank 0 are saved.

        Raises
        ------
        CheckpointError
            On every rank, if some rank failed; the message has the rank and the reason. Earlier checkpoints are kept.
        """
        step, table = self._plan(step, tensors)
        name = from_root(self._comm, lambda: self._make_temporary(step) if table is not None else None)
        if name is None:
            return
        folder = self.folder / name
        try:
            self._write(step, folder, tensors, table, facts)
        except CheckpointFailed:
            if self._comm.Get_rank() == 0:
                with contextlib.suppress(OSError):  # it is cleaned when the next run starts
                    durable_files.remove(folder)
            raise
        self._saved.append(step)
        on_root(self._comm, lambda: self._prune(step))

    def _plan(self, step: int, tensors: Tensors) -> tuple[int, dict[str, Any] | None]:
        """Make all checks that need no writing; return the step and the manifest's table of tensors.

        The table is None on other ranks than 0, and if the step is saved already.
        """
        size, rank = self._comm.Get_size(), self._comm.Get_rank()
        mine = attempt(self._comm, lambda: (operator.index(step), layouts(tensors, size, rank)), naming_rank=True)
        told = to_root(self._comm, mine)

        def join() -> dict[str, Any] | None:
            assert told is not None
            if len({other for other, _ in told}) > 1 or not 0 <= told[0][0] <= durable_files.MAX_STEP:
                steps = sorted({other for other, _ in told})
                raise CheckpointFailed(f"step {steps}: must be one on all ranks, from 0 to 10**18 - 1")
            if mine[0] == self._opened or mine[0] in self._saved:
                return None
            self._refuse_older(mine[0])
            return merge([{name: TensorLayout(*layout) for name, layout in said.items()} for _, said in told])

        return mine[0], on_root(self._comm, join)

    def _refuse_older(self, step: int) -> None:
        newer = [found for found in durable_files.steps_in(self.folder) if found >= step]
        if newer and (self._opened is None or not set(newer).isdisjoint(self._saved)):
            raise CheckpointFailed(
                f"{self.folder}: has a checkpoint of step {newer[-1]}, step {step} cannot come after it; "
                "resume from it, or use another folder"
            )

    def _make_temporary(self, step: int) -> str:
        name = durable_files.temporary_name(step)
        (self.folder / name).mkdir()
        return name

    def _write(
        self, step: int, folder: Path, tensors: Tensors, table: dict[str, Any] | None, facts: Mapping[str, Any]
    ) -> None:
        size, rank = self._comm.Get_size(), self._comm.Get_rank()
        written = attempt(
            self._comm,
            lambda: _write_file(
                folder / durable_files.file_name(rank), arrays_to_write(tensors, size, rank), self._patience
            ),
            naming_rank=True,
        )
        files = to_root(self._comm, written)

        def finish() -> None:
            assert files is not None
            assert table is not None
            pairs = tuple((nbytes, digest) for nbytes, digest in files)
            self._publish(folder, Manifest(step, size, pairs, table, manifests.plain(facts)))

        on_root(self._comm, finish)

    def _publish(self, folder: Path, manifest: Manifest) -> None:
        """Write the manifest, and give the folder its name by an atomic rename."""
        data = manifests.encode(manifest)
        if len(data) > manifests.MAX_BYTES:
            raise CheckpointFailed(f"a manifest of {len(data)} bytes is too long; save long facts as tensors")
        for rank, (nbytes, _) in enumerate(manifest.files):
            path = folder / durable_files.file_name(rank)
            if durable_files.patiently(path.stat, self._patience).st_size != nbytes:
                raise CheckpointFailed(f"{path}: does not have the {nbytes} bytes that rank {rank} wrote")
        durable_files.write_durably(folder / manifests.NAME, [data])
        durable_files.sync(folder)
        target = self.folder / durable_files.step_name(manifest.step)
        if os.path.lexists(target):  # from before an older checkpoint was opened, which stays
            durable_files.put_aside(self.folder, manifest.step)
        folder.rename(target)
        durable_files.sync(self.folder)

    def _prune(self, step: int) -> None:
        """Remove checkpoints newer than `step`, which were abandoned, and all but the last `keep`, each atomically."""
        try:
            there = durable_files.steps_in(self.folder)
            newer, older = [s for s in there if s > step], [s for s in there if s <= step]
            for number in newer + older[: -self._keep]:
                durable_files.put_aside(self.folder, number)
            durable_files.clean(self.folder)
        except OSError as error:
            raise CheckpointFailed(
                f"{error.filename}: step {step} is saved, but an older checkpoint cannot be removed: {error.strerror}"
            ) from None


def _write_file(path: Path, arrays: dict[str, Any], patience: float) -> tuple[int, str]:
    """Write this rank's file and return its length and SHA-256 when it is on the disk."""
    durable_files.patiently(path.parent.lstat, patience)
    return tensor_file.write(path, arrays)
