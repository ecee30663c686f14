"""Subsets of stored samples, and samples of which some have no label."""

from __future__ import annotations

import numpy as np

from mpicoll.data.datasets import Fillable, StoredSamples

UNLABELED = -1
"""Label of a sample without one."""


class _Rows:
    """Some samples of a source; a :class:`~mpicoll.data.datasets.Fillable`."""

    def __init__(self, source: Fillable, rows: np.ndarray) -> None:
        self._source, self._rows, self.count = source, rows, len(rows)

    def fill(self, indices: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        self._source.fill(self._rows[indices], x, y)


class _PartlyLabeled:
    """Samples of a source, some of them without their labels; a :class:`~mpicoll.data.datasets.Fillable`."""

    def __init__(self, source: Fillable, rows: np.ndarray) -> None:
        self._source, self.count = source, source.count
        self._labeled = np.zeros(source.count, bool)
        self._labeled[rows] = True

    def fill(self, indices: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        self._source.fill(indices, x, y)
        y[~self._labeled[indices]] = UNLABELED


def subset(samples: StoredSamples, rows: np.ndarray) -> StoredSamples:
    """Return the samples with the numbers `rows`, an array of integers, numbered in this order."""
    return samples.seen_through(lambda source: _Rows(source, rows))


def labeled_only(samples: StoredSamples, rows: np.ndarray) -> StoredSamples:
    """Return all samples; those whose numbers are not among `rows` have the label :data:`UNLABELED`."""
    return samples.seen_through(lambda source: _PartlyLabeled(source, rows))
