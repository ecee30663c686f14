"""Calls on shared memory whose counts were not given before are compiled, too, and compared between the ranks."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.errors import MismatchError

pytestmark = pytest.mark.mpi(min_size=2)


def _counts(comm: Intracomm, turn: int) -> list[int]:
    return [1 + (7 * turn + rank) % 11 for rank in range(comm.size)]


def _exchange(comm: Intracomm, turn: int, root: int) -> None:
    """Gather and scatter vectors of other counts each turn, and compare."""
    counts = _counts(comm, turn)
    whole = np.concatenate([turn + rank / 100 + np.arange(float(count)) for rank, count in enumerate(counts)])
    own = turn + comm.rank / 100 + np.arange(float(counts[comm.rank]))
    found = np.zeros(whole.size)
    comm.Gatherv(own, [found, counts] if comm.rank == root else None, root)
    if comm.rank == root:
        np.testing.assert_array_equal(found, whole)
    part = np.zeros(own.size)
    comm.Scatterv([whole, counts] if comm.rank == root else None, part, root)
    np.testing.assert_array_equal(part, own)
    told = whole.copy() if comm.rank == root else np.zeros(whole.size)
    comm.Bcast(told, root)
    np.testing.assert_array_equal(told, whole)


def test_counts_that_change_each_time(comm: Intracomm, compiled: Callable[[], None]) -> None:
    for root in range(comm.size):
        _exchange(comm, 0, root)
    compiled()
    for turn in range(1, 40):
        _exchange(comm, turn, turn % comm.size)


def test_ranks_that_differ_in_the_first_call_with_new_counts_all_raise_in_it(comm: Intracomm) -> None:
    for count in (3, 5):
        comm.Bcast(np.zeros(count))
    with pytest.raises(MismatchError):
        comm.Bcast(np.zeros(7 if comm.rank else 8))


def test_counts_that_do_not_fit_are_an_error_on_all_ranks(comm: Intracomm) -> None:
    """At the latest in the next call."""
    last = comm.size - 1
    for turn in range(3):
        _exchange(comm, turn, 0)
    counts = _counts(comm, 5)
    own = np.zeros(counts[comm.rank] + (comm.rank == last))

    def call() -> None:
        comm.Gatherv(own, [np.zeros(sum(counts)), counts] if comm.rank == 0 else None)
        comm.Barrier()

    with pytest.raises((ValueError, RuntimeError)):
        call()


def test_other_buffers_and_orders_are_compiled_too(comm: Intracomm, compiled: Callable[[], None]) -> None:
    size = comm.size
    own, all_ = np.zeros(6), np.zeros(6 * size)
    comm.Bcast(own)
    comm.Allreduce(own.copy(), own)
    comm.Gather(own, all_ if comm.rank == 0 else None)
    comm.Allgatherv(own, all_)
    compiled()
    numbers, total = array("d", range(6)), array("d", [0.0] * 6)
    comm.Allreduce(numbers, total)
    assert total.tolist() == [size * each for each in numbers]
    text = bytearray(b"abcdef" if comm.rank == 0 else 6)
    comm.Bcast([text, MPI.BYTE])
    assert text == b"abcdef"
    given = np.asfortranarray(np.arange(6.0).reshape(2, 3) + comm.rank)
    result = np.zeros((2, 3), order="F")
    comm.Allreduce(given, result)
    np.testing.assert_array_equal(result, size * np.arange(6.0).reshape(2, 3) + sum(range(size)))
    lines = np.zeros((size, 6)) if comm.rank == 0 else None
    comm.Gather(given, lines)
    if lines is not None:
        for rank in range(size):
            np.testing.assert_array_equal(lines[rank], np.arange(6.0).reshape(2, 3).T.ravel() + rank)
    parts = array("d", [0.0] * (3 * size))
    comm.Allgatherv(array("d", [comm.rank] * 3), [parts, 3])
    assert parts.tolist() == [rank for rank in range(size) for _ in range(3)]


@pytest.mark.parametrize("name", ["Gatherv", "Scatterv", "Allgatherv"])
def test_blocks_that_do_not_follow_each_other_are_compiled_too(
    comm: Intracomm, compiled: Callable[[], None], name: str
) -> None:
    """Blocks in any order, with elements between them, which stay as they are."""
    size, root, turns = comm.size, comm.size - 1, 12
    for rank in range(size):
        _exchange(comm, 0, rank)
    comm.Allgatherv(np.zeros(2), np.zeros(2 * size))
    compiled()
    for turn in range(turns):
        counts = [(turn + rank) % 3 if turn % 2 else 1 + rank for rank in range(size)]
        if not sum(counts):
            continue
        displs = [4 * size * ((rank + turn) % size) + rank for rank in range(size)]
        whole, wanted = np.full(4 * size * size + 8, -1.0), np.full(4 * size * size + 8, -1.0)
        for rank, (count, displ) in enumerate(zip(counts, displs, strict=True)):
            wanted[displ : displ + count] = rank + np.arange(count) / 8 + turn
        own = comm.rank + np.arange(counts[comm.rank]) / 8 + turn
        if name == "Scatterv":
            got = np.zeros(counts[comm.rank])
            comm.Scatterv([wanted, counts, displs, MPI.DOUBLE] if comm.rank == root else None, got, root)
            np.testing.assert_array_equal(got, own)
        elif name == "Gatherv":
            comm.Gatherv(own, [whole, (counts, displs)] if comm.rank == root else None, root)
            np.testing.assert_array_equal(whole, wanted if comm.rank == root else -1)
        else:
            comm.Allgatherv(own, [whole, (np.array(counts), np.array(displs))])
            np.testing.assert_array_equal(whole, wanted)


def test_blocks_that_overlap_are_refused_where_they_are_received(comm: Intracomm) -> None:
    size = comm.size
    comm.Allgatherv(np.zeros(2), np.zeros(2 * size))
    with pytest.raises(ValueError, match="overlap"):
        comm.Allgatherv(np.zeros(2), [np.zeros(2 * size), ([2] * size, list(range(size)))])
