"""Whole numbers of as many bits as an absolute error bound needs, block by block; what does not fit stays as it is.

A payload is a byte for each block, filled with zeros to a multiple of 4, then the bodies of the blocks one after
another. A byte from 0 to 16 is a number of bits: the body is an int32, the *base*, and so many bits for each element,
packed as `bit_packing.py` says, from 9 bits on the lower 8 first and then the others; elements count up to a multiple
of 32, and code c means ``(base + c) * step``. A byte `RAW` says that the body is the elements themselves, as float32.

Why every element is within the bound e: ``step = 2 e (1 - 2^-6)``, so that rounding to a multiple of it costs at most
e (1 - 2^-6). A block is rounded only if no |x| in it exceeds 2^16 e. Then the quotient x / step, computed as a product
with 1 / step, is below 2^15.03 and off by at most 2^-23 of itself, which is 2^-7.97 steps or less than 2^-6.96 e; and
the result is off by 2^-24 of itself, which is less than 2^-7.9 e. Together: e (1 - 2^-6 + 2^-6.96 + 2^-7.9) < e.
All others are raw: also those with NaN or inf, those that more than 16 bits would take, and the last one if that is
shorter.
"""

import numpy as np

from ..bits import float32_bits
from ..decorators import helper
from .bit_packing import UNIT, pack, unpack
from .codec_kernels import decoder, encoder
from .integer_codec import largest_bits

RAW = 32
"""What says that a block is not compressed."""
MOST_BITS = 16
_REACH = 2.0**16
_FARTHEST = 1 << 16
"""No base is farther from zero."""
LEAST_BOUND, MOST_BOUND = 1e-36, 1e30
"""Between these a step and one over it are normal float32 numbers."""


def step_of(bound: float) -> np.float32:
    """Return the distance of the numbers that elements are rounded to."""
    return np.float32(2 * bound * (1 - 2.0**-6))


def limit_of(bound: float) -> np.float32:
    """Return the largest |x| that is rounded."""
    return np.float32(_REACH * bound)


def wire_nbytes(count: int, block: int) -> int:
    """Return how many bytes `count` elements become at most."""
    return _padded(-(-count // block), 4) + 4 * count


@helper
def _padded(number, unit):
    return (number + unit - 1) // unit * unit


@helper
def _body_nbytes(bits, count):
    """Return the length of the body of a block of `count` elements."""
    return 4 * count if bits == RAW else 4 + _padded(count, UNIT) * bits // 8


@helper
def _round(x, inverse, numbers):
    for i in range(x.size):
        numbers[i] = np.int32(np.rint(x[i] * inverse))


@helper
def _bits_for(spread):
    """Return how many bits the whole numbers from 0 to `spread` take."""
    bits = 0
    while spread >> bits:
        bits += 1
    return bits


@helper
def _split(numbers, base, low, high):
    for i in range(numbers.size):
        code = np.uint32(numbers[i] - base)
        low[i] = np.uint8(code)
        high[i] = np.uint8(code >> np.uint32(8))


@helper
def _pack_wide(low, high, bits, out):
    """Pack codes of up to 16 bits, given as their lower and upper bytes."""
    pack(low, min(bits, 8), out[: low.size * min(bits, 8) // 8])
    if bits > 8:
        pack(high, bits - 8, out[low.size :])


@encoder
def encode(x, out, settings, keys, first):
    """Encode a vector; see `codec_kernels`. Settings: block, and `step_of` and `limit_of` the bound, real numbers."""
    block, reals = int(settings[0]), settings.view(np.float64)
    step, limit = np.float32(reals[1]), np.float32(reals[2])
    count, patterns, inverse = x.size, x.view(np.uint32), np.float32(1) / step
    bases, raws = out.view(np.int32), out.view(np.float32)
    numbers, low, high = np.zeros(block, np.int32), np.zeros(block, np.uint8), np.zeros(block, np.uint8)
    blocks = (count + block - 1) // block
    at = _padded(blocks, 4)
    out[blocks:at] = np.uint8(0)
    for number in range(blocks):
        begin = number * block
        length = min(count - begin, block)
        part, fits, bits, base = x[begin : begin + length], _padded(length, UNIT), RAW, np.int32(0)
        if largest_bits(patterns[begin : begin + length]) <= float32_bits(limit):
            _round(part, inverse, numbers[:length])
            base = numbers[:length].min()
            bits = _bits_for(np.int64(numbers[:length].max()) - np.int64(base))
        if bits > MOST_BITS or _body_nbytes(bits, length) > 4 * length:
            bits = RAW
        nbytes = _body_nbytes(bits, length)
        out[number] = np.uint8(bits)
        if bits == RAW:
            raws[at // 4 : at // 4 + length] = part
        else:
            bases[at // 4] = base
            numbers[length:fits] = base
            _split(numbers[:fits], base, low[:fits], high[:fits])
            _pack_wide(low[:fits], high[:fits], bits, out[at + 4 : at + nbytes])
        at += nbytes
    return at


@helper
def _unpack_wide(packed, bits, low, high):
    """Undo `_pack_wide`."""
    if bits == 0:
        low[:] = np.uint8(0)
    unpack(packed[: low.size * min(bits, 8) // 8], min(bits, 8), low)
    if bits > 8:
        unpack(packed[low.size :], bits - 8, high)
    else:
        high[:] = np.uint8(0)


@helper
def _number(low, high, base):
    return np.int32(base + np.int32(np.int32(low) + np.int32(np.int32(high) << np.int32(8))))


@helper
def _write(low, high, base, step, out, add):
    if add:
        for i in range(out.size):
            out[i] += np.float32(_number(low[i], high[i], base)) * step
    else:
        for i in range(out.size):
            out[i] = np.float32(_number(low[i], high[i], base)) * step


@helper
def _copy(raw, out, add):
    if add:
        for i in range(out.size):
            out[i] += raw[i]
    else:
        out[:] = raw


@helper
def _is_right(packed, count, block):
    """Say whether uint8 `packed`, a multiple of 4 long, can be the payload of `count` elements."""
    blocks = (count + block - 1) // block
    at, bases = _padded(blocks, 4), packed.view(np.int32)
    if packed.size < at or packed[blocks:at].any():
        return False
    for number in range(blocks):
        length, bits = min(count - number * block, block), np.int64(packed[number])
        if bits != RAW and bits > MOST_BITS:
            return False
        nbytes = _body_nbytes(bits, length)
        if at + nbytes > packed.size:
            return False
        if bits != RAW and not -_FARTHEST <= bases[at // 4] <= _FARTHEST:
            return False
        at += nbytes
    return at == packed.size


@decoder
def decode(packed, out, settings, add):
    """Decode a payload; see `codec_kernels`. Settings: those of `encode`.

    Returns
    -------
    int
        1 if its length is no multiple of 4, 2 if it cannot be the payload of so many elements.
    """
    block, step = int(settings[0]), np.float32(settings.view(np.float64)[1])
    if packed.size % 4:
        return 1
    if not _is_right(packed, out.size, block):
        return 2
    count, bases, raws = out.size, packed.view(np.int32), packed.view(np.float32)
    low, high = np.zeros(block, np.uint8), np.zeros(block, np.uint8)
    blocks = (count + block - 1) // block
    at = _padded(blocks, 4)
    for number in range(blocks):
        length, bits = min(count - number * block, block), np.int64(packed[number])
        target, fits = out[number * block : number * block + length], _padded(length, UNIT)
        nbytes = _body_nbytes(bits, length)
        if bits == RAW:
            _copy(raws[at // 4 : at // 4 + length], target, add)
        else:
            _unpack_wide(packed[at + 4 : at + nbytes], bits, low[:fits], high[:fits])
            _write(low[:length], high[:length], bases[at // 4], step, target, add)
        at += nbytes
    return 0
