"""Casts to 16-bit floating-point types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from mpicoll.compression.aggregatable import Aggregatable, AggregationRound, AggregationSession
from mpicoll.compression.base import CodecCompressor
from mpicoll.compression.compressor_specs import enter
from mpicoll.kernels.codecs import cast_codec
from mpicoll.kernels.codecs.codec_kernels import Codec, settings_of

_DTYPES: dict[str, np.dtype[Any]] = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@enter("fp16", kind="float16")
@enter("bf16", kind="bfloat16")
@dataclass(frozen=True)
class ShortFloats(Aggregatable, CodecCompressor):
    """float16 or bfloat16, rounded to nearest even.

    float16 keeps 11 bits of significand, and numbers beyond 65504 arrive as inf; bfloat16 keeps 8 bits and the range of
    float32. NaN and inf arrive unchanged.

    The two-shot allreduce adds them as float32. Every other algorithm adds two 16-bit numbers as float32 and rounds
    each partial sum: on P ranks with partial sums s_k the error of an element is to first order at most ``u (sum of
    |x_i| + sum of |s_k|)`` with u = 2^-11 or 2^-8, which is at most P u times the sum of |x_i| and grows with P.
    """

    in_two_shots: ClassVar[bool] = True
    kind: str = "float16"

    def __post_init__(self) -> None:
        if self.kind not in cast_codec.NARROW:
            raise ValueError(f"kind: {self.kind!r} is not one of {', '.join(cast_codec.NARROW)}")

    def wire_nbytes(self, count: int) -> int:
        """Return two bytes for each element, padded to a multiple of 4."""
        return 2 * (count + count % 2)

    @property
    def codec(self) -> Codec:
        """The codec of the elements."""
        return Codec(cast_codec.ENCODE[self.kind], cast_codec.DECODE[self.kind], settings_of())

    def rounds(self, count: int, size: int) -> tuple[AggregationRound, ...]:
        """Return the elements."""
        return (AggregationRound(count, _DTYPES[self.kind]),)

    def session(self, count: int, size: int, vectors: Sequence[np.ndarray]) -> AggregationSession:
        """Return one rank's part."""
        return _Rounded(self.kind, vectors)


class _Rounded(AggregationSession):
    def __init__(self, kind: str, vectors: Sequence[np.ndarray]) -> None:
        super().__init__(vectors)
        self._kind = kind

    def fill(self, number: int, x: np.ndarray) -> None:
        cast_codec.NARROW[self._kind](x, self.vectors[0])

    def own(self, out: np.ndarray) -> None:
        self.finish(out)

    def finish(self, y: np.ndarray) -> None:
        cast_codec.WIDEN[self._kind](self.vectors[0], y, False)
