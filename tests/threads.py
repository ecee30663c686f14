"""Ranks as threads of one process: the few calls that ranks make to tell each other how it went, without MPI."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np


class _Request:
    def __init__(self, barrier: threading.Barrier) -> None:
        self._barrier = barrier

    def Test(self) -> bool:
        self._barrier.wait()
        return True


class ThreadComm:
    """What one rank sees."""

    def __init__(self, rank: int, barrier: threading.Barrier, table: list[Any]) -> None:
        self._rank, self._barrier, self._table = rank, barrier, table

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return len(self._table)

    def Ibarrier(self) -> _Request:
        return _Request(self._barrier)

    def _all(self, array: np.ndarray) -> list[np.ndarray]:
        self._table[self._rank] = array.copy()
        self._barrier.wait()
        found = list(self._table)
        self._barrier.wait()
        return found

    def Bcast(self, array: np.ndarray, root: int = 0) -> None:
        array[...] = self._all(array)[root]

    def Allgather(self, mine: np.ndarray, joined: np.ndarray) -> None:
        joined.reshape(-1)[...] = np.concatenate(self._all(mine))

    def Gatherv(self, mine: np.ndarray, joined: list[Any], root: int = 0) -> None:
        found = self._all(mine)
        if self._rank == root:
            joined[0][...] = np.concatenate(found)


def on_ranks(size: int, function: Callable[..., Any]) -> list[Any]:
    """Call ``function(comm)`` on every rank; return what each returned or raised, in rank order."""
    barrier, table = threading.Barrier(size, timeout=30), [None] * size
    outcomes: list[Any] = [None] * size

    def work(rank: int) -> None:
        try:
            outcomes[rank] = function(ThreadComm(rank, barrier, table))
        except BaseException as error:
            outcomes[rank] = error
            if not hasattr(error, "exit_status"):  # ours are raised on every rank, which can go on
                barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def results(size: int, function: Callable[..., Any]) -> list[Any]:
    """Call ``function(comm)`` on every rank; return what each returned, or raise what the first raised."""
    outcomes = on_ranks(size, function)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, threading.BrokenBarrierError):
            raise outcome
    return outcomes
