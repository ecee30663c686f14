"""The whole state of a parameter server: what a server sends to a worker that asks, and how it begins from it.

A message has two words, version and steps, then the parameters and each vector that the optimiser keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from mpi4py import MPI

from mpicoll.optim.optimizers import OPTIMIZERS, Optimizer

TAG = 1
_WORDS = 2


class Answers:
    """Replies of a server to workers' requests, kept until they have arrived.

    Parameters
    ----------
    comm
        A communicator of the parameter server's own.
    """

    def __init__(self, comm: MPI.Intracomm, workers: int) -> None:
        self._comm, self._given = comm, np.zeros(workers, np.int64)
        self._under_way: list[tuple[int, MPI.Request, np.ndarray]] = []

    @property
    def receivers(self) -> list[int]:
        """Those who have not taken everything yet."""
        return [worker for worker, _, _ in self._under_way]

    def give(self, asks: np.ndarray, message: Callable[[], np.ndarray]) -> None:
        """Send to each worker that has asked again, by the numbers of times that they have."""
        due = asks[: self._given.size] > self._given
        if due.any():
            found = message()
            for worker in np.flatnonzero(due).tolist():
                self._under_way.append((worker, self._comm.Isend(found, worker, TAG), found))
            self._given[due] = asks[: self._given.size][due]
        if self._under_way:
            self.are_sent()

    def are_sent(self) -> bool:
        """Return whether all has arrived."""
        self._under_way = [each for each in self._under_way if not each[1].Test()]
        return not self._under_way


def message_nbytes(optimizer: str, count: int, itemsize: int) -> int:
    """Return the length of a message about a shard of `count` elements."""
    return 8 * _WORDS + (1 + len(OPTIMIZERS[optimizer].slots)) * count * itemsize


def packed(optimizer: Optimizer, version: int) -> np.ndarray:
    """Return a message; a copy."""
    words = np.array([version, optimizer.steps], np.int64)
    return np.concatenate([part.view(np.uint8) for part in (words, optimizer.parameters, *optimizer.state.values())])


def unpacked(message: np.ndarray, optimizer: str, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Return what a message says, by name; views."""
    version, steps = message[: 8 * _WORDS].view(np.int64)[:, np.newaxis]
    names = ("parameters", *OPTIMIZERS[optimizer].slots)
    vectors = message[8 * _WORDS :].view(dtype).reshape(len(names), -1)
    return {"version": version, "steps": steps, **dict(zip(names, vectors, strict=True))}


def part_of(state: Mapping[str, np.ndarray], start: int, stop: int, optimizer: Optimizer) -> None:
    """Let an optimizer of elements ``start`` to ``stop - 1`` go on from a state of all elements."""
    optimizer.parameters[:] = state["parameters"][start:stop]
    optimizer.steps = int(state["steps"].min())
    for name, vector in optimizer.state.items():
        vector[:] = state[name][start:stop]
