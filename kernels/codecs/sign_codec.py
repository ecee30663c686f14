"""One bit an element: its sign, and for each block the mean of |x|.

A block of ``block`` elements is a record of ``4 + block / 8`` bytes: its scale, a float32, and the sign bits, packed as
`bit_packing.py` says, 1 for minus. The last block is filled with zeros, which do not count for its scale.
(Seide et al., "1-bit stochastic gradient descent", Interspeech 2014.)
"""

import numpy as np

from ..bits import bits_float32, float32_bits, pointer, prefetch
from ..decorators import helper
from .codec_kernels import decoder, encoder
from .integer_codec import NOT_FINITE, is_scale, wire_nbytes

_SIGN, _ABSOLUTE = 0x80000000, 0x7FFFFFFF


@helper
def _bit(x, place):
    return np.uint32(np.uint32(float32_bits(x) >> np.uint32(31 - place)) & np.uint32(1 << place))


@helper
def _absolute(x):
    return bits_float32(np.uint32(float32_bits(x) & np.uint32(_ABSOLUTE)))


@helper
def _pack_signs(x, run, out, sums):
    """Pack the signs of eight runs, each bit of a byte from another one, and add their |x|, in float32 by halves."""
    a, b, c, d = x, pointer(x, run), pointer(x, 2 * run), pointer(x, 3 * run)
    x = pointer(x, 4 * run)
    e, f, g, h = x, pointer(x, run), pointer(x, 2 * run), pointer(x, 3 * run)
    for j in range(run):
        low = np.uint32(_bit(a[j], 0) | _bit(b[j], 1) | _bit(c[j], 2) | _bit(d[j], 3))
        high = np.uint32(_bit(e[j], 4) | _bit(f[j], 5) | _bit(g[j], 6) | _bit(h[j], 7))
        out[j] = np.uint8(np.uint32(low | high) & np.uint32(255))
        left = (_absolute(a[j]) + _absolute(b[j])) + (_absolute(c[j]) + _absolute(d[j]))
        sums[j] = left + ((_absolute(e[j]) + _absolute(f[j])) + (_absolute(g[j]) + _absolute(h[j])))


@helper
def _total(sums, count):
    """Return their sum, by halves as long as those fill vectors."""
    while count > 16 and count % 2 == 0:
        count //= 2
        other = pointer(sums, count)
        for j in range(count):
            sums[j] = sums[j] + other[j]
    total = np.float64(0)
    for j in range(count):
        total += np.float64(sums[j])
    return total


@helper
def _exact_total(x, block):
    """Return the sum of |x| of a block where float32 may not hold it; not finite if an element is not."""
    total = np.float64(0)
    for j in range(block):
        total += np.float64(_absolute(x[j]))
    return total


@helper
def _encode(x, count, out, scales, block, sums, last):
    """Encode with pointers only; `last` is the last block, if it is not whole, and zeros."""
    record, whole = 4 + block // 8, count // block
    for i in range(count - whole * block):
        last[i] = x[whole * block + i]
    for number in range(whole + (whole * block < count)):
        source, at = pointer(x, number * block) if number < whole else last, number * record
        prefetch(source, block)
        _pack_signs(source, block // 8, pointer(out, at + 4), sums)
        total = _total(sums, block // 8)
        if not total < np.inf:
            total = _exact_total(source, block)
        mean = np.float32(total / min(block, count - number * block))
        finite = mean < np.float32(np.inf)
        scales[at // 4] = float32_bits(mean) if finite else np.uint32(NOT_FINITE)


@helper
def _encode_arrays(x, out, scales, block, sums, last):
    a, b, c, d, e = pointer(x, 0), pointer(out, 0), pointer(scales, 0), pointer(sums, 0), pointer(last, 0)
    _encode(a, x.size, b, c, block, d, e)


@encoder
def encode(x, out, settings, keys, first):
    """Encode a vector; see `codec_kernels`. Settings: block."""
    block = int(settings[0])
    _encode_arrays(x, out, out.view(np.uint32), block, np.empty(block // 8, np.float32), np.zeros(block, np.float32))
    return wire_nbytes(x.size, block, 1)


@helper
def _decode_run(body, run, place, scale, out, add):
    up = np.uint32(31 - place) & np.uint32(31)
    if add:
        for j in range(run):
            sign = np.uint32(np.uint32(np.uint32(body[j]) << up) & np.uint32(_SIGN))
            out[j] = out[j] + bits_float32(np.uint32(sign | scale))
    else:
        for j in range(run):
            sign = np.uint32(np.uint32(np.uint32(body[j]) << up) & np.uint32(_SIGN))
            out[j] = bits_float32(np.uint32(sign | scale))


@helper
def _decode(packed, scales, out, count, block, add, last):
    """Decode with pointers only; `last` has room for a last block that is not whole."""
    record, whole, run = 4 + block // 8, count // block, block // 8
    for number in range(whole + (whole * block < count)):
        at = number * record
        scale = scales[at // 4]
        if not is_scale(scale):
            return False
        body, target = pointer(packed, at + 4), pointer(out, number * block) if number < whole else last
        for place in range(8):
            _decode_run(body, run, place, scale, pointer(target, place * run), add and number < whole)
    for i in range(whole * block, count):
        out[i] = out[i] + last[i - whole * block] if add else last[i - whole * block]
    return True


@helper
def _decode_arrays(packed, scales, out, block, add, last):
    a, b, c, d = pointer(packed, 0), pointer(scales, 0), pointer(out, 0), pointer(last, 0)
    return _decode(a, b, c, out.size, block, add, d)


@decoder
def decode(packed, out, settings, add):
    """Decode a payload; see `codec_kernels`. Settings: block.

    Returns
    -------
    int
        1 as soon as a scale is no finite number that is not negative, nor NOT_FINITE.
    """
    block = int(settings[0])
    return 0 if _decode_arrays(packed, packed.view(np.uint32), out, block, add, np.empty(block, np.float32)) else 1
