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
        self._earlier: list[ShareRecord] = []
        self._first_step: int | None = None

    def add(self, piece: ShareRecord) -> None:
        """Add a share of this rank."""
        self.own.append(piece)
        self.records.append(self._record(piece.number // self._workers, [piece]))

    def take_over(self, before: ShareRecords, first: int) -> None:
        """Take over the shares of this rank before others died; those of the dead are missing.

        Parameters
        ----------
        first
            Number of the first share of the run, as `before` counts them.
        """
        self._first_step = before._first_step
        if self._first_step is None:
            self._first_step = first // before._workers
        for piece in (*before._earlier, *before.own):
            step = piece.number // before._workers
            self._earlier.append(piece._replace(number=step * self._workers))
            self.records.append(self._record(step, [piece]))

    def share(self, comm: MPI.Intracomm) -> None:
        """Gather the shares of all ranks on every rank, and compute `records` from them. Collective."""
        own = [*self._earlier, *self.own]
        counts = np.empty(comm.Get_size(), np.int64)
        comm.Allgather(np.array([len(own)]), counts)
        width = len(ShareRecord._fields)
        table = np.empty((int(counts.sum()), width))
        mine = np.array(own, np.float64).reshape(len(own), width)
        comm.Allgatherv(mine, [table, (counts * width).tolist()])
        steps: dict[int, list[ShareRecord]] = {}
        for row in table.tolist():
            piece = ShareRecord(int(row[0]), *row[1:])
            steps.setdefault(piece.number // self._workers, []).append(piece)
        self.records = [self._record(step, steps[step]) for step in sorted(steps)]
        if self._first_step is not None:
            self.records = self._without_gaps(self._first_step)

    def _without_gaps(self, first_step: int) -> list[StepRecord]:
        """Return records of all steps from the first one on; where ranks that died took a step alone, of one nearby."""
        known, found = {record.step: record for record in self.records}, self.records[:1]
        for step in range(first_step, max(known, default=-1) + 1):
            near, epoch = known.get(step, found[-1]), step // self._course.steps_per_epoch
            found.append(near._replace(step=step, epoch=epoch, learning_rate=self._course.rate(step)))
        return found[1:]

    def _record(self, step: int, pieces: Sequence[ShareRecord]) -> StepRecord:
        count = max(1, sum(piece.samples for piece in pieces))
        loss, correct = sum(piece.loss for piece in pieces), sum(piece.correct for piece in pieces)
        accuracy = correct / count if self._course.config.counts_hits else None
        return StepRecord(step, step // self._course.steps_per_epoch, pieces[0].rate, loss / count, accuracy)
