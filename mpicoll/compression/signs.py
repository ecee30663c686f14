"""Sign compression: one bit an element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpicoll.compression.base import CodecCompressor
from mpicoll.compression.compressor_specs import enter
from mpicoll.compression.payload_checks import require_block
from mpicoll.kernels.codecs import bit_packing, integer_codec, sign_codec
from mpicoll.kernels.codecs.codec_kernels import Codec, settings_of


@enter("sign")
@dataclass(frozen=True)
class Sign(CodecCompressor):
    """The sign of every element, times the mean of |x| in its block: biased, to be used with error feedback.

    A zero is sent as its sign bit. A block with NaN or inf arrives as NaN, all of it. (Seide et al., "1-bit stochastic
    gradient descent", Interspeech 2014; the records are described in :mod:`mpicoll.kernels.codecs.sign_codec`.)
    """

    problems: ClassVar[tuple[str, ...]] = ("a scale is not a finite number",)
    needs_feedback: ClassVar[bool] = True
    block: int = 1024

    def __post_init__(self) -> None:
        require_block("block", self.block, bit_packing.UNIT)

    @property
    def granularity(self) -> int:
        """The block length."""
        return self.block

    def wire_nbytes(self, count: int) -> int:
        """Return the bytes of all records."""
        return integer_codec.wire_nbytes(count, self.block, 1)

    @property
    def codec(self) -> Codec:
        """The codec of all blocks."""
        return Codec(sign_codec.encode, sign_codec.decode, settings_of(self.block))
