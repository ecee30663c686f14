"""Learning-rate schedules."""

from __future__ import annotations

import math


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
