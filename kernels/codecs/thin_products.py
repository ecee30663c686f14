"""Matrices of low rank as products of thin ones, with the same bits wherever they are computed.

Columns of a thin matrix are the rows of a float32 array of shape (rank, length), so that each is one run of memory.
Sums are taken in float64 lanes of fixed number and order, and nothing depends on threads or on a BLAS.
"""

import numpy as np

from ..decorators import helper, kernel
from .counter_random import block_key, uniform

_LANES = 16
_DEPENDENT = 1e-12
"""A column of which no more than this is left, as a square, once the others are taken out of it, is rounding."""


@helper
def _dot(a, b):
    sums = np.zeros(_LANES, np.float64)
    whole = a.size // _LANES * _LANES
    for begin in range(0, whole, _LANES):
        left, right = a[begin : begin + _LANES], b[begin : begin + _LANES]
        for lane in range(_LANES):
            sums[lane] += np.float64(left[lane]) * np.float64(right[lane])
    total = np.float64(0)
    for lane in range(_LANES):
        total += sums[lane]
    for i in range(whole, a.size):
        total += np.float64(a[i]) * np.float64(b[i])
    return total


@helper
def _take_out(column, other):
    share = _dot(column, other)
    for i in range(column.size):
        column[i] = np.float32(np.float64(column[i]) - share * np.float64(other[i]))


@kernel
def orthonormalize(columns):
    """Make the rows of float32 `columns` of shape (rank, length) orthonormal, in place, in order.

    One that is zero, or depends on those before but for rounding, becomes zero. With NaN or inf in one, NaN is in it
    and in all that follow. (Gram-Schmidt, modified, each column twice: Giraud et al., "The loss of orthogonality in the
    Gram-Schmidt orthogonalization process", 2005.)

    Returns
    -------
    int
        How many became zero.
    """
    zeros = 0
    for number in range(columns.shape[0]):
        column = columns[number]
        before = _dot(column, column)
        for _ in range(2):
            for other in range(number):
                _take_out(column, columns[other])
        after = _dot(column, column)
        if before < np.inf and after <= before * _DEPENDENT:
            column[:] = np.float32(0)
            zeros += 1
        else:
            factor = 1 / np.sqrt(after)
            for i in range(column.size):
                column[i] = np.float32(np.float64(column[i]) * factor)
    return zeros


@kernel
def fill_zero_columns(columns, keys, first):
    """Fill zero rows of `columns` with random numbers; `keys` and `first`: see `counter_random.block_key`."""
    for number in range(columns.shape[0]):
        column = columns[number]
        if _dot(column, column) == 0:
            key = block_key(keys, first + number * column.size)
            for i in range(column.size):
                column[i] = uniform(key, i) - np.float32(0.5)


@kernel
def product(p, q, out):
    """Write the matrix sum of ``p[k, i] * q[k, j]`` to float32 `out` of shape (rows * columns,).

    Parameters
    ----------
    p, q : float32 arrays of shape (rank, rows) and (rank, columns), rank > 0
        Added up from the first to the last, as float32.
    """
    columns = q.shape[1]
    for i in range(p.shape[1]):
        row = out[i * columns : (i + 1) * columns]
        _write(p[0, i], q[0], row)
        for k in range(1, p.shape[0]):
            _add(p[k, i], q[k], row)


@helper
def _write(factor, column, row):
    for j in range(row.size):
        row[j] = factor * column[j]


@helper
def _add(factor, column, row):
    for j in range(row.size):
        row[j] += factor * column[j]
