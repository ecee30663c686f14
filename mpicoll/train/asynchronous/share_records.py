"""Records of the shares of batches that workers have taken, and of the steps that they make up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.train.metrics import StepRecord
from mpicoll.train.step_plan import StepPlan


class ShareRecord(NamedTuple):
    """Record of a share of a batch; `loss` and `correct` are sums over its samples, `number` counts from 0."""

    number: int
    rate: float
    loss: float
    correct: float
    samples: float
    seconds: float


class ShareRecords:
    """Records of the workers' shares: this rank's, and after :meth:`share` those of all ranks.

    Attributes
    ----------
    own : list of ShareRecord
        Shares of this rank.
    records : list of StepRecord
        Means over the known shares of each step, in the order of steps.
    """

    def __init__(self, course: StepPlan, workers: int) -> None:
        self._course, self._workers = course, workers
        self.own: list[ShareRecord] = []
        self.records: list[StepRecord] = []

    def add(self, piece: ShareRecord) -> None:
        """Add a share of this rank."""
        self.own.append(piece)
        self.records.append(self._record(piece.number // self._workers, [piece]))

    def share(self, comm: MPI.Intracomm) -> None:
        """Gather the shares of all ranks on every rank, and compute `records` from them. Collective."""
        counts = np.empty(comm.Get_size(), np.int64)
        comm.Allgather(np.array([len(self.own)]), counts)
        width = len(ShareRecord._fields)
        table = np.empty((int(counts.sum()), width))
        mine = np.array(self.own, np.float64).reshape(len(self.own), width)
        comm.Allgatherv(mine, [table, (counts * width).tolist()])
        steps: dict[int, list[ShareRecord]] = {}
        for row in table.tolist():
            piece = ShareRecord(int(row[0]), *row[1:])
            steps.setdefault(piece.number // self._workers, []).append(piece)
        self.records = [self._record(step, steps[step]) for step in sorted(steps)]

    def _record(self, step: int, pieces: Sequence[ShareRecord]) -> StepRecord:
        count = max(1, sum(piece.samples for piece in pieces))
        loss, correct = sum(piece.loss for piece in pieces), sum(piece.correct for piece in pieces)
        accuracy = correct / count if self._course.config.counts_hits else None
        return StepRecord(step, step // self._course.steps_per_epoch, pieces[0].rate, loss / count, accuracy)
