"""Norm of all gradients of a model, of which a rank may hold parts, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

Gradients = Sequence[tuple[int, np.ndarray]]
"""Parts of a vector of gradients, each with the index of its first element."""
Squares = Callable[[Gradients], float]
"""Function that returns the sum of squares of all gradients of the model, given this rank's; collective over the ranks
of a replica. Gradients that several of these ranks hold count once.
"""
Unify = Callable[[Gradients], None]
"""Function that makes this rank's sums of gradients equal to those of other ranks of its replica, where they hold the
same arrays; collective over these ranks.
"""


def norm_of(squares: float) -> float:
    """Return the square root of a sum of squares; NaN if it is negative or NaN."""
    return math.sqrt(squares) if squares >= 0 else math.nan


def sum_of_squares(x: np.ndarray) -> float:
    """Return the sum of squares of a vector, added up in float64."""
    return float(np.einsum("i,i->", x, x, dtype=np.float64))


def squares_of(own: Gradients) -> float:
    """Return the sum of squares of the rank's gradients: :data:`Squares` of replicas that are not divided."""
    return sum(sum_of_squares(piece) for _, piece in own)


def already_equal(own: Gradients) -> None:
    """Do nothing: :data:`Unify` where no other rank of the replica holds the same arrays."""


def clipping(norm: float, clip: float | None) -> float:
    """Return the factor that scales gradients of norm `norm` down to `clip`; 1 if `norm` is smaller or not finite."""
    return clip / norm if clip is not None and clip < norm < math.inf else 1.0
