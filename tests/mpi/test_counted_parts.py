"""Gatherv and Scatterv of parts of any length: in slots, in stages, and where they are; every element is compared."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.kernels import operation_words as words

LENGTHS = (1, 50, 3000, 40_000, 300_000)
MEMORY = ("private", "shared", "mixed")


@pytest.fixture(params=["copies", "stages"])
def comm_by(request: pytest.FixtureRequest, comm: Intracomm) -> Iterator[Intracomm]:
    """A communicator whose long private buffers the system copies between processes, or that does without.

    Each rank decides by itself, so that with stages the last one still has its memory copied.
    """
    node = comm._scope.channel.node
    if node is None:
        pytest.skip("no shared memory")
    before = int(node.blocking[words.METHODS])
    if request.param == "stages" and comm.rank + 1 < comm.size:
        node.blocking[words.METHODS] = 0
    yield comm
    node.blocking[words.METHODS] = before


def allocate(comm: Intracomm, memory: str, count: int) -> np.ndarray:
    near = memory == "shared" or (memory == "mixed" and comm.rank % 2 == 0)
    made = comm.empty(count) if near else np.empty(count)
    made[:] = -1
    return made


def part_of(rank: int, count: int) -> np.ndarray:
    return np.arange(count) * 3.0 + rank


def counts_for(size: int, length: int) -> list[int]:
    """Return lengths of which some are short, and one is 0, beside long ones."""
    return [(length, 0, length + 1, length // 7 + 2)[rank % 4] for rank in range(size)]


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_part_gets_to_its_place(comm_by: Intracomm, length: int, memory: str) -> None:
    comm = comm_by
    rank, counts = comm.rank, counts_for(comm.size, length)
    for root, gap in itertools.product(sorted({0, 1 % comm.size, comm.size - 1}), (0, 2)):
        displs = [sum(counts[:peer]) + gap * peer for peer in range(comm.size)]
        whole = allocate(comm, memory, sum(counts) + gap * comm.size)
        spec: Any = [whole, (counts, displs), MPI.DOUBLE] if rank == root else None
        own = allocate(comm, memory, counts[rank])
        own[:] = part_of(rank, counts[rank])
        comm.Gatherv(own, spec, root)
        own[:] = -1  # nobody reads it any more
        if rank == root:
            expected = np.full(whole.size, -1.0)
            for peer, (count, displ) in enumerate(zip(counts, displs, strict=True)):
                expected[displ : displ + count] = part_of(peer, count)
            np.testing.assert_array_equal(whole, expected)
        comm.Scatterv(spec, own, root)
        whole[:] = -2
        np.testing.assert_array_equal(own, part_of(rank, counts[rank]))


@pytest.mark.parametrize("length", LENGTHS)
def test_the_roots_part_stays_where_it_is(comm_by: Intracomm, length: int) -> None:
    comm = comm_by
    rank, counts = comm.rank, counts_for(comm.size, length)
    begin = sum(counts[:rank])
    whole = np.full(sum(counts), -1.0)
    inside = whole[begin : begin + counts[rank]]
    inside[:] = part_of(rank, counts[rank])
    for given in (MPI.IN_PLACE, inside):
        at_root = rank == 0
        comm.Gatherv(given if at_root else inside, [whole, counts] if at_root else None)
        comm.Scatterv([whole, counts] if at_root else None, given if at_root else inside)
        np.testing.assert_array_equal(inside, part_of(rank, counts[rank]))


def test_ranks_go_on_while_the_root_is_late(comm: Intracomm) -> None:
    """Short parts are in slots: as many calls as there are pieces end before the root has begun the first."""
    node = comm._scope.channel.node
    if node is None:
        pytest.skip("no shared memory")
    counts, many = [3] * comm.size, int(node.blocking[words.AHEAD])
    own, whole = part_of(comm.rank, 3), np.zeros(3 * comm.size)
    comm.Gatherv(own, [whole, counts] if comm.rank == 0 else None)  # compared the first time
    comm.Barrier()
    for turn in range(many):
        if comm.rank == 0 and turn == 0:
            comm._scope.channel.comm.Barrier()  # the MPI library's: all others have left all their calls
        comm.Gatherv(own + turn, [whole, counts] if comm.rank == 0 else None)
        if comm.rank == 0:
            np.testing.assert_array_equal(whole, np.concatenate([part_of(each, 3) for each in range(comm.size)]) + turn)
    if comm.rank:
        comm._scope.channel.comm.Barrier()
