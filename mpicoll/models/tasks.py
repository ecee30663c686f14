"""Tasks: the loss of a model's outputs, its derivative, and the number of correct predictions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpicoll.errors import DataError
from mpicoll.kernels.network import softmax_cross_entropy

LossFunction = Callable[[np.ndarray, np.ndarray], tuple[float, int]]
"""Function of outputs and targets that returns the loss and the hits, each summed over the samples, and replaces the
outputs with the sum's gradient."""


def classification(logits: np.ndarray, labels: np.ndarray) -> tuple[float, int]:
    """Return the summed cross entropy and the hits: :func:`~mpicoll.kernels.network.softmax_cross_entropy`.

    Parameters
    ----------
    logits : (rows, classes) of float32 or float64, overwritten with the gradient
    labels : (rows,) of int64

    Raises
    ------
    mpicoll.errors.DataError
        If the shapes do not fit each other, or a label is not the number of an output.
    """
    _check_labels("classification", labels, logits, "(rows, classes)")
    loss, hits = softmax_cross_entropy(logits, labels)
    return loss, hits


def regression(outputs: np.ndarray, targets: np.ndarray) -> tuple[float, int]:
    """Return the mean of the squared differences of each sample, summed over the samples; and 0 hits.

    Parameters
    ----------
    outputs : (rows, targets) of float32 or float64, overwritten with the gradient
    targets : (rows, targets), or (rows,) for one target

    Raises
    ------
    mpicoll.errors.DataError
        If the shapes do not fit each other.
    """
    if outputs.ndim < 2 or targets.shape[:1] != outputs.shape[:1] or targets.size != outputs.size:
        raise DataError(
            f"regression: targets of shape {targets.shape} do not fit outputs of shape {outputs.shape}; "
            "both are (rows, targets)"
        )
    outputs -= targets.reshape(outputs.shape)
    width = outputs.shape[1]
    flat = outputs.reshape(-1)
    loss = float(np.einsum("i,i->", flat, flat, dtype=np.float64)) / width
    outputs *= outputs.dtype.type(2 / width)
    return loss, 0


def language_modeling(logits: np.ndarray, following: np.ndarray) -> tuple[float, int]:
    """Return the mean cross entropy over each sample's positions in nats, summed over the samples; and 0 hits.

    Parameters
    ----------
    logits : (rows, positions, 256) of float32 or float64, overwritten with the gradient
    following : (rows, positions) of int64
        The byte after each position.

    Raises
    ------
    mpicoll.errors.DataError
        If the shapes do not fit each other, or a byte is not the number of an output.
    """
    _check_labels("language_modeling", following, logits, "(rows, positions, 256)")
    positions = logits.shape[1]
    loss, _ = softmax_cross_entropy(logits.reshape(-1, logits.shape[2]), following.reshape(-1))
    logits *= logits.dtype.type(1 / positions)
    return loss / positions, 0


def _check_labels(task: str, labels: np.ndarray, logits: np.ndarray, shape: str) -> None:
    """Raise DataError unless labels are whole numbers of outputs: the kernel writes where they point.

    `shape` is that of `logits`, as messages name it; labels have all of it but the last.
    """
    if logits.ndim != shape.count(",") + 1 or labels.shape != logits.shape[:-1]:
        raise DataError(
            f"{task}: labels of shape {labels.shape} do not fit outputs of shape {logits.shape}; "
            f"outputs are {shape}, labels the same without the last"
        )
    outputs = logits.shape[-1]
    if labels.dtype.kind not in "iu":
        raise DataError(f"{task}: labels are {labels.dtype}, not whole numbers")
    if labels.size and (labels.min() < 0 or labels.max() >= outputs):
        wrong = labels.min() if labels.min() < 0 else labels.max()
        raise DataError(f"{task}: label {wrong} is not one of the model's outputs, 0 to {outputs - 1}")


LOSSES: dict[str, LossFunction] = {
    "classification": classification,
    "regression": regression,
    "language_modeling": language_modeling,
}
"""Loss of each task of ``--task``."""
