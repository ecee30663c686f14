"""State of a parameter server: the messages by which servers send it to a worker, and its restoration.

A message has two words, version and steps, then the parameters and each vector of the optimizer's state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from mpi4py import MPI

from mpicoll.optim.optimizers import OPTIMIZERS
from mpicoll.optim.update_rule import Optimizer

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
        """Workers that have not received all messages yet."""
        return [worker for worker, _, _ in self._under_way]

    def give(self, asks: np.ndarray, message: Callable[[], np.ndarray]) -> None:
        """Send a message to each worker whose number of requests in `asks` has grown."""
        due = asks[: self._given.size] > self._given
        if due.any():
            found = message()
            for worker in np.flatnonzero(due).tolist():
                self._under_way.append((worker, self._comm.Isend(found, worker, TAG), found))
            self._given[due] = asks[: self._given.size][due]
        if self._under_way:
            self.are_sent()

    def are_sent(self) -> bool:
        """Return whether all messages have been sent."""
        self._under_way = [each for each in self._under_way if not each[1].Test()]
        return not self._under_way


def message_nbytes(optimizer: str, count: int, itemsize: int) -> int:
    """Return the bytes of a message for a shard of `count` elements."""
    return 8 * _WORDS + (1 + len(OPTIMIZERS[optimizer].slots)) * count * itemsize


def packed(optimizer: Optimizer, version: int) -> np.ndarray:
    """Return a message with copies of an optimizer's parameters and state."""
    words = np.array([version, optimizer.steps], np.int64)
    return np.concatenate([part.view(np.uint8) for part in (words, optimizer.parameters, *optimizer.state.values())])


def unpacked(message: np.ndarray, optimizer: str, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Return the arrays of a message by name, as views."""
    version, steps = message[: 8 * _WORDS].view(np.int64)[:, np.newaxis]
    names = ("parameters", *OPTIMIZERS[optimizer].slots)
    vectors = message[8 * _WORDS :].view(dtype).reshape(len(names), -1)
    return {"version": version, "steps": steps, **dict(zip(names, vectors, strict=True))}


def part_of(state: Mapping[str, np.ndarray], start: int, stop: int, optimizer: Optimizer) -> None:
    """Restore an optimizer of elements ``start`` to ``stop - 1`` from a state of all elements."""
    optimizer.parameters[:] = state["parameters"][start:stop]
    optimizer.steps = int(state["steps"].min())
    for name, vector in optimizer.state.items():
        vector[:] = state[name][start:stop]
