"""Data whose reduction is the same in every order, and the exact result, computed without any of our code."""

from __future__ import annotations

from functools import lru_cache

import ml_dtypes
import numpy as np

INTEGERS = tuple(np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
BOOL = np.dtype(bool)
REALS = tuple(map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)))
COMPLEX = tuple(map(np.dtype, (np.complex64, np.complex128)))
DTYPES = (BOOL, *INTEGERS, *REALS, *COMPLEX)
OPS = ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR")

_PERIOD = 60
"""Values repeat along the vector, so that the expected result of a long one is quickly made. No algorithm cuts at
multiples of it only."""


def applies(op: str, dtype: np.dtype) -> bool:
    """Say whether hand-written algorithms have this reduction."""
    if op in ("LAND", "LOR", "LXOR"):
        return dtype == BOOL or dtype in INTEGERS
    if op in ("BAND", "BOR", "BXOR"):
        return dtype in INTEGERS
    if op in ("MAX", "MIN"):
        return dtype in INTEGERS or dtype in REALS
    return dtype != BOOL


@lru_cache(maxsize=4096)
def _period(op: str, dtype: np.dtype, rank: int) -> np.ndarray:
    """One period of a rank's values: small integers, so that all sums and products are exact."""
    index = np.arange(_PERIOD)
    if op == "PROD":
        values = 1 + ((index + rank) % 3 == 0)  # at most 2^3 over 8 ranks
    elif op in ("LAND", "LOR", "LXOR"):
        values = (index * (rank + 3)) % (4 if op == "LAND" else 3) != 0
    else:
        values = (index * (rank + 2) + 5 * rank) % 11
    if dtype in COMPLEX and op == "SUM":
        return (values + 1j * ((index + rank) % 5)).astype(dtype)
    return values.astype(dtype)


_REFERENCE = {
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


@lru_cache(maxsize=4096)
def _reduced_period(op: str, dtype: np.dtype, size: int) -> np.ndarray:
    wide = dtype if dtype in COMPLEX else np.dtype(np.float64) if dtype in REALS else dtype
    result = _period(op, dtype, 0).astype(wide)
    for rank in range(1, size):
        result = _REFERENCE[op](result, _period(op, dtype, rank).astype(wide)).astype(wide)
    return result.astype(dtype)


def given(op: str, dtype: np.dtype, rank: int, count: int) -> np.ndarray:
    """Return a rank's contribution."""
    return np.resize(_period(op, dtype, rank), count) if count else np.empty(0, dtype)


def expected(op: str, dtype: np.dtype, size: int, count: int) -> np.ndarray:
    """Return the exact result."""
    return np.resize(_reduced_period(op, dtype, size), count) if count else np.empty(0, dtype)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Compare bytes, so that NaNs and signs of zero count."""
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(_bytes(a), _bytes(b))


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
