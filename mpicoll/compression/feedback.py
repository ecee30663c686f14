"""What a compressor left out comes with the next vector."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicoll.compression.base import Compressor
from mpicoll.compression.registry import compressor


class ErrorFeedback:
    """Remember what compression lost of one vector and add it to the next: e' = (e + x) - decoded(encoded(e + x)).

    Give one object to every call that sums the same vector again, such as a gradient, in place of the compressor:

    >>> feedback = mpicoll.ErrorFeedback("topk:0.01")
    >>> comm.Allreduce(gradient, total, compression=feedback)

    Every rank has its own. (Seide et al., "1-bit SGD", Interspeech 2014; Karimireddy et al., "Error feedback fixes
    SignSGD", ICML 2019.)

    Parameters
    ----------
    compressor
        A compressor or its specification.

    Attributes
    ----------
    residual : (count,) float32, or None
        What is still owed, in the units of the vectors; None before the first.
    steps : int
        How many vectors have come.
    memory : dict
        What the way of summing keeps from one vector to the next, under a name of its own.
    """

    def __init__(self, spec: str | Compressor) -> None:
        self.compressor = compressor(spec)
        self.residual: np.ndarray | None = None
        self.steps = 0
        self.memory: dict[str, Any] = {}

    def compensate(self, x: np.ndarray) -> np.ndarray:
        """Add float32 `x` of shape (count,) to the residual and return that, the memory itself.

        It is what has to be compressed; :meth:`update` then takes away what was sent of it.

        Raises
        ------
        ValueError
            If the count is not that of the first vector.
        """
        if self.residual is None:
            self.residual = np.zeros(x.size, np.float32)
        if self.residual.size != x.size:
            raise ValueError(f"error feedback: {x.size} elements came after {self.residual.size}; one object a vector")
        self.residual += x
        self.steps += 1
        return self.residual

    def update(self, sent: np.ndarray, start: int = 0) -> None:
        """Take what was sent, as decoded, away from elements ``start`` to ``start + sent.size - 1``."""
        assert self.residual is not None
        self.residual[start : start + sent.size] -= sent

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.compressor!r})"
