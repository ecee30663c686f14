"""Facts of the start of a run that its loops have in common."""

from __future__ import annotations

from typing import NamedTuple


class RunStart(NamedTuple):
    """Facts of the start of a run, which a loop that goes on from another one takes over.

    Attributes
    ----------
    first_epoch
        Number of the first epoch.
    resumed_after
        Steps up to the checkpoint from which the run resumed; 0 for a new run.
    seconds_to_first_step
        Age of the process after its first step; 0 before that.
    """

    first_epoch: int
    resumed_after: int
    seconds_to_first_step: float
