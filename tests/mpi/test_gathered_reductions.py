"""Reductions that only MPI_Reduce_local executes: pairs, long double, operations of MPI.Op.Create."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.collectives import gathered_reductions
from mpicoll.errors import MismatchError, MpicollError
from tests.mpi.conftest import TIMEOUT, WORLD, refuse

pytestmark = pytest.mark.mpi(min_size=2)
PAIRS = {
    "DOUBLE_INT": np.dtype([("value", "f8"), ("place", "i4")], align=True),
    "FLOAT_INT": np.dtype([("value", "f4"), ("place", "i4")], align=True),
    "LONG_INT": np.dtype([("value", "i8"), ("place", "i4")], align=True),
    "SHORT_INT": np.dtype([("value", "i2"), ("place", "i4")], align=True),
    "TWOINT": np.dtype([("value", "i4"), ("place", "i4")], align=True),
}
COLLECTIVES = ("Allreduce", "Reduce", "Scan", "Exscan")


def _join(left: memoryview, right: memoryview, datatype: MPI.Datatype) -> None:
    """The numbers of ranks one after the other, so that the order can be seen."""
    a, b = np.frombuffer(left, np.float64), np.frombuffer(right, np.float64)
    b[:] = a * 10 ** (1 + np.floor(np.log10(b))) + b


@pytest.fixture(scope="module")
def join() -> Iterator[MPI.Op]:
    op = MPI.Op.Create(_join, commute=False)
    yield op
    op.Free()


@pytest.fixture(params=["compiled", "general", "some general"])
def gathered(request: pytest.FixtureRequest, comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The collectives that were gathered: by compiled code, on the general path, or so on every other rank."""
    made: list[str] = []
    combine = gathered_reductions.Vectors.combine

    def noted(vectors: gathered_reductions.Vectors, rows: np.ndarray) -> None:
        made.append(vectors.collective)
        combine(vectors, rows)

    monkeypatch.setattr(gathered_reductions.Vectors, "combine", noted)
    if request.param == "compiled":
        comm.Allreduce(np.ones(1, np.longdouble), np.ones(1, np.longdouble))  # the first call takes the general path
        made.clear()
        monkeypatch.setattr(gathered_reductions.GatheredReduction, "run", refuse)
    elif request.param == "general" or comm.rank % 2:
        monkeypatch.setattr(gathered_reductions, "begin", lambda *arguments: None)
    return made


def both(comm: Intracomm, name: str, given: Any, result: Any, op: MPI.Op, root: int) -> tuple[Any, Any]:
    """Return the result, an array or None, by mpicoll and by the MPI library."""
    found = []
    for each in (comm, MPI.Intracomm(comm)):
        mine = None if name == "Reduce" and comm.rank != root else result()
        getattr(each, name)(given(mine), mine, op, *([root] if name == "Reduce" else []))
        found.append(mine)
    return found[0], found[1]


FILLER = 0x63


def untouched(count: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Return elements of which all bytes are FILLER, also those in gaps."""
    return np.frombuffer(bytearray([FILLER] * (count * dtype.itemsize)), dtype)


def gaps_of(elements: np.ndarray) -> np.ndarray:
    """Return the bytes that belong to no field."""
    dtype = elements.dtype
    assert dtype.fields is not None
    used = {place for kind, offset in dtype.fields.values() for place in range(offset, offset + kind.itemsize)}
    gaps = [place for place in range(dtype.itemsize) if place not in used]
    return elements.view(np.uint8).reshape(-1, dtype.itemsize)[:, gaps]


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("op", ["MINLOC", "MAXLOC"])
def test_pairs(comm: Intracomm, gathered: list[str], name: str, kind: str, op: str) -> None:
    datatype, dtype = getattr(MPI, kind), PAIRS[kind]
    assert dtype.itemsize == datatype.Get_extent()[1]
    for count in (1, 7, 0):
        x = np.zeros(count, dtype)
        x["value"], x["place"] = (np.arange(count) + comm.rank) % 3, comm.rank
        root = count % comm.size
        ours, plain = both(
            comm,
            name,
            lambda _, x=x: [x, datatype],
            lambda count=count: [untouched(count, dtype), count, datatype],
            getattr(MPI, op),
            root,
        )
        if ours is not None:
            assert ours[0].tolist() == plain[0].tolist(), count
            assert (gaps_of(ours[0]) == FILLER).all()
    assert len(gathered) == (3 if comm.channel.node is not None else 0)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_long_double_and_in_place(comm: Intracomm, gathered: list[str], name: str) -> None:
    x = np.arange(1, 6, dtype=np.longdouble) / 4 + comm.rank  # exact in any order
    for op in (MPI.SUM, MPI.PROD, MPI.MAX):
        ours, plain = both(comm, name, lambda _: x, lambda: np.full(5, -1, np.longdouble), op, 1)
        assert ours is None or (ours == plain).all()
        # The MPI library's own result of an Exscan in place differs between libraries on rank 0.
        if name == "Exscan":
            continue
        ours, plain = both(comm, name, lambda mine: x if mine is None else MPI.IN_PLACE, lambda: x.copy(), op, 1)
        assert ours is None or (ours == plain).all()
    assert set(gathered) == ({name.lower()} if comm.channel.node is not None else set())


@pytest.mark.parametrize("name", COLLECTIVES)
def test_operands_are_combined_in_rank_order(comm: Intracomm, join: MPI.Op, name: str) -> None:
    x = np.full(3, comm.rank + 1.0)
    last = {"Scan": comm.rank + 1, "Exscan": comm.rank}.get(name, comm.size)
    wanted = float("".join(str(rank + 1) for rank in range(last)) or -1)
    for root in range(comm.size):
        result = None if name == "Reduce" and comm.rank != root else np.full(3, -1.0)
        getattr(comm, name)(x, result, join, *([root] if name == "Reduce" else []))
        assert result is None or (result == wanted).all()
    strided = np.full(6, -1.0)[::2]
    if name == "Allreduce":  # the MPI library does not take it
        with pytest.raises((ValueError, BufferError)):
            comm.Allreduce(x, strided, join)


def test_ranks_name_the_same_elements_in_other_ways(comm: Intracomm, gathered: list[str], join: MPI.Op) -> None:
    wanted = float("".join(str(rank + 1) for rank in range(comm.size)))
    ways: list[Callable[[np.ndarray], Any]] = [
        lambda x: x[2:4],
        lambda x: [x, (2, 2), MPI.DOUBLE],
        lambda x: [x[2:], 2, "d"],
        lambda x: [memoryview(x)[2:4], MPI.DOUBLE],
        lambda x: [x[2:4].view(">f8"), MPI.DOUBLE],
        lambda x: x[2:4].reshape(2, 1),
    ]
    for turn in range(len(ways)):
        x, y = np.full(6, comm.rank + 1.0), np.zeros(6)
        comm.Allreduce(ways[(comm.rank + turn) % len(ways)](x), ways[(2 * comm.rank + turn) % len(ways)](y), join)
        assert y.tolist() == [0, 0, wanted, wanted, 0, 0]


def test_long_vectors_are_the_librarys(comm: Intracomm, gathered: list[str], join: MPI.Op) -> None:
    x = np.ones(10_000, np.longdouble)
    y = np.zeros_like(x)
    comm.Allreduce(x, y)
    assert (y == comm.size).all()
    assert gathered == []
    request = comm.Iallreduce(x[:3], y[:3], MPI.MAX)
    request.Wait()
    assert (y[:3] == 1).all()
    assert gathered == []


def test_a_datatype_of_ones_own_is_the_librarys(comm: Intracomm, gathered: list[str]) -> None:
    seen = []

    def largest(left: memoryview, right: memoryview, datatype: MPI.Datatype) -> None:
        seen.append(datatype.Get_size())
        a, b = np.frombuffer(left, np.float64), np.frombuffer(right, np.float64)
        np.maximum(a, b, out=b)

    two = MPI.DOUBLE.Create_contiguous(2).Commit()
    op = MPI.Op.Create(largest, commute=True)
    x, y = np.array([comm.rank, -comm.rank], float), np.zeros(2)
    comm.Allreduce([x, 1, two], [y, 1, two], op)
    assert y.tolist() == [comm.size - 1, 0]
    assert set(seen) <= {16}
    assert gathered == []
    op.Free()
    two.Free()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (lambda comm, x, y: comm.Allreduce(x, y, MPI.MAX), lambda comm, x, y: comm.Allreduce(x, y, MPI.MIN)),
        (lambda comm, x, y: comm.Allreduce(x, y), lambda comm, x, y: comm.Allreduce(x[:1], y[:1])),
        (lambda comm, x, y: comm.Allreduce(x, y), lambda comm, x, y: comm.Scan(x, y)),
        (lambda comm, x, y: comm.Reduce(x, y, MPI.SUM, 0), lambda comm, x, y: comm.Reduce(x, y, MPI.SUM, 1)),
        (
            lambda comm, x, y: comm.Allreduce(x, y),
            lambda comm, x, y: comm.Allgather(x.view(np.uint8), np.zeros(x.nbytes * comm.size, np.uint8)),
        ),
        (lambda comm, x, y: comm.Allreduce(x, y), lambda comm, x, y: comm.Barrier()),
    ],
    ids=["operation", "count", "collective", "root", "allgather", "barrier"],
)
def test_another_call_on_one_rank_is_an_error_on_all(
    comm: Intracomm, right: Callable[..., None], wrong: Callable[..., None]
) -> None:
    if comm.channel.node is None:
        pytest.skip("needs shared memory")
    x = np.ones(4, np.longdouble)
    with pytest.raises(MismatchError):
        (wrong if comm.rank == comm.size - 1 else right)(comm, x, np.zeros(4, np.longdouble))
    with pytest.raises(MpicollError):
        comm.Barrier()


def test_an_operation_that_is_not_for_the_type_is_an_error_on_all_ranks(comm: Intracomm) -> None:
    x, y = np.ones(4), np.zeros(4)
    with pytest.raises(MPI.Exception):
        comm.Allreduce(x, y, MPI.MINLOC)
    comm.Barrier()


@pytest.mark.parametrize("times", [0, 2])
def test_buffers_that_overlap_are_refused(comm: Intracomm, join: MPI.Op, times: int) -> None:
    """The first call takes the general path, later ones are of compiled code."""
    x = np.full(6, comm.rank + 1.0)
    for _ in range(times):
        comm.Allreduce(x[:3], x[3:], join)
    with pytest.raises((ValueError, MpicollError)):
        comm.Allreduce(x[:3], x[1:4] if comm.rank == 0 else x[3:], join)


@pytest.mark.parametrize("dtype", [np.dtype([("a", "f8")]), np.dtype(object)], ids=["structure", "object"])
def test_elements_without_a_datatype_are_an_error(comm: Intracomm, join: MPI.Op, dtype: np.dtype[Any]) -> None:
    with pytest.raises(TypeError, match="cannot be communicated"):
        comm.Allreduce(np.zeros(2, dtype), np.zeros(2, dtype), join)


def test_without_shared_memory(monkeypatch: pytest.MonkeyPatch, join: MPI.Op) -> None:
    monkeypatch.setenv("MPICOLL_NODE", "off")
    plain = WORLD.Dup()
    comm = Intracomm(plain, timeout=TIMEOUT)
    y = np.zeros(1)
    comm.Allreduce(np.array([comm.rank + 1.0]), y, join)
    assert y == float("".join(str(rank + 1) for rank in range(comm.size)))
    plain.Free()
