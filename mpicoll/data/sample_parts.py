"""Data sets of several files: ranks divide the files among them, and every rank gets all rows, in the files' order."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.consensus import all_succeed, share
from mpicoll.data import sample_files
from mpicoll.data.distributed_arrays import DistributedArrays
from mpicoll.data.sample_checks import check_arrays, naming_source
from mpicoll.data.sample_tables import TABLES, read_table
from mpicoll.data.user_paths import expanded
from mpicoll.errors import DataError
from mpicoll.quantities import counted
from mpicoll.train.config import TrainConfig, is_idx

_SHOWN = 200


class _Part(NamedTuple):
    """Arrays of a file, and names of its columns; a file of arrays has none."""

    columns: Sequence[str]
    arrays: dict[str, np.ndarray]

    def facts(self) -> dict[str, Any]:
        """Return what must be equal in all parts, as JSON has it, and the number of rows."""
        listed = ", ".join(self.columns)
        kinds = {name: [array.dtype.str, *array.shape[1:]] for name, array in self.arrays.items()}
        digest = hashlib.sha256(repr(list(self.columns)).encode()).hexdigest()
        return {"columns": listed[:_SHOWN], "digest": digest, "kinds": kinds, "rows": len(self.arrays["x"])}


def load_parts(config: TrainConfig, comm: MPI.Intracomm) -> dict[str, np.ndarray]:
    """Return ``x`` and ``y`` of all files that ``--dataset`` and ``--labels`` name or match. Collective over `comm`.

    File number i, in the order of their names, is read by rank i modulo the number of ranks.

    Raises
    ------
    DataError
        On every rank, if there are no files, one of them cannot be read, or columns, shapes or element types differ.
    """
    size, rank = comm.Get_size(), comm.Get_rank()
    names = all_succeed(comm, lambda: _matching(config) if rank == 0 else None)
    paths = share(comm, {"paths": names} if rank == 0 else None)["paths"]
    own: dict[int, _Part] = all_succeed(
        comm, lambda: {number: _read(paths[number], config) for number in range(rank, len(paths), size)}
    )
    facts: list[dict[str, Any]] = [{} for _ in paths]
    for root in range(min(size, len(paths))):
        told = {str(number): part.facts() for number, part in own.items()} if root == rank else None
        for number, found in share(comm, told, root).items():
            facts[int(number)] = found
    _check_alike(facts, [files[0] for files in paths])
    return _joined(facts, own, config, comm)


def _matching(config: TrainConfig) -> list[list[str]]:
    """Return the files of each part: that of the samples, and that of their labels if it is another."""
    samples = _expanded(config.dataset, "--dataset")
    if config.labels is None:
        return [[path] for path in samples]
    labels = _expanded(config.labels, "--labels")
    if len(labels) != len(samples):
        raise DataError(
            f"--labels {config.labels}: {counted(len(labels), 'file')} for {len(samples)} of --dataset {config.dataset}"
        )
    return [list(pair) for pair in zip(samples, labels, strict=True)]


def _expanded(pattern: str, option: str) -> list[str]:
    whole = str(expanded(pattern))
    paths = [whole] if Path(whole).exists() else sorted(glob.glob(whole, recursive=True))  # noqa: PTH207, a pattern may be absolute
    if not paths:
        what = "no file matches this pattern" if glob.has_magic(whole) else "there is no such file"
        raise DataError(f"{option} {pattern}: {what}")
    return paths


def _read(files: Sequence[str], config: TrainConfig) -> _Part:
    path, reals = Path(files[0]), config.task == "regression"
    columns: Sequence[str] = ()
    sources = dict.fromkeys("xy", f"--dataset {path}")
    if path.suffix in TABLES:
        with naming_source("--dataset", " "):
            columns, x, y = read_table(path, config.target, config.dtype, reals=reals)
        arrays = {"x": x, "y": y}
    elif len(files) > 1:
        sources["y"] = f"--labels {files[1]}"
        arrays = {"x": _read_array("--dataset", path), "y": _read_array("--labels", Path(files[1]))}
    elif path.suffix == ".npz":
        with naming_source("--dataset", " "):
            arrays = sample_files.read_npz(path)
        if "x" not in arrays:
            raise DataError(f"--dataset {path}: has a test part; files that a pattern names have x and y")
    else:
        raise DataError(f"--dataset {path}: not a file .csv, .parquet or .npz; files .npy and IDX files need --labels")
    return _Part(columns, check_arrays(arrays, reals=reals, files=sources))


def _read_array(option: str, path: Path) -> np.ndarray:
    with naming_source(option, " "):
        return sample_files.read_idx(path) if is_idx(path.name) else sample_files.map_npy(path)


def _check_alike(facts: Sequence[dict[str, Any]], paths: Sequence[str]) -> None:
    """Raise, on all ranks alike, unless columns, shapes and element types of all parts are those of the first."""
    first = facts[0]
    for part, path in zip(facts, paths, strict=True):
        if part["digest"] != first["digest"]:
            raise DataError(f"{path}: has columns {part['columns']}, {paths[0]} has {first['columns']}")
        for name, kind in first["kinds"].items():
            if part["kinds"][name] != kind:
                raise DataError(f"{path}: {name} is {_described(part, name)}, in {paths[0]} {_described(first, name)}")


def _described(part: dict[str, Any], name: str) -> str:
    dtype, *shape = part["kinds"][name]
    return f"{np.dtype(dtype)} of shape ({', '.join(map(str, (part['rows'], *shape)))})"


def _joined(
    facts: Sequence[dict[str, Any]], own: dict[int, _Part], config: TrainConfig, comm: MPI.Intracomm
) -> dict[str, np.ndarray]:
    rows = sum(part["rows"] for part in facts)
    wanted = {name: (dtype, (rows, *shape)) for name, (dtype, *shape) in facts[0]["kinds"].items()}
    copies = DistributedArrays(wanted, comm, shared=config.share_data)
    first = 0
    for number, part in enumerate(facts):
        mine = own.pop(number, None)  # freed when it has been copied
        for name in wanted:
            data = mine.arrays[name] if mine is not None else None
            copies.fill(name, first, part["rows"], number % comm.Get_size(), data)
        first += part["rows"]
    return copies.finish()
