"""Minus one, zero or one for each element, times a scale for each block; five elements in a byte.

A block of ``block`` elements, a multiple of 20, is a record of ``4 + block / 5`` bytes: its scale, a float32, and its
codes (0, 1, 2 for minus one, zero, one) as digits of numbers to the base 3. Byte j holds codes j, j + n/5, j + 2n/5,
j + 3n/5 and j + 4n/5 (n codes in the block), the first one lowest, so that bytes are made from runs of codes. The last
block is filled with zeros.

- An element x becomes the scale s with its sign with the probability |x| / s, and otherwise zero; s is the largest |x|:
  unbiased, and the error of an element is ``s |x| - x^2`` in the mean square.
- With a limit, s is at most so many times the root mean square of the block, and what is larger than s arrives as s.
- A block with NaN or inf in it arrives as NaN, all of it.

(Wen et al., "TernGrad: ternary gradients to reduce communication in distributed deep learning", NIPS 2017, section 3.)
"""

import numpy as np

from ..bits import bits_float32
from ..decorators import helper
from .block_norms import sum_of_squares
from .codec_kernels import decoder, encoder
from .counter_random import block_key, uniform
from .integer_codec import NOT_FINITE, largest_bits, scales_are_right

UNIT = 20
"""Block lengths are multiples of it: five elements in a byte, four bytes in a word."""
_INF = 0x7F800000
_BYTES = 243  # 3^5
_LIFT = 2.0**64


def record_nbytes(block: int) -> int:
    """Return the length of a block's record."""
    return 4 + block // 5


@helper
def _scale(x, clip, room):
    """Return the scale of a block."""
    largest = largest_bits(x.view(np.uint32))
    if largest >= np.uint32(_INF):
        return bits_float32(np.uint32(NOT_FINITE))
    scale = bits_float32(largest)
    if clip > 0:
        scale = np.float32(min(np.float64(scale), clip * np.sqrt(sum_of_squares(x, room) / x.size)))
    return scale


@helper
def _choose(x, scale, key, codes):
    # What is compared is made larger where it could be subnormal, of which products have few digits.
    lift = np.float32(_LIFT) if scale < np.float32(1) else np.float32(1)
    top = scale * lift
    for i in range(x.size):
        there = np.int32(uniform(key, i) * top < abs(x[i]) * lift)
        codes[i] = np.uint8(np.int32(1) + (there if x[i] > 0 else -there))


@helper
def _pack(codes, out):
    """Make bytes of five digits each."""
    run = out.size
    a, b, c = codes[:run], codes[run : 2 * run], codes[2 * run : 3 * run]
    d, e = codes[3 * run : 4 * run], codes[4 * run :]
    for j in range(run):
        out[j] = np.uint8(a[j] + np.uint8(3) * b[j] + np.uint8(9) * c[j] + np.uint8(27) * d[j] + np.uint8(81) * e[j])


@helper
def _digit(rest, codes):
    """Take the lowest digit off each of uint8 `rest`."""
    for j in range(rest.size):
        third = np.uint16(np.uint16(np.uint16(rest[j]) * np.uint16(171)) >> np.uint16(9))  # exact for a byte
        codes[j] = np.uint8(rest[j] - np.uint8(3) * np.uint8(third))
        rest[j] = np.uint8(third)


@helper
def _unpack(packed, rest, codes):
    """Undo `_pack`."""
    run = packed.size
    rest[:] = packed
    for place in range(5):
        _digit(rest, codes[place * run : (place + 1) * run])


@encoder
def encode(x, out, settings, keys, first):
    """Encode a vector; see `codec_kernels`.

    Settings: block; how many times the root mean square of a block its scale is at most, a real number, 0 for no limit.
    """
    block, clip = int(settings[0]), settings.view(np.float64)[1]
    count, scales, record = x.size, out.view(np.float32), 4 + block // 5
    codes, room = np.zeros(block, np.uint8), np.empty(block, np.float64)
    for number in range((count + block - 1) // block):
        begin, at = number * block, number * record
        end = min(count, begin + block)
        scale = _scale(x[begin:end], clip, room)
        scales[at // 4] = scale
        if end - begin < block or not scale > 0:
            codes[:] = np.uint8(1)
        if scale > 0:
            _choose(x[begin:end], scale, block_key(keys, first + begin), codes[: end - begin])
        _pack(codes, out[at + 4 : at + record])
    return (count + block - 1) // block * record


@helper
def _decode(codes, scale, out, add):
    if add:
        for i in range(out.size):
            out[i] += (np.float32(codes[i]) - np.float32(1)) * scale
    else:
        for i in range(out.size):
            out[i] = (np.float32(codes[i]) - np.float32(1)) * scale


@helper
def _digits_are_right(packed, record):
    """Say whether every byte of codes is a number of five digits."""
    largest = np.uint8(0)
    for number in range(packed.size // record):
        codes = packed[number * record + 4 : (number + 1) * record]
        for j in range(codes.size):
            largest = max(largest, codes[j])
    return largest < _BYTES


@decoder
def decode(packed, out, settings, add):
    """Decode a payload; see `codec_kernels`. Settings: block.

    Returns
    -------
    int
        1 if a scale is no finite number that is not negative, nor NOT_FINITE; 2 if a byte is not five digits.
    """
    block = int(settings[0])
    count, scales, record = out.size, packed.view(np.float32), 4 + block // 5
    if not scales_are_right(packed, record):
        return 1
    if not _digits_are_right(packed, record):
        return 2
    codes, rest = np.empty(block, np.uint8), np.empty(block // 5, np.uint8)
    for number in range((count + block - 1) // block):
        begin, at = number * block, number * record
        _unpack(packed[at + 4 : at + record], rest, codes)
        _decode(codes, scales[at // 4], out[begin : min(count, begin + block)], add)
    return 0
