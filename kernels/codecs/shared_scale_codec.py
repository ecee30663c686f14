"""Whole numbers with scales that all ranks have in common, so that codes can be added as they are.

A block's scale is ``largest / levels``, where `largest` is the largest |x| that any rank has in it: the ranks take the
maximum of what `maxima` writes, as uint32, which orders numbers, and NOT_FINITE above them. A code is a whole number
from -levels to levels and means ``code * scale``. With ``levels = 127 // size`` the sum of int8 codes is an int8, and
exact, in whatever order it is taken.

- nearest: every element of every rank is within scale / 2.
- stochastic: up or down with the probability that makes the mean right; within scale, variance at most scale^2 / 4.
- A block in which any rank has NaN or inf arrives as NaN, all of it, on all ranks. A block in which all |x| are below
  levels * 2^-126 arrives as zeros: its scale would be no normal number.

(Adding quantised numbers without decoding them: Huang et al., "hZCCL: accelerating collective communication with
co-designed homomorphic compression", SC24.)
"""

import numpy as np

from ..bits import bits_float32
from ..decorators import helper, kernel
from .counter_random import block_key, uniform
from .integer_codec import NOT_FINITE, largest_bits

INF = 0x7F800000
_NORMAL = np.float32(2.0**-126)
_FLOAT32_MAX = np.float32(3.4028234663852886e38)


@helper
def _scale(largest, levels):
    """Return the scale of a block whose largest |x| has these bits; 0 if it arrives as zeros."""
    if largest >= np.uint32(INF):
        return bits_float32(np.uint32(NOT_FINITE))
    scale = bits_float32(np.uint32(largest)) / levels
    if scale < _NORMAL:
        return np.float32(0)
    # Rounded up, levels times the scale of the largest numbers would be inf.
    return scale if scale * levels <= _FLOAT32_MAX else scale * np.float32(1 - 2.0**-23)


@kernel
def maxima(x, block, out):
    """Write the bits of the largest |x| of every block of float32 `x`, or NOT_FINITE, to uint32 `out`.

    Parameters
    ----------
    block : int
        Elements in a block; `out` has shape (number of blocks,), the last of which may be shorter.
    """
    patterns = x.view(np.uint32)
    for number in range(out.size):
        begin = number * block
        largest = largest_bits(patterns[begin : min(x.size, begin + block)])
        out[number] = largest if largest < np.uint32(INF) else np.uint32(NOT_FINITE)


# The limits come first in `max` and `min`: that is what NaN gives, if the caller changes a vector on its way.
@helper
def _nearest(x, inverse, levels, codes):
    for i in range(x.size):
        codes[i] = np.int32(min(levels, max(-levels, np.rint(x[i] * inverse))))


@helper
def _stochastic(x, inverse, levels, codes, key):
    for i in range(x.size):
        codes[i] = np.int32(min(levels, max(-levels, np.floor(x[i] * inverse + uniform(key, i)))))


@kernel
def encode(x, largest, block, levels, codes, keys, first, stochastic):
    """Write the codes of float32 `x` of shape (count,).

    Parameters
    ----------
    largest : uint32 array of shape (number of blocks,)
        The maximum over all ranks of what `maxima` wrote.
    levels : int
        The largest code.
    codes : int8 or int16 array of shape (count,)
    keys, first
        See `counter_random.block_key`.
    """
    top = np.float32(levels)
    for number in range(largest.size):
        begin = number * block
        end = min(x.size, begin + block)
        scale = _scale(largest[number], top)
        target = codes[begin:end]
        if not scale > 0:
            target[:] = 0
        elif stochastic:
            _stochastic(x[begin:end], np.float32(1) / scale, top, target, block_key(keys, first + begin))
        else:
            _nearest(x[begin:end], np.float32(1) / scale, top, target)


@helper
def _decode(codes, scale, out):
    for i in range(out.size):
        out[i] = np.float32(codes[i]) * scale


@kernel
def decode(codes, largest, block, levels, out):
    """Write what codes, or sums of codes, mean to float32 `out` of shape (count,); see `encode`."""
    top = np.float32(levels)
    for number in range(largest.size):
        begin = number * block
        end = min(out.size, begin + block)
        _decode(codes[begin:end], _scale(largest[number], top), out[begin:end])
