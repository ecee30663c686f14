"""Reader of checkpoints: verifies a checkpoint and restores it on any number of ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.checkpoint import manifest as manifests
from mpicoll.checkpoint.collective_reads import attempt, from_root, on_root, to_root
from mpicoll.checkpoint.durable_files import file_name, fingerprint, opened, patiently, step_name, steps_in
from mpicoll.checkpoint.manifest import Manifest
from mpicoll.checkpoint.tensor_file import Entry, dtype_of, read_header, read_range
from mpicoll.checkpoint.write_assignment import (
    PerRank,
    TensorLayout,
    Tensors,
    Whole,
    describe,
    layouts,
    piece_key,
    pieces_of,
)
from mpicoll.errors import CheckpointFailed

_TOLD = 20
"""Largest number of differences that a message lists."""


class Rejected(NamedTuple):
    """Checkpoint that was not used, and the reason."""

    step: int
    reason: str


class Checkpoint:
    """Verified checkpoint: the state of a run at one step.

    Attributes
    ----------
    step, size : int
        The step after which it was written, and the number of ranks that wrote it.
    facts : dict
        The `facts` that were saved with it.
    rejected : list of Rejected
        Newer checkpoints that are damaged, with the reasons.
    """

    def __init__(self, path: Path, comm: MPI.Intracomm, manifest: Manifest, patience: float) -> None:
        self.step, self.size, self.facts = manifest.step, manifest.size, manifest.facts
        self.rejected: list[Rejected] = []
        self._path, self._comm, self._manifest, self._patience = path, comm, manifest, patience
        self._headers: dict[int, dict[str, Entry]] = {}

    @property
    def vectors(self) -> list[str]:
        """Names of the tensors that were saved as Whole or Piece."""
        return [name for name, tensor in self._manifest.tensors.items() if tensor["kind"] == "vector"]

    @property
    def per_rank_names(self) -> list[str]:
        """Names of the tensors that were saved as PerRank, on any rank."""
        return [name for name, tensor in self._manifest.tensors.items() if tensor["kind"] == "per_rank"]

    # ---- collective -------------------------------------------------------------------------------------------------

    def check(self, tensors: Tensors) -> None:
        """Compare names, kinds, dtypes and shapes with those of the run's tensors. Collective.

        Of a PerRank only the dtype is compared. A PerRank of the checkpoint may be missing in `tensors`, since a new
        run may not have its own yet.

        Raises
        ------
        CheckpointError
            On every rank, listing all differences.
        """
        mine = attempt(self._comm, lambda: layouts(tensors, self._comm.Get_size(), self._comm.Get_rank()))
        told = to_root(self._comm, [sorted(mine), self._differences(mine)])

        def join() -> None:
            wanted = {name for names, _ in told or [] for name in names}
            found = [f"{name}: in the checkpoint, but not wanted" for name in self.vectors if name not in wanted]
            found += list(dict.fromkeys(text for _, differences in told or [] for text in differences))
            if found:
                more = [f"and {len(found) - _TOLD} more"] if len(found) > _TOLD else []
                raise CheckpointFailed(f"{self._path}: is of another model: {'; '.join(found[:_TOLD] + more)}")

        on_root(self._comm, join)

    def _differences(self, wanted: Mapping[str, TensorLayout]) -> list[str]:
        found = []
        for name, layout in wanted.items():
            if name not in self._manifest.tensors:
                found.append(f"{name}: not in the checkpoint")
                continue
            kind = "per_rank" if layout.kind == "per_rank" else "vector"
            want = TensorLayout(kind, layout.dtype, () if kind == "per_rank" else layout.shape, [])
            there = self._manifest.layout(name)
            if there != want:
                found.append(f"{name}: {describe(there)} in the checkpoint, {describe(want)} wanted")
        return found

    def restore(self, tensors: Tensors) -> None:
        """Check all tensors, then fill the arrays of Wholes and Pieces in place. Collective.

        A PerRank is not filled: see :meth:`per_rank`.

        Raises
        ------
        CheckpointError
            On every rank. If the checkpoint does not fit, no array has been changed.
        """
        self.check(tensors)

        def fill() -> None:
            for name, entry in tensors.items():
                if isinstance(entry, Whole):
                    self._fill(name, 0, entry.array)
                elif not isinstance(entry, PerRank):
                    for piece in pieces_of(entry):
                        self._fill(name, piece.start, piece.array)

        attempt(self._comm, fill)

    # ---- each rank for itself ---------------------------------------------------------------------------------------

    def description(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """Return dtype and shape of a Whole or Piece tensor. Not collective.

        Raises
        ------
        CheckpointError
            If there is no such tensor.
        """
        tensor = self._tensor(name, "vector")
        return dtype_of(tensor["dtype"]), tuple(tensor["shape"])

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return elements `start` to ``stop - 1`` of a Whole or Piece tensor, in C order. Not collective.

        Reads these elements only, from the files of the ranks that wrote them.

        Returns
        -------
        (stop - start,) of the tensor's dtype

        Raises
        ------
        CheckpointError
            If there is no such tensor, or it can no longer be read.
        ValueError
            If the range is not within the tensor.
        """
        tensor = self._tensor(name, "vector")
        count = math.prod(tensor["shape"])
        stop = count if stop is None else stop
        if not 0 <= start <= stop <= count:
            raise ValueError(f"start={start}, stop={stop}: not a range within the {count} elements of {name}")
        out = np.empty(stop - start, dtype_of(tensor["dtype"]))
        self._read_vector(name, start, out)
        return out

    def per_rank(self, name: str) -> list[np.ndarray]:
        """Return the arrays of a PerRank that former ranks r with ``r % size == rank`` wrote. Not collective.

        On the same number of ranks this is the rank's own array; on fewer ranks it may be several, on more ranks none.

        Raises
        ------
        CheckpointError
            If there is no such tensor, or it can no longer be read.
        """
        tensor, found = self._tensor(name, "per_rank"), []
        for owner, shape in tensor["shapes"]:
            if owner % self._comm.Get_size() == self._comm.Get_rank():
                out = np.empty(math.prod(shape), dtype_of(tensor["dtype"]))
                self._read(owner, name, 0, out)
                found.append(out.reshape(shape))
        return found

    def _fill(self, name: str, start: int, target: np.ndarray) -> None:
        if target.flags.carray and target.dtype.isnative:
            self._read_vector(name, start, target.reshape(-1))
        else:
            target[...] = self.read(name, start, start + target.size).reshape(target.shape)

    def _read_vector(self, name: str, start: int, out: np.ndarray) -> None:
        stop = start + out.size
        for first, last, owner in self._tensor(name, "vector")["pieces"]:
            begin, end = max(first, start), min(last, stop)
            if begin < end:
                self._read(owner, piece_key(name, first), begin - first, out[begin - start : end - start])

    def _tensor(self, name: str, kind: str) -> dict[str, Any]:
        tensor = self._manifest.tensors.get(name)
        if tensor is None or tensor["kind"] != kind:
            raise CheckpointFailed(f"{self._path}: has no {kind} {name}")
        return tensor

    def _read(self, owner: int, key: str, start: int, out: np.ndarray) -> None:
        path = self._path / file_name(owner)
        with opened(path, self._patience) as descriptor:
            if owner not in self._headers:
                self._headers[owner] = _expected_header(descriptor, path, self._manifest, owner)
            read_range(descriptor, self._headers[owner][key], start, out, path)


# ---- finding one ----------------------------------------------------------------------------------------------------


def open_checkpoint(
    folder: str | Path, comm: MPI.Intracomm, *, step: int | None = None, fallback: bool = False, patience: float = 10.0
) -> Checkpoint:
    """Return the newest checkpoint of a run, or that of `step`, with all its files verified. Collective.

    The ranks share the verification, and all return the same step. The folder is not changed.

    Parameters
    ----------
    folder
        Folder of the run's checkpoints.
    comm
        Communicator of the ranks that read it, of any size.
    step
        Step of the checkpoint; None for the newest one.
    fallback
        True to open an older checkpoint if the newest is damaged; :attr:`Checkpoint.rejected` has the reasons.
    patience
        Seconds for which a rank looks for a file that another host may just have written.

    Raises
    ------
    CheckpointError
        On every rank, if there is no checkpoint, or it is damaged, incomplete or foreign; the message names the file.
    """
    folder = Path(folder).expanduser().absolute()
    steps = from_root(comm, lambda: patiently(lambda: steps_in(folder), patience))
    candidates = [found for found in reversed(steps) if step is None or found <= step]
    if not candidates or (step is not None and candidates[0] != step and not fallback):
        raise CheckpointFailed(f"{folder}: has no checkpoint" + (f" of step {step}" if step is not None else ""))
    rejected = []
    for candidate in candidates if fallback else candidates[:1]:
        try:
            checkpoint = _open(folder / step_name(candidate), candidate, comm, patience)
        except CheckpointFailed as error:
            rejected.append(Rejected(candidate, str(error)))
        else:
            checkpoint.rejected = rejected
            return checkpoint
    older = len(rejected) - 1
    which = "the older one" if older == 1 else f"any of {older} older ones"
    others = f"; nor can {which} be used" if older else ""
    raise CheckpointFailed(rejected[0].reason + others)


def _open(path: Path, step: int, comm: MPI.Intracomm, patience: float) -> Checkpoint:
    """Return the checkpoint in a folder, verified; CheckpointFailed if it is damaged. Collective."""
    text = from_root(comm, lambda: _read_manifest(path, step, patience))
    manifest = manifests.decode(text.encode("ascii"), step)
    mine = range(comm.Get_rank(), manifest.size, comm.Get_size())

    def verify() -> None:
        for owner in mine:
            _verify(path, manifest, owner, patience)

    attempt(comm, verify)
    return Checkpoint(path, comm, manifest, patience)


def _read_manifest(path: Path, step: int, patience: float) -> str:
    """Return the text of a valid manifest; CheckpointFailed for an invalid one, or other files in the folder."""
    name = path / manifests.NAME
    with opened(name, patience) as descriptor:
        length = os.fstat(descriptor).st_size
        if length > manifests.MAX_BYTES:
            raise CheckpointFailed(f"{name}: has {length} bytes, more than a manifest can have")
        data = os.pread(descriptor, length, 0)
    try:
        manifest = manifests.decode(data, step)
    except ValueError as error:
        raise CheckpointFailed(f"{name}: {error}") from None
    expected = {manifests.NAME, *map(file_name, range(manifest.size))}
    extra = {entry.name for entry in os.scandir(path) if not entry.name.startswith(".")} - expected
    if extra:
        raise CheckpointFailed(f"{path / min(extra)!s:.300}: does not belong there")
    return data.decode("ascii")


def _verify(path: Path, manifest: Manifest, owner: int, patience: float) -> None:
    name = path / file_name(owner)
    nbytes, digest = manifest.files[owner]
    with opened(name, patience) as descriptor:
        length = os.fstat(descriptor).st_size
        if length != nbytes:
            raise CheckpointFailed(f"{name}: has {length} bytes instead of {nbytes}")
        if fingerprint(descriptor) != (nbytes, digest):
            raise CheckpointFailed(f"{name}: is not what was written: its SHA-256 does not match the manifest's")
        _expected_header(descriptor, name, manifest, owner)


def _expected_header(descriptor: int, path: Path, manifest: Manifest, owner: int) -> dict[str, Entry]:
    header = read_header(descriptor, path)
    there = {key: (entry.dtype, entry.shape) for key, entry in header.items()}
    expected = manifest.contents_of(owner)
    if there != expected:
        wrong = min(key for key in {*there, *expected} if there.get(key) != expected.get(key))
        raise CheckpointFailed(f"{path}: {wrong!r:.80} is not in it as the manifest says")
    return header
