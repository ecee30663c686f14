"""Learning-rate schedules."""

from __future__ import annotations

import math


def learning_rate(step: int, total: int, peak: float, warmup: int, schedule: str) -> float:
    """Return the learning rate of a step.

    Parameters
    ----------
    step, total
        This step, from 0, and the number of steps of the run.
    peak
        The highest rate.
    warmup
        Number of steps over which the rate rises linearly to `peak`.
    schedule
        ``"constant"``; ``"cosine"``, falling to 0 at the end of the run; or ``"step"``, a tenth from one half of the
        run on and a hundredth from three quarters on.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    if schedule == "step":
        return peak * 0.1 ** ((2 * step >= total) + (4 * step >= 3 * total))
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
