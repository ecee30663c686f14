"""Data sets: loading on all ranks, and batches of features and labels."""

from __future__ import annotations

import hashlib
import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from mpicoll.consensus import all_succeed, share
from mpicoll.data import sample_files
from mpicoll.data.synthetic import SyntheticSamples
from mpicoll.errors import DataError
from mpicoll.gradients import differing_ranks
from mpicoll.train.config import Synthetic, TrainConfig, parse_synthetic

_MAX_CLASSES = 65536
_BCAST_BYTES = 1 << 28
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
        Element type of the features, float32 or float64.
    """

    def __init__(self, source: Fillable, features: int, dtype: str) -> None:
        self._source, self.count = source, source.count
        self._x, self._y = np.empty((0, features), dtype), np.empty(0, np.int64)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See :class:`Samples`."""
        if len(indices) > len(self._y):
            self._x = np.empty((len(indices), self._x.shape[1]), self._x.dtype)
            self._y = np.empty(len(indices), np.int64)
        x, y = self._x[: len(indices)], self._y[: len(indices)]
        self._source.fill(indices, x, y)
        return x, y


class Fillable(Protocol):
    """Source of samples that writes them to given memory."""

    count: int

    def fill(self, indices: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        """Write the features and labels of the samples `indices`.

        Parameters
        ----------
        indices : (rows,) of an integer type
        x : (rows, features) of float32 or float64, overwritten
        y : (rows,) of int64, overwritten
        """


class ArraySamples:
    """Source of samples in arrays, in memory or mapped, which are converted and scaled when they are used.

    Parameters
    ----------
    x : (count, ...) of numbers
        Features.
    y : (count,) of integers
        Labels.
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
        y[:] = self._y[rows]


@dataclass(frozen=True)
class Dataset:
    """Training and test samples.

    Attributes
    ----------
    feature_count, class_count
        Number of features of a sample, and number of classes; 0 for user-defined data.
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

    Rank 0 reads data sets that are held in memory and broadcasts them. Every rank maps a .npy file. Synthetic samples
    are computed when they are used.

    Raises
    ------
    DataError
        On every rank, if one of them cannot read the data, or they are not valid.
    """
    if config.dataset.startswith("synthetic:"):
        return _synthetic(parse_synthetic(config.dataset), config)
    if config.labels is not None:
        arrays = _map_everywhere(config, comm)
        scale = _scale(arrays["x"])
    else:
        arrays, scale = _read_and_broadcast(config.dataset, comm)
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
        ranks = ", ".join(map(str, differing))
        raise DataError(
            f"rank {ranks}: samples, their number, or shapes of parameters differ from those of other ranks"
        )


# ---- reading --------------------------------------------------------------------------------------------------------


def _read(dataset: str) -> tuple[dict[str, np.ndarray], float]:
    """Read a data set that fits into memory; return its checked arrays and the features' scale."""
    if dataset == "digits":
        return _check_arrays(_read_digits()), 1 / 16
    path = Path(dataset).expanduser()
    if dataset.endswith(".npz"):
        arrays = sample_files.read_npz(path)
    elif path.is_dir():
        arrays = sample_files.read_idx_folder(path)
    else:
        raise DataError(f"--dataset {dataset}: neither digits, synthetic:N, a folder, nor a file .npz or .npy")
    arrays = _check_arrays(arrays)
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


def _check_arrays(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Check that features and labels fit together; return them with labels of shape ``(n,)``."""
    for x_name, y_name in (("x", "y"), ("x_train", "y_train"), ("x_test", "y_test")):
        if x_name in arrays:
            arrays[y_name] = _check_pair(arrays[x_name], arrays[y_name], x_name, y_name)
    if "x_test" in arrays and arrays["x_train"].shape[1:] != arrays["x_test"].shape[1:]:
        raise DataError(f"x_test: {arrays['x_test'].shape} does not fit x_train {arrays['x_train'].shape}")
    return arrays


def _check_pair(x: np.ndarray, y: np.ndarray, x_name: str, y_name: str) -> np.ndarray:
    if not 2 <= x.ndim <= 4 or 0 in x.shape:
        raise DataError(f"{x_name}: shape {x.shape} is not (samples, features) or (samples, height, width[, channels])")
    if y.shape not in ((len(x),), (len(x), 1)):
        raise DataError(f"{y_name}: shape {y.shape} does not give one label to each of {len(x)} samples")
    if y.dtype.kind not in "iu":
        raise DataError(f"{y_name}: labels are integers, not {y.dtype}")
    y = y.reshape(-1)
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= _MAX_CLASSES:
        wrong = low if low < 0 else high
        raise DataError(f"{y_name}: label {wrong} is not in 0..{_MAX_CLASSES - 1}")
    return y


def _read_and_broadcast(dataset: str, comm: MPI.Intracomm) -> tuple[dict[str, np.ndarray], float]:
    arrays: dict[str, np.ndarray] = {}
    scale = 1.0
    found = all_succeed(comm, lambda: _read(dataset) if comm.Get_rank() == 0 else None)
    record = None
    if found is not None:
        arrays, scale = found
        record = {"scale": scale, "arrays": {name: [a.dtype.str, a.shape] for name, a in arrays.items()}}
    record = share(comm, record)
    for name, (dtype, shape) in record["arrays"].items():
        array = np.ascontiguousarray(arrays[name]) if found is not None else np.empty(tuple(shape), np.dtype(dtype))
        arrays[name] = array
        flat = array.reshape(-1).view(np.uint8)
        for start in range(0, len(flat), _BCAST_BYTES):
            comm.Bcast(flat[start : start + _BCAST_BYTES])
    return arrays, float(record["scale"])


def _map_everywhere(config: TrainConfig, comm: MPI.Intracomm) -> dict[str, np.ndarray]:
    """Map features and labels on every rank; check that shapes, element types and labels are equal on all."""

    def read() -> dict[str, np.ndarray]:
        x = sample_files.map_npy(Path(config.dataset).expanduser())
        y = sample_files.map_npy(Path(config.labels or "").expanduser())
        return _check_arrays({"x": x, "y": y})

    arrays: dict[str, np.ndarray] = all_succeed(comm, read)
    facts = repr([(a.shape, a.dtype.str) for a in arrays.values()]).encode() + arrays["y"].tobytes()
    if differing := differing_ranks(comm, hashlib.sha256(facts).digest()):
        ranks = ", ".join(map(str, differing))
        raise DataError(f"{config.dataset}: rank {ranks} has other shapes or labels than the other ranks")
    return arrays


# ---- assembling -----------------------------------------------------------------------------------------------------


def _from_arrays(arrays: dict[str, np.ndarray], scale: float, config: TrainConfig) -> Dataset:
    classes = 1 + max(int(array.max()) for name, array in arrays.items() if name.startswith("y"))
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
    return stored((train, test), math.prod(x.shape[1:]), max(2, classes), config.dtype, _image_shape(x.shape[1:]))


def stored(
    parts: tuple[Fillable, Fillable], features: int, classes: int, dtype: str, image_shape: ImageShape | None = None
) -> Dataset:
    """Return a data set of training and test samples with features of `dtype`."""
    train, test = (StoredSamples(part, features, dtype) for part in parts)
    return Dataset(train, test, features, classes, image_shape)


def _test_count(count: int, config: TrainConfig) -> int:
    held_out = round(count * config.test_fraction)
    if held_out >= count:
        raise DataError(f"--test-fraction {config.test_fraction:g} of {count} samples leaves none to train on")
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
    make: Any = SyntheticSamples.maker(spec, config.seed)
    parts = make(0, spec.count - held_out), make(spec.count - held_out, held_out)
    return stored(parts, spec.features, spec.classes, config.dtype, _image_shape((spec.features,)))
