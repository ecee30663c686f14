"""Learning-rate schedules."""

from __future__ import annotations

import math


def scaled(peak: float, rule: str, batch: int, base: int) -> float:
    """Return the learning rate for batches of `batch` samples, where `peak` is that for batches of `base`.

    Parameters
    ----------
    rule
        ``"none"``; ``"linear"``, in proportion to the batch (Goyal et al., "Accurate, large minibatch SGD",
        arXiv:1706.02677, 2017, section 2.1); or ``"sqrt"``, to its square root, which keeps the variance of a step
        (Krizhevsky, "One weird trick for parallelizing convolutional neural networks", arXiv:1404.5997, 2014, section
        5; Hoffer et al., "Train longer, generalize better", NIPS 2017).
    """
    if rule == "none":
        return peak
    return peak * (batch / base if rule == "linear" else math.sqrt(batch / base))


def learning_rate(step: int, total: int, peak: float, warmup: int, schedule: str) -> float:
    """Return the learning rate of a step.

    Parameters
    ----------
    step, total
        Number of the step, from 0, and number of steps of the run.
    peak
        Largest learning rate.
    warmup
        Number of steps over which the rate rises linearly to `peak` (Goyal et al., "Accurate, large minibatch SGD",
        2017, section 2.2).
    schedule
        ``"constant"``; ``"cosine"``, falling to 0 at the end of the run (Loshchilov and Hutter, "SGDR", ICLR 2017,
        without restarts); or ``"step"``, ``peak / 10`` after one half of the run and ``peak / 100`` after three
        quarters.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    if schedule == "step":
        return peak * 0.1 ** ((2 * step >= total) + (4 * step >= 3 * total))
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
