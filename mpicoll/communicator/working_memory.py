"""Working memory of the plans of a communicator."""

from __future__ import annotations

from typing import Any

import numpy as np


class WorkingMemory:
    """Working memory shared by the plans of blocking calls, of which one runs at a time; it never shrinks."""

    _ALIGNMENT = 64

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._used = 0

    def restart(self) -> None:
        """Start a new plan, which may use all the memory."""
        self._used = 0

    def take(self, count: int, dtype: np.dtype[Any]) -> np.ndarray:
        """Return uninitialised memory that no other part of the same plan uses."""
        nbytes = count * dtype.itemsize
        start = self._used
        if start + nbytes > self._memory.size:
            # Plans that hold the old memory keep it alive; parts of this plan may lie in old and new memory.
            grown = max(start + nbytes, 2 * self._memory.size, 1 << 16)
            raw = np.empty(grown + self._ALIGNMENT, np.uint8)
            shift = -raw.ctypes.data % self._ALIGNMENT
            self._memory = raw[shift : shift + grown]
        self._used = start + -(-nbytes // self._ALIGNMENT) * self._ALIGNMENT
        return self._memory[start : start + nbytes].view(dtype)
