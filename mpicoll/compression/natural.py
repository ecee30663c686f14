"""Natural compression: random rounding to powers of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpicoll.compression.base import CodecCompressor
from mpicoll.compression.compressor_specs import enter
from mpicoll.compression.payload_checks import require_block
from mpicoll.kernels.codecs import bit_packing, natural_codec
from mpicoll.kernels.codecs.codec_kernels import Codec, settings_of


@enter("natural")
@dataclass(frozen=True)
class Natural(CodecCompressor):
    """Random rounding of each element to the power of two below or above it, unbiased; 9 bits an element.

    The mean squared error of an element is at most an eighth of its square. A subnormal number becomes 0 or 2^-126. A
    number beyond 2^127 always arrives as 2^127, which is biased. NaN and inf arrive as NaN; other elements of the block
    are not affected. (Horvath et al., "Natural compression for distributed deep learning", MSML 2022; the records are
    described in :mod:`mpicoll.kernels.codecs.natural_codec`.)
    """

    block: int = 1024

    unbiased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_block("block", self.block, bit_packing.UNIT)

    @property
    def granularity(self) -> int:
        """The block length."""
        return self.block

    def wire_nbytes(self, count: int) -> int:
        """Return the bytes of all records."""
        return -(-count // self.block) * natural_codec.record_nbytes(self.block)

    @property
    def codec(self) -> Codec:
        """The codec of all blocks."""
        return Codec(natural_codec.encode, natural_codec.decode, settings_of(self.block))
