"""Reductions in NumPy, and operands for which every order of reduction gives the same bits."""

from __future__ import annotations

import numpy as np

NUMPY: dict[str, np.ufunc] = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.maximum,
    "MIN": np.minimum,
    "LAND": np.logical_and,
    "LOR": np.logical_or,
    "LXOR": np.logical_xor,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
_PERIOD = 13
"""A prime, so that a piece that lands in the wrong place is seen."""


def write(array: np.ndarray) -> None:
    """Write every byte of a contiguous array with its own value.

    The values stay, and nothing else is read: afterwards the array is modified in the caches of this rank's core, as
    far as it fits there, which is where a program's data are that it has just computed.
    """
    raw = array.view(np.uint8)
    np.bitwise_or(raw, raw, out=raw)


def operand(op: str, rank: int) -> np.ndarray:
    """Return the first elements of a rank's vector, which repeat: shape (13,), whole numbers of at most 12 + rank."""
    pattern = np.arange(_PERIOD)
    return 1 + (pattern == rank) if op == "PROD" else pattern + rank
