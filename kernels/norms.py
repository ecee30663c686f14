"""Norms of float32 blocks in float64, which no float32 overflows."""

import numpy as np

from .jit import helper

_LANES = 16


@helper
def sum_of_squares(x):
    """Return the sum of the squares of float32 `x`, added in lanes so that vector units can do it."""
    sums = np.zeros(_LANES, np.float64)
    whole = x.size // _LANES * _LANES
    for begin in range(0, whole, _LANES):
        part = x[begin : begin + _LANES]
        for lane in range(_LANES):
            sums[lane] += np.float64(part[lane]) * np.float64(part[lane])
    total = np.float64(0)
    for lane in range(_LANES):
        total += sums[lane]
    for i in range(whole, x.size):
        total += np.float64(x[i]) * np.float64(x[i])
    return total
