"""Gather, Scatter, Alltoall, Scan and Exscan in all forms, by every algorithm: every element is right."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll import Intracomm
from mpicoll.errors import UnknownAlgorithm
from mpicoll.schedules import ALGORITHMS
from tests.mpi import call_forms
from tests.mpi.call_forms import FORMS

pytestmark = pytest.mark.mpi
COUNTS = (0, 1, 3, 1000, 40_000, 300_000)
"""Of one part: by record, by slot, in one segment and in several."""
COLLECTIVES = ("gather", "scatter", "alltoall", "scan", "exscan")
make = partial(call_forms.make, starts=2)


@pytest.fixture(scope="module")
def comm() -> Intracomm:
    return Intracomm(MPI.COMM_WORLD)


def test_parts_of_different_lengths_have_the_algorithms_of_equal_parts(comm: Intracomm) -> None:
    for name, equal in (("allgatherv", "allgather"), ("reduce_scatter_block", "reduce_scatter")):
        assert comm.algorithms(name) == comm.algorithms(equal)
        assert comm.choice(name, 8) == comm.choice(equal, 8)
    with pytest.raises(UnknownAlgorithm, match="'alltoallw' is not one of"):
        comm.algorithms("alltoallw")


def algorithms(comm: Intracomm, collective: str) -> list[str]:
    return ["auto", "native", *ALGORITHMS[collective]]


def data(rank: int, count: int) -> np.ndarray:
    return (np.arange(count) * 7 + rank * 1009) % 65_521 + 0.5


def empty(comm: Intracomm, memory: str, count: int) -> np.ndarray:
    made = comm.empty(count, np.float64) if memory == "shared" else np.empty(count)
    made[:] = -1
    return made


def filled(comm: Intracomm, memory: str, values: np.ndarray) -> np.ndarray:
    made = empty(comm, memory, values.size)
    made[:] = values
    return made


@pytest.mark.parametrize("memory", ["private", "shared", "mixed"])
@pytest.mark.parametrize("way", FORMS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_element(comm: Intracomm, collective: str, way: str, memory: str) -> None:
    rank, size = comm.rank, comm.size
    kind = ("private", "shared")[rank % 2] if memory == "mixed" else memory
    for count in COUNTS:
        for algorithm in algorithms(comm, collective) if memory == "private" else ["auto"]:
            for root in {0, size - 1} if collective in ("gather", "scatter") else {0}:
                send, recv, expected = case(collective, rank, size, root, count)
                given = None if send is None else filled(comm, kind, send)
                got = None if recv is None else empty(comm, kind, recv)
                rest = (root,) if collective in ("gather", "scatter") else ()
                make(comm, way, collective, given, got, *rest, algorithm=algorithm)
                if expected is not None:
                    np.testing.assert_array_equal(got, expected, err_msg=f"{algorithm}, {count}, root {root}")
                if send is not None:
                    np.testing.assert_array_equal(given, send)


def case(
    collective: str, rank: int, size: int, root: int, count: int
) -> tuple[np.ndarray | None, int | None, np.ndarray | None]:
    """Return what a rank gives, how long its recvbuf is, and what must be there."""
    if collective == "gather":
        whole = np.concatenate([data(peer, count) for peer in range(size)])
        return data(rank, count), size * count if rank == root else None, whole if rank == root else None
    if collective == "scatter":
        whole = data(root, size * count)
        return whole if rank == root else None, count, whole[rank * count : (rank + 1) * count]
    if collective == "alltoall":
        mine = slice(rank * count, (rank + 1) * count)
        return (
            data(rank, size * count),
            size * count,
            np.concatenate([data(p, size * count)[mine] for p in range(size)]),
        )
    ranks = rank + (collective == "scan")
    total = sum(data(peer, count) for peer in range(ranks))
    return data(rank, count), count, total if ranks else np.full(count, -1.0)


@pytest.mark.parametrize("way", FORMS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_in_place(comm: Intracomm, collective: str, way: str) -> None:
    rank, size, root = comm.rank, comm.size, comm.size - 1
    for count in (1, 1000, 300_000):
        for algorithm in algorithms(comm, collective):
            send, length, expected = case(collective, rank, size, root, count)
            rest = (root,) if collective in ("gather", "scatter") else ()
            if collective in ("gather", "scatter") and rank != root:
                arguments = send, None if length is None else np.empty(length)
                got = arguments[1]
            elif collective == "gather":
                got = np.full(length, -1.0)
                got[rank * count : (rank + 1) * count] = send
                arguments = MPI.IN_PLACE, got
            elif collective == "scatter":
                arguments, got, expected = (send, MPI.IN_PLACE), send, data(root, size * count)
            else:
                got = send.copy()
                arguments = MPI.IN_PLACE, got
                if collective == "exscan" and rank == 0:
                    expected = None
            if way == "persistent" and collective in ("scan", "exscan", "alltoall"):
                continue  # a second start would begin with the result of the first
            make(comm, way, collective, *arguments, *rest, algorithm=algorithm)
            if expected is not None:
                np.testing.assert_array_equal(got, expected, err_msg=f"{algorithm}, {count}")


def uneven(size: int) -> list[int]:
    return [(5 * rank + 2) % 7 * 100 for rank in range(size)]


@pytest.mark.parametrize("gaps", [0, 3])
@pytest.mark.parametrize("way", FORMS)
def test_gatherv_and_scatterv(comm: Intracomm, way: str, gaps: int) -> None:
    rank, size, root, counts = comm.rank, comm.size, comm.size // 2, uneven(comm.size)
    displs = [sum(counts[:peer]) + gaps * peer for peer in range(size)]
    length = displs[-1] + counts[-1] + gaps
    whole = np.full(length, -1.0)
    for peer in range(size):
        whole[displs[peer] : displs[peer] + counts[peer]] = data(peer, counts[peer])
    for algorithm in ("auto", "linear", "native", "auto", "linear"):  # twice, since plans are kept
        got = np.full(length, -1.0) if rank == root else None
        spec = [got, counts, displs, MPI.DOUBLE] if rank == root else None
        make(comm, way, "gatherv", data(rank, counts[rank]), spec, root, algorithm=algorithm)
        if rank == root:
            np.testing.assert_array_equal(got, whole)
        own = np.full(counts[rank], -1.0)
        spec = [whole, counts, displs, MPI.DOUBLE] if rank == root else None
        make(comm, way, "scatterv", spec, own, root, algorithm=algorithm)
        np.testing.assert_array_equal(own, data(rank, counts[rank]))


FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    "plain": lambda part: part,
    "list": lambda part: [part, MPI.DOUBLE],
    "strided": lambda part: part,
    "code": lambda part: [part, part.size, "d"],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 40, 1000, 100_000])
def test_scatterv_with_counts_that_the_ranks_know(comm: Intracomm, length: int, form: str) -> None:
    """Short parts come with the counts then, also to a rank with an argument that compiled code does not read."""
    rank, size = comm.rank, comm.size
    counts = [0 if peer == 1 else length + peer for peer in range(size)]
    begin = sum(counts[:rank])
    for odd, root in itertools.product(range(size), (0, size - 1)):
        for turn in range(4):
            whole = data(turn, sum(counts))
            own = np.full(2 * counts[rank], -1.0)[:: 2 if form == "strided" and rank == odd else 1][: counts[rank]]
            comm.Scatterv([whole, counts] if rank == root else None, FORMS[form](own) if rank == odd else own, root)
            np.testing.assert_array_equal(own, whole[begin : begin + counts[rank]])


@pytest.mark.parametrize("length", [1, 1000])
def test_scatterv_of_a_root_that_keeps_its_part(comm: Intracomm, length: int) -> None:
    """With IN_PLACE it takes the general path, which attaches nothing."""
    rank, counts = comm.rank, [length + peer for peer in range(comm.size)]
    begin = sum(counts[:rank])
    for turn in range(6):
        whole, own = data(turn, sum(counts)), np.full(counts[rank], -1.0)
        inside = turn % 2 and rank == 0
        comm.Scatterv([whole, counts] if rank == 0 else None, MPI.IN_PLACE if inside else own)
        assert inside or (own == whole[begin : begin + counts[rank]]).all()


@pytest.mark.parametrize("way", FORMS)
def test_alltoallv(comm: Intracomm, way: str) -> None:
    rank, size = comm.rank, comm.size

    def count(source: int, dest: int) -> int:
        return (3 * source + 5 * dest) % 6 * 211

    sent, got = [count(rank, peer) for peer in range(size)], [count(peer, rank) for peer in range(size)]
    parts = [data(rank * size + peer, sent[peer]) for peer in range(size)]
    expected = np.concatenate([data(peer * size + rank, got[peer]) for peer in range(size)])
    here = comm.algorithms("alltoallv") if way == "blocking" else ("pairwise", "native")
    assert comm.choice("alltoallv", 8) in comm.algorithms("alltoallv")
    for algorithm in ("auto", *here):
        recv = np.full(sum(got), -1.0)
        send = np.concatenate(parts)
        make(comm, way, "alltoallv", [send, sent], [recv, got], algorithm=algorithm)
        np.testing.assert_array_equal(recv, expected)


def test_ranks_may_name_the_algorithm_that_the_others_take_by_default(comm: Intracomm) -> None:
    chosen = {"algorithm": "auto"} if comm.rank % 2 else {}
    for other in (comm, Intracomm(MPI.Intracomm(comm), algorithm="shared")):
        recv = np.zeros(comm.size)
        other.Alltoallv([np.full(comm.size, comm.rank + 0.5), [1] * comm.size], [recv, [1] * comm.size], **chosen)
        assert recv.tolist() == [rank + 0.5 for rank in range(comm.size)]


@pytest.mark.parametrize("collective", ["gatherv", "scatterv"])
def test_names_of_algorithms_where_only_the_root_knows_the_counts(comm: Intracomm, collective: str) -> None:
    rank, size = comm.rank, comm.size
    assert comm.choice(collective, 100) in comm.algorithms(collective)
    for algorithm in comm.algorithms(collective):
        whole, own = np.full(size, -1.0), np.full(1, rank + 0.5)
        if collective == "gatherv":
            comm.Gatherv(own, [whole, [1] * size], algorithm=algorithm)
            assert rank or whole.tolist() == [each + 0.5 for each in range(size)]
        else:
            comm.Scatterv([np.arange(size) + 0.5, [1] * size], own, algorithm=algorithm)
            assert own[0] == rank + 0.5


@pytest.mark.parametrize("collective", ["scan", "exscan"])
def test_operands_are_in_rank_order(comm: Intracomm, collective: str) -> None:
    first = mpicoll.op(lambda a, b: a, commutative=False)
    for count in (1, 40_000):
        for algorithm in ("auto", *ALGORITHMS[collective]):
            send, recv = data(comm.rank, count), np.full(count, -1.0)
            make(comm, "blocking", collective, send, recv, first, algorithm=algorithm)
            expected = data(0, count) if comm.rank or collective == "scan" else np.full(count, -1.0)
            np.testing.assert_array_equal(recv, expected)


WRONG: dict[str, tuple[Callable[[Intracomm], Any], type[Exception], str]] = {
    "parts": (lambda c: c.Alltoall(np.zeros(2 * c.size + 1), np.zeros(2 * c.size + 1)), ValueError, "divided among"),
    "lengths": (lambda c: c.Alltoall(np.zeros(c.size), np.zeros(2 * c.size)), ValueError, "elements"),
    "in place": (lambda c: c.Gather(MPI.IN_PLACE, np.zeros(c.size), 1 - min(c.rank, 1)), ValueError, "only the root"),
    "root": (lambda c: c.Scatter(None, np.zeros(1), c.size), ValueError, "root"),
    "algorithm": (lambda c: c.Alltoallv([np.zeros(c.size), [1] * c.size], [np.zeros(c.size), [1] * c.size],
                                        algorithm="linear"), ValueError, "needs all counts"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(comm: Intracomm, name: str) -> None:
    """On every rank, so that nobody waits for one that has refused its arguments."""
    if comm.size == 1:
        pytest.skip("some need another rank")
    call, error, text = WRONG[name]
    own = comm.Dup()
    try:
        with pytest.raises((error, mpicoll.errors.RemoteError)) as raised:
            call(own)
        if not isinstance(raised.value, mpicoll.errors.RemoteError):
            assert text in str(raised.value)
    finally:
        MPI.COMM_WORLD.Barrier()
