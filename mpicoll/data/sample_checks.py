"""Checks of arrays of samples: shapes, element types and values of features, labels and targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from mpicoll.errors import DataError

_MAX_CLASSES = 65536


def check_arrays(
    arrays: dict[str, np.ndarray], *, reals: bool, files: Mapping[str, str] | None = None
) -> dict[str, np.ndarray]:
    """Check that features and labels fit together; return them with labels of shape ``(n,)``.

    Parameters
    ----------
    arrays
        ``x`` and ``y``, or ``x_train``, ``y_train``, ``x_test`` and ``y_test``.
    reals
        True for targets of a regression in place of labels: numbers, returned in shape ``(n, targets)``.
    files
        Option and file that an array is of, by the array's name; messages begin with it.

    Raises
    ------
    DataError
        If they do not; the message names the array.
    """
    for x_name, y_name in (("x", "y"), ("x_train", "y_train"), ("x_test", "y_test")):
        if x_name in arrays:
            check = _check_targets if reals else _check_labels
            with naming_source((files or {}).get(x_name)):
                _check_features(arrays[x_name], x_name)
            with naming_source((files or {}).get(y_name)):
                arrays[y_name] = check(arrays[y_name], len(arrays[x_name]), y_name)
    for letter in "xy":
        train, test = f"{letter}_train", f"{letter}_test"
        if test in arrays and arrays[train].shape[1:] != arrays[test].shape[1:]:
            with naming_source((files or {}).get(test)):
                raise DataError(f"{test}: {arrays[test].shape} does not fit {train} {arrays[train].shape}")
    return arrays


@contextmanager
def naming_source(source: str | None, separator: str = ": ") -> Iterator[None]:
    """Context whose DataErrors begin with `source`, the option or file that is at fault; None for no such beginning."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error) if source is None else f"{source}{separator}{error}") from None


def _check_features(x: np.ndarray, name: str) -> None:
    if not 2 <= x.ndim <= 4 or 0 in x.shape:
        raise DataError(f"{name}: shape {x.shape} is not (samples, features) or (samples, height, width[, channels])")


def _check_labels(y: np.ndarray, count: int, name: str) -> np.ndarray:
    if y.shape not in ((count,), (count, 1)):
        raise DataError(f"{name}: shape {y.shape} does not give one label to each of {count} samples")
    if y.dtype.kind not in "iu":
        raise DataError(f"{name}: labels are integers, not {y.dtype}; --task regression takes other numbers")
    y = y.reshape(-1)
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= _MAX_CLASSES:
        wrong = low if low < 0 else high
        raise DataError(f"{name}: label {wrong} is not in 0..{_MAX_CLASSES - 1}")
    return y


def _check_targets(y: np.ndarray, count: int, name: str) -> np.ndarray:
    if y.ndim not in (1, 2) or len(y) != count or 0 in y.shape:
        raise DataError(f"{name}: shape {y.shape} is not ({count},) or ({count}, targets), for {count} samples")
    if y.dtype.kind not in "iuf":
        raise DataError(f"{name}: targets are real numbers, not {y.dtype}")
    if not np.isfinite(y).all():
        raise DataError(f"{name}: a target is not finite")
    return y.reshape(count, -1)
