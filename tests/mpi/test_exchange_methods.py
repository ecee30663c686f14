"""Exchanges of long blocks by copies between processes, by stages, and by the one that trials find faster."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm, shared_arrays
from mpicoll.collectives import select
from mpicoll.collectives.exchange_memory import ExchangeMemory, memory_of
from mpicoll.kernels import exchange_words, method_trials
from mpicoll.kernels import operation_words as words
from tests.secret_memory import secret_on_one_rank

pytestmark = pytest.mark.mpi(min_size=2)
ROUTES = (None, *select.ON_NODE)


@pytest.fixture
def single(comm: Intracomm) -> Intracomm:
    if comm.channel.node is None or comm.channel.node.copies is None:
        pytest.skip("processes do not copy from each other here")
    return comm


class Exchange:
    """An Alltoallv of blocks of different lengths, and what it gives."""

    def __init__(self, comm: Intracomm, unit: int, sent: np.ndarray | None = None) -> None:
        size, rank = comm.size, comm.rank
        self.counts = [unit * (1 + (rank + 2 * to) % 3) for to in range(size)]
        self.expected_counts = [unit * (1 + (source + 2 * rank) % 3) for source in range(size)]
        count = sum(self.counts)
        self.sent = np.empty(count) if sent is None else sent[:count]
        self.got = np.empty(sum(self.expected_counts))
        self._comm = comm

    def check(self, turn: int, algorithm: str | None = None) -> None:
        rank, size = self._comm.rank, self._comm.size
        self.sent[:] = np.concatenate([np.arange(n) + turn + 7 * rank + to for to, n in enumerate(self.counts)])
        self.got[:] = -1
        self._comm.Alltoallv([self.sent, self.counts], [self.got, self.expected_counts], algorithm=algorithm)
        sources = zip(range(size), self.expected_counts, strict=True)
        np.testing.assert_array_equal(
            self.got, np.concatenate([np.arange(n) + turn + 7 * source + rank for source, n in sources])
        )


def _memory(comm: Intracomm) -> ExchangeMemory:
    return memory_of(comm.channel.node)


@pytest.mark.parametrize("algorithm", ROUTES)
@pytest.mark.parametrize("unit", [1, 50, 3000, 40_000, 200_000])
def test_blocks_of_different_lengths(single: Intracomm, unit: int, algorithm: str | None) -> None:
    exchange = Exchange(single, unit)
    for turn in range(3):
        exchange.check(turn, algorithm)


@pytest.mark.parametrize("algorithm", ROUTES)
@pytest.mark.parametrize("run", [40, 128, 1000])
@pytest.mark.parametrize("rows", [3, 300])
def test_runs_of_a_matrix(single: Intracomm, rows: int, run: int, algorithm: str | None) -> None:
    """Columns of a matrix go to each rank, more of them than the system takes in one call, and come as rows."""
    size, rank = single.size, single.rank
    given = np.arange(rows * size * run, dtype=float).reshape(rows, size * run) + 1000 * rank
    got = np.empty((size * rows, run))
    columns = [MPI.DOUBLE.Create_subarray(given.shape, [rows, run], [0, run * to]).Commit() for to in range(size)]
    lines = [MPI.DOUBLE.Create_subarray(got.shape, [rows, run], [rows * to, 0]).Commit() for to in range(size)]
    single.Alltoallw([given, columns], [got, lines], algorithm=algorithm)
    whole = np.arange(rows * size * run, dtype=float).reshape(rows, size * run)[:, rank * run : (rank + 1) * run]
    np.testing.assert_array_equal(got, np.concatenate([whole + 1000 * source for source in range(size)]))
    for each in (*columns, *lines):
        each.Free()


def test_what_is_asked_for_is_done(single: Intracomm) -> None:
    exchange = Exchange(single, 5000)
    for algorithm in select.ON_NODE:
        exchange.check(0, algorithm)
        assert (_memory(single).words[exchange_words.SHORTEST_RUN] > 0) == (algorithm == select.SINGLE_COPY)


def test_memory_that_cannot_be_copied_passes_through_stages(single: Intracomm) -> None:
    exchange = Exchange(single, 5000, secret_on_one_rank(single, 5000 * 3 * single.size))
    for turn in range(3):
        exchange.check(turn, select.SINGLE_COPY)
    assert _memory(single).words[exchange_words.TRIALS] == 0


@pytest.mark.parametrize("unit", [3000, 40_000])
def test_trials_change_the_method(single: Intracomm, unit: int, monkeypatch: Any) -> None:
    monkeypatch.setenv("MPICOLL_TRIALS", "eager" if single.rank % 2 == 0 else "off")
    comm = Intracomm(MPI.Intracomm(single).Dup(), timeout=60)
    exchange, methods = Exchange(comm, unit), set()
    for turn in range(60):
        exchange.check(turn)
        job = _memory(comm)._trials._job
        methods.add(int(job[words.METHOD]))
    assert len(methods) == (2 if comm.rank % 2 == 0 else 1)
    assert _memory(comm)._trials._trials._own[method_trials.OWN_FIRST] == (1 if comm.rank % 2 == 0 else 24)
    comm.Free()


def test_calls_that_no_method_changes_are_not_timed(single: Intracomm) -> None:
    with shared_arrays(min_nbytes=0):
        exchange = Exchange(single, 40_000)
    exchange.check(0)
    job = _memory(single)._trials._job
    before = int(job[words.LONG_CALLS])
    job[words.TIMED] = 1  # as a call leaves it that has failed
    exchange.check(1)
    assert job[words.LONG_CALLS] == before
    assert job[words.TIMED] == 0
    Exchange(single, 40_000).check(2)
    assert job[words.LONG_CALLS] == before + 1
