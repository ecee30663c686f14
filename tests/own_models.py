"""A model and a data set of the user's own, for tests of the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicoll.train import ArrayDataset

FEATURES, CLASSES = 12, 5


class Softmax:
    """Logistic regression in NumPy."""

    def __init__(self, dtype: str = "float32") -> None:
        self.dtype = dtype

    def initial(self, seed: int) -> Sequence[np.ndarray]:
        random = np.random.default_rng(seed)
        return [0.1 * random.standard_normal((FEATURES, CLASSES)).astype(self.dtype), np.zeros(CLASSES, self.dtype)]

    def forward(self, parameters: Sequence[np.ndarray], x: Any, y: Any) -> tuple[float, float, Any]:
        weights, bias = parameters
        logits = x @ weights + bias
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        hits = int((p.argmax(axis=1) == y).sum())
        return float(-np.log(p[np.arange(len(y)), y]).sum()), hits, (x, y, p)

    def backward(self, parameters: Sequence[np.ndarray], saved: Any) -> Sequence[np.ndarray]:
        x, y, p = saved
        delta = p.copy()
        delta[np.arange(len(y)), y] -= 1
        return x.T @ delta, delta.sum(axis=0)


def samples(count: int, dtype: str = "float32", seed: int = 3) -> ArrayDataset:
    """Return clouds around one centre a class."""
    centres = 1.5 * np.random.default_rng(1).standard_normal((CLASSES, FEATURES))
    random = np.random.default_rng(seed)
    y = random.integers(0, CLASSES, count)
    return ArrayDataset((centres[y] + random.standard_normal((count, FEATURES))).astype(dtype), y)
