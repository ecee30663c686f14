"""Floating-point bit patterns, and the address of an array, inside kernels.

float16 and bfloat16 travel as uint16: Numba knows neither. They are widened to float32, which is exact, and narrowed
with round to nearest even. Overflow gives inf, subnormals are kept, NaN stays NaN (quiet, its payload undefined).

Every function here also works as plain Python, which is what runs with NUMBA_DISABLE_JIT=1; `overloads` has the code of
some of them inside kernels.
"""

import numpy as np

from .decorators import helper

_TWO_TO_112 = np.float32(2.0**112)  # the float32 exponent bias less the float16 one
_FLOAT16_INF_IN_PLACE = 0x7C00 << 13
_FLOAT32_INF = 0x7F800000
_FLOAT32_NAN = 0x7FC00000
_FLOAT16_OVERFLOW = (127 + 16) << 23  # the float32 bits of 2**16
_FLOAT16_MIN_NORMAL = (127 - 14) << 23  # the float32 bits of 2**-14
_SUBNORMAL_SHIFT = np.float32(0.5)  # one unit in its last place is the smallest float16 subnormal, 2**-24
_SUBNORMAL_SHIFT_BITS = 0x3F000000
_REBIAS_AND_ROUND = 0xFFF - (112 << 23)


def address(array: np.ndarray) -> int:
    """Return the address of the first element (`array.ctypes.data` inside a kernel would forbid to cache it)."""
    return array.ctypes.data


def pointer(array: np.ndarray, begin: int) -> np.ndarray:
    """Return where element `begin` of a contiguous vector is, to be indexed by numbers that are not negative.

    Inside kernels it is a bare address: nothing is checked, and no references are counted, which in a loop over short
    blocks takes longer than the work. An array made in a kernel is freed after its last mention there, so make it in
    one function and give it to another that takes pointers.
    """
    return array[begin:]


PREFETCHED_NBYTES = 8 << 10
"""So far ahead of what is worked on: nearer, memory is not there in time; farther, it is gone again from the cache."""


def prefetch(array: np.ndarray, count: int) -> None:
    """Ask for `count` float32 to be brought into the first cache, PREFETCHED_NBYTES beyond a pointer.

    For loops that do more with an element than a machine foresees who only reads: there it doubles the pace of long
    vectors. Nothing happens where there is no memory.
    """


def and_bits(a: np.floating, b: np.floating) -> np.floating:
    """Return the number whose bits are those of `a` AND those of `b`, two float32 or two float64."""
    unsigned = np.uint32 if a.itemsize == 4 else np.uint64
    return (a.view(unsigned) & b.view(unsigned)).view(a.dtype)


def or_bits(a: np.floating, b: np.floating) -> np.floating:
    """Return the number whose bits are those of `a` OR those of `b`, two float32 or two float64."""
    unsigned = np.uint32 if a.itemsize == 4 else np.uint64
    return (a.view(unsigned) | b.view(unsigned)).view(a.dtype)


def float16_to_float32(bits: np.uint16) -> np.float32:
    """Widen a float16, given as its bits."""
    return np.uint16(bits).view(np.float16).astype(np.float32)


def float32_to_float16(x: np.float32) -> np.uint16:
    """Round a float32 to a float16, returned as its bits."""
    return np.float32(x).astype(np.float16).view(np.uint16)


@helper
def float32_bits(x):
    """Return the bits of a float32 as uint32."""
    return np.float32(x).view(np.uint32)


@helper
def bits_float32(bits):
    """Return the float32 whose bits are the lower 32 of an integer."""
    return np.uint32(bits).view(np.float32)


@helper
def widen_by_integers(bits):
    """Widen a float16 (its bits as uint16) to float32 with integer operations and one exact product."""
    magnitude = np.uint32((bits & 0x7FFF) << 13)
    # In the float32 fields the number is too small by a power of two; the product is exact for subnormals as well.
    widened = float32_bits(bits_float32(magnitude) * _TWO_TO_112)
    if magnitude >= _FLOAT16_INF_IN_PLACE:
        widened = np.uint32(magnitude | _FLOAT32_INF)
    return bits_float32(widened | ((bits & 0x8000) << 16))


@helper
def narrow_by_integers(x):
    """Round a float32 to float16 (its bits as uint16) with integer operations and one addition."""
    bits = float32_bits(x)
    magnitude = np.uint32(bits & 0x7FFFFFFF)
    # A carry out of the mantissa runs into the exponent, as it should, up to infinity.
    normal = np.uint32(np.uint32(magnitude + _REBIAS_AND_ROUND + ((magnitude >> 13) & 1)) >> 13)
    # Adding 0.5 lets the floating-point unit round at the place of the smallest subnormal.
    subnormal = np.uint32(float32_bits(bits_float32(magnitude) + _SUBNORMAL_SHIFT) - _SUBNORMAL_SHIFT_BITS)
    half = subnormal if magnitude < _FLOAT16_MIN_NORMAL else normal
    if magnitude >= _FLOAT16_OVERFLOW:
        half = np.uint32(0x7E00 if magnitude > _FLOAT32_INF else 0x7C00)
    return np.uint16(half | ((bits >> 16) & 0x8000))


@helper
def bfloat16_to_float32(bits):
    """Widen a bfloat16, given as its bits (uint16)."""
    return bits_float32(np.uint32(bits) << np.uint32(16))


@helper
def float32_to_bfloat16(x):
    """Round a float32 to a bfloat16, returned as its bits (uint16)."""
    bits = float32_bits(x)
    odd = np.uint32(bits >> np.uint32(16)) & np.uint32(1)
    # Half of the last place kept, less one where the part kept is even: ties go to even, carries run up to infinity.
    rounded = np.uint32(bits + np.uint32(0x7FFF) + odd)
    rounded = rounded if x == x else np.uint32(_FLOAT32_NAN)
    return np.uint16(rounded >> np.uint32(16))
