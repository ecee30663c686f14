"""Alltoallw against the MPI library's: layouts of every kind, lengths from nothing to many rounds, errors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll import Intracomm
from mpicoll.buffers.typed_blocks import Descriptions
from mpicoll.errors import MismatchError, MpicollError, RemoteError

pytestmark = pytest.mark.mpi(min_size=2)


class Side:
    """A buffer with a block for each rank, in layouts drawn by chance; blocks do not overlap."""

    def __init__(self, numbers: random.Random, elements: list[int], shared: bool) -> None:
        self.types: list[MPI.Datatype] = []
        self.counts: list[int] = []
        self.displs: list[int] = []
        self._made: list[MPI.Datatype] = []
        end = 0
        for count in elements:
            entries, datatype = self._draw(numbers, count)
            begin = end + 4 * numbers.randrange(0, 5)
            self.displs.append(begin)
            self.counts.append(entries)
            self.types.append(datatype)
            true_lb, true_extent = datatype.Get_true_extent()
            assert true_lb >= 0
            end = begin + max(entries - 1, 0) * datatype.Get_extent()[1] + true_lb + true_extent if entries else begin
        make = mpicoll.shared_arrays if shared else None
        if make is None:
            self.data = np.zeros(end // 4 + 9, np.int32)
        else:
            with make(min_nbytes=0):
                self.data = np.zeros(end // 4 + 9, np.int32)

    def _draw(self, numbers: random.Random, count: int) -> tuple[int, MPI.Datatype]:
        kind = numbers.choice(("plain", "vector", "subarray", "indexed", "struct", "resized"))
        if kind == "plain" or count < 4:
            return count, MPI.INT
        if kind == "vector":
            divisors = [each for each in range(1, 9) if count % each == 0]
            length = numbers.choice(divisors)
            made = MPI.INT.Create_vector(count // length, length, length + numbers.randrange(3))
        elif kind == "subarray":
            rows = next(each for each in (7, 5, 4, 3, 2, 1) if count % each == 0)
            columns = count // rows
            sizes, starts = [rows + 2, columns + 3], [1, 2]
            order = numbers.choice((MPI.ORDER_C, MPI.ORDER_F))
            made = MPI.INT.Create_subarray(sizes, [rows, columns], starts, order)
        elif kind == "indexed":
            first = numbers.randrange(1, count)
            made = MPI.INT.Create_indexed([first, count - first], [0, first + numbers.randrange(1, 4)])
        elif kind == "struct":
            lengths, places, begin = [], [], 0
            for _ in range(10):
                lengths.append(numbers.randrange(1, max(2, count // 10)))
                places.append(begin)
                begin += 4 * (lengths[-1] + numbers.randrange(3))
            rest = count - sum(lengths)
            if rest < 0:
                return count, MPI.INT
            made = MPI.Datatype.Create_struct([*lengths, rest], [*places, begin], [MPI.INT] * 11)
        else:
            entry = MPI.INT.Create_contiguous(1)
            made = entry.Create_resized(0, 4 * numbers.randrange(1, 4))
            entry.Free()
            self._made.append(made)
            made.Commit()
            return count, made
        self._made.append(made)
        made.Commit()
        return 1, made

    @property
    def spec(self) -> list:
        return [self.data, (self.counts, self.displs), self.types]

    def free(self) -> None:
        for datatype in self._made:
            datatype.Free()


LENGTHS = {"none": (0, 3), "inline": (0, 112), "border": (100, 130), "one round": (100, 4000), "many": (9000, 300_000)}


def check_usable(comm: Intracomm) -> None:
    data = np.full(5, comm.rank + 1.0)
    comm.Allreduce(MPI.IN_PLACE, data)
    assert (data == comm.size * (comm.size + 1) / 2).all()


@pytest.fixture(autouse=True)
def _still_usable(comm: Intracomm, request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if request.function not in (test_arguments_that_are_refused, test_a_block_of_another_length_is_an_error):
        check_usable(comm)


def elements(seed: object, size: int, lengths: str) -> np.ndarray:
    """Return how many elements each rank sends to each; the same on all ranks."""
    low, high = LENGTHS[lengths]
    numbers = np.random.default_rng(list(str(seed).encode()))
    return numbers.integers(low, high, (size, size))


@pytest.mark.parametrize("shared", [False, True, "some"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_blocks_of_any_layout_arrive_as_the_library_has_them(comm: Intracomm, lengths: str, shared: object) -> None:
    for trial in range(3 if lengths == "many" else 12):
        counts = elements((lengths, shared, trial), comm.size, lengths)
        numbers = random.Random(f"{comm.rank} {lengths} {shared} {trial}")
        in_memory = numbers.random() < 0.5 if shared == "some" else bool(shared)
        send = Side(numbers, counts[comm.rank].tolist(), in_memory)
        recv = Side(numbers, counts[:, comm.rank].tolist(), in_memory)
        send.data[:] = np.random.default_rng([comm.rank, trial]).integers(-(2**31), 2**31 - 1, send.data.size)
        expected = recv.data.copy()
        MPI.Intracomm(comm).Alltoallw(send.spec, [expected, *recv.spec[1:]])
        for _ in range(2):
            recv.data[:] = 0
            comm.Alltoallw(send.spec, recv.spec)
            np.testing.assert_array_equal(recv.data, expected)
        send.free()
        recv.free()


@pytest.mark.parametrize("algorithm", ["pairwise", "native", "auto", "shared", "single_copy"])
def test_each_algorithm_gives_the_same(comm: Intracomm, algorithm: str) -> None:
    if algorithm not in ("auto", *comm.algorithms("alltoall")):
        pytest.skip(f"there is no {algorithm} here")
    part, size = 50, comm.size
    send = np.arange(size * part, dtype=np.float32) + 1000 * comm.rank
    recv = np.zeros_like(send)
    types = [MPI.FLOAT.Create_subarray([size, part], [1, part], [rank, 0]).Commit() for rank in range(size)]
    comm.Alltoallw([send, types], [recv, types], algorithm=algorithm)
    expected = np.concatenate([np.arange(part) + comm.rank * part + 1000 * rank for rank in range(size)])
    np.testing.assert_array_equal(recv, expected)
    for each in types:
        each.Free()


@pytest.mark.parametrize("part", [7, 300, 90_000])
def test_in_place(comm: Intracomm, part: int) -> None:
    size = comm.size
    data = np.arange(size * part, dtype=np.int64) + 10**7 * comm.rank
    with mpicoll.shared_arrays():
        data = data.copy()
    types = [MPI.INT64_T.Create_contiguous(part).Commit()] * size
    displs = [8 * part * rank for rank in range(size)]
    for given in (MPI.IN_PLACE, None):
        before = data.copy()
        comm.Alltoallw(given, [data, ([1] * size, displs), types])
        for rank in range(size):
            block = np.arange(part) + comm.rank * part + 10**7 * rank if given is MPI.IN_PLACE else None
            if block is not None:
                np.testing.assert_array_equal(data[rank * part : (rank + 1) * part], block)
        del before
    types[0].Free()


def test_a_pencil_exchange_and_back(comm: Intracomm) -> None:
    """Transpose a distributed array of three dimensions, as FFT libraries do."""
    size, shape = comm.size, (2 * comm.size, 3 * comm.size, 5)
    whole = np.arange(np.prod(shape), dtype=np.complex128).reshape(shape)
    rows, columns = shape[0] // size, shape[1] // size
    mine = np.ascontiguousarray(whole[comm.rank * rows : (comm.rank + 1) * rows])
    other = np.zeros((shape[0], columns, shape[2]), np.complex128)
    outgoing = [
        MPI.DOUBLE_COMPLEX.Create_subarray(mine.shape, [rows, columns, 5], [0, columns * rank, 0]).Commit()
        for rank in range(size)
    ]
    incoming = [
        MPI.DOUBLE_COMPLEX.Create_subarray(other.shape, [rows, columns, 5], [rows * rank, 0, 0]).Commit()
        for rank in range(size)
    ]
    where = ([1] * size, [0] * size)
    comm.Alltoallw([mine, where, outgoing], [other, where, incoming])
    np.testing.assert_array_equal(other, whole[:, comm.rank * columns : (comm.rank + 1) * columns])
    back = np.zeros_like(mine)
    comm.Alltoallw([other, where, incoming], [back, where, outgoing])
    np.testing.assert_array_equal(back, mine)
    for each in (*outgoing, *incoming):
        each.Free()


def test_a_freed_datatype_is_not_taken_for_a_new_one(comm: Intracomm) -> None:
    """The MPI library gives a new datatype the handle of one that was freed."""
    size = comm.size
    for stride in (2, 3, 2, 5):
        data, result = np.arange(20 * stride * size, dtype=np.int32), np.zeros(10 * size, np.int32)
        made = MPI.INT.Create_vector(10, 1, stride).Commit()
        where = [40 * stride * 2 * rank for rank in range(size)]
        comm.Alltoallw(
            [data, ([1] * size, where), [made] * size],
            [result, ([10] * size, [40 * rank for rank in range(size)]), [MPI.INT] * size],
        )
        first = where[comm.rank] // 4
        np.testing.assert_array_equal(result, np.tile(data[first : first + 10 * stride : stride], size))
        made.Free()


def _columns(size: int, rows: int, axis: int) -> list[MPI.Datatype]:
    """Return datatypes of the parts of a matrix of `size` times `rows` rows and columns, divided along an axis."""
    whole = [size * rows, size * rows]
    own = [rows if axis == 0 else size * rows, rows if axis == 1 else size * rows]
    starts = [[rows * rank * (axis == 0), rows * rank * (axis == 1)] for rank in range(size)]
    return [MPI.INT64_T.Create_subarray(whole, own, start).Commit() for start in starts]


@pytest.mark.parametrize("pair", [False, True])
def test_specifications_that_come_again_are_read_anew_where_they_differ(
    comm: Intracomm, monkeypatch: pytest.MonkeyPatch, pair: bool
) -> None:
    """Compiled code knows them by their objects; items, handles, arrays and lengths may be others each time."""
    size, rank, rows = comm.size, comm.rank, 2
    side, read = size * rows, []
    given, got = np.empty((side, side), np.int64), np.zeros((side, side), np.int64)
    sent, received = (([1] * size, [0] * size, _columns(size, rows, axis)) for axis in (1, 0))
    monkeypatch.setattr(Descriptions, "blocks", _counted(Descriptions.blocks, read))
    plain = MPI.Intracomm(comm)

    def spec(data: Any, blocks: tuple[Any, ...]) -> list[Any]:
        counts, displs, types = blocks
        return [data, (counts, displs), types] if pair else [data, counts, displs, types]

    specs = spec(given, sent), spec(got, received)

    def check() -> int:
        """Make the call, compare with the library's, and return how many specifications Python has read."""
        before = len(read)
        given[:] = np.random.default_rng([rank, before]).integers(0, 1000, given.shape)
        got[:] = -1
        wanted = got.copy()
        plain.Alltoallw(specs[0], spec(wanted, received))
        comm.Alltoallw(*specs)
        np.testing.assert_array_equal(got, wanted)
        return len(read) - before

    assert [check() for _ in range(4)] == [2, 0, 0, 0]
    sent[0][:] = received[0][:] = [0 if 0 in (rank, other) else 1 for other in range(size)]
    assert check() == 2
    sent[0][:] = received[0][:] = [1] * size
    check()
    sent[1][0] = 8  # the next columns
    check()
    sent[1][0] = 0
    old = sent[2][0]
    sent[2][0] = old.Dup()
    old.Free()
    check()
    fresh = [np.zeros((side, side), np.int64) for _ in range(2)]
    specs[0][0], specs[1][0] = given, got = fresh
    check()
    specs[1][0] = np.zeros((side, side), np.int64, order="F")[: side - 1]
    with pytest.raises((ValueError, TypeError, RemoteError)):
        comm.Alltoallw(*specs)
    specs[1][0] = got
    check()
    for each in (*sent[2], *received[2]):
        each.Free()
    with pytest.raises((ValueError, TypeError, MPI.Exception, RemoteError)):
        comm.Alltoallw(*specs)


def _counted(method: Any, calls: list[int]) -> Any:
    def blocks(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return method(*arguments, **named)

    return blocks


@pytest.mark.parametrize("count", [3, 5000, 400_000])
def test_a_block_of_another_length_is_an_error(comm: Intracomm, count: int) -> None:
    """Rank 0 sends one element too many to the last rank."""
    size = comm.size
    counts = [count + (comm.rank == 0 and rank == size - 1) for rank in range(size)]
    send, recv = np.zeros(sum(counts), np.int32), np.zeros(count * size, np.int32)
    displs = [4 * sum(counts[:rank]) for rank in range(size)]
    where = [count] * size, [4 * count * rank for rank in range(size)]
    seen: list[BaseException] = []
    try:
        comm.Alltoallw([send, (counts, displs), [MPI.INT] * size], [recv, where, [MPI.INT] * size])
    except MpicollError as error:
        seen.append(error)
    if comm.rank == size - 1:
        assert isinstance(seen[0], MismatchError)
        assert f"rank 0 sends {4 * count + 4} bytes, but this rank expects {4 * count}" in str(seen[0])
    elif 4 * count > 448:
        assert isinstance(seen[0], MismatchError)
        assert f"rank {size - 1} got a block of another length" in str(seen[0])
    if 4 * count <= 448:  # the others hear of it in their next call
        with pytest.raises(RemoteError):
            comm.Barrier()
    else:
        check_usable(comm)


def test_the_same_memory_twice_is_in_place(comm: Intracomm) -> None:
    size, part = comm.size, 500
    for make in (np.zeros, comm.zeros):
        data = make(size * part, np.int64)
        data[:] = np.arange(size * part) + 10**6 * comm.rank
        types = [MPI.INT64_T.Create_contiguous(part).Commit()] * size
        where = [1] * size, [8 * part * rank for rank in range(size)]
        comm.Alltoallw([data, where, types], [data, where, types])
        for rank in range(size):
            expected = np.arange(part) + comm.rank * part + 10**6 * rank
            np.testing.assert_array_equal(data[rank * part : (rank + 1) * part], expected)
        types[0].Free()


@pytest.mark.parametrize("count", [5, 3000])
def test_blocks_between_each_other_in_one_array(comm: Intracomm, count: int) -> None:
    """Blocks that are sent and blocks that are received take turns."""
    size = comm.size
    for make in (np.zeros, comm.zeros):
        for name in ("Alltoallv", "Alltoallw"):
            data = make(2 * count * size, np.int64).reshape(size, 2, count)
            data[:, 0] = np.arange(count) + 100 * comm.rank + 1000 * np.arange(size)[:, None]
            sends, takes = ([2 * count * rank + count * side for rank in range(size)] for side in (0, 1))
            flat = data.reshape(-1)
            if name == "Alltoallv":
                comm.Alltoallv([flat, [count] * size, sends, MPI.INT64_T], [flat, [count] * size, takes, MPI.INT64_T])
            else:
                types = [MPI.INT64_T] * size
                where = [([count] * size, [8 * place for place in places]) for places in (sends, takes)]
                comm.Alltoallw([flat, where[0], types], [flat, where[1], types])
            for rank in range(size):
                np.testing.assert_array_equal(data[rank, 1], np.arange(count) + 100 * rank + 1000 * comm.rank)


def test_no_counts_after_counts_in_an_array(comm: Intracomm) -> None:
    size = comm.size
    data, result = np.arange(3 * size, dtype=np.int32) + 100 * comm.rank, np.zeros(3 * size, np.int32)
    types = [MPI.INT] * size
    where = np.ones(size, int), 4 * np.arange(size)
    comm.Alltoallw([data, where, types], [result, where, types])
    expected = 100 * np.arange(size) + comm.rank
    np.testing.assert_array_equal(result[:size], expected)
    takes = [1] * size, [4 * rank for rank in range(size)]
    comm.Alltoallw([data, (None, None), types], [result, takes, types])
    np.testing.assert_array_equal(result[:size], 100 * np.arange(size))


BAD = {
    "datatypes": lambda size: [np.zeros(4), ([1] * size, [0] * size), [MPI.INT] * (size + 1)],
    "counts": lambda size: [np.zeros(4), ([1] * (size - 1), [0] * size), [MPI.INT] * size],
    "negative": lambda size: [np.zeros(4), ([-1] * size, [0] * size), [MPI.INT] * size],
    "too far": lambda size: [np.zeros(4), ([1] * size, [33] * size), [MPI.INT] * size],
    "before": lambda size: [np.zeros(4), ([1] * size, [-8] * size), [MPI.INT] * size],
    "null": lambda size: [np.zeros(4), ([1] * size, [0] * size), [MPI.DATATYPE_NULL] * size],
    "no datatype": lambda size: [np.zeros(4), ([1] * size, [0] * size), [None] * size],
    "huge": lambda size: [np.zeros(4), ([2**62] * size, [0] * size), [MPI.INT] * size],
    "objects": lambda size: [np.array([None] * 4), ([1] * size, [0] * size), [MPI.LONG] * size],
    "no pair": lambda size: [np.zeros(4), [1] * (size + 1), [MPI.INT] * size],
    "no list": lambda size: np.zeros(4),
    "read-only": lambda size: [np.broadcast_to(np.zeros(1), 4), ([1] * size, [0] * size), [MPI.INT] * size],
}


@pytest.mark.parametrize("wrong", BAD)
def test_arguments_that_are_refused(comm: Intracomm, wrong: str) -> None:
    size = comm.size
    good = [np.zeros(4), ([1] * size, [0] * size), [MPI.INT] * size]
    if comm.rank == 1:
        with pytest.raises((ValueError, TypeError, OverflowError)):
            comm.Alltoallw(good, BAD[wrong](size))
    else:
        with pytest.raises(RemoteError, match="rank 1"):
            comm.Alltoallw([np.zeros(4), *good[1:]], good)


REFUSED = {
    "Allreduce": lambda send, recv, where, wrong: (send, recv[:-1] if wrong else recv),
    "Alltoallv": lambda send, recv, where, wrong: ([send, where], [recv, where[:-1] if wrong else where]),
    "Alltoallw": lambda send, recv, where, wrong: (
        [send, (where, [0] * len(where)), [MPI.DOUBLE] * (len(where) + wrong)],
        [recv, (where, [8 * rank for rank in range(len(where))]), [MPI.DOUBLE] * len(where)],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_all_calls_are_compared_a_refused_one_leaves_the_communicator_usable(name: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("MPICOLL_CHECK", "full")
    plain = MPI.COMM_WORLD.Dup()
    comm = Intracomm(plain, timeout=10)
    size, wrong = comm.size, comm.rank == 1
    for _ in range(2):
        send, recv = np.ones(size), np.zeros(size)
        with pytest.raises((ValueError, TypeError) if wrong else RemoteError):
            getattr(comm, name)(*REFUSED[name](send, recv, [1] * size, wrong))
        getattr(comm, name)(*REFUSED[name](send, recv, [1] * size, False))
        assert (recv == (size if name == "Allreduce" else 1)).all()
    plain.Free()


def test_nonblocking_and_persistent(comm: Intracomm) -> None:
    size, part = comm.size, 6
    send, recv = np.arange(size * part, dtype=np.int32) + 100 * comm.rank, np.zeros(size * part, np.int32)
    where = [part] * size, [4 * part * rank for rank in range(size)]
    expected = np.concatenate([np.arange(part) + comm.rank * part + 100 * rank for rank in range(size)])
    sides = [send, where, [MPI.INT] * size], [recv, where, [MPI.INT] * size]
    comm.Ialltoallw(*sides).Wait()
    np.testing.assert_array_equal(recv, expected)
    kept = comm.Alltoallw_init(*sides)
    for _ in range(2):
        recv[:] = 0
        kept.Start()
        kept.Wait()
        np.testing.assert_array_equal(recv, expected)
    kept.Free()


def test_blocks_without_entries_need_no_datatype(comm: Intracomm) -> None:
    size, after = comm.size, (comm.rank + 1) % comm.size
    counts = [int(rank == after) for rank in range(size)]
    got_counts = [int((rank + 1) % size == comm.rank) for rank in range(size)]
    recv = np.zeros(1)
    for _ in range(4):
        recv[:] = 0
        types = [MPI.DOUBLE if count else MPI.DATATYPE_NULL for count in counts]
        into = [MPI.DOUBLE if count else MPI.DATATYPE_NULL for count in got_counts]
        comm.Alltoallw([np.full(1, comm.rank + 0.5), counts, [0] * size, types], [recv, got_counts, [0] * size, into])
        assert recv[0] == (comm.rank - 1) % size + 0.5


def test_datatypes_that_are_no_sequence_are_named(comm: Intracomm) -> None:
    own, size = comm.Dup(), comm.size
    with pytest.raises(TypeError, match=r"recvbuf: .* is not a sequence of datatypes"):
        own.Alltoallw([np.zeros(size), [MPI.DOUBLE] * size], [np.zeros(size), MPI.DOUBLE])
    own.Free()


def test_ranks_may_use_different_objects_of_a_communicator(comm: Intracomm) -> None:
    plain = MPI.COMM_WORLD.Dup()
    objects = [Intracomm(plain), Intracomm(plain)]
    size, places = comm.size, [8 * rank for rank in range(comm.size)]
    for turn in range(6):
        made = objects[0 if turn == 0 else (comm.rank + turn) % 2]
        recv = np.zeros(size)
        spec = [[1] * size, places, [MPI.DOUBLE] * size]
        made.Alltoallw([np.full(size, comm.rank + 0.5), *spec], [recv, *spec])
        assert recv.tolist() == [rank + 0.5 for rank in range(size)]
    plain.Free()
