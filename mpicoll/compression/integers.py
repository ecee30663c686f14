"""Block-wise quantisation to integers of 2 to 8 bits, with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpicoll.compression.base import CodecCompressor
from mpicoll.compression.compressor_specs import enter
from mpicoll.compression.payload_checks import require_block, require_rounding
from mpicoll.kernels.codecs import bit_packing, integer_codec
from mpicoll.kernels.codecs.codec_kernels import Codec, settings_of

_BLOCK, _PACKED_BLOCK = 512, 1024
"""Default block lengths for 8 bits and for fewer: packing is faster in longer blocks."""


@enter("int8", bits=8)
@enter("int7", bits=7)
@enter("int6", bits=6)
@enter("int5", bits=5)
@enter("int4", bits=4)
@enter("int3", bits=3)
@enter("int2", bits=2)
@dataclass(frozen=True)
class QuantizedIntegers(CodecCompressor):
    """Integers of 2 to 8 bits, with a scale for each block of `block` elements.

    A step is the block's largest |x| divided by ``2**(bits - 1) - 1``. The error of an element is at most half a step
    with ``rounding="nearest"``; with ``"stochastic"`` it is less than a step and zero on average. A block with NaN or
    inf arrives as NaN, all of it. ``block=0`` stands for 512 elements with 8 bits, 1024 with fewer. (Dettmers, "8-bit
    approximations for parallelism in deep learning", ICLR 2016; the records are described in
    :mod:`mpicoll.kernels.codecs.integer_codec`.)
    """

    problems: ClassVar[tuple[str, ...]] = ("a scale is not a finite number",)
    block: int = 0
    rounding: str = "nearest"
    bits: int = 8

    def __post_init__(self) -> None:
        if self.block == 0:
            object.__setattr__(self, "block", _BLOCK if self.bits == 8 else _PACKED_BLOCK)
        require_block("block", self.block, bit_packing.UNIT)
        require_rounding(self.rounding)
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits: {self.bits} is not in 2..8")

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
        return integer_codec.wire_nbytes(count, self.block, self.bits)

    @property
    def codec(self) -> Codec:
        """The codec of all blocks."""
        settings = settings_of(self.block, self.bits, int(self.rounding == "stochastic"))
        return Codec(integer_codec.encode, integer_codec.decode, settings)
