"""Sign compression: one bit an element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mpicoll.compression.base import Compressor, Key
from mpicoll.compression.compressor_specs import register
from mpicoll.compression.payload_checks import require, require_block
from mpicoll.kernels.codecs import bit_packing, integer_codec, sign_codec


@register("sign")
@dataclass(frozen=True)
class Sign(Compressor):
    """The sign of every element, times the mean of |x| in its block: biased, to be used with error feedback.

    A zero is sent as its sign bit. A block with NaN or inf arrives as NaN, all of it. (Seide et al., "1-bit stochastic
    gradient descent", Interspeech 2014; the records are described in :mod:`mpicoll.kernels.codecs.sign_codec`.)
    """

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

    def compress(self, x: np.ndarray, out: np.ndarray, key: Key) -> int:
        """Write the records of all blocks."""
        nbytes = self.wire_nbytes(x.size)
        sign_codec.encode(x, out[:nbytes], self.block)
        return nbytes

    def decompress(self, payload: np.ndarray, out: np.ndarray) -> None:
        """Write all elements."""
        self._decode(payload, out, False)

    def decompress_add(self, payload: np.ndarray, out: np.ndarray) -> None:
        """Add all elements, in one pass."""
        self._decode(payload, out, True)

    def _decode(self, payload: np.ndarray, out: np.ndarray, add: bool) -> None:
        require(payload.size == self.wire_nbytes(out.size), payload, out, "its length is another")
        require(sign_codec.decode(payload, out, self.block, add), payload, out, "a scale is not a finite number")
