"""Calls with derived datatypes that were used before: compiled code packs and unpacks their entries."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.collectives import execute
from mpicoll.collectives.vector_calls import VectorCalls
from mpicoll.interface import nonblocking
from tests.mpi.conftest import TIMEOUT, WORLD, refuse

pytestmark = pytest.mark.mpi(min_size=2)

GAP = -7.0
LENGTHS = [3, 127, 128, 1024, 2000, 8192, 9000]
"""Up to records, slots, and the longest packed copy; and longer."""


class Columns:
    """A matrix of which every second column is sent or received."""

    def __init__(self, count: int, number: int) -> None:
        self.matrix = np.full((count, 2 * number), GAP)
        column = MPI.DOUBLE.Create_vector(count, 1, 2 * number)
        self.type = column.Create_resized(0, 2 * MPI.DOUBLE.extent).Commit()
        column.Free()

    def spec(self, number: int) -> list[Any]:
        return [self.matrix, number, self.type]

    @property
    def found(self) -> np.ndarray:
        """The elements, by column."""
        return self.matrix[:, ::2].T

    def check(self, wanted: Any) -> None:
        """Compare the elements, and look whether those between them are untouched."""
        np.testing.assert_array_equal(self.found, wanted)
        assert (self.matrix[:, 1::2] == GAP).all()


@pytest.fixture(params=LENGTHS)
def columns(request: pytest.FixtureRequest, comm: Intracomm) -> Iterator[tuple[Columns, Columns]]:
    """One column, and one for each rank."""
    made = Columns(request.param, 1), Columns(request.param, comm.size)
    yield made
    for each in made:
        each.type.Free()


def _every_call(comm: Intracomm, one: Columns, all_of_them: Columns, turn: int) -> None:
    rank, size = comm.rank, comm.size
    root, values = turn % size, np.arange(float(one.found.size)) + turn
    everybodys = values + 10 * np.arange(size)[:, None]
    result = np.empty(one.found.size)

    one.found[...] = everybodys[rank]
    comm.Bcast(one.spec(1), root)
    one.check(everybodys[root : root + 1])

    one.found[...] = everybodys[rank]
    comm.Allreduce(MPI.IN_PLACE, one.spec(1))
    one.check(everybodys.sum(0, keepdims=True))

    one.found[...] = everybodys[rank]
    comm.Allreduce(one.spec(1), result)
    np.testing.assert_array_equal(result, everybodys.sum(0))

    comm.Exscan(everybodys[rank], one.spec(1))  # rank 0 keeps what it has
    one.check(everybodys[: max(rank, 1)].sum(0, keepdims=True))

    one.found[...] = 0
    one.matrix.flags.writeable = rank == root
    comm.Reduce(everybodys[rank], one.spec(1), root=root)
    one.matrix.flags.writeable = True
    one.check([everybodys.sum(0) if rank == root else 0 * values])

    all_of_them.found[...] = 0
    comm.Gather(everybodys[rank], all_of_them.spec(1) if rank == root else None, root)
    all_of_them.check(everybodys if rank == root else 0 * everybodys)

    all_of_them.found[...] = 0
    comm.Allgather(everybodys[rank], all_of_them.spec(1))
    all_of_them.check(everybodys)

    one.found[...] = 0
    comm.Scatter(all_of_them.spec(1) if rank == root else None, one.spec(1), root)
    one.check(everybodys[rank : rank + 1])

    theirs = np.empty((size, values.size))
    comm.Alltoall(all_of_them.spec(1), theirs)
    np.testing.assert_array_equal(theirs, np.tile(everybodys[rank], (size, 1)))


def test_every_collective(comm: Intracomm, columns: tuple[Columns, Columns]) -> None:
    for turn in range(2 * comm.size + 1):
        _every_call(comm, *columns, turn)


def _vector_calls(comm: Intracomm, one: Columns, all_of_them: Columns, turn: int, late: int = -1) -> None:
    """Make vector collectives of columns of which some are not moved; rank `late` comes late to each."""
    rank, size = comm.rank, comm.size
    root, values = turn % size, np.arange(float(one.found.size)) + turn
    everybodys = values + 10 * np.arange(size)[:, None]
    counts = [int((other + turn) % 3 != 0) for other in range(size)]
    whole = [all_of_them.matrix, counts, list(range(size)), all_of_them.type]
    wanted = everybodys * np.array(counts)[:, None]
    mine = [everybodys[rank], counts[rank] * values.size]

    def wait() -> None:
        if rank == late:
            time.sleep(0.02)

    all_of_them.found[...] = 0
    wait()
    comm.Gatherv(mine, whole if rank == root else None, root)
    all_of_them.check(wanted if rank == root else 0 * wanted)

    all_of_them.found[...] = 0
    wait()
    comm.Allgatherv(mine, whole)
    all_of_them.check(wanted)

    all_of_them.found[...] = 0
    all_of_them.found[rank] = everybodys[rank]
    wait()
    comm.Allgatherv(MPI.IN_PLACE, whole)
    all_of_them.check(np.where(np.arange(size)[:, None] == rank, everybodys, wanted))

    all_of_them.found[...] = 0
    all_of_them.found[rank] = -everybodys[rank]
    wait()
    comm.Gatherv(MPI.IN_PLACE if rank == root else mine, whole if rank == root else None, root)
    others = np.arange(size)[:, None] != rank
    all_of_them.check(np.where(others, wanted if rank == root else 0 * wanted, -everybodys))

    all_of_them.found[...] = everybodys
    one.found[...] = -1
    wait()
    comm.Scatterv(whole if rank == root else None, one.spec(1) if counts[rank] else np.empty(0), root)
    one.check([everybodys[rank] if counts[rank] else np.full(values.size, -1)])

    one.found[...] = everybodys[rank]
    all_of_them.found[...] = 0
    wait()
    comm.Gatherv(one.spec(1), [all_of_them.matrix, [1] * size, all_of_them.type] if rank == root else None, root)
    all_of_them.check(everybodys if rank == root else 0 * everybodys)


def test_vector_collectives(comm: Intracomm, columns: tuple[Columns, Columns]) -> None:
    for turn in range(3 * comm.size):
        _vector_calls(comm, *columns, turn, late=turn % (2 * comm.size))


def test_python_does_not_read_the_arguments_of_vector_collectives(
    comm: Intracomm, compiled: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = Columns(5, 1), Columns(5, comm.size)
    for turn in range(3 * comm.size):
        _vector_calls(comm, *columns, turn)
    compiled()
    for name in ("_plain_ends", "_plain_allgatherv"):
        monkeypatch.setattr(VectorCalls, name, refuse)
    for turn in range(2 * comm.size):  # fewer than the calls after which Python looks for messages
        _vector_calls(comm, *columns, turn, late=turn % (2 * comm.size))
    for each in columns:
        each.type.Free()


def _in_flight(comm: Intracomm, turn: int, made: list[tuple[Columns, Columns]], late: int = -1) -> None:
    """Start nonblocking calls of columns, one of each kind for every pair of columns, and complete them together."""
    rank, size = comm.rank, comm.size
    root, requests, checks = turn % size, list[MPI.Request](), list[Callable[[], None]]()
    for number, (one, all_of_them) in enumerate(made):
        values = np.arange(float(one.found.size)) + turn + 100 * number
        everybodys = values + 10 * np.arange(size)[:, None]
        one.found[...] = everybodys[rank]
        all_of_them.found[...] = 0
        if rank == late:
            time.sleep(0.002)
        kind = (turn + number) % 5
        if kind == 0:
            requests.append(comm.Ibcast(one.spec(1), root))
            checks.append(partial(one.check, everybodys[root : root + 1]))
        elif kind == 1:
            requests.append(comm.Iallreduce(MPI.IN_PLACE, one.spec(1)))
            checks.append(partial(one.check, everybodys.sum(0, keepdims=True)))
        elif kind == 2:
            requests.append(comm.Iallgather(one.spec(1), all_of_them.spec(1)))
            checks.append(partial(all_of_them.check, everybodys))
        elif kind == 3:
            all_of_them.found[...] = everybodys
            requests.append(comm.Iscatter(all_of_them.spec(1) if rank == root else None, one.spec(1), root))
            checks.append(partial(one.check, everybodys[rank : rank + 1]))
        else:
            requests.append(comm.Iexscan(everybodys[rank].copy(), one.spec(1)))
            checks.append(partial(one.check, everybodys[: max(rank, 1)].sum(0, keepdims=True)))
    if turn % 2:
        for request in reversed(requests):
            request.Wait()
    else:
        MPI.Request.Waitall(requests)
    for check in checks:
        check()


@pytest.fixture
def many_columns(comm: Intracomm) -> Iterator[list[tuple[Columns, Columns]]]:
    """More pairs of columns than a communicator has lanes, for calls in flight at once."""
    lengths = [3, 40, 700, 1100][: 4 if comm.size <= 4 else 3]
    made = [(Columns(count, 1), Columns(count, comm.size)) for count in lengths * 3]
    yield made
    for pair in made:
        for each in pair:
            each.type.Free()


def test_many_nonblocking_calls_in_flight(comm: Intracomm, many_columns: list[tuple[Columns, Columns]]) -> None:
    for turn in range(20):
        _in_flight(comm, turn, many_columns, late=turn % (2 * comm.size))


def test_python_does_not_read_the_arguments_of_nonblocking_calls(
    comm: Intracomm, refused: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = [(Columns(5, 1), Columns(5, comm.size))]
    for turn in range(5 * comm.size):
        _in_flight(comm, turn, columns)
    refused("run", "start")
    for name in ("plain_arguments", "start"):
        monkeypatch.setattr(nonblocking, name, refuse)
    for turn in range(5 * comm.size):
        _in_flight(comm, turn, columns, late=turn % (2 * comm.size))
    for each in columns[0]:
        each.type.Free()


def test_a_datatype_may_be_freed_while_its_entries_are_in_flight(comm: Intracomm) -> None:
    for turn in range(30):
        columns = Columns(20, 1)
        columns.found[...] = comm.rank
        if comm.rank == turn % comm.size:
            time.sleep(0.002)
        request = comm.Iallreduce(MPI.IN_PLACE, columns.spec(1))
        columns.type.Free()
        other = Columns(20, 2)  # whose datatype may have the same handle
        requests = [request, comm.Ibcast(other.spec(1))]
        MPI.Request.Waitall(requests)
        columns.check(np.full((1, 20), sum(range(comm.size))))
        other.type.Free()


def test_python_does_not_read_the_arguments(comm: Intracomm, refused: Callable[..., None]) -> None:
    columns = Columns(5, 1), Columns(5, comm.size)
    for turn in range(comm.size):
        _every_call(comm, *columns, turn)
    refused("plain_arguments", "run")
    for turn in range(2 * comm.size):
        _every_call(comm, *columns, turn)
    for each in columns:
        each.type.Free()


def test_a_handle_that_is_used_again_means_another_datatype(comm: Intracomm) -> None:
    array = np.arange(60.0)
    for step in range(2, 12):
        for _ in range(3):
            column = MPI.DOUBLE.Create_vector(5, 1, step).Commit()
            total = np.empty(5)
            comm.Allreduce([array, 1, column], total)
            np.testing.assert_array_equal(total, comm.size * array[: 5 * step : step])
            comm.Allreduce([array, 1, column], total, MPI.MAX)
            np.testing.assert_array_equal(total, array[: 5 * step : step])
            column.Free()


def test_ranks_with_other_datatypes_make_the_same_call(comm: Intracomm) -> None:
    """Columns, rows and bytes of different structures; each rank changes its turn by turn."""
    columns, total = Columns(6, 1), np.empty(6)
    pair = MPI.DOUBLE.Create_contiguous(2).Commit()
    for turn in range(12):
        values = np.arange(6.0) + comm.rank
        columns.found[...] = values
        spec: Any = [columns.spec(1), [values, 3, pair], [values, MPI.DOUBLE]][(comm.rank + turn) % 3]
        comm.Allreduce(spec, total)
        np.testing.assert_array_equal(total, comm.size * np.arange(6.0) + sum(range(comm.size)))
    columns.type.Free()
    pair.Free()


def test_memory_that_cannot_be_written_is_refused(comm: Intracomm) -> None:
    columns = Columns(4, 1)
    comm.Allreduce(np.ones(4), columns.spec(1))
    columns.matrix.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        comm.Allreduce(np.ones(4), columns.spec(1))
    columns.matrix.flags.writeable = True
    comm.Allreduce(np.ones(4), columns.spec(1))
    columns.check(np.full((1, 4), comm.size))
    columns.type.Free()


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Intracomm]:
    """A communicator whose ranks are on nodes of their own."""
    monkeypatch.setenv("MPICOLL_NODE", "off")
    plain = WORLD.Dup()
    yield Intracomm(plain, timeout=TIMEOUT)
    plain.Free()


def test_calls_by_messages_are_known_too(apart: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """They need not have been made with arrays before."""
    columns = Columns(40, 1), Columns(40, apart.size)
    for turn in range(apart.size):
        for _ in range(3):
            _every_call(apart, *columns, turn)
    monkeypatch.setattr(execute, "run", refuse)
    for _ in range(3):
        one = columns[0]
        one.found[...] = apart.rank
        apart.Bcast(one.spec(1), 1)
        one.check(np.full((1, 40), 1))
        apart.Allreduce(MPI.IN_PLACE, one.spec(1))
        one.check(np.full((1, 40), apart.size))
    for each in columns:
        each.type.Free()


@pytest.mark.parametrize("root", [np.int64(1), True], ids=["int64", "bool"])
@pytest.mark.parametrize("where", ["node", "apart"])
def test_a_root_that_is_no_int_and_comes_late(comm: Intracomm, apart: Intracomm, root: Any, where: str) -> None:
    used, columns = comm if where == "node" else apart, Columns(40, 1)
    for turn in range(6):
        columns.found[...] = used.rank
        used.Bcast(columns.spec(1), 1)
        columns.found[...] = used.rank + turn
        if used.rank == 1:
            time.sleep(0.02)
        used.Bcast(columns.spec(1), root)
        columns.check(np.full((1, 40), 1 + turn))
    columns.type.Free()
