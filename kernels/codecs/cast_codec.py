"""float32 to shorter floating-point types and back, as whole vectors."""

from ..bits import bfloat16_to_float32, float16_to_float32, float32_to_bfloat16, float32_to_float16
from ..decorators import BOOL, FLOATS, HALVES, kernel_for


@kernel_for(FLOATS, HALVES)
def to_float16(x, out):
    """Round float32 `x` to float16, as uint16 `out` of the same shape."""
    for i in range(x.size):
        out[i] = float32_to_float16(x[i])


@kernel_for(FLOATS, HALVES)
def to_bfloat16(x, out):
    """Round float32 `x` to bfloat16, as uint16 `out` of the same shape."""
    for i in range(x.size):
        out[i] = float32_to_bfloat16(x[i])


@kernel_for(HALVES, FLOATS, BOOL)
def from_float16(halves, out, add):
    """Widen float16, given as uint16, into float32 `out`, or add it there."""
    if add:
        for i in range(out.size):
            out[i] += float16_to_float32(halves[i])
    else:
        for i in range(out.size):
            out[i] = float16_to_float32(halves[i])


@kernel_for(HALVES, FLOATS, BOOL)
def from_bfloat16(halves, out, add):
    """Widen bfloat16, given as uint16, into float32 `out`, or add it there."""
    if add:
        for i in range(out.size):
            out[i] += bfloat16_to_float32(halves[i])
    else:
        for i in range(out.size):
            out[i] = bfloat16_to_float32(halves[i])


NARROW = {"float16": to_float16, "bfloat16": to_bfloat16}
WIDEN = {"float16": from_float16, "bfloat16": from_bfloat16}
