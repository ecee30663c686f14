"""Buffers in all kinds of memory, with neighbours that nobody may touch."""

from __future__ import annotations

import random

import numpy as np

from mpicoll import Intracomm

KINDS = {"own": 45, "arena": 35, "arena slice": 10, "own slice": 5, "strided": 3, "misaligned": 2}
_GUARD = 8
_CANARY = 0x5B


class Memory:
    """A buffer of `count` elements, `data`, and what surrounds it."""

    def __init__(self, comm: Intracomm, kind: str, count: int, dtype: np.dtype) -> None:
        self.kind = kind
        make = comm.empty if kind.startswith("arena") else np.empty
        if kind in ("own", "arena"):
            self._around, self.data = None, make(count, dtype)
            return
        step = 2 if kind == "strided" else 1
        shift = 1 if kind == "misaligned" else 0
        begin, nbytes = _GUARD * dtype.itemsize + shift, step * count * dtype.itemsize
        self._around = make((step * count + 2 * _GUARD) * dtype.itemsize, np.uint8)
        self._around[:] = _CANARY
        self.data = self._around[begin : begin + nbytes].view(dtype)[::step]
        self._inside = (begin, begin + nbytes, step * dtype.itemsize, dtype.itemsize)

    def is_intact(self) -> bool:
        """Say whether nothing was written but the elements."""
        if self._around is None:
            return True
        begin, end, stride, itemsize = self._inside
        outside = (self._around[:begin] == _CANARY).all() and (self._around[end:] == _CANARY).all()
        between = self._around[begin:end].reshape(-1, stride)[:, itemsize:]
        return bool(outside and (between == _CANARY).all())


def draw_kind(numbers: random.Random) -> str:
    """Draw a kind of memory; each rank for itself."""
    (kind,) = numbers.choices(tuple(KINDS), tuple(KINDS.values()))
    return kind
