"""Operations drawn at random, alike on all ranks, with what each rank gives to them and what it must get."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from mpi4py import MPI

import mpicoll
from mpicoll.buffers.reduction_ops import UserOperation as UserOp

LONGEST = 1_500_000
NARROW_COUNT = 40_000
_SHIFT = 1 << 12
_WIDE_DTYPES = tuple(map(np.dtype, ("float64", "float32", "int64", "int32")))
_NARROW_DTYPES = tuple(map(np.dtype, ("int8", "uint16", "float16", "complex128", "longdouble")))
_WIDE_OPS, _NARROW_OPS = ("SUM", "MAX", "MIN", "LEFT"), ("SUM", "PROD")
LEFT_DTYPES = tuple(map(np.dtype, ("float64", "int32")))
"""Every rank compiles its operations itself, which takes a second for each of these."""
LEFT = mpicoll.op(lambda a, b: a, commutative=False)
_UFUNCS: dict[str, Callable[..., np.ndarray]] = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "LEFT": lambda a, b: a,
}

BY_PARTS = ("reduce_scatter_block", "allgather", "gather", "scatter", "alltoall")
BY_UNEQUAL_PARTS = ("reduce_scatter", "allgatherv", "gatherv", "scatterv", "alltoallv")
MOVING_UNEQUAL_PARTS = ("allgatherv", "gatherv", "scatterv", "alltoallv")
"""Collectives to which a rank without elements may give any element type."""
ANY_DTYPES = tuple(map(np.dtype, ("float64", "int8", "complex64", "longdouble")))
REDUCING = ("allreduce", "reduce", "reduce_scatter_block", "reduce_scatter", "scan", "exscan")
ROOTED = ("reduce", "bcast", "gather", "gatherv", "scatter", "scatterv")
OWN_PART_IN_PLACE = ("allgather", "allgatherv", "gather", "gatherv")
"""Collectives in which a rank's own part can be in place; the others of them need the whole vector there."""
IN_PLACE = (*OWN_PART_IN_PLACE, "allreduce", "reduce", "reduce_scatter_block", "alltoall", "scan", "exscan")
IN_PLACE_AT_ROOT = ("reduce", "gather", "gatherv")
"""Collectives that are drawn in place, too."""
WEIGHTS = {
    "allreduce": 8, "reduce": 4, "bcast": 4, "allgather": 4, "reduce_scatter_block": 4, "barrier": 1,
    "reduce_scatter": 2, "allgatherv": 2, "gather": 2, "gatherv": 2, "scatter": 2, "scatterv": 2, "alltoall": 3,
    "alltoallv": 3, "scan": 2, "exscan": 2,
}  # fmt: skip
EXACT_COMPRESSORS = ("fp16", "bf16")
COMPRESSORS = (*EXACT_COMPRESSORS, "int8", "topk:0.1")


@functools.cache
def _table(dtype: np.dtype, wide: bool) -> np.ndarray:
    """Return numbers whose sums over 64 ranks, or products over 8 if not `wide`, every element type holds exactly."""
    numbers = np.random.default_rng(99)
    if wide:
        return numbers.integers(0, 1 << 17, LONGEST + _SHIFT).astype(dtype)
    return numbers.choice([1, 2], NARROW_COUNT + _SHIFT).astype(dtype)


@dataclass(frozen=True)
class Operation:
    """One collective.

    Attributes
    ----------
    counts
        Elements of each rank's part; of the whole vector, once, where ranks own no parts.
    shifts
        Where each rank's data begin in the table of numbers.
    """

    number: int
    collective: str
    counts: tuple[int, ...]
    dtype: np.dtype
    wide: bool
    op: str
    root: int
    in_place: bool
    shifts: tuple[int, ...]
    compression: str = ""

    def __str__(self) -> str:
        parts = [f"#{self.number} {self.collective}", f"count={sum(self.counts):,}", str(self.dtype)]
        parts += [self.op] * (self.collective in REDUCING)
        parts += [f"root={self.root}"] * (self.collective in ROOTED)
        parts += ["in place"] * self.in_place + [self.compression] * bool(self.compression)
        return " ".join(parts)

    @property
    def count(self) -> int:
        """Elements of the whole vector."""
        return sum(self.counts)

    @property
    def mpi_op(self) -> MPI.Op | UserOp:
        """What the call gets as ``op``."""
        return LEFT if self.op == "LEFT" else getattr(MPI, self.op)

    def part(self, rank: int) -> slice:
        """Return the elements of the vector that a rank owns."""
        if self.collective not in BY_PARTS + BY_UNEQUAL_PARTS:
            return slice(0, self.count)
        begin = sum(self.counts[:rank])
        return slice(begin, begin + self.counts[rank])

    def given(self, rank: int) -> np.ndarray:
        """Return what a rank gives."""
        gathers = self.collective in ("allgather", "allgatherv", "gather", "gatherv")
        count = self.counts[rank] if gathers else self.count
        return _table(self.dtype, self.wide)[self.shifts[rank] : self.shifts[rank] + count]

    def result(self, rank: int, size: int) -> np.ndarray | None:
        """Return what a rank must get; None if nothing."""
        if self.collective == "barrier" or (self.collective == "reduce" and rank != self.root):
            return None
        if self.collective == "bcast":
            return self.given(self.root)
        if self.collective in ("scatter", "scatterv"):
            return self.given(self.root)[self.part(rank)]
        if self.collective in ("alltoall", "alltoallv"):
            return np.concatenate([self.sent(other, rank) for other in range(size)])
        if self.collective in ("gather", "gatherv") and rank != self.root:
            return None
        if self.collective in ("allgather", "allgatherv", "gather", "gatherv"):
            return np.concatenate([self.given(other) for other in range(size)])
        part = self.part(rank)
        if self.collective in ("scan", "exscan"):
            size = rank + (self.collective == "scan")
        operands = [self.given(other)[part] for other in range(size)]
        return functools.reduce(_UFUNCS[self.op], operands) if operands else None

    def sent_counts(self, rank: int) -> list[int]:
        """Return how many elements a rank has for each rank in an alltoall; so many come from each, too."""
        return [self.counts[(rank + other) % len(self.counts)] for other in range(len(self.counts))]

    def sent(self, source: int, dest: int) -> np.ndarray:
        """Return what one rank has for another one in an alltoall."""
        counts = self.sent_counts(source)
        return self.given(source)[sum(counts[:dest]) : sum(counts[: dest + 1])]

    def again(self, numbers: random.Random) -> Operation:
        """Return the same with other data, for another start of a persistent operation."""
        return replace(self, shifts=_shifts(numbers, len(self.shifts)))


def _shifts(numbers: random.Random, size: int) -> tuple[int, ...]:
    return tuple(numbers.randrange(_SHIFT) for _ in range(size))


def _length(numbers: random.Random, most: int) -> int:
    """Return a count: mostly short, sometimes up to `most`."""
    (limit,) = numbers.choices((256, 2_000, NARROW_COUNT, most), (0.45, 0.35, 0.185, 0.015))
    return max(1, int(2.0 ** numbers.uniform(0, math.log2(min(most, limit)))))


def _counts(numbers: random.Random, collective: str, count: int, size: int) -> tuple[int, ...]:
    if collective in BY_PARTS:
        return (max(1, count // size),) * size
    if collective in BY_UNEQUAL_PARTS:
        return tuple(numbers.randrange(max(2, count // size)) for _ in range(size))
    return (0 if collective == "barrier" else count,)


def draw(numbers: random.Random, number: int, size: int, among: tuple[str, ...] = tuple(WEIGHTS)) -> Operation:
    """Draw an operation for `size` ranks; those with equal `numbers` draw the same."""
    (collective,) = numbers.choices(among, [WEIGHTS[name] for name in among])
    wide = numbers.random() < 0.8
    dtypes, ops = (_WIDE_DTYPES, _WIDE_OPS) if wide else (_NARROW_DTYPES, _NARROW_OPS)
    dtype = numbers.choice(dtypes)
    count = _length(numbers, LONGEST if wide else NARROW_COUNT)
    op = numbers.choice(ops)
    dtype = LEFT_DTYPES[count % len(LEFT_DTYPES)] if op == "LEFT" else dtype
    root, in_place = numbers.randrange(size), numbers.random() < 0.2
    counts = _counts(numbers, collective, count, size)
    in_place = in_place and collective in IN_PLACE
    return Operation(number, collective, counts, dtype, wide, op, root, in_place, _shifts(numbers, size))


def draw_compressed(numbers: random.Random, number: int, size: int) -> Operation:
    """Draw an allreduce whose messages are compressed."""
    spec = numbers.choice(COMPRESSORS)
    count = _length(numbers, NARROW_COUNT)
    shifts = _shifts(numbers, size)
    return Operation(number, "allreduce", (count,), np.dtype("float32"), False, "SUM", 0, False, shifts, spec)
