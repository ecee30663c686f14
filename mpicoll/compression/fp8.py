"""Eight-bit floating point with a power-of-two scale for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpicoll.compression.base import CodecCompressor
from mpicoll.compression.compressor_specs import enter
from mpicoll.compression.payload_checks import require_block, require_rounding
from mpicoll.kernels.codecs import bit_packing, fp8_codec
from mpicoll.kernels.codecs.codec_kernels import Codec, settings_of


@enter("fp8", kind="e4m3")
@enter("e4m3", kind="e4m3")
@enter("e5m2", kind="e5m2")
@dataclass(frozen=True)
class Fp8(CodecCompressor):
    """E4M3 or E5M2, with a power-of-two scale for each block of `block` elements.

    With ``rounding="nearest"``, ties to even, the error of an element is at most 2^-4 (E4M3) or 2^-3 (E5M2) of itself;
    that of a small one at most 2^-17 or 2^-31 of its block's largest |x|, or 2^-136 or 2^-143 if that is tiny. With
    ``"stochastic"`` it is less than twice as much and zero on average. Numbers beyond 1.75 * 2^127 arrive as that
    number in either case. NaN arrives as NaN, inf as inf (E5M2) or NaN (E4M3); other elements of the block are not
    affected. (Micikevicius et al., "FP8 formats for deep learning", 2022; the records are described in
    :mod:`mpicoll.kernels.codecs.fp8_codec`.)
    """

    problems: ClassVar[tuple[str, ...]] = ("a scale is not a power of two in range",)
    block: int = 512
    rounding: str = "nearest"
    kind: str = "e4m3"

    def __post_init__(self) -> None:
        require_block("block", self.block, bit_packing.UNIT)
        require_rounding(self.rounding)
        if self.kind not in fp8_codec.FORMATS:
            raise ValueError(f"kind: {self.kind!r} is not one of {', '.join(fp8_codec.FORMATS)}")

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """True with stochastic rounding."""
        return self.rounding == "stochastic"

    @property
    def granularity(self) -> int:
        """The block length."""
        return self.block

    def wire_nbytes(self, count: int) -> int:
        """Return the bytes of all records."""
        return -(-count // self.block) * fp8_codec.record_nbytes(self.block)

    @property
    def codec(self) -> Codec:
        """The codec of all blocks."""
        stochastic = int(self.rounding == "stochastic")
        settings = settings_of(self.block, stochastic, *fp8_codec.FORMATS[self.kind])
        return Codec(fp8_codec.encode, fp8_codec.decode, settings)
