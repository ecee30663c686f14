"""Whole numbers of 2 to 8 bits for float32, block by block.

A block of ``block`` elements is a record of ``4 + block * bits / 8`` bytes: its *scale*, a float32, and its codes,
packed as `planes.py` says. A code is a whole number from 0 to ``2 levels``, ``levels = 2**(bits - 1) - 1``, and means
``(code - levels) * scale`` with ``scale = max |x| / levels``. The last block is filled with zeros.

- nearest: every element is within scale / 2.
- stochastic: up or down with the probability that makes the mean right; within scale, variance at most scale^2 / 4.
- A block with NaN or inf in it arrives as NaN, all of it. A block below 2^-119 arrives as zeros.

(Block-wise quantisation as in Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016.)
"""

import numpy as np

from .bits import bits_float32
from .jit import helper, kernel
from .planes import pack, unpack
from .random import block_key, uniform

NOT_FINITE = 0x7FC00000
"""The scale of a block that holds NaN or inf, as bits."""
_INF = 0x7F800000
_ABSOLUTE = 0x7FFFFFFF
_TINY = (127 - 119) << 23  # bits of 2^-119: levels divided by anything larger is finite
_FLOAT32_MAX = 3.4028234663852886e38


def record_nbytes(block: int, bits: int) -> int:
    """Return the length of a block's record."""
    return 4 + block * bits // 8


def wire_nbytes(count: int, block: int, bits: int) -> int:
    """Return how many bytes `count` elements become."""
    return -(-count // block) * record_nbytes(block, bits)


@helper
def largest_bits(patterns):
    """Return the bits of the largest |x|; NaN is larger than inf, and both than all numbers."""
    largest = np.uint32(0)
    for i in range(patterns.size):
        largest = max(largest, patterns[i] & np.uint32(_ABSOLUTE))
    return largest


@helper
def scale_of(largest, levels):
    """Return the scale of a block whose largest |x| has these bits."""
    if largest >= np.uint32(_INF):
        return bits_float32(np.uint32(NOT_FINITE))
    if largest < np.uint32(_TINY):
        return np.float32(0)
    top = bits_float32(largest)
    scale = top / levels
    # Rounded up, levels times the scale of the largest numbers would be inf.
    return scale if scale * levels <= np.float32(_FLOAT32_MAX) else scale * np.float32(1 - 2.0**-23)


@helper
def _nearest(x, inverse, levels, codes):
    top = np.float32(2) * levels
    for i in range(x.size):
        codes[i] = np.uint8(np.int32(min(max(np.rint(x[i] * inverse) + levels, np.float32(0)), top)))


@helper
def _stochastic(x, inverse, levels, codes, key):
    top = np.float32(2) * levels
    for i in range(x.size):
        code = np.floor(x[i] * inverse + uniform(key, i)) + levels
        codes[i] = np.uint8(np.int32(min(max(code, np.float32(0)), top)))


@kernel
def quantize(x, out, block, bits, keys, first, stochastic):
    """Encode float32 `x` of shape (count,) into uint8 `out` of shape (`wire_nbytes`,), aligned to 4 bytes.

    Parameters
    ----------
    keys : uint32 array of shape (2,)
        See `random.key`.
    first : int
        Number of the first element, which decides its random bits; a multiple of `block`.
    """
    count, patterns = x.size, x.view(np.uint32)
    scales = out.view(np.float32)
    levels = np.float32((1 << (bits - 1)) - 1)
    record = 4 + block * bits // 8
    codes = np.zeros(block, np.uint8)
    for number in range((count + block - 1) // block):
        begin, at = number * block, number * record
        end = min(count, begin + block)
        scale = scale_of(largest_bits(patterns[begin:end]), levels)
        scales[at // 4] = scale
        inverse = np.float32(1) / scale if scale > 0 else np.float32(0)
        body = out[at + 4 : at + record]
        if end - begin < block or not scale > 0:
            codes[:] = np.uint8(levels)
        target = body if bits == 8 and end - begin == block else codes[: end - begin]
        if scale > 0 and stochastic:
            _stochastic(x[begin:end], inverse, levels, target, block_key(keys, first + begin))
        elif scale > 0:
            _nearest(x[begin:end], inverse, levels, target)
        else:
            target[:] = np.uint8(levels)
        if bits < 8:
            pack(codes, bits, body)
        elif end - begin < block:
            body[:] = codes


@helper
def _decode(codes, levels, scale, out):
    for i in range(out.size):
        out[i] = (np.float32(codes[i]) - levels) * scale


@helper
def _decode_add(codes, levels, scale, out):
    for i in range(out.size):
        out[i] += (np.float32(codes[i]) - levels) * scale


@kernel
def dequantize(packed, out, block, bits, add):
    """Decode uint8 `packed` of shape (`wire_nbytes`,) into float32 `out` of shape (count,), or add it there."""
    count, scales = out.size, packed.view(np.float32)
    levels = np.float32((1 << (bits - 1)) - 1)
    record = 4 + block * bits // 8
    room = np.empty(block, np.uint8)
    for number in range((count + block - 1) // block):
        begin, at = number * block, number * record
        codes = packed[at + 4 : at + record]
        if bits < 8:
            unpack(codes, bits, room)
            codes = room
        target = out[begin : min(count, begin + block)]
        if add:
            _decode_add(codes, levels, scales[at // 4], target)
        else:
            _decode(codes, levels, scales[at // 4], target)


@kernel
def scales_are_right(packed, record):
    """Say whether every scale is a finite number that is not negative, or NOT_FINITE."""
    patterns = packed.view(np.uint32)
    for number in range(packed.size // record):
        pattern = patterns[number * record // 4]
        if pattern >= np.uint32(_INF) and pattern != np.uint32(NOT_FINITE):
            return False
    return True
