"""Random bits from a counter: element `i` of step `s` on rank `r` gets the same bits whenever it is asked for.

Rounding needs errors that are independent between ranks (else they add up as P^2, not P) and a run that can be
repeated. So there is no state: bits are a hash of the element's number and a key, and the key is a hash of seed, rank
and step. (Counter-based generators: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11; the 32-bit
mixing function is C. Wellons' hash prospector's with two multiplications, which vector units have.)
"""

import numpy as np

from ..bits import bits_float32
from ..decorators import helper

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_TO_UNIT = np.float32(2.0**-24)
_MID = np.float32(1.5)


def key(seed: int, rank: int, step: int) -> np.ndarray:
    """Return a key of two uint32 words for `helper` functions below; any integers will do."""
    state = splitmix(stream(seed, rank) ^ (step & _MASK))
    return np.array([state & 0xFFFFFFFF, state >> 32], np.uint32)


def stream(seed: int, rank: int) -> int:
    """Return what the keys of all steps of a rank begin with: `splitmix` of it XOR the step is a key, as 64 bits."""
    return splitmix(splitmix(seed & _MASK) ^ (rank & _MASK))


@helper
def splitmix(word):
    """Return the output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) of the next state; uint64."""
    word = (word + _GOLDEN) & _MASK
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)


@helper
def mix(word):
    """Return a hash of a uint32, every bit of which depends on every bit."""
    # Numba widens uint32 operations to 64 bits: each result is cut back, which also keeps the loop in 32-bit lanes.
    word = np.uint32(word ^ (word >> np.uint32(16)))
    word = np.uint32(word * np.uint32(0x21F0AAAD))
    word = np.uint32(word ^ (word >> np.uint32(15)))
    word = np.uint32(word * np.uint32(0x735A2D97))
    return np.uint32(word ^ (word >> np.uint32(15)))


@helper
def block_key(keys, first):
    """Return the key of a block of elements that begins at element number `first`."""
    low, high = np.uint32(first & 0xFFFFFFFF), np.uint32((first >> 32) & 0xFFFFFFFF)
    return np.uint32(mix(np.uint32(mix(np.uint32(low ^ keys[0])) + high)) ^ keys[1])


@helper
def word(block, index):
    """Return the bits of element `index` of a block, a uint32."""
    return mix(np.uint32(np.uint32(np.uint32(index) * np.uint32(0x9E3779B9)) ^ block))


@helper
def unit(word):
    """Return a uint32 as a float32 in [0, 1), a multiple of 2^-24."""
    return np.float32(np.int32(word >> np.uint32(8))) * _TO_UNIT


@helper
def uniform(block, index):
    """Return element `index` of a block: a float32 in [0, 1), a multiple of 2^-24."""
    return unit(word(block, index))


@helper
def low_noise(bits):
    """Return a float32 between -1/2 and 1/2, an odd multiple of 2^-17: added before rounding to a whole number.

    There are 2^16 such numbers, as many below 0 as above; 1/2 itself is not one of them, so that no tie arises.
    """
    return bits_float32(np.uint32(np.uint32(bits << np.uint32(7)) & np.uint32(0x7FFF80)) | np.uint32(0x3F800040)) - _MID


@helper
def high_noise(bits):
    """Return another, from the other bits."""
    return bits_float32(np.uint32(np.uint32(bits >> np.uint32(9)) & np.uint32(0x7FFF80)) | np.uint32(0x3F800040)) - _MID
