"""Random sparsifiers, which are unbiased."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpicoll.compression.aggregatable import Aggregatable, AggregationRound, AggregationSession
from mpicoll.compression.base import Key
from mpicoll.compression.compressor_specs import enter
from mpicoll.compression.sparsifiers import CompiledSparsifier, Sparsifier, check_density, entries_for
from mpicoll.kernels.codecs import sampling, sparse_codec, sparse_vectors
from mpicoll.kernels.codecs.codec_kernels import settings_of
from mpicoll.kernels.codecs.sparse_codec import Selector

_UNLIKELY = math.log(1e18)
_DENSITY = 0.01


@enter("randomk")
@dataclass(frozen=True)
class RandomK(Aggregatable, Sparsifier):
    """A fixed number of random elements, the same positions on every rank: one of each of k runs of equal length.

    ``density`` is the fraction of elements sent, rounded up; ``k``, if it is not 0, their number instead. With
    ``scale=1`` each element is multiplied by the length of its run, about 1/density, which makes it unbiased; the
    expected squared error is (count / k - 1) |x|^2 if k divides the count. With ``scale=0`` it is biased, to be used
    with error feedback. A product beyond the range of float32 is inf. NaN and inf arrive if they are drawn.

    Positions depend on the key's seed, step and first element, and not on its rank: only values are sent in an
    allreduce, and they are added as dense vectors are.
    """

    density: float = 0.01
    k: int = 0
    scale: int = 1

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.k < 0:
            raise ValueError(f"k: {self.k} is negative")
        if self.scale not in (0, 1):
            raise ValueError(f"scale: {self.scale} is not 0 or 1")

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """True if the result is unbiased."""
        return bool(self.scale)

    @property
    def needs_feedback(self) -> bool:  # type: ignore[override]
        """True if error feedback is needed, which is where the result is biased."""
        return not self.scale

    def capacity(self, count: int) -> int:
        """Return the number of elements sent."""
        return entries_for(count, self.density, self.k)

    def positions(self, count: int, key: Key) -> np.ndarray:
        """Return the indices of the elements sent, uint32 of shape (capacity(count),), increasing."""
        indices = np.empty(self.capacity(count), np.uint32)
        self._draw(count, key, indices)
        return indices

    def select(self, x: np.ndarray, key: Key, indices: np.ndarray, values: np.ndarray) -> int:
        """Write what is drawn."""
        self._draw(x.size, key, indices)
        sparse_vectors.gather(x, indices, values)
        if self.scale:
            sampling.amplify(x.size, values)
        return indices.size

    @staticmethod
    def _draw(count: int, key: Key, indices: np.ndarray) -> None:
        if count:
            sampling.positions(count, key._replace(rank=0).words(), key.first, indices)

    def rounds(self, count: int, size: int) -> tuple[AggregationRound, ...]:
        """Return the values."""
        return (AggregationRound(self.capacity(count), np.dtype(np.float32)),)

    def session(self, count: int, size: int, vectors: Sequence[np.ndarray]) -> AggregationSession:
        """Return one rank's part."""
        return _Drawn(self, vectors)


class _Drawn(AggregationSession):
    def __init__(self, settings: RandomK, vectors: Sequence[np.ndarray]) -> None:
        super().__init__(vectors)
        self._settings, self._values = settings, vectors[0]
        self._indices = np.empty(self._values.size, np.uint32)

    def fill(self, number: int, x: np.ndarray) -> None:
        self._settings.select(x, self.key, self._indices, self._values)

    def own(self, out: np.ndarray) -> None:
        self.finish(out)

    def finish(self, y: np.ndarray) -> None:
        y[:] = 0
        sparse_vectors.scatter(self._indices, self._values, y)


@enter("wangni")
@dataclass(frozen=True)
class Wangni(CompiledSparsifier):
    """Element i with probability p_i = min(rate |x_i|, 1), sent as x_i / p_i: unbiased, of least variance.

    With ``density`` about this fraction of the elements is sent, fewer if fewer are not zero. With ``variance``, a
    number above 1, the second moment (the mean squared norm of what is sent) is at most ``variance`` times the squared
    norm of the vector, with the fewest elements that are possible on average: at most ``count / variance``, and far
    fewer if elements are of different sizes. (Wangni et al., "Gradient sparsification for communication-efficient
    distributed optimization", NeurIPS 2018: ``density`` by algorithm 3, ``variance`` by algorithm 2, without sorting.)

    A quotient beyond the range of float32 is inf. NaN and inf are always sent, unchanged; if they exceed the capacity,
    the first of them.

    The number of elements drawn varies. It exceeds the capacity, which depends on the count alone, with a probability
    below 1e-18 (Bernstein's inequality); the elements are then drawn again, which biases the mean by a fraction of
    about 1e-18. A payload with more entries than pay is the whole vector.
    """

    density: float = _DENSITY
    variance: float = 0.0
    unbiased: ClassVar[bool] = True
    fixed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.variance and not 1 < self.variance < math.inf:
            raise ValueError(f"variance: {self.variance} is not above 1")
        if self.variance and self.density != _DENSITY:
            raise ValueError(f"density: {self.density} and variance={self.variance} cannot both be given")

    def _most_on_average(self, count: int) -> int:
        # Probabilities of 1 / variance for all elements have that variance, so that the best ones add up to no more.
        return entries_for(count, 1 / self.variance if self.variance else self.density)

    def capacity(self, count: int) -> int:
        """Return the largest number of elements sent."""
        # Probabilities are rounded up to multiples of 2^-32, which adds one element at most.
        mean = self._most_on_average(count) + 1
        slack = _UNLIKELY / 3 + math.sqrt((_UNLIKELY / 3) ** 2 + 2 * _UNLIKELY * mean)
        return min(count, math.ceil(mean + slack))

    def rate(self, x: np.ndarray) -> float:
        """Return the factor of |x_i| in the probabilities, for float32 `x` of shape (count,)."""
        if not x.size:
            return 0.0
        most = float(self._most_on_average(x.size))
        if self.variance:
            return float(sampling.rate_of_variance(x, self.variance, most))
        return float(sampling.best_rate(x, most))

    def selector(self, count: int) -> Selector:
        """Return what draws."""
        return Selector(sparse_codec.drawn, settings_of(float(self._most_on_average(count)), float(self.variance)))
