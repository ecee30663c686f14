"""Shares of samples that workers have taken, and the steps and epochs that they amount to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpicoll.train.course import Course
from mpicoll.train.tally import EpochRecord, StepRecord


class Piece(NamedTuple):
    """A share of a batch: its number, learning rate, summed loss, hits, samples, and the seconds that it took."""

    number: int
    rate: float
    loss: float
    correct: float
    samples: float
    seconds: float


class Pieces:
    """The shares of all workers, of which each knows its own until they are brought together.

    Attributes
    ----------
    own : list of Piece
        Those of this rank.
    records : list of StepRecord
        Means over what is known of each step, in the order of steps.
    """

    def __init__(self, course: Course, workers: int) -> None:
        self._course, self._workers = course, workers
        self.own: list[Piece] = []
        self.records: list[StepRecord] = []

    def add(self, piece: Piece) -> None:
        """Note one of this rank."""
        self.own.append(piece)
        self.records.append(self._record(piece.number // self._workers, [piece]))

    def share(self, comm: MPI.Intracomm) -> None:
        """Let all ranks know all. Collective."""
        counts = np.empty(comm.Get_size(), np.int64)
        comm.Allgather(np.array([len(self.own)]), counts)
        width = len(Piece._fields)
        table = np.empty((int(counts.sum()), width))
        mine = np.array(self.own, np.float64).reshape(len(self.own), width)
        comm.Allgatherv(mine, [table, (counts * width).tolist()])
        steps: dict[int, list[Piece]] = {}
        for row in table.tolist():
            piece = Piece(int(row[0]), *row[1:])
            steps.setdefault(piece.number // self._workers, []).append(piece)
        self.records = [self._record(step, steps[step]) for step in sorted(steps)]

    def _record(self, step: int, pieces: Sequence[Piece]) -> StepRecord:
        count = max(1, sum(piece.samples for piece in pieces))
        loss, correct = sum(piece.loss for piece in pieces), sum(piece.correct for piece in pieces)
        return StepRecord(step, step // self._course.steps_per_epoch, pieces[0].rate, loss / count, correct / count)

    def with_means(self, epochs: Iterable[EpochRecord]) -> list[EpochRecord]:
        """Return the epochs with the training loss and accuracy of their steps, as far as these are known."""
        return [self._with_means(epoch) for epoch in epochs]

    def _with_means(self, epoch: EpochRecord) -> EpochRecord:
        records = [record for record in self.records if record.epoch == epoch.epoch]
        if not records:
            return epoch
        loss, accuracy = np.mean([(record.loss, record.accuracy) for record in records], axis=0).tolist()
        return epoch._replace(train_loss=loss, train_accuracy=accuracy)
