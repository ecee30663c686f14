"""Batch normalisation, with statistics of one rank's samples or of those of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from mpicoll.models.layers.layer_interface import Arrays, Constant, Initial, Layer, Shape, Workspace

_WIDE = np.dtype(np.float64)


class BatchNorm:
    """Batch normalisation: mean 0 and variance 1 of each channel over a micro-batch, then a gain and a bias.

    The channels are the last axis. An evaluation, in which the workspace has no key, uses running averages of mean and
    variance: ``(1 - momentum) * average + momentum * value`` after each micro-batch, of which the variance is the
    unbiased one. (Ioffe and Szegedy, "Batch normalization: accelerating deep network training by reducing internal
    covariate shift", ICML 2015, algorithms 1 and 2.)

    The statistics are sums in float64. Those of all ranks are one sum over the ranks in the forward pass, and one in
    the backward pass if the derivative with respect to the input is wanted; a gradient is then that of the whole
    batch. See :class:`~mpicoll.parallel.running_statistics.RunningStatistics`.

    Parameters
    ----------
    shape
        Shape of a sample.
    synchronized
        True for statistics of the samples of all ranks, False for those of the rank's own.
    epsilon
        Number added to the variance, positive.
    momentum
        Weight of a micro-batch in the running averages, in (0, 1].

    Attributes
    ----------
    running : (2 * channels,) of float64
        Running averages of the means, then those of the variances. They are state, not parameters.
    seen : int
        Elements of each channel that have entered `running` on this rank since it was last set to 0.
    add_up : callable or None
        Function that replaces a vector of float64 with its sum over the ranks; None for one rank.

    Raises
    ------
    ValueError
        If `epsilon` or `momentum` is out of range.
    """

    def __init__(
        self, shape: Shape, *, synchronized: bool = True, epsilon: float = 1e-5, momentum: float = 0.1
    ) -> None:
        if not epsilon > 0:
            raise ValueError(f"epsilon: {epsilon} is not positive")
        if not 0 < momentum <= 1:
            raise ValueError(f"momentum: {momentum} is not in (0, 1]")
        self._width = width = shape[-1]
        self.shapes: tuple[Shape, ...] = ((width,), (width,))
        self.decays: tuple[bool, ...] = (False, False)
        self.initials: tuple[Initial, ...] = (Constant(1.0), Constant(0.0))
        self.output, self.synchronized, self.waited = shape, synchronized, 0.0
        self._epsilon, self._momentum = epsilon, momentum
        self.running = np.concatenate([np.zeros(width), np.ones(width)])
        self.seen = 0
        self.add_up: Callable[[np.ndarray], None] | None = None

    def forward(self, arrays: Arrays, x: np.ndarray, room: Workspace) -> np.ndarray:
        """See :class:`Layer`. Collective in training if a sum over the ranks is set."""
        normal, out = (room.rows(name, len(x), self.output, x.dtype) for name in ("normal", "out"))
        if room.key is None:
            mean, variance = self.running[: self._width], self.running[self._width :]
        else:
            mean, variance = self._statistics(x.reshape(-1, self._width), room)
        factor = self._factor(room)
        np.divide(1, np.sqrt(variance + self._epsilon), out=factor)
        np.subtract(x, mean.astype(x.dtype), out=normal)
        normal *= factor.astype(x.dtype)
        np.multiply(normal, arrays[0], out=out)
        out += arrays[1]
        return out

    def affine(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """Return factor and shift of each channel in an evaluation, two (channels,) arrays of float64."""
        mean, variance = self.running[: self._width], self.running[self._width :]
        factor = arrays[0] / np.sqrt(variance + self._epsilon)
        return factor, arrays[1] - mean * factor

    def _statistics(self, x: np.ndarray, room: Workspace) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance of the batch, (channels,) of float64, and enter them into the running averages."""
        width = self._width
        sums = np.empty(1 + 2 * width)
        sums[0] = len(x)
        np.sum(x, axis=0, dtype=_WIDE, out=sums[1 : 1 + width])
        np.einsum("ij,ij->j", x, x, dtype=_WIDE, out=sums[1 + width :])
        self._sum_over_ranks(sums)
        count = sums[0]
        room.rows("count", 1, (), _WIDE)[0] = count
        if count == 0:
            return sums[1 : 1 + width], sums[1 + width :]
        mean, square = sums[1 : 1 + width] / count, sums[1 + width :] / count
        variance = np.maximum(square - mean * mean, 0)
        if room.again:
            return mean, variance
        now = np.concatenate([mean, variance * (count / max(count - 1, 1))])
        self.running *= 1 - self._momentum
        self.running += self._momentum * now
        self.seen += int(count)
        return mean, variance

    def _sum_over_ranks(self, sums: np.ndarray) -> None:
        if self.add_up is not None:
            began = time.perf_counter()
            self.add_up(sums)
            self.waited += time.perf_counter() - began

    def _factor(self, room: Workspace) -> np.ndarray:
        return room.rows("factor", self._width, (), _WIDE)

    def backward(
        self, arrays: Arrays, delta: np.ndarray, room: Workspace, gradients: Arrays, *, below: bool, add: bool
    ) -> np.ndarray | None:
        """See :class:`Layer`. Collective in training if a sum over the ranks is set and `below` is True."""
        normal, into = (room.rows(name, len(delta), self.output, delta.dtype) for name in ("normal", "out"))
        width = self._width
        np.multiply(delta, normal, out=into)
        sums = np.empty(2 * width)
        for half, values in ((sums[:width], into), (sums[width:], delta)):
            np.sum(values.reshape(-1, width), axis=0, dtype=_WIDE, out=half)
        for gradient, half in zip(gradients, (sums[:width], sums[width:]), strict=True):
            np.add(gradient, half, out=gradient, casting="same_kind") if add else np.copyto(gradient, half, "same_kind")
        if not below:
            return None
        if room.key is not None:  # mean and variance depend on the input too
            self._sum_over_ranks(sums)
            sums /= max(room.rows("count", 1, (), _WIDE)[0], 1)
            means = sums.astype(delta.dtype)
            normal *= means[:width]
            delta -= normal
            delta -= means[width:]
        return np.multiply(delta, (arrays[0] * self._factor(room)).astype(delta.dtype), out=into)


def batch_norms(layers: Iterable[Layer]) -> Iterator[BatchNorm]:
    """Yield the batch normalisations among layers, and within them, in order."""
    for layer in layers:
        if isinstance(layer, BatchNorm):
            yield layer
        else:
            yield from batch_norms(getattr(layer, "layers", ()))
