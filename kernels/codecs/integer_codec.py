"""Whole numbers of 2 to 8 bits for float32, block by block.

A block of ``block`` elements is a record of ``4 + block * bits / 8`` bytes: its *scale*, a float32, and its codes,
packed as `bit_packing.py` says. A code is a whole number from 1 to ``2**bits - 1`` and means ``(code - 2**(bits - 1)) *
scale`` with ``scale = max |x| / levels``, ``levels = 2**(bits - 1) - 1``. The last block is filled with zeros.

- nearest: every element is within scale / 2.
- stochastic: up or down with the probability that makes the mean right to 2^-16 of a step; within scale, variance at
  most scale^2 / 4. Two elements share a random word, half a block apart, so that vector units can do it.
- A block with NaN or inf in it arrives as NaN, all of it. A block below 2^-119 arrives as zeros.

(Block-wise quantisation as in Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016.)
"""

import numpy as np

from ..bits import bits_float32, float32_bits, pointer, prefetch
from ..decorators import helper
from .bit_packing import pack_at, unpack_at
from .codec_kernels import decoder, encoder
from .counter_random import block_key, high_noise, low_noise, word

NOT_FINITE = 0x7FC00000
"""The scale of a block that holds NaN or inf, as bits."""
_INF = 0x7F800000
_ABSOLUTE = 0x7FFFFFFF
_TINY = (127 - 119) << 23  # bits of 2^-119: levels divided by anything larger is finite
_FLOAT32_MAX = 3.4028234663852886e38
_MAGIC = 1.5 * 2**23
"""Added to a number, it is rounded to a whole one, which the lowest bits then are."""


@helper
def record_nbytes(block: int, bits: int) -> int:
    """Return the length of a block's record."""
    return 4 + block * bits // 8


@helper
def wire_nbytes(count: int, block: int, bits: int) -> int:
    """Return how many bytes `count` elements become."""
    return -(-count // block) * record_nbytes(block, bits)


@helper
def largest_bits(patterns):
    """Return the bits of the largest |x|; NaN is larger than inf, and both than all numbers."""
    largest = np.uint32(0)
    for i in range(patterns.size):
        largest = np.uint32(max(largest, np.uint32(patterns[i] & np.uint32(_ABSOLUTE))))
    return largest


@helper
def largest_at(x, count):
    """Return the bits of the largest |x| of `count` float32 at a pointer, as `largest_bits` does."""
    largest = np.uint32(0)
    for i in range(count):
        largest = larger(largest, x[i])
    return largest


@helper
def larger(largest, x):
    """Return the larger of some bits and those of |x|, in 32-bit lanes."""
    return np.uint32(max(largest, np.uint32(float32_bits(x) & np.uint32(_ABSOLUTE))))


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
def inverse_of(largest, levels):
    """Return the factor that brings a block into ``-levels .. levels``, rounding included: no code overflows."""
    if largest < np.uint32(_TINY) or largest >= np.uint32(_INF):
        return np.float32(0)
    top = bits_float32(largest)
    inverse = levels / top
    # Products are rounded monotonically: what holds for the largest holds for all.
    return inverse if top * inverse <= levels else bits_float32(np.uint32(float32_bits(inverse) - np.uint32(1)))


@helper
def _nearest(x, ahead, block, inverse, zero, codes):
    """Round a block, one code a byte; like the three below, return what `largest_at` does for the block ahead.

    So the vector unit works on a block in the first cache while the next one comes from memory.
    """
    largest = np.uint32(0)
    for i in range(block):
        codes[i] = np.uint8(float32_bits(x[i] * inverse + zero) & np.uint32(255))
        largest = larger(largest, ahead[i])
    return largest


@helper
def _nearest_nibbles(x, ahead, block, inverse, zero, body):
    half, largest = block // 2, np.uint32(0)
    y, ahead_of_y = pointer(x, half), pointer(ahead, half)
    for j in range(half):
        low, high = float32_bits(x[j] * inverse + zero), float32_bits(y[j] * inverse + zero)
        body[j] = np.uint8(np.uint32(low | np.uint32(high << np.uint32(4))) & np.uint32(255))
        largest = larger(larger(largest, ahead[j]), ahead_of_y[j])
    return largest


@helper
def _stochastic(x, ahead, block, inverse, zero, key, codes):
    half, largest = block // 2, np.uint32(0)
    y, ahead_of_y, codes_of_y = pointer(x, half), pointer(ahead, half), pointer(codes, half)
    for j in range(half):
        both = word(key, j)
        low = float32_bits((x[j] * inverse + low_noise(both)) + zero)
        high = float32_bits((y[j] * inverse + high_noise(both)) + zero)
        codes[j], codes_of_y[j] = np.uint8(low & np.uint32(255)), np.uint8(high & np.uint32(255))
        largest = larger(larger(largest, ahead[j]), ahead_of_y[j])
    return largest


@helper
def _stochastic_nibbles(x, ahead, block, inverse, zero, key, body):
    half, largest = block // 2, np.uint32(0)
    y, ahead_of_y = pointer(x, half), pointer(ahead, half)
    for j in range(half):
        both = word(key, j)
        low = float32_bits((x[j] * inverse + low_noise(both)) + zero)
        high = float32_bits((y[j] * inverse + high_noise(both)) + zero)
        body[j] = np.uint8(np.uint32(low | np.uint32(high << np.uint32(4))) & np.uint32(255))
        largest = larger(larger(largest, ahead[j]), ahead_of_y[j])
    return largest


@helper
def _encode_block(x, ahead, block, bits, inverse, key, stochastic, codes, body):
    """Write the codes of a whole block, by way of `codes` where a code is not whole planes of 8 or 4 bits."""
    zero = np.float32(_MAGIC + (1 << (bits - 1)))
    target = body if bits == 8 else codes
    prefetch(ahead, block)
    if bits == 4:
        if stochastic:
            return _stochastic_nibbles(x, ahead, block, inverse, zero, key, body)
        return _nearest_nibbles(x, ahead, block, inverse, zero, body)
    if stochastic:
        largest = _stochastic(x, ahead, block, inverse, zero, key, target)
    else:
        largest = _nearest(x, ahead, block, inverse, zero, target)
    if bits < 8:
        pack_at(codes, block, bits, body)
    return largest


@helper
def _encode(x, count, out, scales, block, bits, keys, first, stochastic, codes, last):
    """Encode with pointers only; `last` is the last block, if it is not whole, and zeros of another's length."""
    levels, record = np.float32((1 << (bits - 1)) - 1), 4 + block * bits // 8
    whole, key, zeros = count // block, np.uint32(0), pointer(last, block)
    for i in range(count - whole * block):
        last[i] = x[whole * block + i]
    source = x if whole > 0 else last
    following = pointer(x, block) if whole > 1 else last
    largest, next_largest = largest_at(source, block), largest_at(following, block)
    for number in range(whole + (whole * block < count)):
        # Two blocks ahead, so that nothing waits for the largest of the lanes and the divisions.
        ahead = pointer(x, (number + 2) * block) if number + 2 < whole else last
        at, inverse = number * record, inverse_of(largest, levels)
        if stochastic:
            key = block_key(keys, first + number * block)
        scales[at // 4] = scale_of(largest, levels)
        finite = source if largest < np.uint32(_INF) else zeros
        largest = next_largest
        next_largest = _encode_block(finite, ahead, block, bits, inverse, key, stochastic, codes, pointer(out, at + 4))
        source, following = following, ahead


@helper
def _quantize(x, out, scales, block, bits, keys, first, stochastic, codes, last):
    a, b, c = pointer(x, 0), pointer(out, 0), pointer(scales, 0)
    d, e, f = pointer(keys, 0), pointer(codes, 0), pointer(last, 0)
    _encode(a, x.size, b, c, block, bits, d, first, stochastic, e, f)


@encoder
def encode(x, out, settings, keys, first):
    """Encode a vector; see `codec_kernels`. Settings: block, bits, 1 for stochastic rounding."""
    block, bits, stochastic = int(settings[0]), int(settings[1]), settings[2] != 0
    codes, last = np.empty(block, np.uint8), np.zeros(2 * block, np.float32)
    _quantize(x, out, out.view(np.float32), block, bits, keys, first, stochastic, codes, last)
    return wire_nbytes(x.size, block, bits)


@helper
def _decode_plane(plane, run, place, mask, zero, scale, out, add):
    place &= np.uint8(7)  # known to be small, shifts stay in narrow lanes
    if add:
        for j in range(run):
            out[j] = out[j] + (np.float32(np.uint8(plane[j] >> place) & mask) - zero) * scale
    else:
        for j in range(run):
            out[j] = (np.float32(np.uint8(plane[j] >> place) & mask) - zero) * scale


@helper
def _decode_block(body, block, bits, scale, codes, out, add):
    """Decode the codes of a whole block; those of more than one plane are put together in `codes` before."""
    zero, mask = np.float32(1 << (bits - 1)), np.uint8((1 << bits) - 1)
    if bits & (bits - 1):
        unpack_at(body, block, bits, codes)
        _decode_plane(codes, block, np.uint8(0), mask, zero, scale, out, add)
    else:
        run = block * bits // 8
        for place in range(8 // bits):
            _decode_plane(body, run, np.uint8(place * bits), mask, zero, scale, pointer(out, place * run), add)


@helper
def _decode(packed, scales, out, count, block, bits, add, codes, last):
    """Decode with pointers only; `last` has room for a last block that is not whole."""
    record, whole = 4 + block * bits // 8, count // block
    for number in range(whole + (whole * block < count)):
        at = number * record
        if not is_scale(scales[at // 4]):
            return False
        scale, target = bits_float32(scales[at // 4]), pointer(out, number * block) if number < whole else last
        _decode_block(pointer(packed, at + 4), block, bits, scale, codes, target, add and number < whole)
    for i in range(whole * block, count):
        out[i] = out[i] + last[i - whole * block] if add else last[i - whole * block]
    return True


@helper
def _dequantize(packed, scales, out, block, bits, add, codes, last):
    a, b, c, d, e = pointer(packed, 0), pointer(scales, 0), pointer(out, 0), pointer(codes, 0), pointer(last, 0)
    return _decode(a, b, c, out.size, block, bits, add, d, e)


@decoder
def decode(packed, out, settings, add):
    """Decode a payload; see `codec_kernels`. Settings: block, bits.

    Returns
    -------
    int
        1 as soon as a scale is no finite number that is not negative, nor NOT_FINITE.
    """
    block, bits = int(settings[0]), int(settings[1])
    codes, last = np.empty(block, np.uint8), np.empty(block, np.float32)
    return 0 if _dequantize(packed, packed.view(np.uint32), out, block, bits, add, codes, last) else 1


@helper
def is_scale(pattern):
    """Say whether these are the bits of a finite number that is not negative, or NOT_FINITE."""
    return pattern < np.uint32(_INF) or pattern == np.uint32(NOT_FINITE)


@helper
def scales_are_right(packed, record):
    """Say whether every scale is a finite number that is not negative, or NOT_FINITE."""
    patterns = packed.view(np.uint32)
    for number in range(packed.size // record):
        pattern = patterns[number * record // 4]
        if pattern >= np.uint32(_INF) and pattern != np.uint32(NOT_FINITE):
            return False
    return True
