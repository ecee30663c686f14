"""Derived datatypes, other types of bytes, and calls without elements are compiled, too, on shared memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.collectives import execute
from mpicoll.errors import RemoteError
from mpicoll.interface import nonblocking
from tests.mpi.conftest import refuse

pytestmark = pytest.mark.mpi(min_size=2)

COUNT, STEP = 4, 3
GAP = -7.0


@pytest.fixture
def column() -> Iterator[MPI.Datatype]:
    """A column of four doubles, resized so that the next entry is the next column."""
    made = MPI.DOUBLE.Create_vector(COUNT, 1, STEP)
    resized = made.Create_resized(0, MPI.DOUBLE.extent).Commit()
    yield resized
    made.Free()
    resized.Free()


class Matrix:
    """A matrix whose columns are sent or received: one in every second column, or as a vector on odd ranks."""

    def __init__(self, column: MPI.Datatype, derived: bool, values: np.ndarray | None = None) -> None:
        self._column, self._derived = column, derived
        self._memory: Any = np.full((COUNT, STEP), GAP) if derived else np.full(COUNT, GAP)
        if values is not None:
            self.found[...] = values

    @property
    def found(self) -> np.ndarray:
        """The elements."""
        return self._memory[:, 1] if self._derived else self._memory

    @property
    def spec(self) -> Any:
        """The specification."""
        return [self._memory.reshape(-1)[1:], 1, self._column] if self._derived else self._memory

    def check(self, wanted: Any) -> None:
        """Compare the elements, and look whether those between them are untouched."""
        np.testing.assert_array_equal(self.found, wanted)
        if self._derived:
            assert (self._memory[:, [0, 2]] == GAP).all()


def _warm_up(comm: Intracomm) -> None:
    """Let every collective's plan be known."""
    own, everything = np.zeros(COUNT), np.zeros(COUNT * comm.size)
    for root in range(comm.size):
        comm.Bcast(own, root)
        comm.Reduce(own, own.copy(), root=root)
        comm.Gather(own, everything, root)
        comm.Scatter(everything, own, root)
        comm.Gatherv(own, [everything, [COUNT] * comm.size] if comm.rank == root else None, root)
        comm.Scatterv([everything, [COUNT] * comm.size] if comm.rank == root else None, own, root)
    comm.Allreduce(own, own.copy())
    comm.Scan(own, own.copy())
    comm.Exscan(own, own.copy())
    comm.Allgather(own, everything)
    comm.Alltoall(everything, everything.copy())
    comm.Reduce_scatter_block(everything, own)
    comm.Allgatherv(own, everything)
    comm.Alltoallv([everything, [COUNT] * comm.size], [everything.copy(), [COUNT] * comm.size])
    comm.Reduce_scatter(everything, own, [COUNT] * comm.size)


def test_columns_on_some_ranks_and_vectors_on_others(
    comm: Intracomm, compiled: Callable[[], None], column: MPI.Datatype
) -> None:
    _warm_up(comm)
    compiled()
    size, rank, values = comm.size, comm.rank, np.arange(float(COUNT))
    everybodys = np.concatenate([values + each for each in range(size)])
    for turn in range(2 * size):
        root, derived = turn % size, bool((rank + turn) % 2)
        own, result = Matrix(column, derived, values + rank), Matrix(column, not derived)
        told = Matrix(column, derived, values + rank)
        comm.Bcast(told.spec, root)
        told.check(values + root)
        comm.Allreduce(own.spec, result.spec)
        result.check(size * values + sum(range(size)))
        comm.Reduce(own.spec, result.spec if rank == root else None, root=root)
        if rank == root:
            result.check(size * values + sum(range(size)))
        comm.Scan(own.spec, result.spec)
        result.check((rank + 1) * values + sum(range(rank + 1)))
        gathered = np.zeros(COUNT * size)
        comm.Gather(own.spec, gathered if rank == root else ["nothing", 1, column], root)
        if rank == root:
            np.testing.assert_array_equal(gathered, everybodys)
        comm.Scatter(everybodys if rank == root else ["nothing", 1, column], result.spec, root)
        result.check(values + rank)
        comm.Allgather(own.spec, gathered)
        np.testing.assert_array_equal(gathered, everybodys)
        comm.Gatherv(own.spec, [gathered, [COUNT] * size] if rank == root else None, root)
        comm.Scatterv([everybodys, [COUNT] * size] if rank == root else None, result.spec, root)
        result.check(values + rank)


def test_blocks_of_columns(comm: Intracomm, compiled: Callable[[], None]) -> None:
    """All columns of a matrix, which is the transposed one of vectors in rank order."""
    size, rank = comm.size, comm.rank
    made = MPI.DOUBLE.Create_vector(COUNT, 1, size)
    column = made.Create_resized(0, MPI.DOUBLE.extent).Commit()
    _warm_up(comm)
    compiled()
    own = rank + np.arange(COUNT) / 8
    wanted = (np.arange(size)[:, None] + np.arange(COUNT) / 8).T
    ones, places = [1] * size, list(range(size))
    for root in range(size):
        at_root = rank == root
        matrix = np.full((COUNT, size), GAP)
        comm.Allgatherv(own, [matrix, ones, places, column])
        np.testing.assert_array_equal(matrix, wanted)
        matrix[...] = GAP
        comm.Gatherv(own, [matrix, (ones, places), column] if at_root else None, root)
        np.testing.assert_array_equal(matrix, wanted if at_root else GAP)
        found = np.zeros(COUNT)
        comm.Scatterv([np.ascontiguousarray(wanted), ones, places, column] if at_root else None, found, root)
        np.testing.assert_array_equal(found, own)
        matrix[...] = GAP
        comm.Allgather(own, [matrix, 1, column])
        np.testing.assert_array_equal(matrix, wanted)
        comm.Scatter([np.ascontiguousarray(wanted), 1, column] if at_root else None, found, root)
        np.testing.assert_array_equal(found, own)
        matrix[...] = GAP
        columns, vectors = [matrix, ones, places, column], [matrix.T.copy(), [COUNT] * size]
        comm.Alltoallv([np.tile(own, size), [COUNT] * size], columns if (rank + root) % 2 else vectors)
        np.testing.assert_array_equal(matrix if (rank + root) % 2 else vectors[0].T, wanted)
    made.Free()
    column.Free()


def test_arrays_as_bytes(comm: Intracomm, compiled: Callable[[], None]) -> None:
    _warm_up(comm)
    compiled()
    numbers = np.arange(5, dtype=np.int32) if comm.rank == 0 else np.zeros(5, np.int32)
    comm.Bcast([numbers, MPI.BYTE] if comm.rank % 2 else numbers.view(np.uint8))
    np.testing.assert_array_equal(numbers, range(5))
    numbers = np.full(1, comm.rank, np.int32)
    found = bytearray(4 * comm.size)
    comm.Allgather([numbers, MPI.INT], [found, MPI.INT])
    assert np.frombuffer(found, np.int32).tolist() == list(range(comm.size))


FORMS: dict[str, Callable[[np.ndarray, int], Any]] = {
    "tuple": lambda array, count: (array, MPI.DOUBLE),
    "letter": lambda array, count: [array, "d"],
    "count": lambda array, count: [array, count],
    "count, type": lambda array, count: [array, count, MPI.DOUBLE],
    "count, letter, tuple": lambda array, count: (array, count, "d"),
}


@pytest.mark.parametrize("form", FORMS)
def test_specifications_are_read_by_compiled_code(
    comm: Intracomm, compiled: Callable[[], None], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Counts are those of a block where a buffer has one for each rank."""
    _warm_up(comm)
    compiled()
    for module in (execute, nonblocking):
        monkeypatch.setattr(module, "plain_arguments", refuse)
    size, rank, specify = comm.size, comm.rank, FORMS[form]
    room = 0 if form in ("tuple", "letter") else 3  # behind what is counted
    own = np.concatenate([np.arange(COUNT) + 10.0 * rank, np.full(room, GAP)])
    blocks = np.concatenate([np.arange(COUNT * size) + 100.0 * rank, np.full(room, GAP)])
    every = [np.arange(COUNT) + 10.0 * other for other in range(size)]

    def made(call: Callable[..., Any], send: np.ndarray, wanted: Any, *rest: Any) -> None:
        wanted = np.ravel(wanted)
        got = np.full(wanted.size + room, GAP)
        request = call(specify(send, COUNT), specify(got, COUNT), *rest)
        if request is not None:
            request.Wait()
        np.testing.assert_array_equal(got, np.concatenate([wanted, np.full(room, GAP)]))

    mine = slice(COUNT * rank, COUNT * (rank + 1))
    columns = [(np.arange(COUNT * size) + 100.0 * other)[mine] for other in range(size)]

    def of(name: str, begin: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(comm, begin + (name.lower() if begin else name))
        return found

    for begin in ("", "I"):
        made(of("Allreduce", begin), own, sum(every))
        made(of("Allgather", begin), own, every)
        made(of("Alltoall", begin), blocks, columns)
        made(of("Reduce_scatter_block", begin), blocks, sum(columns))
        made(of("Scan", begin), own, sum(every[: rank + 1]))
        sent = own.copy() if rank == 0 else np.full(COUNT + room, GAP)
        request = of("Bcast", begin)(specify(sent, COUNT), 0)
        if request is not None:
            request.Wait()
        np.testing.assert_array_equal(sent[:COUNT], every[0])


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.complex64, np.bool_])
def test_scalars_are_read_by_compiled_code(
    comm: Intracomm, compiled: Callable[[], None], monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    result, every = np.zeros((), dtype), np.zeros(comm.size, dtype)
    comm.Allreduce(dtype(1), result, MPI.SUM if dtype is not np.bool_ else MPI.LOR)
    _warm_up(comm)
    compiled()
    monkeypatch.setattr(execute, "plain_arguments", refuse)
    comm.Allreduce(dtype(1), result, MPI.SUM if dtype is not np.bool_ else MPI.LOR)
    assert result == (comm.size if dtype is not np.bool_ else True)
    comm.Allgather(dtype(comm.rank % 2), every)
    assert every.tolist() == [dtype(rank % 2) for rank in range(comm.size)]


def test_a_list_may_change_while_its_array_is_in_use(comm: Intracomm) -> None:
    """What a nonblocking call was given stays alive."""
    count = 100_000
    send, recv = [np.full(count, comm.rank + 1.0), MPI.DOUBLE], [np.zeros(count), MPI.DOUBLE]
    result = recv[0]
    for _ in range(3):
        request = comm.Iallreduce(send, recv)
        send[0], recv[0] = None, None
        trash = [np.full(count, -5.0) for _ in range(4)]  # in the place of what would be free
        request.Wait()
        assert (result == comm.size * (comm.size + 1) / 2).all()
        send[0], recv[0] = trash[0], result
        send[0][...] = comm.rank + 1.0


@pytest.mark.parametrize("kind", ["arrays", "counts", "no memory"])
def test_calls_without_elements(comm: Intracomm, compiled: Callable[[], None], kind: str) -> None:
    """Elements that are only moved may be of any type if there are none."""
    _warm_up(comm)
    compiled()
    size, rank = comm.size, comm.rank
    dtype, datatype = ((np.float64, MPI.DOUBLE), (np.int32, MPI.INT))[rank % 2]

    def nothing() -> Any:
        specs = {"arrays": np.zeros(0, dtype), "counts": [np.ones(3, dtype), 0, datatype]}
        return specs.get(kind, [None, 0, datatype])

    def numbers() -> Any:
        return [np.zeros(3), 0] if kind == "counts" else [np.zeros(0), MPI.DOUBLE]

    none, empty = [0] * size, np.zeros(0, dtype)
    for root in range(size):
        at_root = rank == root
        comm.Bcast(nothing(), root)
        comm.Gather(nothing(), nothing() if at_root else None, root)
        comm.Scatter(nothing() if at_root else None, nothing(), root)
        comm.Allgather(nothing(), nothing())
        comm.Alltoall(nothing(), nothing())
        comm.Allreduce(numbers(), numbers())
        comm.Reduce(numbers(), numbers() if at_root else None, root=root)
        comm.Scan(numbers(), numbers())
        comm.Exscan(numbers(), numbers())
        comm.Allgatherv(empty, [empty.copy(), none])
        comm.Gatherv(nothing(), [np.zeros(2, dtype), none] if at_root else None, root)
        comm.Scatterv([np.zeros(2, dtype), none] if at_root else None, nothing(), root)
    total = np.full(3, 1.0)
    comm.Allreduce(MPI.IN_PLACE, total)
    np.testing.assert_array_equal(total, size)


def test_nonblocking_calls_unpack_at_their_end(
    comm: Intracomm, column: MPI.Datatype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several at a time, with ranks that come later."""
    if comm._nonblocking_table == 0:
        pytest.skip("needs shared memory and compiled dispatch")
    _warm_up(comm)
    monkeypatch.setattr(nonblocking, "start", refuse)
    size, rank, values = comm.size, comm.rank, np.arange(float(COUNT))
    for turn in range(4 * size):
        root = turn % size
        own, told = Matrix(column, True, values + rank), Matrix(column, bool((rank + turn) % 2), values + rank)
        total, every = Matrix(column, True), np.full((COUNT, size), GAP)
        ones, places = [1] * size, list(range(size))
        columns = MPI.DOUBLE.Create_vector(COUNT, 1, size)
        next_column = columns.Create_resized(0, MPI.DOUBLE.extent).Commit()
        if rank == root:
            time.sleep(0.001)
        requests = [
            comm.Ibcast(told.spec, root),
            comm.Iallreduce(own.spec, total.spec),
            comm.Iallgatherv(values + rank, [every, ones, places, next_column]),
        ]
        for request in requests[:: 1 if turn % 2 else -1]:
            request.Wait()
        told.check(values + root)
        total.check(size * values + sum(range(size)))
        np.testing.assert_array_equal(every, values[:, None] + np.arange(size))
        columns.Free()
        next_column.Free()


@pytest.mark.parametrize("data", [np.zeros(0), None, np.zeros(3)])
def test_memory_that_is_too_short_for_the_counts_is_refused(comm: Intracomm, data: Any) -> None:
    _warm_up(comm)
    for call in (
        lambda: comm.Bcast([data, 4, MPI.INT64_T]),
        lambda: comm.Allgather([data, 4, MPI.INT64_T], np.zeros(4 * comm.size, np.int64)),
        lambda: comm.Allgatherv(np.zeros(4, np.int64), [data, [4] * comm.size, None, MPI.INT64_T]),
        lambda: comm.Allreduce([np.zeros(32, np.uint8), MPI.INT64_T], [data, 4, MPI.INT64_T]),
    ):
        with pytest.raises(ValueError, match=r"do not fit|has 0|end at"):
            call()


def test_arrays_in_other_orders_are_received_into(comm: Intracomm) -> None:
    """Of a type that no kernel knows, which goes as bytes."""
    _warm_up(comm)
    size, wanted = comm.size, np.arange(1, 5).astype("g")
    everything = [np.tile(wanted, size), [4] * size] if comm.rank == 0 else None
    columns, strided = np.zeros((2, 2), "g", order="F"), np.zeros(8, "g")[::2]
    comm.Scatterv(everything, columns)
    comm.Scatterv(everything, strided)
    np.testing.assert_array_equal(columns.ravel("K"), wanted)
    np.testing.assert_array_equal(strided, wanted)


class Evil:
    """An object whose attributes cannot be asked for."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(name)


WRONG: dict[str, Callable[[], Any]] = {
    "objects": lambda: np.zeros(4, object),
    "many": lambda: [np.zeros(8), (4, 1 << 62), MPI.INT],
    "evil": Evil,
}


@pytest.mark.parametrize("collective", ["scatterv", "allgatherv"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_on_one_rank_is_told_to_the_others(comm: Intracomm, collective: str, name: str) -> None:
    _warm_up(comm)
    counts, last = [4] * comm.size, comm.rank == comm.size - 1
    wrong = WRONG[name]() if last else None

    def call() -> None:
        if collective == "scatterv":
            comm.Scatterv([np.zeros(sum(counts)), counts] if comm.rank == 0 else None, wrong if last else np.zeros(4))
        else:
            comm.Allgatherv(wrong if last else np.zeros(4), [np.zeros(sum(counts)), counts])
        comm.Barrier()  # the root need not hear of it before

    with pytest.raises((TypeError, ValueError, RuntimeError) if last else RemoteError):
        call()


def test_counts_are_of_entries(comm: Intracomm) -> None:
    """A datatype of three elements: entries that cannot be divided, and counts of Reduce_scatter."""
    _warm_up(comm)
    size, three = comm.size, MPI.DOUBLE.Create_contiguous(3).Commit()
    entries = 2 if size == 3 else 3 * size + 1
    if 3 * entries % size == 0:
        with pytest.raises(ValueError, match="divided"):
            comm.Allgather(np.zeros(3 * entries // size), [np.zeros(3 * entries), three])
    with pytest.raises(ValueError, match="count is"):
        comm.Reduce_scatter(np.zeros(3 * size), [np.zeros(3), 1, three], [3] * size)
    result = np.zeros(3)
    comm.Reduce_scatter(np.ones(3 * size), [result, 1, three], [1] * size)
    np.testing.assert_array_equal(result, size)
    three.Free()
