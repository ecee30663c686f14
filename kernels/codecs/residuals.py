"""Residuals of compression, element by element, as reducers: plans call them by address."""

import functools
from typing import Any

import numpy as np

from ..decorators import FLOATS, compile_for, helper, kernel
from ..elementwise import elementwise, same

_SIGNATURE = (FLOATS, f"readonly {FLOATS}", f"readonly {FLOATS}")
"""That of the reducers of float32."""
_LARGEST = np.finfo(np.float32).max


@helper
def _sum(residual, x):
    return (residual if abs(residual) <= _LARGEST else np.float32(0)) + x


@helper
def _difference(residual, sent):
    left = residual - sent
    return left if abs(left) <= _LARGEST else np.float32(0)


@kernel
def _add(out, residual, x):
    elementwise(_sum, same, same, out, residual, x)


@kernel
def _subtract(out, residual, sent):
    elementwise(_difference, same, same, out, residual, sent)


@functools.cache
def add() -> Any:
    """Return the reducer of float32 ``residual + x``, where what is not finite in the residual counts as zero."""
    return compile_for(_add, _SIGNATURE)


@functools.cache
def subtract() -> Any:
    """Return the reducer of float32 ``residual - sent``, where what is not finite then becomes zero."""
    return compile_for(_subtract, _SIGNATURE)
