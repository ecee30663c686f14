"""State of a parameter server: the messages by which servers send it to a worker, and its restoration.

A message has two words, version and steps, then the parameters, each vector of the optimizer's state and, with
compressed pulls, the published parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicoll.optim.update_rule import Optimizer
from mpicoll.parameter_server.partition import PUBLISHED, Settings

STATE_TAG, PARAMETERS_TAG = 1, 2
_WORDS = 2
_abandoned: list[Any] = []
"""Messages that their receivers will not take: MPI may still read their memory."""


class Answers:
    """Replies of a server to workers' requests, kept until they have arrived.

    Parameters
    ----------
    comm
        A communicator of the parameter server's own.
    tag
        Tag of these replies.
    """

    def __init__(self, comm: MPI.Intracomm, workers: int, tag: int) -> None:
        self._comm, self._tag, self._given = comm, tag, np.zeros(workers, np.int64)
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
                self._under_way.append((worker, self._comm.Isend(found, worker, self._tag), found))
            self._given[due] = asks[: self._given.size][due]
        if self._under_way:
            self.are_sent()

    def abandon(self, workers: Iterable[int]) -> None:
        """Wait no longer for these workers to receive their messages."""
        gone = set(workers)
        _abandoned.extend(each for each in self._under_way if each[0] in gone)
        self._under_way = [each for each in self._under_way if each[0] not in gone]

    def are_sent(self) -> bool:
        """Return whether all messages have been sent."""
        self._under_way = [each for each in self._under_way if not each[1].Test()]
        return not self._under_way


def state_nbytes(settings: Settings, count: int) -> int:
    """Return the bytes of a message for a shard of `count` elements."""
    return 8 * _WORDS + len(settings.state_names) * count * settings.dtype.itemsize


def packed(optimizer: Optimizer, version: int, published: np.ndarray | None) -> np.ndarray:
    """Return a message with copies of an optimizer's parameters and state, and of published parameters."""
    words = np.array([version, optimizer.steps], np.int64)
    vectors = [optimizer.parameters, *optimizer.state.values(), *(() if published is None else (published,))]
    return np.concatenate([part.view(np.uint8) for part in (words, *vectors)])


def published_of(initial: np.ndarray, state: Mapping[str, np.ndarray] | None) -> np.ndarray:
    """Return the published parameters at the start: those of a state, its parameters if it has none, or `initial`."""
    return initial if state is None else state.get(PUBLISHED, state["parameters"])


def unpacked(message: np.ndarray, settings: Settings) -> dict[str, np.ndarray]:
    """Return the arrays of a message by name, as views."""
    version, steps = message[: 8 * _WORDS].view(np.int64)[:, np.newaxis]
    names, dtype = settings.state_names, settings.dtype
    vectors = message[8 * _WORDS :].view(dtype).reshape(len(names), -1)
    return {"version": version, "steps": steps, **dict(zip(names, vectors, strict=True))}


def part_of(state: Mapping[str, np.ndarray], start: int, stop: int, optimizer: Optimizer) -> None:
    """Restore an optimizer of elements ``start`` to ``stop - 1`` from a state of all elements."""
    optimizer.parameters[:] = state["parameters"][start:stop]
    optimizer.steps = int(state["steps"].min())
    for name, vector in optimizer.state.items():
        vector[:] = state[name][start:stop]
