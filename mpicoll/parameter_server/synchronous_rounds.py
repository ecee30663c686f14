"""Synchronous steps on a server: whose gradients make one up, and their sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


class SynchronousRound:
    """The gradients of one step, added up.

    Without backup workers those of all workers, in the order of their ranks: then the sum is the same to the bit in
    every run. With ``backup`` of them, those that come first, and the step does not wait for so many.
    (Chen et al., "Revisiting distributed synchronous SGD", ICLR workshop 2016.)

    Attributes
    ----------
    total : (count,)
        The sum so far.
    rate
        Learning rate of the first gradient in it.
    given
        How many there are.
    """

    def __init__(self, workers: int, backup: int, count: int, dtype: np.dtype) -> None:
        self.total = np.empty(count, dtype)
        self._workers, self._backup = workers, backup
        self.reset()

    def reset(self) -> None:
        """Begin the next step."""
        self.given, self.rate, self._turn = 0, 0.0, 0
        self._gave = [False] * self._workers

    def due(self, waiting: Sequence[bool], over: Sequence[bool]) -> Iterator[int]:
        """Yield the workers whose next message is to be taken now.

        Parameters
        ----------
        waiting, over
            Who has sent one, and who will send no more.
        """
        if self._backup:
            yield from (worker for worker in range(self._workers) if waiting[worker] and not self.is_complete(over))
            return
        while self._turn < self._workers:
            if waiting[self._turn]:
                yield self._turn
            elif not over[self._turn]:
                return
            self._turn += 1

    def add(self, worker: int, gradient: np.ndarray, rate: float, first: int = 0) -> None:
        """Take a gradient of the elements from `first` on."""
        part = self.total[first : first + gradient.size]
        if self.given == 0:
            self.rate = rate
            if part.size < self.total.size:
                self.total[:] = 0
            part[:] = gradient
        else:
            part += gradient
        self.given += 1
        self._gave[worker] = True

    def is_complete(self, over: Sequence[bool]) -> bool:
        """Return whether the step can be taken: some gradients, and nobody left to wait for."""
        if self._backup:
            enough = self.given >= self._workers - self._backup
            return enough or (self.given > 0 and all(a or b for a, b in zip(self._gave, over, strict=True)))
        return self.given > 0 and self._turn == self._workers
