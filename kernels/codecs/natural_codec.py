"""Natural compression: every element is rounded at random to a power of two, so that its sign and exponent remain.

A block of ``block`` elements is a record of ``block * 9 / 8`` bytes: the signs, one bit each, 1 for a negative one,
packed as `bit_packing.py` says; and the exponents of float32, a byte each. The last block is filled with zeros.

- A number between two powers of two becomes the larger one with the probability that makes the mean right, which its
  mantissa says. The error is at most ``x^2 / 8`` in the mean square. Subnormal numbers become 0 or 2^-126 likewise.
- A number beyond 2^127 arrives as 2^127, because the next power is inf: only there it is biased.
- NaN and inf arrive as NaN; nothing else is touched.

(Horvath et al., "Natural compression for distributed deep learning", MSML 2022, section 2.)
"""

import numpy as np

from ..bits import bits_float32
from ..decorators import helper
from .bit_packing import pack, unpack
from .codec_kernels import decoder, encoder
from .counter_random import block_key, word

_INF = 0x7F800000
_NAN = 0x7FC00000
_ABSOLUTE = 0x7FFFFFFF


def record_nbytes(block: int) -> int:
    """Return the length of a block's record."""
    return block // 8 + block


@helper
def _round(patterns, key, signs, exponents):
    for i in range(patterns.size):
        magnitude = np.uint32(patterns[i] & np.uint32(_ABSOLUTE))
        # A carry out of the mantissa comes with the probability that the mantissa says.
        carried = np.uint32(magnitude + np.uint32(word(key, i) >> np.uint32(9)))
        exponent = min(np.uint32(carried >> np.uint32(23)), np.uint32(254))
        exponents[i] = np.uint8(np.uint32(255) if magnitude >= np.uint32(_INF) else exponent)
        signs[i] = np.uint8(patterns[i] >> np.uint32(31))


@encoder
def encode(x, out, settings, keys, first):
    """Encode a vector; see `codec_kernels`. Settings: block."""
    block = int(settings[0])
    count, patterns, record = x.size, x.view(np.uint32), block // 8 + block
    signs = np.zeros(block, np.uint8)
    for number in range((count + block - 1) // block):
        begin, at = number * block, number * record
        length = min(count - begin, block)
        exponents = out[at + block // 8 : at + record]
        part = patterns[begin : begin + length]
        _round(part, block_key(keys, first + begin), signs[:length], exponents[:length])
        signs[length:] = np.uint8(0)
        exponents[length:] = np.uint8(0)
        pack(signs, 1, out[at : at + block // 8])
    return (count + block - 1) // block * record


@helper
def _power(exponent, sign):
    """Return what a sign and an exponent mean."""
    bits = np.uint32(np.uint32(exponent) << np.uint32(23))
    bits = np.uint32(_NAN) if bits >= np.uint32(_INF) else bits
    return bits_float32(np.uint32(bits | np.uint32(np.uint32(sign) << np.uint32(31))))


@helper
def _decode(exponents, signs, out, add):
    if add:
        for i in range(out.size):
            out[i] += _power(exponents[i], signs[i])
    else:
        for i in range(out.size):
            out[i] = _power(exponents[i], signs[i])


@decoder
def decode(packed, out, settings, add):
    """Decode a payload; see `codec_kernels`. Settings: block. Return 0, since all payloads are right."""
    block = int(settings[0])
    count, record = out.size, block // 8 + block
    signs = np.empty(block, np.uint8)
    for number in range((count + block - 1) // block):
        begin, at = number * block, number * record
        unpack(packed[at : at + block // 8], 1, signs)
        exponents = packed[at + block // 8 : at + record]
        _decode(exponents, signs, out[begin : min(count, begin + block)], add)
    return 0
