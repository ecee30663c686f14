"""One bit an element: its sign, and for each block the mean of |x|.

A block of ``block`` elements is a record of ``4 + block / 8`` bytes: its scale, a float32, and the bits, packed as
`planes.py` says; 1 is for x < 0. The last block is filled with plus signs, which do not count for its scale.
(Seide et al., "1-bit stochastic gradient descent", Interspeech 2014.)
"""

import numpy as np

from .bits import bits_float32
from .jit import helper, kernel
from .planes import pack, unpack
from .quantize import NOT_FINITE, largest_bits

_INF = 0x7F800000
_LANES = 16


@helper
def _mean_of_absolutes(patterns):
    """Return the mean of |x| in float64, added in lanes so that vector units can do it."""
    sums = np.zeros(_LANES, np.float64)
    whole = patterns.size // _LANES * _LANES
    for begin in range(0, whole, _LANES):
        part = patterns[begin : begin + _LANES]
        for lane in range(_LANES):
            sums[lane] += np.float64(bits_float32(np.uint32(part[lane] & np.uint32(0x7FFFFFFF))))
    total = np.float64(0)
    for lane in range(_LANES):
        total += sums[lane]
    for i in range(whole, patterns.size):
        total += np.float64(bits_float32(np.uint32(patterns[i] & np.uint32(0x7FFFFFFF))))
    return total / patterns.size


@helper
def _signs(x, codes):
    for i in range(x.size):
        codes[i] = np.uint8(x[i] < 0)


@kernel
def encode(x, out, block):
    """Encode float32 `x` of shape (count,) into uint8 `out`, aligned to 4 bytes."""
    count, patterns, scales = x.size, x.view(np.uint32), out.view(np.float32)
    record = 4 + block // 8
    codes = np.zeros(block, np.uint8)
    for number in range((count + block - 1) // block):
        begin, at = number * block, number * record
        end = min(count, begin + block)
        if largest_bits(patterns[begin:end]) >= np.uint32(_INF):
            scales[at // 4] = bits_float32(np.uint32(NOT_FINITE))
        else:
            scales[at // 4] = np.float32(_mean_of_absolutes(patterns[begin:end]))
        if end - begin < block:
            codes[:] = np.uint8(0)
        _signs(x[begin:end], codes[: end - begin])
        pack(codes, 1, out[at + 4 : at + record])


@helper
def _decode(codes, scale, out):
    twice = np.float32(2) * scale
    for i in range(out.size):
        out[i] = scale - np.float32(codes[i]) * twice


@helper
def _decode_add(codes, scale, out):
    twice = np.float32(2) * scale
    for i in range(out.size):
        out[i] += scale - np.float32(codes[i]) * twice


@kernel
def decode(packed, out, block, add):
    """Decode uint8 `packed` into float32 `out` of shape (count,), or add it there."""
    count, scales = out.size, packed.view(np.float32)
    record = 4 + block // 8
    codes = np.empty(block, np.uint8)
    for number in range((count + block - 1) // block):
        begin, at = number * block, number * record
        unpack(packed[at + 4 : at + record], 1, codes)
        target = out[begin : min(count, begin + block)]
        if add:
            _decode_add(codes, scales[at // 4], target)
        else:
            _decode(codes, scales[at // 4], target)
