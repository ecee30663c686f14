"""Norms of float32 blocks in float64, which no float32 overflows."""

import numpy as np

from ..decorators import helper


@helper
def sum_of_squares(x, room):
    """Return the sum of the squares of float32 `x`; `room` is float64, as long or longer, and is overwritten.

    Halves are added until one number remains, which vector units can do and which is also more precise.
    """
    left = x.size
    for i in range(left):
        room[i] = np.float64(x[i]) * np.float64(x[i])
    while left > 1:
        half = left // 2
        low, high = room[:half], room[left - half : left]
        for i in range(half):
            low[i] += high[i]
        left -= half
    return room[0]
