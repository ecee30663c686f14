"""Residuals of compression, element by element."""

import numpy as np

from ..decorators import kernel

_LARGEST = np.finfo(np.float32).max


@kernel
def add(x, residual):
    """Add float32 `x` to `residual` of the same shape; what is not finite there counts as zero."""
    for i in range(x.size):
        owed = residual[i]
        residual[i] = (owed if abs(owed) <= _LARGEST else np.float32(0)) + x[i]


@kernel
def subtract(sent, residual):
    """Take float32 `sent` away from `residual` of the same shape; what is not finite then becomes zero."""
    for i in range(sent.size):
        left = residual[i] - sent[i]
        residual[i] = left if abs(left) <= _LARGEST else np.float32(0)
