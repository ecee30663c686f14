"""Quantisation with an absolute error bound, of as many bits as each block needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpicoll.compression.base import CodecCompressor
from mpicoll.compression.compressor_specs import enter
from mpicoll.compression.payload_checks import require_block
from mpicoll.kernels.codecs import bit_packing, error_bounded_codec
from mpicoll.kernels.codecs.codec_kernels import Codec, settings_of


@enter("error")
@dataclass(frozen=True)
class ErrorBounded(CodecCompressor):
    """Quantised integers with an absolute error bound: each decoded element is within `bound` of the original.

    The length of the payload depends on the contents. A block of `block` elements takes 0 to 16 bits an element. It is
    sent as float32 if 16 bits cannot keep the bound: with |x| beyond about ``2**15 * bound``, with NaN and with inf,
    which thus arrive unchanged.

    A two-shot allreduce on P ranks compresses every contribution once and the sum once: its result is within
    ``(P + 1) * bound`` of the exact sum, plus what adding P float32 numbers in turn loses anyway. See
    :mod:`mpicoll.kernels.codecs.error_bounded_codec`.
    """

    problems: ClassVar[tuple[str, ...]] = (
        "its length is no multiple of 4",
        "its blocks do not fit its length, or begin too far from zero",
    )
    bound: float = 1e-3
    block: int = 1024

    fixed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_block("block", self.block, bit_packing.UNIT)
        if not error_bounded_codec.LEAST_BOUND <= self.bound <= error_bounded_codec.MOST_BOUND:
            raise ValueError(
                f"bound: {self.bound} is not in {error_bounded_codec.LEAST_BOUND}..{error_bounded_codec.MOST_BOUND}"
            )

    @property
    def granularity(self) -> int:
        """The block length."""
        return self.block

    def wire_nbytes(self, count: int) -> int:
        """Return the bytes if no block can be compressed."""
        return error_bounded_codec.wire_nbytes(count, self.block)

    @property
    def codec(self) -> Codec:
        """The codec of all blocks."""
        step, limit = error_bounded_codec.step_of(self.bound), error_bounded_codec.limit_of(self.bound)
        settings = settings_of(self.block, float(step), float(limit))
        return Codec(error_bounded_codec.encode, error_bounded_codec.decode, settings)
