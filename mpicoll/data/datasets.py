"""Data sets: loading on all ranks, and batches of features and labels."""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from mpicoll.consensus import all_succeed, share
from mpicoll.data import sample_files
from mpicoll.data.distributed_arrays import DistributedArrays
from mpicoll.data.sample_checks import check_arrays, naming_source
from mpicoll.data.sample_parts import load_parts
from mpicoll.data.synthetic import SyntheticSamples, SyntheticTargets
from mpicoll.data.text_samples import BYTES, load_text
from mpicoll.data.user_paths import expanded
from mpicoll.errors import DataError, named_ranks
from mpicoll.gradients import differing_ranks
from mpicoll.quantities import counted
from mpicoll.train.config import Synthetic, TrainConfig, is_parts, is_text, parse_synthetic

_SPLIT = 0x5F3759DF
"""Part of the split's seed, which makes its random stream differ from those of the epochs."""

ImageShape = tuple[int, int, int]


class Samples(Protocol):
    """Interface of a set of samples, numbered ``0 .. count - 1``.

    Attributes
    ----------
    count
        Number of samples.
    """

    count: int

    def batch(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Return features and labels of the samples `indices`, a row for each; valid until the next call."""


class StoredSamples:
    """Samples that a source writes to reused memory; see :class:`Samples`.

    Parameters
    ----------
    source
        The samples.
    features
        Number of features of a sample.
    dtype
        Element type of the features, and of targets: float32 or float64.
    targets
        Number of targets of a sample; 0 for a label, which is of int64.
    """

    def __init__(self, source: Fillable, features: int, dtype: str, targets: int = 0) -> None:
        self._source, self.count, self._targets = source, source.count, targets
        self._x = np.empty((0, features), dtype)
        self._y = np.empty((0, targets), dtype) if targets else np.empty(0, np.int64)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See :class:`Samples`."""
        if len(indices) > len(self._y):
            self._x = np.empty((len(indices), self._x.shape[1]), self._x.dtype)
            self._y = np.empty((len(indices), *self._y.shape[1:]), self._y.dtype)
        x, y = self._x[: len(indices)], self._y[: len(indices)]
        self._source.fill(indices, x, y)
        return x, y

    def another(self) -> StoredSamples:
        """Return the same samples with memory of their own, so that batches of both are valid at a time."""
        return self.seen_through(lambda source: source)

    def seen_through(self, view: Callable[[Fillable], Fillable]) -> StoredSamples:
        """Return the samples of another source, which `view` makes of this one's, with memory of their own."""
        return StoredSamples(view(self._source), self._x.shape[1], self._x.dtype.name, self._targets)


class Fillable(Protocol):
    """Source of samples that writes them to given memory."""

    count: int

    def fill(self, indices: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        """Write the features and labels of the samples `indices`.

        Parameters
        ----------
        indices : (rows,) of an integer type
        x : (rows, features) of float32 or float64, overwritten
        y : (rows,) of int64, or (rows, targets) of the features' dtype, overwritten
        """


class ArraySamples:
    """Source of samples in arrays, in memory or mapped, which are converted and scaled when they are used.

    Parameters
    ----------
    x : (count, ...) of numbers
        Features.
    y : (count,) of integers, or (count, targets) of numbers
        Labels, or targets of a regression.
    scale
        Factor on the features.
    rows
        Indices of the rows that belong to this set; None for all.
    """

    def __init__(self, x: np.ndarray, y: np.ndarray, scale: float, rows: np.ndarray | None = None) -> None:
        self._x, self._y, self._scale, self._rows = x, y, scale, rows
        self.count = len(x) if rows is None else len(rows)

    def fill(self, indices: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        """See :class:`Fillable`."""
        rows = indices if self._rows is None else self._rows[indices]
        np.multiply(self._x[rows].reshape(x.shape), x.dtype.type(self._scale), out=x, casting="unsafe")
        y[...] = self._y[rows]


@dataclass(frozen=True)
class Dataset:
    """Training and test samples.

    Attributes
    ----------
    feature_count, class_count
        Number of features of a sample, and number of classes, or of targets of a regression; 0 for user-defined data.
    image_shape
        Height, width and channels of a sample; None if samples are not images.
    """

    train: Samples
    test: Samples
    feature_count: int
    class_count: int
    image_shape: ImageShape | None


def load(config: TrainConfig, comm: MPI.Intracomm) -> Dataset:
    """Load the data set that `config` names. Collective over `comm`.

    Rank 0 reads data sets of one file and broadcasts them; the ranks divide several files among them. Every rank maps a
    .npy file. Synthetic samples are computed when they are used.

    Raises
    ------
    DataError
        On every rank, if one of them cannot read the data, or they are not valid.
    """
    if config.dataset.startswith("synthetic:"):
        return _synthetic(parse_synthetic(config.dataset), config)
    if is_text(config.dataset):
        parts = load_text(config, comm)
        return Dataset(*parts, config.context, BYTES, None)
    if is_parts(config.dataset) or is_parts(config.labels or ""):
        arrays = load_parts(config, comm)
        scale = _scale(arrays["x"])
    elif config.labels is not None:
        arrays = _map_everywhere(config, comm)
        scale = _scale(arrays["x"])
    else:
        arrays, scale = _read_and_broadcast(config, comm)
    return _from_arrays(arrays, scale, config)


def check_same_data(comm: MPI.Intracomm, facts: object) -> None:
    """Raise if data or models differ between ranks. Collective.

    Parameters
    ----------
    facts
        Properties that must be equal; their ``repr`` is compared.

    Raises
    ------
    DataError
        On every rank, if they differ.
    """
    if differing := differing_ranks(comm, hashlib.sha256(repr(facts).encode()).digest()):
        compared = "samples, their number, or shapes of parameters"
        raise DataError(f"{named_ranks(differing)}: {compared} differ from those of other ranks")


# ---- reading --------------------------------------------------------------------------------------------------------


def _read(dataset: str, *, reals: bool) -> tuple[dict[str, np.ndarray], float]:
    """Read a data set that fits into memory; return its checked arrays and the features' scale."""
    if dataset == "digits":
        return check_arrays(_read_digits(), reals=reals), 1 / 16
    path = expanded(dataset)
    if dataset.endswith(".npz"):
        path = _existing("--dataset", dataset)
        with naming_source("--dataset", " "):
            arrays = sample_files.read_npz(path)
    elif path.is_dir():
        with naming_source("--dataset", " "):
            arrays = sample_files.read_idx_folder(path)
    else:
        kinds = (
            "digits, synthetic:N, synthetic_text, text:FILE, a folder of IDX files, "
            "nor a file or a pattern of files .npz, .npy, .csv or .parquet"
        )
        raise DataError(f"--dataset {dataset}: neither {kinds}")
    arrays = check_arrays(arrays, reals=reals, files=dict.fromkeys(arrays, f"--dataset {dataset}"))
    return arrays, _scale(next(iter(arrays.values())))


def _read_digits() -> dict[str, np.ndarray]:
    """Read scikit-learn's digits, from the file in its package: importing scikit-learn takes far longer."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("--dataset digits needs scikit-learn: pip install 'mpicoll[train]', or use synthetic:2000")
    path = Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if path.is_file():
        table = sample_files.read_csv_rows(path, 65)
    else:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        table = np.column_stack([bunch.data, bunch.target]).astype(np.uint8)
    return {"x": table[:, :64].reshape(-1, 8, 8).copy(), "y": table[:, 64].copy()}


def _scale(x: np.ndarray) -> float:
    return 1 / 255 if x.dtype == np.uint8 else 1.0


def _read_and_broadcast(config: TrainConfig, comm: MPI.Intracomm) -> tuple[dict[str, np.ndarray], float]:
    here = comm.Get_rank() == 0
    found = all_succeed(comm, lambda: _read(config.dataset, reals=_reals(config)) if here else None)
    arrays, scale = found if here else ({}, 1.0)
    record = {"scale": scale, "arrays": {name: [array.dtype.str, array.shape] for name, array in arrays.items()}}
    record = share(comm, record if here else None)
    wanted = {name: (dtype, tuple(shape)) for name, (dtype, shape) in record["arrays"].items()}
    copies = DistributedArrays(wanted, comm, shared=config.share_data)
    for name, (_, shape) in wanted.items():
        copies.fill(name, 0, shape[0], 0, arrays.pop(name, None))
    return copies.finish(), float(record["scale"])


def _existing(option: str, file: str) -> Path:
    """Return the path of a file; raise DataError with the option that names it if there is none."""
    path = expanded(file)
    if not path.exists():
        raise DataError(f"{option} {file}: there is no such file")
    return path


def _map_everywhere(config: TrainConfig, comm: MPI.Intracomm) -> dict[str, np.ndarray]:
    """Map features and labels on every rank; check that shapes, element types and labels are equal on all."""

    def read() -> dict[str, np.ndarray]:
        named = {"x": ("--dataset", config.dataset), "y": ("--labels", config.labels or "")}
        arrays = {}
        for name, (option, file) in named.items():
            path = _existing(option, file)
            with naming_source(option, " "):
                arrays[name] = sample_files.map_npy(path)
        files = {name: " ".join(words) for name, words in named.items()}
        return check_arrays(arrays, reals=_reals(config), files=files)

    arrays: dict[str, np.ndarray] = all_succeed(comm, read)
    facts = repr([(a.shape, a.dtype.str) for a in arrays.values()]).encode() + arrays["y"].tobytes()
    if differing := differing_ranks(comm, hashlib.sha256(facts).digest()):
        raise DataError(f"{config.dataset}: shapes or labels on {named_ranks(differing)} differ from the others'")
    return arrays


# ---- assembling -----------------------------------------------------------------------------------------------------


def _from_arrays(arrays: dict[str, np.ndarray], scale: float, config: TrainConfig) -> Dataset:
    targets = next(array for name, array in arrays.items() if name.startswith("y"))
    outputs = targets.shape[1] if targets.ndim > 1 else 0
    classes = 0 if outputs else 1 + max(int(array.max()) for name, array in arrays.items() if name.startswith("y"))
    train: Fillable
    test: Fillable
    if "x" in arrays:
        x, y = arrays["x"], arrays["y"]
        held_out = _test_count(len(x), config)
        order = np.random.default_rng((config.seed, _SPLIT)).permutation(len(x))
        train = ArraySamples(x, y, scale, np.sort(order[held_out:]))
        test = ArraySamples(x, y, scale, np.sort(order[:held_out]))
    else:
        x = arrays["x_train"]
        train = ArraySamples(x, arrays["y_train"], scale)
        test = ArraySamples(arrays["x_test"], arrays["y_test"], scale)
    kinds = {"targets": outputs} if outputs else {"classes": max(2, classes)}
    return stored((train, test), math.prod(x.shape[1:]), config.dtype, _image_shape(x.shape[1:]), **kinds)


def stored(
    parts: tuple[Fillable, Fillable],
    features: int,
    dtype: str,
    image_shape: ImageShape | None = None,
    *,
    classes: int = 0,
    targets: int = 0,
) -> Dataset:
    """Return a data set of training and test samples with features of `dtype`, and with either classes or targets."""
    train, test = (StoredSamples(part, features, dtype, targets) for part in parts)
    return Dataset(train, test, features, classes or targets, image_shape)


def _test_count(count: int, config: TrainConfig) -> int:
    held_out = round(count * config.test_fraction)
    if held_out >= count:
        raise DataError(
            f"--test-fraction {config.test_fraction:g} of {counted(count, 'sample')} leaves none to train on"
        )
    return held_out


def _image_shape(shape: tuple[int, ...]) -> ImageShape | None:
    """Return height, width, channels; a flat sample is a square image if its length is a square."""
    if len(shape) == 1:
        side = math.isqrt(shape[0])
        return (side, side, 1) if side * side == shape[0] else None
    height, width, *channels = shape
    return height, width, channels[0] if channels else 1


def _synthetic(spec: Synthetic, config: TrainConfig) -> Dataset:
    held_out = _test_count(spec.count, config)
    make: Any = (SyntheticTargets if _reals(config) else SyntheticSamples).maker(spec, config.seed)
    parts = make(0, spec.count - held_out), make(spec.count - held_out, held_out)
    kind = "targets" if _reals(config) else "classes"
    return stored(parts, spec.features, config.dtype, _image_shape((spec.features,)), **{kind: spec.classes})


def _reals(config: TrainConfig) -> bool:
    """Return True if targets are real numbers."""
    return config.task == "regression"
