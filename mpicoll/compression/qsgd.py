"""QSGD: random rounding to multiples of a fraction of the norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpicoll.compression.base import CodecCompressor
from mpicoll.compression.compressor_specs import enter
from mpicoll.compression.payload_checks import require_block
from mpicoll.kernels.codecs import bit_packing, integer_codec, qsgd_codec
from mpicoll.kernels.codecs.codec_kernels import Codec, settings_of


@enter("qsgd")
@dataclass(frozen=True)
class Qsgd(CodecCompressor):
    """Random rounding of each element to a multiple of its bucket's L2 norm over `levels`, unbiased.

    The mean squared error of a bucket of d elements is at most ``min(d / levels**2, sqrt(d) / levels) |x|^2``. A bucket
    with NaN or inf arrives as NaN, all of it; one whose norm is below 2^-119 as zeros. (Alistarh et al., "QSGD:
    communication-efficient SGD via gradient quantization and encoding", NIPS 2017, section 3.1; the records are
    described in :mod:`mpicoll.kernels.codecs.qsgd_codec`.)
    """

    problems: ClassVar[tuple[str, ...]] = ("a scale is not a finite number",)
    levels: int = 7
    bucket: int = 512

    unbiased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_block("bucket", self.bucket, bit_packing.UNIT)
        if not 1 <= self.levels <= 127:
            raise ValueError(f"levels: {self.levels} is not in 1..127")

    @property
    def bits(self) -> int:
        """Bits per element."""
        return self.levels.bit_length() + 1

    @property
    def granularity(self) -> int:
        """The bucket length."""
        return self.bucket

    def wire_nbytes(self, count: int) -> int:
        """Return the bytes of all records."""
        return integer_codec.wire_nbytes(count, self.bucket, self.bits)

    @property
    def codec(self) -> Codec:
        """The codec of all buckets."""
        settings = settings_of(self.bucket, self.bits, self.levels)
        return Codec(qsgd_codec.encode, integer_codec.decode, settings)
