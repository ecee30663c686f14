"""Tasks: the loss of a model's outputs, its derivative, and the number of correct predictions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

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
    """
    loss, hits = softmax_cross_entropy(logits, labels)
    return loss, hits


def regression(outputs: np.ndarray, targets: np.ndarray) -> tuple[float, int]:
    """Return the mean of the squared differences of each sample, summed over the samples; and 0 hits.

    Parameters
    ----------
    outputs : (rows, targets) of float32 or float64, overwritten with the gradient
    targets : (rows, targets), or (rows,) for one target
    """
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
    """
    positions = logits.shape[1]
    loss, _ = softmax_cross_entropy(logits.reshape(-1, logits.shape[2]), following.reshape(-1))
    logits *= logits.dtype.type(1 / positions)
    return loss / positions, 0


LOSSES: dict[str, LossFunction] = {
    "classification": classification,
    "regression": regression,
    "language_modeling": language_modeling,
}
"""Loss of each task of ``--task``."""
