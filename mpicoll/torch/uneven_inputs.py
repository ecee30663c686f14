"""Steps of ranks that have run out of samples, while others still have some.

Ranks with 3, 2 and 1 batches::

    rank 0   step   step   step   done      before its gradients every rank sends a mark, 0 if it has no samples;
    rank 1   step   step   zeros  done      the sum of the marks says who takes part
    rank 2   step   zeros  zeros  done      at last, all get the state of the rank that was the last to stop

(Horovod's ``join``; ``torch.distributed.algorithms.join`` of PyTorch.)
"""

from __future__ import annotations

from enum import IntEnum

import torch

from mpicoll.torch import tensor_communicator as communicator
from mpicoll.torch.call_queue import QueuedWork
from mpicoll.torch.world import rank, size


class Mark(IntEnum):
    """State of a rank: no samples, gradients that it is about to reduce, or reduced ones that are (not) the newest."""

    ABSENT = 0
    REDUCES = 1
    UNCHANGED = 2
    CHANGED = 3


class Attendance:
    """Marks of the ranks, exchanged once a step by those that have samples left.

    Attributes
    ----------
    present : list of int
        The ranks that took part in the last step.
    marks : list of int
        The last marks of all ranks.
    """

    def __init__(self) -> None:
        self.present = list(range(size()))
        self.marks: list[int] = []
        self._marks = torch.zeros(size(), dtype=torch.int32)
        self._work: QueuedWork | None = None

    def send(self, mark: Mark) -> None:
        """Start to exchange marks; this rank's is `mark`."""
        self._marks.zero_()
        self._marks[rank()] = int(mark)
        self._work = communicator.allreduce_async_(self._marks, op=communicator.Sum)

    def receive(self) -> list[int]:
        """Wait for the marks; return the ranks that have samples, which may be none."""
        assert self._work is not None
        self._work.wait()
        self._work = None
        self.marks = self._marks.tolist()
        found = [rank for rank, mark in enumerate(self.marks) if mark]
        if found:
            self.present = found
        return found
