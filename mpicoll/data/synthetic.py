"""Synthetic samples, computed from their numbers, so that a set of any size needs no memory and no file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpicoll.train.config import Synthetic

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NOISE_MEAN = 4 * 65535 / 2
_NOISE_DEVIATION = np.sqrt(4 * (65536**2 - 1) / 12)
_DISTANCE = 4.0
"""Typical distance between two centres in standard deviations: few per cent of samples lie nearer to a wrong centre."""


def mix(keys: np.ndarray) -> np.ndarray:
    """Return 64 well-mixed bits for each key: the finaliser of SplitMix64.

    References
    ----------
    G. L. Steele, D. Lea, C. H. Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
    """
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def _noise(bits: np.ndarray) -> np.ndarray:
    """Return numbers that are close to normal with variance 1, from 64 bits each; (rows, columns)."""
    noise = bits.view(np.uint16).reshape(*bits.shape, 4).sum(axis=2, dtype=np.int64)
    return (noise - _NOISE_MEAN) / _NOISE_DEVIATION


class SyntheticSamples:
    """Clusters of samples around a centre for each class; a :class:`~mpicoll.data.datasets.Fillable`.

    Sample ``i`` depends on the seed and ``first + i`` alone. Its label comes from the mixed bits of that number. A
    feature is that of the label's centre plus noise, a scaled sum of four 16-bit numbers, which is close to normal with
    variance 1.
    """

    def __init__(self, spec: Synthetic, seed: int, first: int, count: int, centres: np.ndarray) -> None:
        self.count = count
        self._first = first
        self._key = mix(np.array([seed], np.uint64) + _GOLDEN)
        self._centres = centres
        self._columns = np.arange(1, spec.features + 1, dtype=np.uint64) * _GOLDEN

    @classmethod
    def maker(cls, spec: Synthetic, seed: int) -> Callable[[int, int], SyntheticSamples]:
        """Return a function of `first` and `count` that returns sets of samples with the same centres."""
        centres = np.random.default_rng((seed, spec.classes)).standard_normal((spec.classes, spec.features))
        centres *= _DISTANCE / np.sqrt(2 * spec.features)
        return lambda first, count: cls(spec, seed, first, count, centres)

    def fill(self, indices: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        """See :class:`mpicoll.data.datasets.Fillable`."""
        keys = self.keys(indices)
        y[:] = keys % np.uint64(len(self._centres))
        bits = mix(keys[:, None] + self._columns)
        x[:] = self._centres[y] + _noise(bits)

    def keys(self, indices: np.ndarray) -> np.ndarray:
        """Return 64 bits for each of the samples `indices`."""
        return mix(self._key + (indices.astype(np.uint64) + np.uint64(self._first)) * _GOLDEN)


class SyntheticTargets:
    """Samples of a regression: a linear function of the features, with noise; a `Fillable`.

    Features are those of :class:`SyntheticSamples` with as many classes as there are targets. The weights of each
    target are normal with variance 1 / features; the noise has variance 0.01.
    """

    def __init__(self, samples: SyntheticSamples, weights: np.ndarray) -> None:
        self.count, self._samples, self._weights = samples.count, samples, weights

    @classmethod
    def maker(cls, spec: Synthetic, seed: int) -> Callable[[int, int], SyntheticTargets]:
        """Return a function of `first` and `count` that returns sets of samples with the same weights."""
        make = SyntheticSamples.maker(spec, seed)
        weights = np.random.default_rng((seed, spec.classes, 1)).standard_normal((spec.features, spec.classes))
        weights /= np.sqrt(spec.features)
        return lambda first, count: cls(make(first, count), weights)

    def fill(self, indices: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
        """See :class:`mpicoll.data.datasets.Fillable`."""
        labels = np.empty(len(indices), np.int64)
        self._samples.fill(indices, x, labels)
        bits = mix(self._samples.keys(indices)[:, None] + np.arange(1, y.shape[1] + 1, dtype=np.uint64))
        y[...] = x @ self._weights + 0.1 * _noise(bits)
