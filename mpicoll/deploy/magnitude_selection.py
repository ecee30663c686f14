"""Selection of the largest elements of a vector that all ranks hold, counted by all ranks together."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from mpicoll.data.sampler import part

_DIGITS = ((21, 11), (10, 11), (0, 10))
"""Lowest bit and number of bits of the digits of a float32, from the highest; its sign is 0."""


def largest(values: np.ndarray, count: int, comm: MPI.Intracomm) -> np.ndarray:
    """Return a mask of the `count` largest elements, (values.size,) of bool, the same on all ranks. Collective.

    A radix selection: three times each rank counts the digits of its part of the elements, and an Allreduce adds the
    counts; so the threshold is exact. Of elements equal to it the first are chosen.

    Parameters
    ----------
    values : (n,) of float32
        At least 0 and not NaN, equal on all ranks.
    count
        From 0 to n.

    Raises
    ------
    ValueError
        If `count` is out of range.
    """
    if not 0 <= count <= values.size:
        raise ValueError(f"count: {count} of {values.size} elements cannot be chosen")
    if count == 0:
        return np.zeros(values.size, bool)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)  # -0.0 is 0.0
    mine = bits[slice(*part(values.size, comm.Get_size(), comm.Get_rank()))]
    threshold, left = 0, count
    for shift, width in _DIGITS:
        counts = np.bincount((mine >> np.uint32(shift)).astype(np.int64) & ((1 << width) - 1), minlength=1 << width)
        counts = counts.astype(np.int64)
        comm.Allreduce(MPI.IN_PLACE, counts, MPI.SUM)
        above = np.cumsum(counts[::-1])[::-1]  # elements with at least this digit
        digit = int(np.nonzero(above >= left)[0][-1])
        left -= int(above[digit]) - int(counts[digit])
        threshold |= digit << shift
        mine = mine[(mine >> np.uint32(shift)) == threshold >> shift]
    mask = bits > threshold
    mask[np.nonzero(bits == threshold)[0][:left]] = True
    return mask
