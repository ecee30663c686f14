"""Dynamic loss scaling: a factor that keeps small gradients within the range of float16."""

from __future__ import annotations

import math

import numpy as np

from mpicoll.errors import NonFiniteLoss

INITIAL = 65536.0
"""First factor, 2**16."""
INTERVAL = 2000
"""Steps without overflow after which the factor is doubled."""
_GROWTH, _BACKOFF = 2.0, 0.5
_SMALLEST, _LARGEST = 2.0**-14, 2.0**24


class LossScale:
    """Loss scale: gradients are computed times a factor, which is found by trial.

    A step whose gradients are not finite is skipped, and halves the factor; after `interval` steps in a row that are
    taken the factor doubles, up to 2**24. (Micikevicius et al., "Mixed precision training", ICLR 2018, section 3.2.)
    Every rank keeps one, and all of them are equal if every rank calls :meth:`accept` with the same values.

    Parameters
    ----------
    initial
        First factor, a power of two: products with it are then exact.
    interval
        Number of steps after which the factor doubles.

    Attributes
    ----------
    state : (3,) of float64
        The factor, steps since it last changed, and steps that were skipped.

    Raises
    ------
    ValueError
        If `initial` is not a power of two from 2**-14 to 2**24, or `interval` is less than 1.
    """

    def __init__(self, initial: float = INITIAL, interval: int = INTERVAL) -> None:
        if not (_SMALLEST <= initial <= _LARGEST and math.frexp(initial)[0] == 0.5):
            raise ValueError(f"initial: {initial} is not a power of two from 2**-14 to 2**24")
        if interval < 1:
            raise ValueError(f"interval: {interval} is not a number of steps of at least 1")
        self.state, self._interval = np.array([initial, 0.0, 0.0]), interval

    @property
    def factor(self) -> float:
        """Factor of the gradients of the next step."""
        return float(self.state[0])

    @property
    def skipped(self) -> int:
        """Number of steps that were skipped."""
        return int(self.state[2])

    def accept(self, *, finite: bool) -> bool:
        """Return True if the step is to be taken; adapt the factor for the next one.

        Parameters
        ----------
        finite
            True if all gradients of the step, on all ranks, are finite.

        Raises
        ------
        NonFiniteLoss
            If gradients are not finite at the smallest factor either.
        """
        if not finite:
            if self.factor <= _SMALLEST:
                raise NonFiniteLoss(
                    f"gradients overflow at the smallest loss scale, {_SMALLEST:g}; "
                    "try a lower --lr or a longer --warmup"
                )
            self.state[:] = self.factor * _BACKOFF, 0, self.skipped + 1
            return False
        self.state[1] += 1
        if self.state[1] >= self._interval:
            self.state[:2] = min(self.factor * _GROWTH, _LARGEST), 0
        return True
