"""PowerSGD: low-rank approximation of matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np

from mpicoll.compression.aggregatable import AggregatableCompressor, AggregationRound, AggregationSession, Memory
from mpicoll.compression.base import Key
from mpicoll.compression.compressor_specs import enter
from mpicoll.kernels.codecs import thin_products

_VALUES = np.dtype(np.float32)
_MOST_SHOWN = 4
_NAME = "powersgd"
Shape = tuple[int, ...]


class Matrix(NamedTuple):
    """A matrix in the vector, from element ``start`` on, row by row, that is sent as two matrices of `rank` columns."""

    start: int
    rows: int
    columns: int
    rank: int

    @property
    def stop(self) -> int:
        """End of the range, exclusive."""
        return self.start + self.rows * self.columns


@enter("powersgd")
@dataclass(frozen=True, repr=False)
class PowerSGD(AggregatableCompressor):
    """Low-rank approximation of the sum of matrices M_i by one step of power iteration; biased, for error feedback.

    With P the orthonormalised sum of the M_i Q, and Q' the sum of the M_i^T P, the result is P Q'^T: ``rank * (rows +
    columns)`` numbers are sent in place of ``rows * columns``. It is the projection of the sum onto the span of P;
    rank i contributes P P^T M_i. A sum of matrix rank at most `rank` is exact but for rounding errors of about 1e-6 of
    its largest column. With :class:`~mpicoll.ErrorFeedback` the next call starts with Q', without it with random
    numbers. (Vogels et al., "PowerSGD: practical low-rank gradient compression for distributed optimization", NeurIPS
    2019.)

    A vector is treated as a matrix of ``rows`` rows, by default nearly square, and remaining elements are sent
    unchanged. With ``shapes`` it consists of arrays of these shapes: one of two dimensions or more is a matrix whose
    rows are the first dimension. Arrays of one dimension, elements after the last array, and matrices that would not
    become shorter are sent unchanged.

    A matrix with NaN or inf, or with sums of a row beyond float32, arrives as NaN, all of it.
    """

    cuttable: ClassVar[bool] = False
    needs_feedback: ClassVar[bool] = True
    rank: int = 4
    rows: int = 0
    shapes: tuple[Shape, ...] = ()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank: {self.rank} is not positive")
        if self.rows < 0:
            raise ValueError(f"rows: {self.rows} is negative")
        if self.rows and self.shapes:
            raise ValueError(f"rows: {self.rows} must be 0 if shapes are given")
        object.__setattr__(self, "shapes", tuple(tuple(int(extent) for extent in shape) for shape in self.shapes))
        for shape in self.shapes:
            if any(extent < 0 for extent in shape):
                raise ValueError(f"shapes: {shape} has a negative extent")

    def __repr__(self) -> str:
        shapes = str(self.shapes)
        if len(self.shapes) > _MOST_SHOWN:
            shapes = f"<{len(self.shapes)}, hash {hash(self.shapes) & 0xFFFFFFFF:08x}>"
        return f"PowerSGD(rank={self.rank}, rows={self.rows}, shapes={shapes})"

    def shaped(self, shapes: Sequence[Shape]) -> PowerSGD:
        """Return the compressor with these shapes, unless it has shapes or rows already."""
        return self if self.rows or self.shapes else PowerSGD(self.rank, 0, tuple(shapes))

    def part(self, start: int, stop: int) -> PowerSGD:
        """Return the compressor for elements ``start`` to ``stop - 1``; it has the whole rows of each matrix there."""
        if not self.shapes:
            return self
        pieces: list[Shape] = []
        begin = 0
        for shape in self.shapes:
            size = math.prod(shape)
            pieces += _cut(shape, max(start, begin) - begin, min(stop, begin + size) - begin)
            begin += size
        return PowerSGD(self.rank, self.rows, tuple(pieces) or ((0,),))

    def rounds(self, count: int, size: int) -> tuple[AggregationRound, ...]:
        """Return two rounds: unchanged elements with all P, and all Q'."""
        matrices, plain = _layout(self, count)
        first = sum(stop - start for start, stop in plain) + sum(each.rank * each.rows for each in matrices)
        second = sum(each.rank * each.columns for each in matrices)
        return (
            (AggregationRound(first, _VALUES), AggregationRound(second, _VALUES))
            if matrices
            else (AggregationRound(first, _VALUES),)
        )

    def session(self, count: int, size: int, vectors: Sequence[np.ndarray]) -> AggregationSession:
        """Return one rank's part."""
        return _Iteration(self, count, vectors)


def _cut(shape: Shape, start: int, stop: int) -> list[Shape]:
    """Return the shapes of the arrays that elements ``start`` to ``stop - 1`` of an array consist of."""
    if stop <= start:
        return []
    columns = math.prod(shape[1:])
    if len(shape) < 2 or columns == 0:
        return [(stop - start,)]
    first, last = -(-start // columns), stop // columns
    if last <= first:
        return [(stop - start,)]
    ends = [(first * columns - start,), (last - first, columns), (stop - last * columns,)]
    return [piece for piece in ends if math.prod(piece)]


@lru_cache(maxsize=256)
def _layout(settings: PowerSGD, count: int) -> tuple[tuple[Matrix, ...], tuple[tuple[int, int], ...]]:
    """Return the matrices, and the runs of elements between them."""
    matrices = tuple(_matrices(settings, count))
    starts, stops = [each.start for each in matrices], [each.stop for each in matrices]
    runs = zip([0, *stops], [*starts, count], strict=True)
    return matrices, tuple((start, stop) for start, stop in runs if stop > start)


def _matrices(settings: PowerSGD, count: int) -> Iterator[Matrix]:
    shapes = settings.shapes
    if not shapes:
        rows = settings.rows or max(1, math.isqrt(count))
        shapes = ((rows, count // rows),)
    total = sum(math.prod(shape) for shape in shapes)
    if total > count:
        raise ValueError(f"shapes: they have {total} elements, but the vector has {count}")
    start = 0
    for shape in shapes:
        size = math.prod(shape)
        if len(shape) > 1 and size:
            rows, columns = shape[0], size // shape[0]
            rank = min(settings.rank, rows, columns)
            if rank * (rows + columns) < size:
                yield Matrix(start, rows, columns, rank)
        start += size


class _Iteration(AggregationSession):
    def __init__(self, settings: PowerSGD, count: int, vectors: Sequence[np.ndarray]) -> None:
        super().__init__(vectors)
        self._matrices, self._plain = _layout(settings, count)
        self._x = np.empty(0, np.float32)
        at = sum(stop - start for start, stop in self._plain)
        self._values, self._p, self._q = vectors[0][:at], [], []
        place = 0
        for each in self._matrices:
            nearest, furthest = at + each.rank * each.rows, place + each.rank * each.columns
            self._p.append(vectors[0][at:nearest].reshape(each.rank, each.rows))
            self._q.append(vectors[1][place:furthest].reshape(each.rank, each.columns))
            at, place = nearest, furthest

    def begin(self, key: Key, memory: Memory) -> None:
        super().begin(key._replace(rank=0), memory)

    def fill(self, number: int, x: np.ndarray) -> None:
        self._x = x
        with np.errstate(all="ignore"):
            if number == 0:
                self._gather(x, self._values)
                self._start()
                for each, p, q in zip(self._matrices, self._p, self._q, strict=True):
                    np.matmul(q, _matrix(x, each).T, out=p)
            else:
                for each, p, q in zip(self._matrices, self._p, self._q, strict=True):
                    thin_products.orthonormalize(p)
                    np.matmul(p, _matrix(x, each), out=q)

    def _gather(self, x: np.ndarray, values: np.ndarray) -> None:
        at = 0
        for start, stop in self._plain:
            values[at : at + stop - start] = x[start:stop]
            at += stop - start

    def _start(self) -> None:
        """Let all Q be what they were at the end of the last sum, made orthonormal; what is not there is random."""
        last = self.memory.get(_NAME)
        for vector in self.vectors[1:]:
            vector[:] = last if last is not None and last.shape == vector.shape else 0
        for each, q in zip(self._matrices, self._q, strict=True):
            if thin_products.orthonormalize(q):
                thin_products.fill_zero_columns(q, self.key.words(), self.key.first + each.start)
                thin_products.orthonormalize(q)

    def own(self, out: np.ndarray) -> None:
        self._write(out, self._x)

    def finish(self, y: np.ndarray) -> None:
        self._write(y, None)
        for vector in self.vectors[1:]:
            self.memory[_NAME] = vector.copy() if np.isfinite(vector).all() else np.zeros_like(vector)

    def _write(self, out: np.ndarray, x: np.ndarray | None) -> None:
        """Write what P and Q say, and the rest from `x`, or the sums of the rest."""
        at = 0
        for start, stop in self._plain:
            out[start:stop] = self._values[at : at + stop - start] if x is None else x[start:stop]
            at += stop - start
        for each, p, q in zip(self._matrices, self._p, self._q, strict=True):
            thin_products.product(p, q, out[each.start : each.stop])


def _matrix(x: np.ndarray, each: Matrix) -> np.ndarray:
    return x[each.start : each.stop].reshape(each.rows, each.columns)
