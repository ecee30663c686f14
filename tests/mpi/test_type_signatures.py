"""Each rank lays out its data as it likes: what a call is, is decided by the type signature."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.errors import MpicollError
from tests import layouts
from tests.layouts import Scattered

pytestmark = pytest.mark.mpi(min_size=2)

DTYPES = tuple(map(np.dtype, ("float64", "int32", "uint8", "complex128")))
LENGTHS = (1, 6, 60, 1200)
"""Elements of a part; the longest are used in place, and pass through stages."""


@pytest.fixture(autouse=True)
def _still_usable(comm: Intracomm) -> Iterator[None]:
    yield
    data = np.full(5, comm.rank + 1.0)
    comm.Allreduce(MPI.IN_PLACE, data)
    assert (data == comm.size * (comm.size + 1) / 2).all()


class Plain:
    """The same face as a scattered vector, around an ordinary array."""

    def __init__(self, count: int, dtype: np.dtype) -> None:
        self.values = np.full(count, 91).astype(dtype)

    def spec(self, blocks: int = 1) -> Any:
        return self.values

    def spec_of_parts(self, counts: Sequence[int]) -> Any:
        return [self.values, list(counts)]

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, name):
            self.values[...] = value
        else:
            super().__setattr__(name, value)

    def is_intact(self) -> bool:
        return True


class Vectors:
    """Makes vectors in layouts that this rank draws for itself, and frees their datatypes."""

    def __init__(self, seed: Any) -> None:
        self._numbers, self._made = random.Random(str(seed)), []

    def __call__(self, count: int, dtype: np.dtype, part: int) -> Any:
        """Make a vector of `count` elements, in parts of which each is a multiple of `part`."""
        if self._numbers.random() < 0.3:
            return Plain(count, dtype)
        layout = layouts.draw(self._numbers, dtype, part)
        self._made.append(layout.datatype)
        return Scattered(layout, count, dtype)

    def free(self) -> None:
        for datatype in self._made:
            datatype.Free()
        self._made.clear()


@pytest.fixture
def vectors(comm: Intracomm) -> Iterator[Vectors]:
    made = Vectors(comm.rank)
    yield made
    made.free()


def numbers(rank: int, count: int, dtype: np.dtype) -> np.ndarray:
    return ((np.arange(count) * (rank + 3) + rank) % 13).astype(dtype)


MOVES = ("Bcast", "Gather", "Scatter", "Allgather", "Alltoall", "Gatherv", "Scatterv", "Allgatherv", "Alltoallv")
REDUCTIONS = ("Allreduce", "Reduce", "Reduce_scatter_block", "Reduce_scatter", "Scan", "Exscan")


def _lengths(collective: str, size: int, count: int) -> tuple[int, int]:
    """Return how many elements a rank gives and takes where each part has `count`."""
    if collective in ("Bcast", "Allreduce", "Reduce", "Scan", "Exscan"):
        return count, count
    many = ("Scatter", "Alltoall", "Reduce_scatter")
    sends = size * count if collective.startswith(many) else count
    takes = size * count if collective.startswith(("Gather", "Allgather", "Alltoall")) else count
    return sends, takes


def _make(comm: Any, collective: str, send: Any, recv: Any, count: int, root: int, prefix: str = "") -> Any:
    """Make a call with vectors as they are laid out, whose parts have `count` elements."""
    size, at_root, parts = comm.size, comm.rank == root, [count] * comm.size
    call = getattr(comm, (prefix + collective.lower() if prefix else collective))
    if collective == "Bcast":
        return call(recv.spec(), root)
    if collective in ("Allreduce", "Scan", "Exscan"):
        return call(send.spec(), recv.spec(), MPI.SUM)
    if collective == "Reduce":
        return call(send.spec(), recv.spec() if at_root else None, MPI.SUM, root)
    if collective == "Reduce_scatter_block":
        return call(send.spec(size), recv.spec(), MPI.SUM)
    if collective == "Reduce_scatter":
        return call(send.spec(), recv.spec(), [count // getattr(recv, "each", 1)] * size, MPI.SUM)
    if collective.startswith("Gather"):
        whole = recv.spec_of_parts(parts) if collective.endswith("v") else recv.spec(size)
        return call(send.spec(), whole if at_root else None, root)
    if collective.startswith("Scatter"):
        whole = send.spec_of_parts(parts) if collective.endswith("v") else send.spec(size)
        return call(whole if at_root else None, recv.spec(), root)
    given = send.spec_of_parts(parts) if collective == "Alltoallv" else send.spec(size)
    given = send.spec() if collective.startswith("Allgather") else given
    return call(given, recv.spec_of_parts(parts) if collective.endswith("v") else recv.spec(size))


@pytest.mark.parametrize("prefix", ["", "I"])
@pytest.mark.parametrize("collective", MOVES + REDUCTIONS)
def test_layouts_of_ranks_are_their_own_affair(comm: Intracomm, vectors: Vectors, collective: str, prefix: str) -> None:
    """Against mpi4py's own call on ordinary arrays."""
    plain = MPI.COMM_WORLD.Dup()
    for turn, count in enumerate(LENGTHS * 3):
        dtype, root = DTYPES[turn % len(DTYPES)], turn % comm.size
        if prefix and collective in ("Reduce", "Scan", "Exscan") and not hasattr(comm, prefix + collective.lower()):
            continue
        sends, takes = _lengths(collective, comm.size, count)
        send, recv = vectors(sends, dtype, count), vectors(takes, dtype, count)
        usual = Plain(sends, dtype), Plain(takes, dtype)
        for vector in (send, usual[0], *([recv, usual[1]] if collective == "Bcast" else [])):
            vector.values = numbers(comm.rank, sends, dtype)
        if collective != "Bcast":
            recv.values = usual[1].values
        _make(plain, collective, *usual, count, root)
        request = _make(comm, collective, send, recv, count, root, prefix)
        if prefix:
            request.Wait()
        assert (recv.values == usual[1].values).all(), (collective, count, dtype, root)
        assert send.is_intact()
        assert recv.is_intact()
        vectors.free()
    plain.Free()


RECORD = np.dtype([("number", np.int32), ("value", np.float64)])


def _records(rank: int, count: int) -> np.ndarray:
    made = np.zeros(count, RECORD)
    made["number"], made["value"] = numbers(rank, count, np.dtype(int)), numbers(rank + 1, count, np.dtype(float))
    return made


class Records:
    """Records of two types of elements, in one of three layouts with equal type signatures."""

    def __init__(self, which: int, count: int) -> None:
        types, displs = [MPI.INT, MPI.DOUBLE], [[0, 4], [0, 8], [12, 0]][which % 3]
        struct = MPI.Datatype.Create_struct([1, 1], displs, types)
        self.itemsize = (12, 16, 24)[which % 3]
        self.datatype = struct.Create_resized(0, self.itemsize).Commit()
        struct.Free()
        self.count, self.memory = count, np.full(count * self.itemsize, 7, np.uint8)
        named = {"names": ["number", "value"], "formats": ["i4", "f8"], "offsets": displs, "itemsize": self.itemsize}
        self._view = self.memory.view(np.dtype(named))

    def spec(self, blocks: int = 1) -> list[Any]:
        return [self.memory, self.count // blocks, self.datatype]

    def spec_of_parts(self, counts: Sequence[int]) -> list[Any]:
        return [self.memory, list(counts), self.datatype]

    @property
    def values(self) -> np.ndarray:
        made = np.zeros(self.count, RECORD)
        made["number"], made["value"] = self._view["number"], self._view["value"]
        return made

    @values.setter
    def values(self, values: np.ndarray) -> None:
        self._view["number"], self._view["value"] = values["number"], values["value"]


class PackedRecords(Records):
    """The same without holes, as bytes to the MPI library: MPICH's Gather to rank 3 of 4 fails on structures."""

    def __init__(self, which: int, count: int) -> None:
        self.datatype = MPI.BYTE.Create_contiguous(RECORD.itemsize).Commit()
        self.itemsize, self.count = RECORD.itemsize, count
        self.memory = np.full(count * self.itemsize, 7, np.uint8)
        self._view = self.memory.view(RECORD)


@pytest.mark.parametrize("prefix", ["", "I"])
@pytest.mark.parametrize("collective", MOVES)
def test_records_of_several_types(comm: Intracomm, collective: str, prefix: str) -> None:
    plain = MPI.COMM_WORLD.Dup()
    for turn, count in enumerate(LENGTHS):
        root, (sends, takes) = turn % comm.size, _lengths(collective, comm.size, count)
        left = []
        for face, kind, before in ((plain, PackedRecords, ""), (comm, Records, prefix)):
            send, recv = kind(comm.rank + turn, sends), kind(comm.rank + turn + 1, takes)
            send.values, recv.values = _records(comm.rank, sends), _records(comm.rank + 7, takes)
            request = _make(face, collective, send, recv, count, root, before)
            if before:
                request.Wait()
            left.append(recv.values)
            send.datatype.Free()
            recv.datatype.Free()
        assert (left[0] == left[1]).all(), (collective, count)
    plain.Free()


NOTHING: dict[str, Callable[[], Any]] = {
    "float64": lambda: np.empty(0),
    "int8": lambda: np.empty((3, 0), np.int8),
    "long double": lambda: np.empty(0, np.longdouble),
    "no memory": lambda: [None, 0, MPI.SHORT],
    "records": lambda: [np.empty(16, np.uint8), 0, MPI.DOUBLE_INT],
    "bottom": lambda: [MPI.BOTTOM, 0, MPI.DOUBLE],
}


@pytest.mark.parametrize("nothing", NOTHING)
@pytest.mark.parametrize("ways", ["blocking", "nonblocking", "persistent", "messages"])
def test_a_rank_without_elements_may_give_any_type(comm: Intracomm, nothing: str, ways: str) -> None:
    """In vector collectives it knows only its own part, and so not the others' element type."""
    size, rank = comm.size, comm.rank
    for idle in (0, size - 1):
        counts = [0 if r == idle else 2 + r for r in range(size)]
        own, displs = counts[rank], np.cumsum([0, *counts])
        mine = NOTHING[nothing]() if rank == idle else numbers(rank, own, np.dtype(np.int32))
        everything = np.concatenate([numbers(r, counts[r], np.dtype(np.int32)) for r in range(size)])
        for root in range(size):
            settings = {"algorithm": "linear"} if ways == "messages" else {}
            got = np.zeros(displs[-1], np.int32)
            _do(comm, "Gatherv", ways, mine, [got, counts] if rank == root else None, root, **settings)
            assert (got == (everything if rank == root else 0)).all()
            part = NOTHING[nothing]() if rank == idle else np.zeros(own, np.int32)
            _do(comm, "Scatterv", ways, [everything, counts] if rank == root else None, part, root, **settings)
            assert rank == idle or (part == everything[displs[rank] : displs[rank + 1]]).all()
        got = np.zeros(displs[-1], np.int32)
        _do(comm, "Allgatherv", ways, mine, [got, counts])
        assert (got == everything).all()


def _do(comm: Intracomm, name: str, way: str, *arguments: Any, **settings: Any) -> None:
    if way == "nonblocking":
        getattr(comm, f"I{name.lower()}")(*arguments).Wait()
    elif way == "persistent":
        request = getattr(comm, f"{name}_init")(*arguments)
        for _ in range(2):
            request.Start()
            request.Wait()
        request.Free()
    else:
        getattr(comm, name)(*arguments, **settings)


@pytest.mark.parametrize("nothing", NOTHING)
def test_a_rank_that_exchanges_nothing_may_give_any_type(comm: Intracomm, nothing: str) -> None:
    size, rank, idle = comm.size, comm.rank, 1
    for prefix in ("", "I"):
        counts = [0 if idle in (rank, other) else 3 for other in range(size)]
        send, recv = numbers(rank, sum(counts), np.dtype(np.int16)), np.zeros(sum(counts), np.int16)
        arguments: list[Any] = [[send, counts], [recv, counts]]
        if rank == idle:
            arguments = [[np.empty(0), counts], [np.empty(0, np.float32), counts]]
            if nothing == "records":
                arguments[0] = [np.empty(16, np.uint8), counts, MPI.DOUBLE_INT]
        request = getattr(comm, "Ialltoallv" if prefix else "Alltoallv")(*arguments)
        if prefix:
            request.Wait()
        place = 3 * sum(r != idle for r in range(rank))
        if rank != idle:
            sent = [numbers(r, 3 * (size - 1), np.dtype(np.int16))[place : place + 3] for r in range(size) if r != idle]
            assert (recv == np.concatenate(sent)).all()


def _twice(call: Callable[..., None], *arguments: Any, **settings: Any) -> None:
    """Make a call and the next one: a rank that only sends may be done with a call before anything is known."""
    call(*arguments, **settings)
    call(*arguments, **settings)


@pytest.mark.parametrize("mode", ["default", "full"])
def test_different_types_in_vector_collectives_are_an_error_everywhere(mode: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("MPICOLL_CHECK", mode)
    for collective in ("Gatherv", "Alltoallv", "Allgatherv"):
        plain = MPI.COMM_WORLD.Dup()
        comm = Intracomm(plain, timeout=5)
        dtype, size = np.float32 if comm.rank == 1 else np.int32, comm.size
        send, recv = np.ones(size, dtype), np.ones(size * size, dtype)
        calls: dict[str, tuple[Any, ...]] = {
            "Gatherv": (send, [recv, [size] * size] if comm.rank == 0 else None, 0),
            "Alltoallv": ([send, [1] * size], [recv[:size], [1] * size]),
            "Allgatherv": (send, [recv, [size] * size]),
        }
        settings = {"algorithm": "linear"} if collective == "Gatherv" else {}
        with pytest.raises(MpicollError):
            _twice(getattr(comm, collective), *calls[collective], **settings)
        plain.Free()


def test_no_elements_are_of_any_type(comm: Intracomm) -> None:
    size, odd = comm.size, comm.rank % 2
    empty: Any = np.empty(0, np.int8 if odd else np.float64)
    for _ in range(3):
        comm.Bcast([None, 0, MPI.DOUBLE_INT] if odd else empty, 0)
        comm.Allgather(empty, np.empty(0, np.int32))
        comm.Alltoall(empty, np.empty(0, np.int32))
        comm.Gather(empty, np.empty((size, 0)), 1)
        comm.Scatter(np.empty((size, 0)), empty, 1)


@pytest.mark.parametrize("dtype", ["longdouble", "clongdouble"])
def test_elements_that_no_kernel_knows_are_moved(comm: Intracomm, dtype: str) -> None:
    """Also from strided arrays, and with counts."""
    size, rank = comm.size, comm.rank
    for count in (3, 900):
        for _ in range(3):
            data = np.arange(2 * count).astype(dtype)[::2] * (rank + 1)
            comm.Bcast(data, size - 1)
            assert (data == np.arange(0, 2 * count, 2) * size).all()
        part = np.arange(count).astype(dtype) + rank
        everything = np.concatenate([np.arange(count).astype(dtype) + r for r in range(size)])
        got = np.zeros((size, count), dtype)
        comm.Allgather(part, got)
        assert (got.ravel() == everything).all()
        got = np.zeros(size * (count + 1), dtype)
        comm.Allgatherv(part, [got, ([count] * size, [(count + 1) * r for r in range(size)])])
        assert (got.reshape(size, -1)[:, :count].ravel() == everything).all()
        assert (got.reshape(size, -1)[:, count] == 0).all()
        comm.Alltoall(everything, got := np.zeros_like(everything))
        assert (got == np.tile(np.arange(count) + rank, size)).all()
        total = np.zeros(count, dtype)
        comm.Allreduce(part, total)
        assert (total == size * np.arange(count) + size * (size - 1) // 2).all()
