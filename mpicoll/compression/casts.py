"""Shorter floating-point types."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpicoll.compression.base import Compressor, Key
from mpicoll.compression.checks import require
from mpicoll.compression.registry import register
from mpicoll.kernels import casts


@register("fp16", kind="float16")
@register("bf16", kind="bfloat16")
@dataclass(frozen=True)
class Halves(Compressor):
    """float16 or bfloat16, rounded to nearest even.

    float16 keeps 11 bits and loses what is beyond 65504, which arrives as inf; bfloat16 keeps 8 bits and the whole
    range. NaN and inf arrive as they are.
    """

    kind: str = "float16"

    def __post_init__(self) -> None:
        if self.kind not in casts.NARROW:
            raise ValueError(f"kind: {self.kind!r} is not one of {', '.join(casts.NARROW)}")

    def wire_nbytes(self, count: int) -> int:
        """Return two bytes for each element, rounded up to a multiple of 4."""
        return 2 * (count + count % 2)

    def compress(self, x: np.ndarray, out: np.ndarray, key: Key) -> int:
        """Write the rounded elements."""
        nbytes = self.wire_nbytes(x.size)
        halves = out[:nbytes].view(np.uint16)
        casts.NARROW[self.kind](x, halves[: x.size])
        halves[x.size :] = 0
        return nbytes

    def decompress(self, payload: np.ndarray, out: np.ndarray) -> None:
        """Write all elements."""
        self._decode(payload, out, False)

    def decompress_add(self, payload: np.ndarray, out: np.ndarray) -> None:
        """Add all elements, in one pass."""
        self._decode(payload, out, True)

    def _decode(self, payload: np.ndarray, out: np.ndarray, add: bool) -> None:
        require(payload.size == self.wire_nbytes(out.size), payload, out, "its length is another")
        casts.WIDEN[self.kind](payload.view(np.uint16)[: out.size], out, add)
