"""QSGD: an element is rounded at random to a multiple of its bucket's L2 norm over the number of levels.

The record is that of `integer_codec.py`, whose `decode` reads it: a scale, ``norm / levels``, and codes, here from
``middle - levels`` to ``middle + levels`` with ``middle = 2**(bits - 1)``.

- Unbiased; the squared error is ``min(d / s^2, sqrt(d) / s) |x|^2`` on average at most (d elements, s levels).
- The norm is computed in float64. One beyond the largest float32 is taken for that number: any norm that no element
  exceeds leaves the mean right, and a smaller one makes the error smaller.
- A bucket with NaN or inf in it arrives as NaN, all of it. A bucket whose norm is below 2^-119 arrives as zeros.

(Alistarh et al., "QSGD: communication-efficient SGD via gradient quantization and encoding", NIPS 2017, section 3.1.)
"""

import numpy as np

from ..bits import bits_float32
from ..decorators import helper
from .bit_packing import pack
from .block_norms import sum_of_squares
from .codec_kernels import encoder
from .counter_random import block_key, uniform
from .integer_codec import NOT_FINITE, largest_bits

_INF = 0x7F800000
_TINY = 2.0**-119  # levels divided by anything larger is finite
_FLOAT32_MAX = 3.4028234663852886e38


@helper
def _step(x, levels, room):
    """Return a multiple of what the elements of a bucket are rounded to."""
    if largest_bits(x.view(np.uint32)) >= np.uint32(_INF):
        return bits_float32(np.uint32(NOT_FINITE))
    norm = min(np.sqrt(sum_of_squares(x, room)), _FLOAT32_MAX)
    if norm < _TINY:
        return np.float32(0)
    step = np.float32(norm / levels)
    # Rounded up, levels times the step of the largest norm would be inf.
    return step if step * levels <= np.float32(_FLOAT32_MAX) else step * np.float32(1 - 2.0**-23)


@helper
def _round(x, inverse, levels, middle, codes, key):
    for i in range(x.size):
        level = min(max(np.floor(x[i] * inverse + uniform(key, i)), -levels), levels)
        codes[i] = np.uint8(np.int32(level + middle))


@encoder
def encode(x, out, settings, keys, first):
    """Encode a vector; see `codec_kernels`. Settings: bucket, bits, levels, at most ``2**(bits - 1) - 1``."""
    bucket, bits, levels = int(settings[0]), int(settings[1]), int(settings[2])
    count, scales, record = x.size, out.view(np.float32), 4 + bucket * bits // 8
    middle = np.float32(1 << (bits - 1))
    codes, room = np.zeros(bucket, np.uint8), np.empty(bucket, np.float64)
    for number in range((count + bucket - 1) // bucket):
        begin, at = number * bucket, number * record
        end = min(count, begin + bucket)
        step = _step(x[begin:end], np.float32(levels), room)
        scales[at // 4] = step
        if end - begin < bucket or not step > 0:
            codes[:] = np.uint8(middle)
        if step > 0:
            key = block_key(keys, first + begin)
            _round(x[begin:end], np.float32(1) / step, np.float32(levels), middle, codes[: end - begin], key)
        pack(codes, bits, out[at + 4 : at + record])
    return (count + bucket - 1) // bucket * record
