"""Agreement of all ranks of a communicator by the MPI library, with a deadline, while mpicoll does not serve it yet."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.errors import CollectiveTimeout
from mpicoll.progress import progress_engine
from mpicoll.progress.failed_ranks import raise_if_failed
from mpicoll.progress.waiting import LOOK_AFTER_SECONDS, POLLS_BEFORE_YIELD, wait_until

MEETING_SECONDS = 60.0
"""Seconds that a rank waits at least for the others: processes start at different times."""
_abandoned: list[tuple[MPI.Request, np.ndarray]] = []
"""Agreements that this rank has given up, and their memory, which the MPI library may still write."""


def largest_of_all(
    comm: MPI.Intracomm, numbers: np.ndarray, timeout: Any = 0.0, *, polls: int = POLLS_BEFORE_YIELD
) -> None:
    """Replace numbers by the largest ones of all ranks; collective.

    Parameters
    ----------
    numbers
        int64 of any shape, the same on all ranks.
    timeout
        Seconds that this rank waits, if more than :data:`MEETING_SECONDS`. What is no number counts as 0: it is refused
        later, on all ranks.
    polls
        Number of polls before the core is yielded.

    Raises
    ------
    CollectiveTimeout
        If a rank does not come.
    RankFailed
        If one has died, and the MPI library lets the others go on.
    """
    seconds = max(timeout, MEETING_SECONDS) if isinstance(timeout, (int, float)) else MEETING_SECONDS
    request = comm.Iallreduce(MPI.IN_PLACE, numbers, MPI.MAX)

    def look(waited: float) -> float:
        raise_if_failed(comm)
        if waited < seconds:
            return min(waited + LOOK_AFTER_SECONDS, seconds)
        raise CollectiveTimeout(
            f"rank {comm.rank} of {comm.size} waited {seconds:g} s for the others to make their first call of mpicoll"
            " for this communicator; did one of them fail before, or use another communicator?"
        )

    try:
        wait_until(progress_engine.with_progress(request.Test), polls, look)
    except BaseException:  # an interrupt, too
        _abandoned.append((request, numbers))
        raise
