"""Eight-bit floating point for float32, block by block: E4M3 and E5M2.

A block of ``block`` elements is a record of ``4 + block`` bytes: its *scale*, a float32 that is a power of two, and a
byte for each element, which means the number of the format times the scale. The scale is the smallest with which no
element of the block is beyond the largest number of the format, so that blocks of any magnitude use the whole range:
1e-38 by itself would be zero in either format. It is at least 2^-126, and at most such that the format's largest number
stands for 1.75 * 2^127; what is beyond that arrives as that. The last block is filled with zeros.

- E4M3: 4 bits of exponent, bias 7, largest number 448; 0x7F is NaN, and there is no inf.
- E5M2: 5 bits of exponent, bias 15, largest number 57344; 0x7C is inf, 0x7D to 0x7F are NaN.
- NaN and inf count for no scale. NaN arrives as NaN; inf as inf in E5M2 and as NaN in E4M3; nothing else is touched.

(Micikevicius et al., "FP8 formats for deep learning", 2022, section 3; Open Compute Project, "OFP8", 2023.)
"""

from typing import NamedTuple

import numpy as np

from ..bits import bits_float32, float32_bits
from ..decorators import helper
from .codec_kernels import decoder, encoder
from .counter_random import block_key, unit, word

_INF = 0x7F800000
_NAN = 0x7FC00000
_ABSOLUTE = 0x7FFFFFFF
_FRACTION = 0x7FFFFF
_LOWEST = -126
"""Exponent of the smallest scale; one over it is finite."""


class Format(NamedTuple):
    """Bits of mantissa, bias of the exponent, the code after the largest number, the lowest code that is NaN."""

    mantissa: int
    bias: int
    inf: int
    nan: int


FORMATS = {"e4m3": Format(3, 7, 0x7F, 0x7F), "e5m2": Format(2, 15, 0x7C, 0x7D)}


@helper
def record_nbytes(block: int) -> int:
    """Return the length of a block's record."""
    return 4 + block


@helper
def _largest_finite(patterns):
    """Return the bits of the largest |x| that is a number."""
    largest = np.uint32(0)
    for i in range(patterns.size):
        magnitude = np.uint32(patterns[i] & np.uint32(_ABSOLUTE))
        largest = max(largest, magnitude if magnitude < np.uint32(_INF) else np.uint32(0))
    return largest


@helper
def _exponent(largest, highest):
    """Return the exponent of the scale of a block whose largest |x| has these bits."""
    exponent = np.int64(largest >> np.uint32(23)) - 127 - highest
    # The largest number of both formats has the mantissa 1.75.
    if np.uint32(largest & np.uint32(_FRACTION)) > np.uint32(0x600000):
        exponent += 1
    return min(max(exponent, _LOWEST), 127 - highest)


@helper
def _code(magnitude, number, sign, inf):
    """Return the code of a scaled |x| with these bits that is rounded to the code `number`."""
    number = min(number, np.uint32(inf - np.uint32(1)))
    if magnitude >= np.uint32(_INF):
        number = np.uint32(0x7F) if magnitude > np.uint32(_INF) else inf
    return np.uint8(number | sign)


@helper
def _nearest(x, inverse, mantissa, bias, inf, codes):
    shift, least = np.uint32(23 - mantissa), np.uint32((128 - bias) << 23)
    half, rebias = np.uint32((1 << (22 - mantissa)) - 1), np.uint32((127 - bias) << mantissa)
    # One unit in its last place is the format's smallest number, so that adding it rounds there.
    place = np.uint32((127 + 24 - bias - mantissa) << 23)
    for i in range(x.size):
        bits = float32_bits(x[i] * inverse)
        magnitude = np.uint32(bits & np.uint32(_ABSOLUTE))
        odd = np.uint32(np.uint32(magnitude >> shift) & np.uint32(1))
        number = np.uint32(np.uint32(np.uint32(magnitude + np.uint32(half + odd)) >> shift) - rebias)
        if magnitude < least:
            number = np.uint32(float32_bits(bits_float32(magnitude) + bits_float32(place)) - place)
        codes[i] = _code(magnitude, number, np.uint32(np.uint32(bits >> np.uint32(24)) & np.uint32(0x80)), inf)


@helper
def _stochastic(x, inverse, mantissa, bias, inf, codes, key):
    shift, least = np.uint32(23 - mantissa), np.uint32((128 - bias) << 23)
    below, rebias = np.uint32((1 << (23 - mantissa)) - 1), np.uint32((127 - bias) << mantissa)
    units = bits_float32((126 + bias + mantissa) << 23)
    for i in range(x.size):
        bits, chance = float32_bits(x[i] * inverse), word(key, i)
        magnitude = np.uint32(bits & np.uint32(_ABSOLUTE))
        # A carry out of the part that is cut off comes with the probability that this part is of a last place.
        cut = np.uint32(np.uint32(chance >> np.uint32(9)) & below)
        number = np.uint32(np.uint32(np.uint32(magnitude + cut) >> shift) - rebias)
        exact = bits_float32(min(magnitude, least)) * units
        whole = np.int32(exact)
        up = np.int32(unit(chance) < exact - np.float32(whole))
        number = np.uint32(whole + up) if magnitude < least else number
        codes[i] = _code(magnitude, number, np.uint32(np.uint32(bits >> np.uint32(24)) & np.uint32(0x80)), inf)


@encoder
def encode(x, out, settings, keys, first):
    """Encode a vector; see `codec_kernels`. Settings: block, 1 for stochastic rounding, those of `Format`."""
    block, stochastic = int(settings[0]), settings[1] != 0
    mantissa, bias, inf = int(settings[2]), int(settings[3]), int(settings[4])
    count, patterns, scales = x.size, x.view(np.uint32), out.view(np.uint32)
    record, last = 4 + block, np.uint32(inf)
    highest = ((inf - 1) >> mantissa) - bias
    for number in range((count + block - 1) // block):
        begin, at = number * block, number * record
        end = min(count, begin + block)
        exponent = _exponent(_largest_finite(patterns[begin:end]), highest)
        scales[at // 4] = np.uint32((127 + exponent) << 23)
        inverse = bits_float32((127 - exponent) << 23)
        codes = out[at + 4 : at + 4 + end - begin]
        if stochastic:
            _stochastic(x[begin:end], inverse, mantissa, bias, last, codes, block_key(keys, first + begin))
        else:
            _nearest(x[begin:end], inverse, mantissa, bias, last, codes)
        out[at + 4 + end - begin : at + record] = np.uint8(0)
    return (count + block - 1) // block * record


@helper
def _number(code, shift, offset, normal, step, inf, nan):
    """Return the number that a code means."""
    magnitude = np.uint32(np.uint32(code) & np.uint32(0x7F))
    bits = np.uint32(np.uint32(magnitude << shift) + offset)
    # Not by way of a float32 subnormal, which some processors are slow with.
    bits = float32_bits(np.float32(np.int32(magnitude)) * step) if magnitude < normal else bits
    bits = np.uint32(_INF) if magnitude >= inf else bits
    bits = np.uint32(_NAN) if magnitude >= nan else bits
    return bits_float32(np.uint32(bits | np.uint32(np.uint32(np.uint32(code) & np.uint32(0x80)) << np.uint32(24))))


@helper
def _decode(codes, scale, mantissa, bias, inf, nan, out, add):
    shift, offset = np.uint32(23 - mantissa), np.uint32((127 - bias) << 23)
    normal, step = np.uint32(1 << mantissa), bits_float32((128 - bias - mantissa) << 23)
    if add:
        for i in range(out.size):
            out[i] += _number(codes[i], shift, offset, normal, step, inf, nan) * scale
    else:
        for i in range(out.size):
            out[i] = _number(codes[i], shift, offset, normal, step, inf, nan) * scale


@helper
def _scales_are_right(packed, record, highest):
    """Say whether every scale is a power of two that `encode` may choose; `highest` is that of the format."""
    patterns = packed.view(np.uint32)
    for number in range(packed.size // record):
        pattern = patterns[number * record // 4]
        exponent = np.int64(pattern >> np.uint32(23)) - 127
        if pattern & np.uint32(_FRACTION) or not _LOWEST <= exponent <= 127 - highest:
            return False
    return True


@decoder
def decode(packed, out, settings, add):
    """Decode a payload; see `codec_kernels`. Settings: those of `encode`. Return 1 if a scale is wrong."""
    block, mantissa, bias = int(settings[0]), int(settings[2]), int(settings[3])
    inf, nan = int(settings[4]), int(settings[5])
    if not _scales_are_right(packed, record_nbytes(block), ((inf - 1) >> mantissa) - bias):
        return 1
    count, scales = out.size, packed.view(np.float32)
    record, first, least = 4 + block, np.uint32(inf), np.uint32(nan)
    for number in range((count + block - 1) // block):
        begin, at = number * block, number * record
        target = out[begin : min(count, begin + block)]
        _decode(packed[at + 4 : at + record], scales[at // 4], mantissa, bias, first, least, target, add)
    return 0
