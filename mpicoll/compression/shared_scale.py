"""Quantisation to integers with scales that all ranks share, so that their codes can be added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpicoll.compression.aggregatable import AggregatableCompressor, AggregationRound, AggregationSession
from mpicoll.compression.compressor_specs import enter
from mpicoll.compression.payload_checks import require_rounding
from mpicoll.kernels.codecs import integer_codec, shared_scale_codec

_WIRE: dict[int, np.dtype[Any]] = {8: np.dtype(np.int8), 16: np.dtype(np.int16)}
_LARGEST = {8: 127, 16: 32767}
_SHORTEST_BLOCK = 32


@enter("common")
@dataclass(frozen=True)
class SharedScaleIntegers(AggregatableCompressor):
    """int8 or int16 with scales that all ranks share; the sum of the codes is exact with any algorithm.

    An allreduce first finds the largest |x| of each block over all ranks, then adds up codes from -levels to levels,
    with ``levels = 127 // size`` or ``32767 // size``, so that no sum overflows. A step is ``largest / levels``. On P
    ranks the error of the sum is at most P/2 steps with ``rounding="nearest"``; with ``"stochastic"`` it is less than P
    steps and zero on average. The float32 result is rounded besides. Each doubling of the ranks costs one bit of
    precision: use ``bits=16`` on many ranks. ``block=0`` stands for one scale for all elements.

    A block with NaN or inf on any rank arrives as NaN, all of it; one with all |x| below levels * 2^-126 as zeros.
    (Huang et al., "hZCCL", SC24, for sums without decoding; the codes are described in
    :mod:`mpicoll.kernels.codecs.shared_scale_codec`.)
    """

    bits: int = 8
    block: int = 512
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        if self.bits not in _WIRE:
            raise ValueError(f"bits: {self.bits} is not one of {', '.join(map(str, _WIRE))}")
        if self.block != 0 and self.block < _SHORTEST_BLOCK:
            raise ValueError(f"block: {self.block} is neither 0 nor at least {_SHORTEST_BLOCK}")
        require_rounding(self.rounding)

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """True with stochastic rounding."""
        return self.rounding == "stochastic"

    @property
    def granularity(self) -> int:
        """The block length."""
        return self.block or 1

    @property
    def cuttable(self) -> bool:  # type: ignore[override]
        """True if the vector is divided into blocks."""
        return self.block != 0

    def levels(self, size: int) -> int:
        """Return the largest code on `size` ranks.

        Raises
        ------
        ValueError
            If there are too many ranks.
        """
        if size > _LARGEST[self.bits]:
            raise ValueError(
                f"compression: {self!r} adds on at most {_LARGEST[self.bits]} ranks without overflow, not on {size}"
            )
        return _LARGEST[self.bits] // size

    def block_for(self, count: int) -> int:
        """Return the block length for a vector of `count` elements."""
        return self.block or max(count, 1)

    def rounds(self, count: int, size: int) -> tuple[AggregationRound, ...]:
        """Return two rounds: the maxima of the blocks, and the codes."""
        self.levels(size)
        blocks = -(-count // self.block_for(count))
        return AggregationRound(blocks, np.dtype(np.uint32), "MAX"), AggregationRound(count, _WIRE[self.bits])

    def session(self, count: int, size: int, vectors: Sequence[np.ndarray]) -> AggregationSession:
        """Return one rank's part."""
        return _Codes(self, count, size, vectors)


class _Codes(AggregationSession):
    def __init__(self, settings: SharedScaleIntegers, count: int, size: int, vectors: Sequence[np.ndarray]) -> None:
        super().__init__(vectors)
        self._block, self._levels = settings.block_for(count), settings.levels(size)
        self._stochastic = settings.rounding == "stochastic"
        self._maxima, self._codes = vectors

    def fill(self, number: int, x: np.ndarray) -> None:
        if number == 0:
            shared_scale_codec.maxima(x, self._block, self._maxima)
            return
        words, first = self.key.words(), self.key.first
        shared_scale_codec.encode(
            x, self._maxima, self._block, self._levels, self._codes, words, first, self._stochastic
        )

    def own(self, out: np.ndarray) -> None:
        self.finish(out)

    def finish(self, y: np.ndarray) -> None:
        shared_scale_codec.decode(self._codes, self._maxima, self._block, self._levels, y)

    def problem(self) -> str:
        wrong = (self._maxima >= shared_scale_codec.INF) & (self._maxima != integer_codec.NOT_FINITE)
        return "a maximum is not a finite number" if wrong.any() else ""
