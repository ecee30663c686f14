"""Outcomes of training runs, ours and PyTorch's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

TORCH = "PyTorch DDP"
GOAL = 0.97
WARMUP_STEPS = 5
"""Steps at the beginning of a run that are taken but not timed."""


@dataclass
class Outcome:
    """One training run; `losses` are those of its steps."""

    task: str
    strategy: str
    ranks: int
    samples_per_second: float
    seconds_to_goal: float | None = None
    accuracy: float | None = None
    held_nbytes: int | None = None
    sent_nbytes: float | None = None
    losses: list[float] = field(default_factory=list)


def mean(comm: MPI.Intracomm, value: float) -> float:
    """Return the mean over ranks; collective."""
    import numpy as np
    from mpi4py import MPI

    total = np.array([value])
    comm.Allreduce(MPI.IN_PLACE, total, MPI.SUM)
    return float(total[0]) / comm.Get_size()
