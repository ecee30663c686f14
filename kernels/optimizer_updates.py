"""Optimizer updates: one pass over parameters and state for each of the usual optimizers.

Parameters, state and gradient are vectors of T, float32 or float64, of one length, and scalars are of T too, so that a
float32 update stays in float32. Lengths are not checked here.
"""

import numpy as np

from .decorators import BOOL, FLOATS, WORDS, kernel_for

_SCALAR = "float32"
_LOW = np.uint64(0xFFFFFFFF)


@kernel_for(FLOATS, FLOATS, FLOATS)
def sgd(parameters: np.ndarray, gradient: np.ndarray, scalars: np.ndarray) -> None:
    """``change = scale * gradient + decay * parameters``, ``parameters -= rate * change``.

    `scalars` are rate, scale, decay.
    """
    rate, scale, decay = scalars
    for i in range(parameters.size):
        parameters[i] -= rate * (scale * gradient[i] + decay * parameters[i])


@kernel_for(FLOATS, FLOATS, FLOATS, FLOATS, BOOL)
def momentum(
    parameters: np.ndarray, gradient: np.ndarray, velocity: np.ndarray, scalars: np.ndarray, nesterov: bool
) -> None:
    """``velocity = momentum * velocity + change``, ``parameters -= rate * velocity``; `change` as in :func:`sgd`.

    With `nesterov`, ``parameters -= rate * (change + momentum * velocity)``. `scalars` are rate, scale, decay,
    momentum.
    """
    rate, scale, decay, momentum = scalars
    for i in range(parameters.size):
        change = scale * gradient[i] + decay * parameters[i]
        velocity[i] = momentum * velocity[i] + change
        if nesterov:
            parameters[i] -= rate * (change + momentum * velocity[i])
        else:
            parameters[i] -= rate * velocity[i]


@kernel_for(FLOATS, FLOATS, FLOATS, FLOATS)
def adagrad(parameters: np.ndarray, gradient: np.ndarray, total: np.ndarray, scalars: np.ndarray) -> None:
    """``total += change**2``, ``parameters -= rate * change / (sqrt(total) + epsilon)``; `change` as in :func:`sgd`.

    `scalars` are rate, scale, decay, epsilon. (Duchi et al., "Adaptive subgradient methods for online learning", JMLR
    12, 2011.)
    """
    rate, scale, decay, epsilon = scalars
    for i in range(parameters.size):
        change = scale * gradient[i] + decay * parameters[i]
        total[i] += change * change
        parameters[i] -= rate * change / (np.sqrt(total[i]) + epsilon)


@kernel_for(FLOATS, FLOATS, FLOATS, FLOATS, FLOATS)
def adam(
    parameters: np.ndarray, gradient: np.ndarray, mean: np.ndarray, square: np.ndarray, scalars: np.ndarray
) -> None:
    """Update both moments, then ``parameters -= shrink * parameters + rate * mean / (sqrt(square) + epsilon)``.

    The moments are of `change` as in :func:`sgd`. `scalars` are rate, beta1, 1 - beta1, beta2, 1 - beta2, epsilon,
    scale, decay, shrink; the caller has the corrections for the first steps in rate and epsilon. (Kingma and Ba,
    "Adam", ICLR 2015, end of section 2.)
    """
    rate, beta1, rest1, beta2, rest2, epsilon, scale, decay, shrink = scalars
    for i in range(parameters.size):
        change = scale * gradient[i] + decay * parameters[i]
        mean[i] = beta1 * mean[i] + rest1 * change
        square[i] = beta2 * square[i] + rest2 * change * change
        parameters[i] -= shrink * parameters[i] + rate * mean[i] / (np.sqrt(square[i]) + epsilon)


@kernel_for(FLOATS, FLOATS, _SCALAR)
def scaled_into(out: np.ndarray, gradient: np.ndarray, factor: float) -> None:
    """``out = factor * gradient``."""
    for i in range(out.size):
        out[i] = factor * gradient[i]


@kernel_for(WORDS, "uint64")
def checksum(words: np.ndarray, seed: int) -> int:
    """Return a number below 2**63 that almost surely differs if any word, their order, or the seed does.

    It is for messages of which part has not arrived, not for adversaries. Two sums, one with odd weights that depend on
    the place, because a vector loop does them at the speed of memory.
    """
    plain, weighed = np.uint64(seed) & _LOW, np.uint64(seed) >> np.uint64(32)
    for i in range(words.size):
        word = np.uint64(words[i])
        plain += word
        weighed += word * np.uint64((2 * i + 1) * 2654435761 & 0xFFFFFFFF) & _LOW
    return np.int64(((weighed & np.uint64(0x7FFFFFFF)) << np.uint64(32)) | (plain & _LOW))
