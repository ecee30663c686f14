"""Interface of codecs: two kernels with the same argument types in all of them, so that plans call them by address.

``encode(x, out, settings, keys, first)`` writes the payload of float32 `x` of shape (count,) to uint8 `out`, which is
aligned to 4 bytes and has room for it, and returns its length in bytes. `keys` are two uint32 words (`counter_random`),
and `first` is the number of the first element, which decides its random bits; it is a multiple of the block length.

``decode(payload, out, settings, add)`` writes the elements of a payload to float32 `out` of shape (count,), or adds
them there. It returns 0, or the number of what is wrong with the payload, counted from 1; `out` is then undefined. The
caller has checked the length of a payload if it depends on the count only.

`settings` are int64 words, each codec's own; a real number is stored as the bits of a float64.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..decorators import BOOL, BYTES, DISABLED, FLOATS, INT, WORDS, kernel_for

SETTINGS = "int64[1C]"
encoder = kernel_for(FLOATS, BYTES, SETTINGS, WORDS, INT)
decoder = kernel_for(BYTES, FLOATS, SETTINGS, BOOL)


class Codec(NamedTuple):
    """Kernels and settings of a compressor."""

    encode: Callable[..., int]
    decode: Callable[..., int]
    settings: np.ndarray


@functools.lru_cache(maxsize=256, typed=True)
def settings_of(*numbers: float) -> np.ndarray:
    """Return settings as words: integers as they are, floats as their bits; nobody writes to them."""
    words = [np.float64(number).view(np.int64) if isinstance(number, float) else int(number) for number in numbers]
    return np.array(words, np.int64)


def address_of(kernel: Any) -> int:
    """Return where the machine code of a codec's kernel is, which may be compiled for that; 0 without a JIT."""
    return 0 if DISABLED else kernel.variant(kernel.signature).address
