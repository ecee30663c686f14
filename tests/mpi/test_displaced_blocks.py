"""Allgatherv into blocks that lie apart, by compiled code; every element is compared, those between blocks too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm

LENGTHS = (1, 50, 3000, 40_000, 300_000)
FORMS = ("Allgatherv", "Iallgatherv")


def part_of(rank: int, count: int) -> np.ndarray:
    return np.arange(count) * 2.0 + rank + 0.25


def gather(comm: Intracomm, form: str, send: Any, spec: Any) -> None:
    request = getattr(comm, form)(send, spec)
    if request is not None:
        request.Wait()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("memory", ["private", "shared"])
@pytest.mark.parametrize("length", LENGTHS)
def test_blocks_apart(comm: Intracomm, length: int, memory: str, form: str) -> None:
    allocate: Callable[[int], np.ndarray] = np.empty if memory == "private" else comm.empty
    counts = [length + rank % 3 if rank % 4 != 1 else 0 for rank in range(comm.size)]
    displs = [2 + sum(counts[:rank]) + 3 * rank for rank in range(comm.size)]
    whole, own = allocate(displs[-1] + counts[-1] + 5), allocate(counts[comm.rank])
    expected = np.full(whole.size, -1.0)
    for rank, (count, displ) in enumerate(zip(counts, displs, strict=True)):
        expected[displ : displ + count] = part_of(rank, count)
    for turn in range(3):
        own[:], whole[:] = part_of(comm.rank, own.size), -1
        spec = [whole, counts, displs, MPI.DOUBLE] if turn else [whole, (counts, np.array(displs))]
        gather(comm, form, own, spec)
        np.testing.assert_array_equal(whole, expected)
    for _ in range(2):
        whole[:] = -1
        begin = displs[comm.rank]
        whole[begin : begin + own.size] = own
        gather(comm, form, MPI.IN_PLACE, [whole, (counts, displs), MPI.DOUBLE])
        np.testing.assert_array_equal(whole, expected)
    joined = np.concatenate([part_of(rank, count) for rank, count in enumerate(counts)])  # the same, without gaps
    packed = np.empty(joined.size)
    gather(comm, form, own, [packed, counts])
    np.testing.assert_array_equal(packed, joined)


@pytest.mark.parametrize("form", FORMS)
def test_one_count_and_a_distance(comm: Intracomm, form: str) -> None:
    own, whole = part_of(comm.rank, 4), np.full((comm.size, 6), -1.0)
    expected = np.array([[*part_of(rank, 4), -1, -1] for rank in range(comm.size)])
    for _ in range(3):
        gather(comm, form, own, [whole, (4, 6)])
        np.testing.assert_array_equal(whole, expected)
    dense = np.full((comm.size, 4), -1.0)
    for spec in ([dense, 4], [dense, 4, MPI.DOUBLE], dense, [dense, MPI.DOUBLE]):
        dense[:] = -1
        gather(comm, form, own, spec)
        np.testing.assert_array_equal(dense, expected[:, :4])


def test_no_element_beyond_the_array(comm: Intracomm) -> None:
    """The last block would end behind it."""
    whole = np.zeros(3 * comm.size)
    for _ in range(3):
        with pytest.raises(ValueError, match=r"blocks|elements"):
            comm.Allgatherv(np.ones(3), [whole, ([3] * comm.size, [3 * rank + 1 for rank in range(comm.size)])])
        comm.Barrier()
    assert not whole.any()


def test_compiled_code_takes_them(comm: Intracomm, compiled: Callable[[], None]) -> None:
    own, whole = part_of(comm.rank, 4), np.full((comm.size, 6), -1.0)
    calls = [
        lambda: comm.Allgatherv(own, [whole, (4, 6)]),
        lambda: comm.Allgatherv(own, [whole, [4] * comm.size, [*range(1, 6 * comm.size, 6)], MPI.DOUBLE]),
        lambda: comm.Allgatherv(own, whole[:, :4].copy()),
    ]
    for call in calls:
        call()
    compiled()
    for call in calls:
        call()
