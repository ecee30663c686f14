"""Synchronous steps on a server: the gradients of a step, and their sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


class SynchronousRound:
    """The sum of the gradients of one step.

    Without backup workers the gradients of all workers are added in rank order, so that the sum is the same to the bit
    in every run. With backup workers the step is complete when all but `backup` gradients have arrived.
    (Chen et al., "Revisiting distributed synchronous SGD", ICLR workshop 2016.)

    Attributes
    ----------
    total : (count,)
        The sum so far.
    rate
        Learning rate of the first gradient in the sum.
    given
        Number of gradients in the sum.
    parts : list of (begin, end)
        The elements that gradients were given for, in ascending order; one empty part if there are none.
    """

    def __init__(self, workers: int, backup: int, count: int, dtype: np.dtype) -> None:
        self.total = np.empty(count, dtype)
        self._workers, self._backup = workers, backup
        self.reset()

    def reset(self) -> None:
        """Start the next step."""
        self.given, self.rate, self._turn, self.parts = 0, 0.0, 0, [(0, 0)]
        self._gave = [False] * self._workers

    def due(self, waiting: Sequence[bool], over: Sequence[bool]) -> Iterator[int]:
        """Yield the workers whose next message is to be added now.

        Parameters
        ----------
        waiting, over
            By worker, whether it has a message in its mailbox, and whether it will send no more.
        """
        if self._backup:
            yield from (worker for worker in range(self._workers) if waiting[worker] and not self._is_enough())
            return
        if self._turn == self._workers and self.given == 0:
            self._turn = 0  # all were over, and one that had been dropped has come back
        while self._turn < self._workers:
            if waiting[self._turn]:
                yield self._turn
            elif not over[self._turn]:
                return
            self._turn += 1

    def add(self, worker: int, gradient: np.ndarray, rate: float, first: int = 0) -> None:
        """Add a gradient of the elements from `first` on."""
        part = self.total[first : first + gradient.size]
        if self.given == 0:
            self.rate = rate
            if part.size < self.total.size:
                self.total[:] = 0
            part[:] = gradient
        else:
            part += gradient
        if gradient.size:
            self._join(first, first + gradient.size)
        self.given += 1
        self._gave[worker] = True

    def _join(self, begin: int, end: int) -> None:
        """Add elements to `parts`, which neither overlap nor touch each other."""
        near = [part for part in self.parts if part[0] <= end and part[1] >= begin and part[0] < part[1]]
        far = [part for part in self.parts if part not in near and part[0] < part[1]]
        joined = min([begin, *(part[0] for part in near)]), max([end, *(part[1] for part in near)])
        self.parts = sorted([*far, joined])

    def _is_enough(self) -> bool:
        return self.given >= self._workers - self._backup

    def is_complete(self, over: Sequence[bool]) -> bool:
        """Return whether the step can be applied: it has gradients, and no worker is left to wait for.

        Parameters
        ----------
        over
            By worker, whether it will send no more, and nothing that it has sent is left to be added.
        """
        if self._backup:
            return self._is_enough() or (self.given > 0 and all(a or b for a, b in zip(self._gave, over, strict=True)))
        return self.given > 0 and self._turn == self._workers
