"""One rank's derived datatype goes with the others' plain arrays, as MPI allows where the type signatures are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll import Intracomm

pytestmark = pytest.mark.mpi(min_size=2)

COUNTS = (4, 700, 6000)
"""Below and above the lengths from which buffers are used in place and from which data pass through stages."""
HOLE = -7.0
ITEM = MPI.DOUBLE.Get_size()


class Layout(NamedTuple):
    """A datatype of doubles: where its elements lie, in doubles from the beginning of an entry, in their order."""

    datatype: MPI.Datatype
    places: np.ndarray
    entries: int
    """How many entries hold the whole vector."""

    @property
    def extent(self) -> int:
        return self.datatype.Get_extent()[1] // ITEM


def vector(count: int) -> Layout:
    return Layout(MPI.DOUBLE.Create_vector(count, 1, 2), 2 * np.arange(count), 1)


def contiguous(count: int) -> Layout:
    return Layout(MPI.DOUBLE.Create_contiguous(2), np.arange(2), count // 2)


def indexed(count: int) -> Layout:
    """Backwards, with holes of different lengths."""
    places = np.cumsum(1 + np.arange(count) % 3)[::-1]
    return Layout(MPI.DOUBLE.Create_indexed_block(1, places.tolist()), places, 1)


def struct(count: int) -> Layout:
    first = count // 2
    made = MPI.Datatype.Create_struct(
        [first, 0, count - first], [0, 8, ITEM * (first + 3)], [MPI.DOUBLE, MPI.INT, MPI.DOUBLE]
    )
    return Layout(made, np.append(np.arange(first), first + 3 + np.arange(count - first)), 1)


def resized(count: int) -> Layout:
    return Layout(MPI.DOUBLE.Create_resized(0, 3 * ITEM), np.zeros(1, int), count)


def columns(count: int) -> Layout:
    """Columns of a matrix of two: the second entry begins inside the first."""
    column = MPI.DOUBLE.Create_vector(count // 2, 1, 2)
    made = column.Create_resized(0, ITEM)
    column.Free()
    return Layout(made, 2 * np.arange(count // 2), 2)


def subarray(count: int) -> Layout:
    return Layout(MPI.DOUBLE.Create_subarray([count, 5], [count, 1], [0, 2]), 5 * np.arange(count) + 2, 1)


def nested(count: int) -> Layout:
    pair = MPI.DOUBLE.Create_contiguous(2)
    made = pair.Create_vector(count // 2, 1, 2)
    pair.Free()
    return Layout(made, (4 * np.arange(count // 2)[:, None] + np.arange(2)).ravel(), 1)


LAYOUTS = (vector, contiguous, indexed, struct, resized, subarray, nested)
"""Of these there can be one block after the other."""


class Scattered:
    """A vector in memory of its own, in the way of a layout; what lies between its elements must not change."""

    def __init__(self, make: Callable[[int], Layout], count: int, blocks: int = 1) -> None:
        self.layout = make(count)
        self.layout.datatype.Commit()
        self.blocks, extent = blocks, self.layout.extent
        starts = extent * np.arange(blocks * self.layout.entries)
        self.places = (starts[:, None] + self.layout.places).ravel()
        self.memory = np.full(self.places.max() + extent + 4, HOLE)

    @property
    def spec(self) -> list[Any]:
        return [self.memory, self.layout.entries, self.layout.datatype]

    @property
    def spec_v(self) -> list[Any]:
        each = self.layout.entries
        return [self.memory, [each] * self.blocks, [each * i for i in range(self.blocks)], self.layout.datatype]

    def put(self, values: Any) -> None:
        self.memory[self.places] = values

    def take(self) -> np.ndarray:
        """Return the elements, after a look at the holes."""
        holes = np.ones(self.memory.size, bool)
        holes[self.places] = False
        assert (self.memory[holes] == HOLE).all()
        return self.memory[self.places]

    def free(self) -> None:
        self.layout.datatype.Free()


class Plain(Scattered):
    """The same as an ordinary array."""

    def __init__(self, count: int, blocks: int = 1) -> None:
        self.memory, self.places, self.blocks = np.full(count * blocks, HOLE), np.arange(count * blocks), blocks
        self.each = count

    spec = property(lambda self: self.memory)  # type: ignore[assignment]
    spec_v = property(lambda self: [self.memory, [self.each] * self.blocks])  # type: ignore[assignment]

    def free(self) -> None:
        pass


def numbers(rank: int, count: int, turn: int = 0) -> np.ndarray:
    return ((np.arange(count) * (rank + 3) + rank + turn) % 13).astype(np.float64)


@pytest.fixture(autouse=True)
def _still_usable(comm: Intracomm) -> Iterator[None]:
    yield
    for count in (5, 5000):
        data = np.full(count, comm.rank + 1.0)
        comm.Allreduce(MPI.IN_PLACE, data)
        assert (data == comm.size * (comm.size + 1) / 2).all()


def _blocking(comm: Intracomm, name: str, *arguments: Any, **settings: Any) -> Callable[[], None]:
    return lambda: getattr(comm, name)(*arguments, **settings)


def _nonblocking(comm: Intracomm, name: str, *arguments: Any, **settings: Any) -> Callable[[], None]:
    return lambda: getattr(comm, f"I{name.lower()}")(*arguments, **settings).Wait() and None


def _persistent(comm: Intracomm, name: str, *arguments: Any, **settings: Any) -> Callable[[], None]:
    request = getattr(comm, f"{name}_init")(*arguments, **settings)

    def again() -> None:
        request.Start()
        request.Wait()

    return again


WAYS = {"blocking": _blocking, "nonblocking": _nonblocking, "persistent": _persistent}
TURNS = 3
SUM = mpicoll.op(lambda a, b: a + b)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


def _buffer(comm: Intracomm, odd: int, make: Callable[[int], Layout], count: int, blocks: int = 1) -> Scattered:
    return Scattered(make, count, blocks) if comm.rank == odd else Plain(count, blocks)


@pytest.mark.parametrize("layout", [*LAYOUTS, columns])
def test_bcast(comm: Intracomm, way: str, layout: Callable) -> None:
    for count in COUNTS:
        for odd in (0, 1):
            buffer = _buffer(comm, odd, layout, count)
            for root in (0, comm.size - 1):
                call = WAYS[way](comm, "Bcast", buffer.spec, root)
                for turn in range(TURNS):
                    buffer.put(numbers(comm.rank, count, turn))
                    call()
                    assert (buffer.take() == numbers(root, count, turn)).all()
            buffer.free()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_allgather(comm: Intracomm, way: str, layout: Callable) -> None:
    size, rank = comm.size, comm.rank
    for count in COUNTS:
        for gives, takes in ((1, -1), (-1, 1), (0, 1), (0, 0)):
            send, recv = _buffer(comm, gives, layout, count), _buffer(comm, takes, layout, count, size)
            for inside in (False, True):
                given = MPI.IN_PLACE if inside else send.spec
                call = WAYS[way](comm, "Allgather", given, recv.spec)
                for turn in range(TURNS):
                    send.put(numbers(rank, count, turn))
                    recv.put(np.tile(numbers(rank, count, turn), size) if inside else HOLE)
                    call()
                    assert (recv.take() == np.concatenate([numbers(r, count, turn) for r in range(size)])).all()
            send.free()
            recv.free()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_allgatherv(comm: Intracomm, layout: Callable) -> None:
    size, rank = comm.size, comm.rank
    for count in COUNTS:
        for gives, takes in ((1, -1), (-1, 1), (0, 1), (0, 0)):
            send, recv = _buffer(comm, gives, layout, count), _buffer(comm, takes, layout, count, size)
            for inside in (False, True):
                send.put(numbers(rank, count))
                recv.put(np.tile(numbers(rank, count), size) if inside else HOLE)
                comm.Allgatherv(MPI.IN_PLACE if inside else send.spec, recv.spec_v)
                assert (recv.take() == np.concatenate([numbers(r, count) for r in range(size)])).all()
            send.free()
            recv.free()


@pytest.mark.parametrize("op", [SUM, MPI.SUM], ids=["own", "predefined"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("collective", ["Reduce", "Allreduce"])
def test_operations_on_elements(comm: Intracomm, way: str, collective: str, layout: Callable, op: Any) -> None:
    """Elements are combined one by one, wherever they lie; MPI defines its own operations on basic types only."""
    if (way, collective) == ("nonblocking", "Reduce"):
        return  # there is none
    for count in COUNTS:
        for odd in (0, 1):
            send, recv = _buffer(comm, odd, layout, count), _buffer(comm, 1 - odd, layout, count)
            extra = (1,) if collective == "Reduce" else ()
            call = WAYS[way](comm, collective, send.spec, recv.spec, op, *extra)
            for turn in range(TURNS):
                send.put(numbers(comm.rank, count, turn))
                recv.put(HOLE)
                call()
                total = sum(numbers(r, count, turn) for r in range(comm.size))
                assert (recv.take() == (total if not extra or comm.rank == 1 else HOLE)).all()
            send.free()
            recv.free()


def test_counts_of_reduce_scatter_are_entries(comm: Intracomm) -> None:
    counts = [rank % 3 for rank in range(comm.size)]
    pairs = MPI.DOUBLE.Create_vector(2, 1, 2).Create_resized(0, 4 * ITEM).Commit()
    data = np.repeat(numbers(comm.rank, 2 * sum(counts)), 2)
    got = np.full(4 * counts[comm.rank] + 1, HOLE)
    comm.Reduce_scatter([data, sum(counts), pairs], [got, counts[comm.rank], pairs], counts)
    total = sum(numbers(r, 2 * sum(counts)) for r in range(comm.size))
    begin = 2 * sum(counts[: comm.rank])
    assert (got[:-1:2] == total[begin : begin + 2 * counts[comm.rank]]).all()
    assert (got[1::2] == HOLE).all()
    pairs.Free()


def test_absolute_addresses(comm: Intracomm) -> None:
    for count in COUNTS:
        data = np.full(2 * count, HOLE)
        made = MPI.DOUBLE.Create_hvector(count, 1, 2 * ITEM)
        placed = MPI.Datatype.Create_struct([1], [MPI.Get_address(data)], [made]).Commit()
        for root in (0, 1):
            data[::2] = numbers(comm.rank, count)
            buffer = np.array(data[::2])
            comm.Bcast([MPI.BOTTOM, 1, placed] if comm.rank == 1 else buffer, root)
            assert ((data[::2] if comm.rank == 1 else buffer) == numbers(root, count)).all()
            assert (data[1::2] == HOLE).all()
        made.Free()
        placed.Free()


def test_negative_distances(comm: Intracomm) -> None:
    """An entry may begin in the middle of an array and go backwards."""
    for count in COUNTS:
        data = np.full(2 * count, HOLE)
        back = MPI.DOUBLE.Create_vector(count, 1, -1).Commit()
        data[:count] = numbers(comm.rank, count)[::-1]
        buffer = numbers(comm.rank, count)
        comm.Bcast([data[count - 1 :], 1, back] if comm.rank == 1 else buffer, 1)
        assert (buffer == numbers(1, count)).all()
        data[:count] = 0
        buffer = numbers(comm.rank, count)
        comm.Bcast([data[count - 1 :], 1, back] if comm.rank == 1 else buffer, 0)
        if comm.rank == 1:
            assert (data[:count] == numbers(0, count)[::-1]).all()
        assert (data[count:] == HOLE).all()
        back.Free()


def test_pairs_of_equal_elements(comm: Intracomm) -> None:
    """MPI_2INT is predefined, but of two elements."""
    data = np.arange(8, dtype=np.intc) + comm.rank
    comm.Bcast([data, 4, MPI.TWOINT] if comm.rank == 1 else data, 0)
    assert (data == np.arange(8)).all()
    located = np.array([comm.rank, comm.rank] * 3, np.intc)
    result = np.zeros(6, np.intc)
    comm.Allreduce([located, MPI.TWOINT], [result, MPI.TWOINT], MPI.MAXLOC)
    assert (result == comm.size - 1).all()


def test_a_datatype_may_be_freed_while_it_is_in_use(comm: Intracomm) -> None:
    for count in COUNTS:
        buffer = _buffer(comm, 1, vector, count)
        buffer.put(numbers(comm.rank, count))
        request = comm.Ibcast(buffer.spec, 0)
        kept = comm.Bcast_init(buffer.spec, comm.size - 1)
        buffer.free()
        request.Wait()
        assert (buffer.take() == numbers(0, count)).all()
        buffer.put(numbers(comm.rank, count))
        kept.Start()
        kept.Wait()
        assert (buffer.take() == numbers(comm.size - 1, count)).all()
        kept.Free()


SHORT: dict[str, Callable[[np.ndarray], Any]] = {
    "address": lambda a: MPI.buffer.fromaddress(a.ctypes.data, 32),
    "memoryview": lambda a: memoryview(a)[:4],
    "array": lambda a: a[:4],
}


@pytest.mark.parametrize("name", SHORT)
def test_entries_may_reach_beyond_the_part_that_is_given(comm: Intracomm, name: str) -> None:
    """Programs give the bytes of the elements without the gaps, or a part of a larger array."""
    column = MPI.DOUBLE.Create_vector(4, 1, 4).Commit()
    matrix, found = np.arange(16.0) + 100 * comm.rank, np.zeros(4 * comm.size)
    comm.Allgather([SHORT[name](matrix), 1, column], found)
    assert (found == [4 * i + 100 * rank for rank in range(comm.size) for i in range(4)]).all()
    comm.Bcast([SHORT[name](matrix), 1, column], comm.size - 1)
    assert (matrix[::4] == np.arange(0, 16, 4) + 100 * (comm.size - 1)).all()
    assert (matrix[1::4] == np.arange(1, 16, 4) + 100 * comm.rank).all()
    column.Free()


def test_an_address_of_memory_that_must_not_be_written_is_no_place_for_a_result(comm: Intracomm) -> None:
    data = np.arange(4.0)
    pointer = MPI.buffer.fromaddress(data.ctypes.data, data.nbytes, True)
    found = np.zeros(4 * comm.size)
    comm.Allgather([pointer, 4, MPI.DOUBLE], found)
    assert (found == np.tile(data, comm.size)).all()
    counts = [4] * comm.size, [0] * comm.size, [MPI.DOUBLE] * comm.size
    for call in (
        lambda: comm.Allreduce(np.zeros(4), [pointer, 4, MPI.DOUBLE]),
        lambda: comm.Alltoallw([np.zeros(4), *counts], [pointer, *counts]),
    ):
        with pytest.raises((TypeError, ValueError, BufferError), match="read-only"):
            call()


WRONG: dict[str, tuple[Callable[[np.ndarray, MPI.Datatype], Any], type[Exception], str]] = {
    "beyond": (lambda a, t: [a, 4, t], ValueError, "4 entries of the datatype reach from byte 0 to byte 96"),
    "displacement": (
        lambda a, t: [a, (1, 3), t],
        ValueError,
        "1 entries of the datatype reach from byte 72 to byte 96",
    ),
    "no_multiple": (lambda a, t: [a[:4], t], ValueError, "32 bytes are no whole number of entries of 24"),
    "strided": (lambda a, t: [a[::2], t], TypeError, "must be contiguous"),
}


@pytest.mark.parametrize("name", WRONG)
def test_entries_that_do_not_fit(comm: Intracomm, name: str) -> None:
    make, error, text = WRONG[name]
    made = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()
    for call in (lambda spec: comm.Bcast(spec), lambda spec: comm.Allgather(spec, np.zeros(2 * comm.size))):
        with pytest.raises(error, match=text):
            call(make(np.zeros(9), made))
    made.Free()
