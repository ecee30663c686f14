"""float32 to shorter floating-point types and back, as whole vectors.

A payload is the elements, two bytes each, filled with zeros to a multiple of 4.
"""

import numpy as np

from ..bits import bfloat16_to_float32, float16_to_float32, float32_to_bfloat16, float32_to_float16
from ..decorators import BOOL, FLOATS, HALVES, helper, kernel_for
from .codec_kernels import decoder, encoder


@helper
def _narrow(narrow, x, out):
    for i in range(x.size):
        out[i] = narrow(x[i])


@helper
def _widen(widen, halves, out, add):
    if add:
        for i in range(out.size):
            out[i] += widen(halves[i])
    else:
        for i in range(out.size):
            out[i] = widen(halves[i])


@helper
def _encode(narrow, x, out):
    nbytes = 2 * (x.size + x.size % 2)
    halves = out.view(np.uint16)
    _narrow(narrow, x, halves)
    halves[x.size : nbytes // 2] = np.uint16(0)
    return nbytes


@kernel_for(FLOATS, HALVES)
def to_float16(x, out):
    """Round float32 `x` to float16, as uint16 `out` of the same shape."""
    _narrow(float32_to_float16, x, out)


@kernel_for(FLOATS, HALVES)
def to_bfloat16(x, out):
    """Round float32 `x` to bfloat16, as uint16 `out` of the same shape."""
    _narrow(float32_to_bfloat16, x, out)


@kernel_for(HALVES, FLOATS, BOOL)
def from_float16(halves, out, add):
    """Widen float16, given as uint16, into float32 `out`, or add it there."""
    _widen(float16_to_float32, halves, out, add)


@kernel_for(HALVES, FLOATS, BOOL)
def from_bfloat16(halves, out, add):
    """Widen bfloat16, given as uint16, into float32 `out`, or add it there."""
    _widen(bfloat16_to_float32, halves, out, add)


@encoder
def encode_float16(x, out, settings, keys, first):
    """Encode a vector; see `codec_kernels`. There are no settings."""
    return _encode(float32_to_float16, x, out)


@encoder
def encode_bfloat16(x, out, settings, keys, first):
    """Encode a vector; see `codec_kernels`. There are no settings."""
    return _encode(float32_to_bfloat16, x, out)


@decoder
def decode_float16(payload, out, settings, add):
    """Decode a payload; see `codec_kernels`. Return 0, since all payloads are right."""
    _widen(float16_to_float32, payload.view(np.uint16), out, add)
    return 0


@decoder
def decode_bfloat16(payload, out, settings, add):
    """Decode a payload; see `codec_kernels`. Return 0, since all payloads are right."""
    _widen(bfloat16_to_float32, payload.view(np.uint16), out, add)
    return 0


NARROW = {"float16": to_float16, "bfloat16": to_bfloat16}
WIDEN = {"float16": from_float16, "bfloat16": from_bfloat16}
ENCODE = {"float16": encode_float16, "bfloat16": encode_bfloat16}
DECODE = {"float16": decode_float16, "bfloat16": decode_bfloat16}
