"""Unusual arrays give the right result; wrong arguments are refused on every rank, by name, and do no harm."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm
from mpicoll.errors import RemoteError, UnknownAlgorithm
from mpicoll.messages import lowering
from mpicoll.schedules import ALGORITHMS

pytestmark = pytest.mark.mpi(min_size=2)

COUNTS = (3, 700, 5000)
"""In numbers of 8 bytes: far below, just below and above the length from which buffers are used in place."""


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(comm: Intracomm) -> Iterator[None]:
    """After every test the communicator still works."""
    yield
    data = np.full(5, comm.rank + 1.0)
    comm.Allreduce(MPI.IN_PLACE, data)
    assert (data == comm.size * (comm.size + 1) / 2).all()
    data = np.full(5000, comm.rank + 1.0)
    comm.Allreduce(MPI.IN_PLACE, data)
    assert (data == comm.size * (comm.size + 1) / 2).all()


def values(rank: int, count: int) -> np.ndarray:
    return ((np.arange(count) * (rank + 3) + rank) % 13).astype(np.float64)


def total(comm: Intracomm, count: int) -> np.ndarray:
    return sum((values(r, count) for r in range(comm.size)), np.zeros(count))


# Arrays that are not simply a run of elements -------------------------------------------------------------------------


def strided(flat: np.ndarray) -> np.ndarray:
    made = np.full(2 * flat.size, -7.0)[::2]
    made[:] = flat
    return made


def backwards(flat: np.ndarray) -> np.ndarray:
    return flat[::-1].copy()[::-1]


def transposed(flat: np.ndarray) -> np.ndarray:
    """Two dimensions, in memory the other way round than a contiguous array, and with gaps."""
    made = np.full((flat.size, 2), -7.0).T[:1]
    made[0] = flat
    return made


def swapped(flat: np.ndarray) -> np.ndarray:
    return flat.astype(">f8")


def misaligned(flat: np.ndarray) -> np.ndarray:
    made = np.zeros(flat.nbytes + 3, np.uint8)[3:].view(np.float64)
    made[:] = flat
    return made


def contiguous(flat: np.ndarray) -> np.ndarray:
    return flat.copy()


LAYOUTS: tuple[Callable[[np.ndarray], np.ndarray], ...] = (
    strided,
    backwards,
    transposed,
    swapped,
    misaligned,
    contiguous,
)


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_layouts(comm: Intracomm, source: Callable, target: Callable) -> None:
    size, rank = comm.size, comm.rank
    for count in COUNTS:
        for _ in range(2):
            given, result = source(values(rank, count)), target(np.full(count, -1.0))
            kept = None if result.base is None else result.base.copy()
            comm.Allreduce(given, result)
            assert (result.ravel() == total(comm, count)).all()
            assert (given.ravel() == values(rank, count)).all()
            if target in (strided, transposed):
                gaps = np.broadcast_to(kept == -7.0, kept.shape)
                assert (result.base[gaps] == -7).all()
            comm.Reduce(given, result, MPI.MAX, 1)
            wanted = np.max([values(r, count) for r in range(size)], axis=0) if rank == 1 else total(comm, count)
            assert (result.ravel() == wanted).all()
            comm.Allreduce(MPI.IN_PLACE, given)
            assert (given.ravel() == total(comm, count)).all()
            result[...] = rank
            comm.Bcast(result, size - 1)
            assert (result == size - 1).all()
            parts = target(np.full(size * count, -1.0))
            comm.Allgather(source(values(rank, count)), parts)
            assert (parts.ravel() == np.concatenate([values(r, count) for r in range(size)])).all()
            parts = target(np.full(size * count, -1.0))
            comm.Allgatherv(source(values(rank, count)), [parts, [count] * size] if target is contiguous else parts)
            assert (parts.ravel() == np.concatenate([values(r, count) for r in range(size)])).all()
            part = target(np.full(count, -1.0))
            comm.Reduce_scatter_block(source(values(rank, size * count)), part)
            assert (part.ravel() == total(comm, size * count)[rank * count : (rank + 1) * count]).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_one_rank_only(comm: Intracomm, layout: Callable) -> None:
    """What an array looks like is each rank's own business."""
    mine = layout if comm.rank == 1 else contiguous
    for count in COUNTS:
        for algorithm in ALGORITHMS["allreduce"]:
            result = mine(np.zeros(count))
            comm.Allreduce(mine(values(comm.rank, count)), result, algorithm=algorithm)
            assert (result.ravel() == total(comm, count)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_without_waiting(comm: Intracomm, layout: Callable) -> None:
    for count in COUNTS:
        given, result = layout(values(comm.rank, count)), layout(np.zeros(count))
        kept = comm.Allreduce_init(given, result)
        request = comm.Iallreduce(MPI.IN_PLACE, again := layout(values(comm.rank, count)))
        for turn in range(3):
            given[...] = (values(comm.rank, count) + turn).reshape(given.shape)
            kept.Start()
            kept.Wait()
            assert (result.ravel() == total(comm, count) + comm.size * turn).all()
        request.Wait()
        assert (again.ravel() == total(comm, count)).all()
        kept.Free()


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 4), (40, 60)])
def test_fortran_order_on_both_sides(comm: Intracomm, shape: tuple[int, ...]) -> None:
    flat = values(comm.rank, int(np.prod(shape)))
    wanted = total(comm, flat.size).reshape(shape)
    for make in (np.asfortranarray, lambda a: np.asfortranarray(a)[..., ::2], lambda a: a.T, lambda a: a.T[::2]):
        given = make(flat.reshape(shape).copy())
        for result in (np.zeros_like(given), np.zeros_like(given, order="K")):
            comm.Allreduce(given, result)
            assert (result == make(wanted)).all()
        comm.Allreduce(MPI.IN_PLACE, given)
        assert (given == make(wanted)).all()


def test_memory_order_is_kept_where_only_some_ranks_have_gaps(comm: Intracomm) -> None:
    for count in (4, 60):
        given = values(0, 6 * count).reshape(6, count)
        for order in "CF":
            whole = np.zeros((12, count), order=order)
            data = np.array(given, order=order) if comm.rank == 0 else whole[::2]
            comm.Bcast(data, 0)
            assert (data == given).all(), order
            data = np.array(given, order=order) if comm.rank % 2 else whole[::2]
            data[...] = given
            comm.Allreduce(MPI.IN_PLACE, data)
            assert (data == comm.size * given).all(), order


@pytest.mark.parametrize("rows", [4, 400])
@pytest.mark.parametrize("orders", ["CF", "FC", "FF"])
@pytest.mark.parametrize("name", ["Scatter", "Gather", "Allgather", "Alltoall", "Bcast", "Allreduce", "Scan"])
def test_arrays_go_as_they_lie_in_memory_as_in_mpi4py(comm: Intracomm, name: str, orders: str, rows: int) -> None:
    plain, size = MPI.Intracomm(comm).Dup(), comm.size
    is_short = (name in ("Gather", "Allgather"), name == "Scatter")
    shapes = [(rows, 3) if short else (rows, 3 * size) for short in is_short]
    for _ in range(3):  # compiled calls, too
        found = []
        for each in (comm, plain):
            send = np.array(values(comm.rank, shapes[0][0] * shapes[0][1]).reshape(shapes[0]), order=orders[0])
            recv = np.zeros(shapes[1], order=orders[1])
            if name == "Bcast":
                recv = np.array(send, order=orders[0] if comm.rank == 0 else orders[1])
            getattr(each, name)(*([recv] if name == "Bcast" else [send, recv]))
            found.append(recv)
        assert (found[0] == found[1]).all()
    plain.Free()


@pytest.mark.parametrize("kind", ["gaps", "byte-swapped"])
@pytest.mark.parametrize("name", ["Alltoall", "Allgather", "Gather", "Allreduce", "Reduce_scatter_block"])
def test_what_is_sent_does_not_depend_on_the_own_receive_array(comm: Intracomm, name: str, kind: str) -> None:
    """Rank 1 receives in Fortran's order; all ranks send copies of arrays in C's order."""
    size, moves = comm.size, name in ("Alltoall", "Allgather", "Gather")
    columns = 3 if name in ("Allgather", "Gather") else 3 * size
    received = {"Allgather": 3 * size, "Gather": 3 * size, "Reduce_scatter_block": 3}.get(name, columns)
    dtype, step = (">i4", 1) if kind == "byte-swapped" else ("=i4", 2)
    send = np.zeros((2, columns * step), dtype)[:, ::step]
    whole = np.arange(2 * columns) + 1000 * np.arange(size)[:, None]
    send[...] = whole[comm.rank].reshape(2, columns)
    order: Any = "F" if comm.rank == 1 else "C"
    for begin in ("", "I"):
        result = np.zeros((2, received), dtype if moves else "=i4", order=order)
        given = send if moves else np.array(send, "=i4", order="C") if kind == "byte-swapped" else send
        request = getattr(comm, begin + (name.lower() if begin else name))(given, result)
        if request is not None:
            request.Wait()
        own = slice(6 * comm.rank, 6 * comm.rank + 6)
        wanted = {
            "Alltoall": lambda own=own: whole[:, own],
            "Allreduce": lambda: whole.sum(0),
            "Reduce_scatter_block": lambda own=own: whole.sum(0)[own],
        }.get(name, lambda: whole)()
        is_copied = kind == "byte-swapped" and moves  # and has the order of what is sent
        if name != "Gather" or comm.rank == 0:
            assert (np.ravel(result, "C" if is_copied else "K") == np.ravel(wanted)).all()


@pytest.mark.parametrize("columns", [3, 300])
def test_counts_may_reach_behind_a_view_as_pointers_do_in_c(comm: Intracomm, columns: int) -> None:
    rank, size, kind = comm.rank, comm.size, MPI.DOUBLE
    for _ in range(3):
        whole = np.full((size + 3, columns), float(rank))
        comm.Bcast([whole[1], 2 * columns, kind], size - 1)
        assert (whole[1:3] == size - 1).all()
        assert (whole[[0, *range(3, size + 3)]] == rank).all()
        comm.Allgatherv(
            np.full(columns, 9.0 + rank), [whole[2], [columns] * size, [columns * place for place in range(size)], kind]
        )
        assert (whole[2 : 2 + size] == np.arange(9.0, 9 + size)[:, None]).all()
        total = np.zeros((4, columns))
        comm.Allreduce([whole[2:3], 2 * columns, kind], [total[1], 2 * columns])
        assert (total[1:3] == np.array([[9.0], [10.0]]) * size).all()
        assert not total[[0, 3]].any()


def test_counts_beyond_the_memory_of_a_view_are_refused(comm: Intracomm) -> None:
    whole = np.zeros((4, 3))
    with pytest.raises(ValueError, match="7 elements of float64 from 0 on do not fit"):
        comm.Bcast([whole[2], 7, MPI.DOUBLE])
    with pytest.raises(ValueError, match="do not fit"):
        comm.Allgatherv(np.zeros(9), [whole[2], [9] * comm.size, MPI.DOUBLE])


def test_elements_without_a_datatype_are_a_key_error_as_in_mpi4py(comm: Intracomm) -> None:
    for dtype in ("S5", "U2", "V4", "O"):
        with pytest.raises(KeyError, match=r"elements of dtype .* cannot be communicated"):
            comm.Bcast(np.zeros(3, dtype))


@pytest.mark.parametrize("count", [1, 50, 40_000])
def test_the_own_part_of_the_other_buffer_counts_as_in_place(comm: Intracomm, count: int) -> None:
    rank, size = comm.rank, comm.size
    root, counts = size - 1, [count] * size
    expected = np.repeat(np.arange(size, dtype=float), count)
    for number in range(3):  # compiled calls, too
        whole = np.zeros(count * size)
        part = whole[rank * count : (rank + 1) * count]
        part[:] = rank
        given = part if rank % 2 else part.copy()
        if number == 0:
            comm.Allgather(given, whole)
        else:
            comm.Allgatherv(given, [whole, counts])
        assert (whole == expected).all()
        whole[: rank * count] = whole[(rank + 1) * count :] = -1
        if number == 0:
            comm.Gather(part, whole if rank == root else None, root)
        else:
            comm.Gatherv(part, [whole, counts] if rank == root else None, root)
        assert rank != root or (whole == expected).all()
        if number == 0:
            comm.Scatter(whole if rank == root else None, part, root)
        else:
            comm.Scatterv([whole, counts] if rank == root else None, part, root)
        assert (part == rank).all()


def test_both_ends_in_one_array_without_overlap(comm: Intracomm) -> None:
    for count in COUNTS:
        whole = np.zeros((2, count))
        whole[0] = values(comm.rank, count)
        comm.Allreduce(whole[0], whole[1])
        assert (whole[1] == total(comm, count)).all()
        both = np.zeros((count, 2))  # interleaved: the memory overlaps, the elements do not
        both[:, 0] = values(comm.rank, count)
        comm.Allreduce(both[:, 0], both[:, 1])
        assert (both[:, 1] == total(comm, count)).all()
        assert (both[:, 0] == values(comm.rank, count)).all()


def test_subclasses_memory_maps_and_masks(comm: Intracomm) -> None:
    with tempfile.TemporaryFile() as file:
        mapped = np.memmap(file, np.float64, "w+", shape=(6,))
    mapped[:] = comm.rank
    result = np.zeros((2, 3)).view(np.recarray)
    comm.Allreduce(mapped, result)
    assert (result == sum(range(comm.size))).all()
    comm.Allreduce(MPI.IN_PLACE, mapped)
    assert (mapped == sum(range(comm.size))).all()


@pytest.mark.parametrize("is_strided", [False, True])
def test_masked_arrays_are_their_data(comm: Intracomm, is_strided: bool) -> None:
    mask = [0, 1, 0, 0, 1, 0][:: 2 if is_strided else 1]
    given = np.ma.masked_array(np.arange(6.0)[:: 2 if is_strided else 1], mask)
    result = np.ma.masked_array(np.zeros(given.shape), mask, hard_mask=True)
    comm.Allreduce(given, result)
    assert (result.data == comm.size * given.data).all()
    assert result.mask.tolist() == given.mask.tolist()
    comm.Bcast(given)
    blocks = np.ma.masked_array(np.zeros((comm.size, given.size)), False)
    comm.Allgather(given, blocks)
    assert (blocks.data == given.data).all()


# What is refused ------------------------------------------------------------------------------------------------------


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


WRONG_TARGETS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "read_only": (lambda: read_only(np.zeros(4)), BufferError, "read-only"),
    "read_only_strided": (lambda: read_only(np.zeros(8)[::2]), ValueError, "read-only"),
    "from_bytes": (lambda: np.frombuffer(bytes(32)), ValueError, "read-only"),
    "bytes": (lambda: [bytes(32), MPI.DOUBLE], BufferError, "read-only"),
    "read_only_with_type": (lambda: [read_only(np.zeros(4)), MPI.DOUBLE], ValueError, "read-only"),
    "broadcast_view": (lambda: np.lib.stride_tricks.as_strided(np.zeros(1), (4,), (0,)), ValueError, "broadcast view"),
    "list": (lambda: [1.0, 2.0, 3.0, 4.0], TypeError, "4.0 is not a datatype"),
    "nothing": (lambda: None, TypeError, "None is not a buffer"),
    "number": (lambda: 4.0, TypeError, "4.0 is not a buffer"),
    "in_place": (lambda: MPI.IN_PLACE, TypeError, "MPI.IN_PLACE is not possible here"),
    "object": (lambda: np.array([None] * 4), TypeError, "dtype object"),
    "text": (lambda: np.array(["ab"] * 4), TypeError, "dtype <U2"),
    "byte_text": (lambda: np.array([b"abc"] * 4), TypeError, "dtype |S3"),
    "dates": (lambda: np.zeros(4, "datetime64[s]"), TypeError, "dtype datetime64"),
    "spans": (lambda: np.zeros(4, "timedelta64[s]"), TypeError, "dtype timedelta64"),
    "structured": (lambda: np.zeros(4, "f4,i4"), TypeError, "dtype "),
    "void": (lambda: np.zeros(4, "V8"), TypeError, "dtype |V8"),
    "objects_with_type": (lambda: [np.array([None] * 4), MPI.DOUBLE], TypeError, "dtype object"),
    "dictionary": (dict, TypeError, "dict is not a buffer"),
    "null_type": (lambda: [np.zeros(4), MPI.DATATYPE_NULL], ValueError, "DATATYPE_NULL"),
    "unknown_code": (lambda: [np.zeros(4), "nonsense"], TypeError, "'nonsense' is not a type code"),
    "not_a_type": (lambda: [np.zeros(4), 4, float], TypeError, "is not a datatype"),
    "one_item": (lambda: [np.zeros(4)], ValueError, "2 to 4 items, not 1"),
    "five_items": (lambda: [np.zeros(4), 4, 0, MPI.DOUBLE, 1], ValueError, "2 to 4 items, not 5"),
    "negative_count": (lambda: [np.zeros(4), -4, MPI.DOUBLE], ValueError, "count -4 is negative"),
    "fractional_count": (lambda: [np.zeros(4), 4.0, MPI.DOUBLE], TypeError, "count 4.0 is not a whole number"),
    "large_count": (lambda: [np.zeros(4), 500, MPI.DOUBLE], ValueError, "do not fit in 32 bytes"),
    "negative_displacement": (lambda: [np.zeros(4), (4, -1), MPI.DOUBLE], ValueError, "displacement -1 is negative"),
    "large_displacement": (lambda: [np.zeros(4), (4, 1), MPI.DOUBLE], ValueError, "do not fit in 32 bytes"),
    "displacement_outside": (lambda: [np.zeros(4), (None, 9), MPI.DOUBLE], ValueError, "do not fit in 32 bytes"),
    "odd_bytes": (lambda: [bytearray(33), MPI.DOUBLE], ValueError, "33 bytes are no whole number"),
    "strided_with_type": (lambda: [np.zeros(8)[::2], MPI.DOUBLE], TypeError, "must be contiguous"),
    "swapped_with_count": (lambda: [np.zeros(4, ">f8"), 4], TypeError, "byte-swapped"),
}
READ_TOO = [
    name
    for name, (_, _, text) in WRONG_TARGETS.items()
    if text not in ("read-only", "broadcast view")
    and name not in ("nothing", "in_place")  # as sendbuf None is IN_PLACE
]


@pytest.mark.parametrize("name", WRONG_TARGETS)
def test_wrong_targets(comm: Intracomm, name: str) -> None:
    make, error, text = WRONG_TARGETS[name]
    good = np.zeros(4)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: comm.Allreduce(good, make()),
        lambda: comm.Allreduce(MPI.IN_PLACE, make()),
        lambda: comm.Allgather(np.zeros(0), make()),
        lambda: comm.Reduce_scatter_block(np.zeros(4 * comm.size), make()),
        lambda: comm.Reduce_scatter(np.zeros(4 * comm.size), make(), [4] * comm.size),
        lambda: comm.Iallreduce(good, make()),
        lambda: comm.Allreduce_init(good, make()),
    )
    for call in calls:
        with pytest.raises(error, match="recvbuf") as caught:
            call()
        assert text in str(caught.value)
    if not name.endswith("count"):
        with pytest.raises(error, match="recvbuf"):
            comm.Allgatherv(np.zeros(0), make())


@pytest.mark.parametrize("name", READ_TOO)
def test_wrong_sources(comm: Intracomm, name: str) -> None:
    make, error, text = WRONG_TARGETS[name]
    calls: tuple[Callable[[], Any], ...] = (
        lambda: comm.Allreduce(make(), np.zeros(4)),
        lambda: comm.Reduce(make(), np.zeros(4)),
        lambda: comm.Allgather(make(), np.zeros(4 * comm.size)),
        lambda: comm.Allgatherv(make(), np.zeros(4 * comm.size)),
        lambda: comm.Reduce_scatter_block(make(), np.zeros(4)),
        lambda: comm.Iallgather(make(), np.zeros(4 * comm.size)),
    )
    for call in calls:
        with pytest.raises(error, match="sendbuf") as caught:
            call()
        assert text in str(caught.value)
    with pytest.raises(error, match="buf"):
        comm.Bcast(make())


def test_no_data_to_broadcast(comm: Intracomm) -> None:
    with pytest.raises(TypeError, match="buf: None is not a buffer"):
        comm.Bcast(None)


CALLS: dict[str, tuple[Callable[[Intracomm], Any], type[Exception], str]] = {
    "counts": (lambda c: c.Allreduce(np.zeros(3), np.zeros(4)), ValueError, "sendbuf has 3 elements, but recvbuf 4"),
    "types": (
        lambda c: c.Allreduce(np.zeros(4), np.zeros(4, "f4")),
        ValueError,
        "sendbuf has elements of float64, but recvbuf of float32",
    ),
    "types_of_equal_size": (
        lambda c: c.Allreduce(np.zeros(4), np.zeros(4, "i8")),
        ValueError,
        "sendbuf has elements of float64, but recvbuf of int64",
    ),
    "types_of_allgather": (
        lambda c: c.Allgather(np.zeros(4), np.zeros(4 * c.size, "f4")),
        ValueError,
        "sendbuf has elements of float64, but recvbuf of float32",
    ),
    "overlap": (lambda c: (lambda a: c.Allreduce(a[1:], a[:-1]))(np.zeros(9)), ValueError, "overlap"),
    "long_overlap": (lambda c: (lambda a: c.Allreduce(a[1:], a[:-1]))(np.zeros(9000)), ValueError, "overlap"),
    "overlap_in_allgather": (
        lambda c: (lambda a: c.Allgather(a[1:3], a))(np.zeros(2 * c.size)),
        ValueError,
        "overlap",
    ),
    "overlap_in_reduce_scatter": (
        lambda c: (lambda a: c.Reduce_scatter_block(a, a[:1]))(np.zeros(c.size)),
        ValueError,
        "overlap",
    ),
    "allgather_counts": (
        lambda c: c.Allgather(np.zeros(3), np.zeros(4 * c.size)),
        ValueError,
        "sendbuf has 3 elements, but recvbuf takes 4 from this rank",
    ),
    "allgather_indivisible": (
        lambda c: c.Allgather(np.zeros(3), np.zeros(3 * c.size + 1)),
        ValueError,
        "recvbuf: .* cannot be divided among",
    ),
    "allgatherv_few_counts": (
        lambda c: c.Allgatherv(np.zeros(1), [np.zeros(c.size), [1] * (c.size - 1)]),
        ValueError,
        "counts were given for",
    ),
    "allgatherv_many_displs": (
        lambda c: c.Allgatherv(np.zeros(1), [np.zeros(c.size), ([1] * c.size, [0] * (c.size + 1))]),
        ValueError,
        "displs were given for",
    ),
    "allgatherv_negative_count": (
        lambda c: c.Allgatherv(np.zeros(1), [np.zeros(c.size), [1, -1] + [1] * (c.size - 2)]),
        ValueError,
        "recvbuf: counts -1 is negative",
    ),
    "allgatherv_fractions": (
        lambda c: c.Allgatherv(np.zeros(1), [np.zeros(c.size), [1.0] * c.size]),
        TypeError,
        "recvbuf: counts .* not whole numbers",
    ),
    "allgatherv_beyond": (
        lambda c: c.Allgatherv(np.zeros(1), [np.zeros(c.size), ([1] * c.size, range(1, c.size + 1))]),
        ValueError,
        "recvbuf: the blocks end at element",
    ),
    "allgatherv_overlap": (
        lambda c: c.Allgatherv(np.zeros(2), [np.zeros(2 * c.size), ([2] * c.size, range(c.size))]),
        ValueError,
        "recvbuf: blocks overlap at element 1",
    ),
    "scatter_indivisible": (
        lambda c: c.Reduce_scatter_block(np.zeros(3 * c.size + 1), np.zeros(3)),
        ValueError,
        "sendbuf: .* cannot be divided among",
    ),
    "scatter_count": (
        lambda c: c.Reduce_scatter_block(np.zeros(3 * c.size), np.zeros(4)),
        ValueError,
        "recvbuf has 4 elements, but this rank's count is 3",
    ),
    "scatter_total": (
        lambda c: c.Reduce_scatter(np.zeros(3 * c.size), np.zeros(4), [4] * c.size),
        ValueError,
        "sendbuf has .* elements, but the counts",
    ),
    "scatter_own": (
        lambda c: c.Reduce_scatter(np.zeros(4 * c.size), np.zeros(3), [4] * c.size),
        ValueError,
        "recvbuf has 3 elements, but this rank's count is 4",
    ),
    "scatter_few_counts": (
        lambda c: c.Reduce_scatter(np.zeros(4 * c.size), np.zeros(4), [4]),
        ValueError,
        "recvcounts: 1 recvcounts were given for",
    ),
    "scatter_counts_of_nothing": (
        lambda c: c.Reduce_scatter(MPI.IN_PLACE, np.zeros(4 * c.size)),
        ValueError,
        "recvcounts: None is not possible with MPI.IN_PLACE",
    ),
    "scatter_number": (
        lambda c: c.Reduce_scatter(np.zeros(4 * c.size), np.zeros(4), 4),
        TypeError,
        "recvcounts 4 are not whole numbers",
    ),
    "root_negative": (lambda c: c.Bcast(np.zeros(3), -1), ValueError, "root: -1 is not in 0"),
    "root_large": (lambda c: c.Bcast(np.zeros(3), c.size), ValueError, "root: . is not in 0"),
    "root_fraction": (lambda c: c.Bcast(np.zeros(3), 0.5), TypeError, "root: 0.5 is not a rank"),
    "root_text": (lambda c: c.Reduce(np.zeros(3), np.zeros(3), root="0"), TypeError, "root: '0' is not a rank"),
    "root_array": (lambda c: c.Bcast(np.zeros(3), np.array([0])), TypeError, "root: .* is not a rank"),
    "root_none": (lambda c: c.Bcast(np.zeros(3), None), TypeError, "root: None is not a rank"),
    "op_text": (lambda c: c.Allreduce(np.zeros(3), np.zeros(3), "SUM"), TypeError, "op: 'SUM' is neither"),
    "op_none": (lambda c: c.Allreduce(np.zeros(3), np.zeros(3), None), TypeError, "op: None is neither"),
    "op_function": (lambda c: c.Reduce(np.zeros(3), np.zeros(3), max), TypeError, "op: .*max.* is neither"),
    "algorithm": (
        lambda c: c.Allreduce(np.zeros(3), np.zeros(3), algorithm="rign"),
        UnknownAlgorithm,
        "algorithm: 'rign' is not one for allreduce; there are auto, .*ring.*native",
    ),
    "algorithm_of_another": (
        lambda c: c.Barrier(algorithm="ring"),
        UnknownAlgorithm,
        "algorithm: 'ring' is not one for barrier",
    ),
    "algorithm_number": (lambda c: c.Bcast(np.zeros(3), algorithm=3), UnknownAlgorithm, "algorithm: 3 is not one"),
    "algorithm_list": (
        lambda c: c.Bcast(np.zeros(3), algorithm=["tree"]),
        (TypeError, ValueError),
        "algorithm: \\['tree'\\]",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_calls(comm: Intracomm, name: str) -> None:
    call, error, text = CALLS[name]
    for _ in range(2):
        with pytest.raises(error, match=text):
            call(comm)


class Index:
    """A whole number that is no int."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


@pytest.mark.parametrize("kind", [bool, np.int64, np.uint8, np.bool_, np.array, Index])
def test_whole_numbers_of_any_kind(comm: Intracomm, kind: Callable[[int], Any]) -> None:
    """What mpi4py takes for a root, a count or a displacement, and whatever else can be an index."""
    root, size = kind(1), comm.size
    for count in COUNTS:
        for make in (lambda x: comm.Bcast(x, root), lambda x: comm.Ibcast(x, root).Wait()):
            data = values(comm.rank, count)
            make(data)
            assert (data == values(1, count)).all()
        result = np.full(count, -1.0)
        comm.Reduce(values(comm.rank, count), result, MPI.SUM, root)
        assert (result == (total(comm, count) if comm.rank == 1 else -1)).all()
    if kind is np.bool_:
        return  # NumPy's bool is a rank to mpi4py, but not a count
    one, result = np.array([comm.rank + 1.0]), np.zeros(size)
    comm.Allgatherv([one, root, MPI.DOUBLE], [result, root, MPI.DOUBLE])
    assert (result == np.arange(size) + 1).all()
    comm.Allgatherv([one, root], [result, ([root] * size, root)])
    assert (result == np.arange(size) + 1).all()
    comm.Reduce_scatter(np.ones(size), one, [root] * size)
    assert one[0] == size


def test_none_is_in_place(comm: Intracomm) -> None:
    """As to mpi4py, wherever IN_PLACE is allowed."""
    size, rank = comm.size, comm.rank
    for count in COUNTS:
        counts = [count] * size
        everything = np.concatenate([values(r, count) for r in range(size)])
        calls: dict[str, tuple[Any, ...]] = {
            "Allreduce": (MPI.SUM,),
            "Reduce_scatter_block": (MPI.SUM,),
            "Reduce_scatter": (counts, MPI.SUM),
            "Allgather": (),
            "Allgatherv": (),
        }
        for name, extra in calls.items():
            gathers = name.startswith("Allgather")
            forms = [f"{name}", f"I{name.lower()}", f"{name}_init"][: 1 if name == "Allgatherv" else 3]
            for form in forms:
                data = np.tile(values(rank, count), size)
                request = getattr(comm, form)(None, data, *extra)
                if form.endswith("_init"):
                    request.Start()
                if request is not None:
                    request.Wait()
                if gathers:
                    assert (data == everything).all(), form
                elif name == "Allreduce":
                    assert (data == np.tile(total(comm, count), size)).all(), form
                else:
                    assert (data[:count] == total(comm, count)).all(), form
        for form in ("Reduce", "Reduce_init"):
            data = values(rank, count)
            request = getattr(comm, form)(*((None, data) if rank == 1 else (data, None)), MPI.SUM, 1)
            if request is not None:
                request.Start()
                request.Wait()
            assert (data == (total(comm, count) if rank == 1 else values(rank, count))).all(), form


def test_in_place_belongs_to_the_root(comm: Intracomm) -> None:
    """Elsewhere it is refused; the root then learns that the call cannot be made."""
    plain = MPI.COMM_WORLD.Dup()
    own = Intracomm(plain, timeout=10)
    refused: tuple[type[Exception], str] = (ValueError, "sendbuf: only the root may pass MPI.IN_PLACE")
    if comm.rank == 0:
        refused = (RemoteError, "refused its arguments: ValueError: sendbuf: only the root")
    with pytest.raises(refused[0], match=refused[1]):
        own.Reduce(MPI.IN_PLACE, np.zeros(3), root=0)
    plain.Free()


def test_operations_that_mpi_does_not_have(comm: Intracomm) -> None:
    """They reach the MPI library, whose error comes back on every rank."""
    for data, op in ((np.zeros(3, complex), MPI.MAX), (np.zeros(3), MPI.BAND), (np.zeros(3), MPI.OP_NULL)):
        with pytest.raises(MPI.Exception):
            comm.Allreduce(MPI.IN_PLACE, data, op)


def test_a_refusal_does_not_disturb_a_call_that_others_are_still_in(comm: Intracomm) -> None:
    """The first ranks leave the broadcast, and refuse the next call, while others still wait in the broadcast."""
    for turn in range(2):
        data = np.full(3, comm.rank)
        if comm.rank == comm.size // 2 and turn:
            time.sleep(0.7)  # in a tree this rank hands on to others
        comm.Bcast(data, 0)
        assert (data == 0).all()
    with pytest.raises(ValueError, match="root: -1"):
        comm.Bcast(data, -1)


# The constructor ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, 3, "MPI.COMM_WORLD", MPI.Intracomm])
def test_only_communicators(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"comm: .* is not an intracommunicator"):
        Intracomm(wrong)


def test_null_and_intercommunicators(comm: Intracomm) -> None:
    with pytest.raises(ValueError, match=r"comm: it is MPI.COMM_NULL"):
        Intracomm(MPI.Intracomm(MPI.COMM_NULL))
    with pytest.raises((TypeError, ValueError), match="comm: "):
        Intracomm(MPI.COMM_NULL)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'comm'"):
        Intracomm()
    half = MPI.COMM_WORLD.Split(comm.rank % 2)
    bridge = half.Create_intercomm(0, MPI.COMM_WORLD, 1 - comm.rank % 2)
    with pytest.raises(TypeError, match=r"comm: .* is not an intracommunicator"):
        Intracomm(bridge)
    bridge.Free()
    half.Free()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "5", None])
def test_timeouts(comm: Intracomm, timeout: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="timeout: "):
        Intracomm(comm, timeout=timeout)


@pytest.mark.parametrize("algorithm", ["", "rign", None, 3, ["ring"]])
def test_default_algorithms(comm: Intracomm, algorithm: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="algorithm: "):
        Intracomm(comm, algorithm=algorithm)


def test_settings_are_kept(comm: Intracomm) -> None:
    other = Intracomm(comm, algorithm="tree", timeout=7)
    assert (other.algorithm, other.timeout) == ("tree", 7.0)
    assert (comm.algorithm, Intracomm(comm, timeout=float("inf")).timeout) == ("auto", float("inf"))
    assert isinstance(other, MPI.Intracomm)
    assert other == comm


# Messages that MPI could not count ------------------------------------------------------------------------------------


def test_messages_above_the_limit_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "MAX_MESSAGE_NBYTES", 64)
    plain = MPI.COMM_WORLD.Dup()
    comm = Intracomm(plain, timeout=20)
    size, rank = comm.size, comm.rank
    for count in (5, 8, 9, 131, 1025):
        for algorithm in ALGORITHMS["allreduce"]:
            result = np.zeros(count)
            comm.Allreduce(values(rank, count), result, algorithm=algorithm)
            assert (result == total(comm, count)).all(), (algorithm, count)
        for algorithm in ALGORITHMS["bcast"]:
            data = values(rank, count)
            comm.Bcast(data, 1, algorithm=algorithm)
            assert (data == values(1, count)).all(), (algorithm, count)
        for algorithm in ALGORITHMS["allgather"]:
            parts = np.zeros((size, count))
            comm.Allgather(values(rank, count), parts, algorithm=algorithm)
            assert (parts == [values(r, count) for r in range(size)]).all(), (algorithm, count)
        request = comm.Iallreduce(values(rank, count), result)
        request.Wait()
        assert (result == total(comm, count)).all(), count
    wide = np.full(11, rank, np.complex128)
    comm.Allreduce(MPI.IN_PLACE, wide)
    assert (wide == sum(range(size))).all()
    plain.Free()


def test_a_limit_below_one_element(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "MAX_MESSAGE_NBYTES", 3)
    plain = MPI.COMM_WORLD.Dup()
    comm = Intracomm(plain, timeout=20)
    result = np.zeros(20)
    comm.Allreduce(values(comm.rank, 20), result)
    assert (result == total(comm, 20)).all()
    plain.Free()
