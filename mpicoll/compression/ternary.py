"""TernGrad: random rounding to -1, 0 or 1 times a scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from mpicoll.compression.base import CodecCompressor
from mpicoll.compression.compressor_specs import enter
from mpicoll.compression.payload_checks import require_block
from mpicoll.kernels.codecs import ternary_codec
from mpicoll.kernels.codecs.codec_kernels import Codec, settings_of


@enter("ternary")
@dataclass(frozen=True)
class Ternary(CodecCompressor):
    """Random rounding of each element to zero or its sign times its block's largest |x|, unbiased; 1.6 bits an element.

    The mean squared error of a block is ``largest * (sum of |x|) - |x|^2``. With ``clip=2.5``, for example, elements
    are clipped to 2.5 times the block's root mean square, which makes the error smaller and the result biased; 0 turns
    it off. A block with NaN or inf arrives as NaN, all of it. (Wen et al., "TernGrad: ternary gradients to reduce
    communication in distributed deep learning", NIPS 2017, section 3; the records are described in
    :mod:`mpicoll.kernels.codecs.ternary_codec`.)
    """

    problems: ClassVar[tuple[str, ...]] = ("a scale is not a finite number", "a byte is not five digits to the base 3")
    block: int = 1280
    clip: float = 0.0

    def __post_init__(self) -> None:
        require_block("block", self.block, ternary_codec.UNIT)
        if not 0 <= self.clip < math.inf:
            raise ValueError(f"clip: {self.clip} is not a finite number of at least 0")

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """True if the result is unbiased."""
        return self.clip == 0

    @property
    def granularity(self) -> int:
        """The block length."""
        return self.block

    def wire_nbytes(self, count: int) -> int:
        """Return the bytes of all records."""
        return -(-count // self.block) * ternary_codec.record_nbytes(self.block)

    @property
    def codec(self) -> Codec:
        """The codec of all blocks."""
        return Codec(ternary_codec.encode, ternary_codec.decode, settings_of(self.block, float(self.clip)))
