"""Every form that mpi4py accepts gives what plain mpi4py gives on the same data."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll import Intracomm
from mpicoll.schedules import ALGORITHMS

pytestmark = pytest.mark.mpi(min_size=2)

Form = Callable[[np.ndarray], tuple[Any, Any]]
"""Makes, from a flat array, a specification and the object whose memory it stands for."""


def whole(wrap: Callable[[np.ndarray], Any]) -> Form:
    """A form around the array itself."""
    return lambda data: (wrap(data), data)


def same(make: Callable[[np.ndarray], Any]) -> Form:
    """A form that is an object of its own."""

    def form(data: np.ndarray) -> tuple[Any, Any]:
        made = make(data)
        return made, made

    return form


def fortran(data: np.ndarray) -> tuple[Any, Any]:
    made = np.asfortranarray(data.reshape(2, -1))
    return made, made.T  # whose bytes are those in memory


def typed_bytearray(data: np.ndarray) -> tuple[Any, Any]:
    made = bytearray(data.tobytes())
    return [made, MPI.DOUBLE], made


FORMS: dict[str, Form] = {
    "array": whole(lambda a: a),
    "type": whole(lambda a: [a, MPI.DOUBLE]),
    "code": whole(lambda a: [a, "d"]),
    "tuple": whole(lambda a: (a, MPI.DOUBLE)),
    "none_type": whole(lambda a: [a, None, MPI.DOUBLE]),
    "two_dimensions": whole(lambda a: a.reshape(2, -1)),
    "three_dimensions": whole(lambda a: a.reshape(2, 1, -1)),
    "fortran": fortran,
    "slice_of_larger": same(lambda a: np.concatenate([a, a, a])[a.size : 2 * a.size]),
    "as_bytes": whole(lambda a: [a.view(np.uint8), MPI.DOUBLE]),
    "memoryview": whole(memoryview),
    "array_module": same(lambda a: array.array("d", a)),
    "bytearray": same(lambda a: bytearray(a.tobytes())),
    "typed_bytearray": typed_bytearray,
    "mpi_buffer": whole(lambda a: [MPI.buffer.frombuffer(a), MPI.DOUBLE]),
    "subclass": same(lambda a: a.copy().view(np.recarray)),
    "byte_order_kept": whole(lambda a: [a.view("<f8"), "d"]),
}
COUNTED: dict[str, Callable[[np.ndarray, int], Any]] = {
    "count": lambda a, n: [a, n],
    "count_type": lambda a, n: [a, n, MPI.DOUBLE],
    "count_code": lambda a, n: [a, n, "d"],
    "numpy_count": lambda a, n: [a, np.int32(n), MPI.DOUBLE],
    "pair": lambda a, n: [a, (n, 2)],
    "pair_type": lambda a, n: [a, (n, 2), MPI.DOUBLE],
    "pair_none": lambda a, n: [a, (n, None), MPI.DOUBLE],
    "list_pair": lambda a, n: [a, [n, 2], MPI.DOUBLE],
    "four_items": lambda a, n: [a, n, 2, MPI.DOUBLE],
    "pair_bytes": lambda a, n: [a.view(np.uint8), (n, 2), MPI.DOUBLE],
}
"""Specifications that say how many; in a buffer of one block a rank, how many in each block."""
REDUCING = [name for name in FORMS if name != "bytearray"]  # MPI has no sum of bytes


def numbers(rank: int, count: int, dtype: Any = np.float64) -> np.ndarray:
    return ((np.arange(count) * (rank + 3) + rank) % 13).astype(dtype)


def memory(owner: Any) -> bytes:
    return np.asarray(owner).tobytes()


@pytest.fixture
def plain(comm: Intracomm):
    """A communicator of mpi4py's own."""
    made = MPI.COMM_WORLD.Dup()
    yield made
    made.Free()


def both(comm: Intracomm, plain: MPI.Intracomm, name: str, make: Callable[[], tuple], **settings: Any) -> bytes:
    """Make the same call through both and compare what they left in memory; `make` returns arguments, then owner."""
    left = []
    for face, keywords in ((comm, settings), (plain, {})):
        *arguments, owner = make()
        getattr(face, name)(*arguments, **keywords)
        left.append(memory(owner))
    assert left[0] == left[1], (name, settings)
    return left[0]


# Forms of the arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", REDUCING)
def test_reducing_calls_take_every_form(comm: Intracomm, plain: MPI.Intracomm, form: str) -> None:
    make, size, rank = FORMS[form], comm.size, comm.rank
    for other in (form, "array", "type"):
        for first, second in ((make, FORMS[other]), (FORMS[other], make)):
            if form == "fortran" and first is not second:
                continue  # flat memory in another order: refused on purpose where both have two dimensions

            def call(count: int, extra: tuple = (), first: Form = first, second: Form = second) -> tuple:
                recv, owner = second(np.zeros(count))
                return first(numbers(rank, 4 * size))[0], recv, *extra, owner

            both(comm, plain, "Allreduce", lambda: call(4 * size))
            both(comm, plain, "Allreduce", lambda: call(4 * size, (MPI.MAX,)))
            both(comm, plain, "Reduce", lambda: call(4 * size, (MPI.SUM, size - 1)))
            both(comm, plain, "Reduce_scatter_block", lambda: call(4))
            both(comm, plain, "Reduce_scatter", lambda: call(4))
            both(comm, plain, "Reduce_scatter", lambda: call(4, ([4] * size,)))


@pytest.mark.parametrize("form", FORMS)
def test_moving_calls_take_every_form(comm: Intracomm, plain: MPI.Intracomm, form: str) -> None:
    make, size, rank = FORMS[form], comm.size, comm.rank

    def gather() -> tuple:
        recv, owner = make(np.zeros(4 * size))
        return make(numbers(rank, 4))[0], recv, owner

    def spread() -> tuple:
        data, owner = make(numbers(rank, 12))
        return data, size - 1, owner

    both(comm, plain, "Allgather", gather)
    both(comm, plain, "Allgatherv", gather)
    result = both(comm, plain, "Bcast", spread)
    assert result == memory(make(numbers(size - 1, 12))[1])


@pytest.mark.parametrize("form", COUNTED)
@pytest.mark.parametrize("count", [0, 3, 2000])
def test_counts_and_displacements(comm: Intracomm, plain: MPI.Intracomm, form: str, count: int) -> None:
    specify, size, rank = COUNTED[form], comm.size, comm.rank

    def exchange(given: int, wanted: int, *extra: Any) -> Callable[[], tuple]:
        """Both buffers specified, `given` and `wanted` blocks long."""

        def make() -> tuple:
            source, result = numbers(rank, given * count + 5), np.full(wanted * count + 5, -1.0)
            return specify(source, count), specify(result, count), *extra, result

        return make

    def reduce_scatter() -> tuple:
        source, result = numbers(rank, size * count + 5), np.full(count + 5, -1.0)
        return specify(source, count * size), specify(result, count), result

    def in_place() -> tuple:
        data = numbers(rank, size * count + 5)
        return MPI.IN_PLACE, specify(data, count), data

    def spread() -> tuple:
        data = numbers(rank, count + 5)
        return specify(data, count), 1, data

    both(comm, plain, "Allreduce", exchange(1, 1))
    both(comm, plain, "Reduce", exchange(1, 1, MPI.SUM, 1))
    both(comm, plain, "Bcast", spread)
    both(comm, plain, "Allgather", exchange(1, size))
    both(comm, plain, "Reduce_scatter_block", exchange(size, 1))
    both(comm, plain, "Reduce_scatter", reduce_scatter)
    both(comm, plain, "Allreduce", in_place)
    both(comm, plain, "Allgather", in_place)
    own = both(comm, plain, "Reduce_scatter_block", in_place)
    assert len(own) == 8 * (size * count + 5)


def test_one_number_for_all_counts_of_allgatherv(comm: Intracomm, plain: MPI.Intracomm) -> None:
    size, rank = comm.size, comm.rank
    specifications: list[Callable[[np.ndarray], Any]] = [
        lambda a: [a, 4, MPI.DOUBLE],
        lambda a: [a, 4],
        lambda a: [a, (4, 5)],
        lambda a: [a, 4, 5, MPI.DOUBLE],
        lambda a: [a[: 4 * size], None, [4 * r for r in reversed(range(size))], MPI.DOUBLE],
    ]
    for specify in specifications:

        def make(specify: Callable[[np.ndarray], Any] = specify) -> tuple:
            result = np.full(5 * size, -1.0)
            return numbers(rank, 4), specify(result), result

        both(comm, plain, "Allgatherv", make)

    def uneven() -> tuple:
        result = np.full(3 * size + 1, -1.0)
        return numbers(rank, 3 + (rank == 0)), result, result

    both(comm, plain, "Allgatherv", uneven)


@pytest.mark.parametrize("form", REDUCING)
def test_in_place_with_every_form(comm: Intracomm, plain: MPI.Intracomm, form: str) -> None:
    make, size, rank = FORMS[form], comm.size, comm.rank

    def everywhere(*extra: Any) -> tuple:
        data, owner = make(numbers(rank, 6 * size))
        return MPI.IN_PLACE, data, *extra, owner

    def at_root() -> tuple:
        data, owner = make(numbers(rank, 6))
        return (MPI.IN_PLACE, data, MPI.SUM, 1, owner) if rank == 1 else (data, None, MPI.SUM, 1, owner)

    both(comm, plain, "Allreduce", everywhere)
    both(comm, plain, "Allgather", everywhere)
    both(comm, plain, "Allgatherv", everywhere)
    both(comm, plain, "Reduce", at_root)


def test_in_place_reduce_scatter_leaves_the_own_part_at_the_beginning(comm: Intracomm) -> None:
    size, rank = comm.size, comm.rank
    for counts in ([3] * size, [r % 3 for r in range(size)], [0] * (size - 1) + [5]):
        total = sum(numbers(r, sum(counts)) for r in range(size))
        begin = sum(counts[:rank])
        data = numbers(rank, sum(counts))
        comm.Reduce_scatter(MPI.IN_PLACE, data, counts)
        assert (data[: counts[rank]] == total[begin : begin + counts[rank]]).all()
    data = numbers(rank, 3 * size)
    comm.Reduce_scatter_block(MPI.IN_PLACE, data)
    assert (data[:3] == sum(numbers(r, 3 * size) for r in range(size))[3 * rank : 3 * rank + 3]).all()


def test_the_same_array_twice_is_in_place(comm: Intracomm) -> None:
    for count in (5, 5000):
        data = numbers(comm.rank, count)
        comm.Allreduce(data, data)
        assert (data == sum(numbers(r, count) for r in range(comm.size))).all()


def test_read_only_sources(comm: Intracomm, plain: MPI.Intracomm) -> None:
    size, rank = comm.size, comm.rank
    text = bytes([rank + 1, 2, 3])

    def gather() -> tuple:
        result = bytearray(3 * size)
        return text, result, result

    def spread() -> tuple:
        data: Any = b"from the root" if rank == 0 else bytearray(13)
        return data, 0, data

    def locked(sendbuf: Any) -> Callable[[], tuple]:
        def make() -> tuple:
            result = np.zeros(4)
            return sendbuf, result, result

        return make

    both(comm, plain, "Allgather", gather)
    assert both(comm, plain, "Bcast", spread) == np.asarray(bytearray(b"from the root")).tobytes()
    frozen = numbers(rank, 4)
    frozen.flags.writeable = False
    both(comm, plain, "Allreduce", locked(frozen))
    both(comm, plain, "Allreduce", locked([numbers(rank, 4).tobytes(), MPI.DOUBLE]))
    both(comm, plain, "Allreduce", locked(np.broadcast_to(np.float64(rank), 4).copy()))


def test_scalars_and_arrays_without_dimensions(comm: Intracomm, plain: MPI.Intracomm) -> None:
    for scalar in (np.float64(comm.rank + 0.5), np.int32(comm.rank), np.complex128(1j), np.array(2.5)):

        def make(scalar: Any = scalar) -> tuple:
            result = np.zeros((), scalar.dtype)
            return scalar, result, result

        both(comm, plain, "Allreduce", make)

    def spread() -> tuple:
        data = np.array(float(comm.rank))
        return data, 1, data

    both(comm, plain, "Bcast", spread)
    parts = np.zeros(comm.size)
    comm.Allgather(np.float64(comm.rank), parts)
    assert (parts == np.arange(comm.size)).all()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_nothing_at_all(comm: Intracomm, shape: tuple[int, ...]) -> None:
    given, result = np.empty(shape), np.empty(shape)
    comm.Allreduce(given, result)
    comm.Reduce(given, result, root=1)
    comm.Bcast(given, 1)
    comm.Allgather(given, np.empty((comm.size, *shape)))
    comm.Reduce_scatter_block(np.empty((comm.size, *shape)), result)
    comm.Reduce_scatter(given, result, [0] * comm.size)


def test_no_buffer_with_a_count_of_nothing(comm: Intracomm) -> None:
    """As mpi4py has it."""
    nothing, result = [None, 0, MPI.DOUBLE], np.zeros(1)
    comm.Allreduce(nothing, nothing)
    comm.Bcast(nothing, 0)
    comm.Bcast([None, MPI.DOUBLE], 0)
    own = [np.ones(1), 1, MPI.DOUBLE] if comm.rank == 0 else nothing
    comm.Allgatherv(own, [result, [1] + [0] * (comm.size - 1)])
    assert result == 1


@pytest.mark.parametrize("root", [0, 1, np.int64(1)])
def test_only_the_root_looks_at_recvbuf(comm: Intracomm, root: int) -> None:
    at_root = comm.rank == root
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    for count in (7, 3000):
        wanted = sum(numbers(r, count) for r in range(comm.size))
        for unused in (None, frozen, "not a buffer"):
            for _ in range(2):
                result = np.zeros(count) if at_root else unused
                comm.Reduce(numbers(comm.rank, count), result, root=root)
                assert not at_root or (result == wanted).all()


def test_keywords_are_mpi4pys(comm: Intracomm) -> None:
    size, rank = comm.size, comm.rank
    result = np.zeros(size)
    comm.Allreduce(sendbuf=numbers(rank, size), recvbuf=result, op=MPI.SUM)
    comm.Reduce(sendbuf=numbers(rank, size), recvbuf=result, op=MPI.SUM, root=1)
    comm.Bcast(buf=result, root=1)
    assert (result == sum(numbers(r, size) for r in range(size))).all()
    comm.Allgather(sendbuf=np.ones(1), recvbuf=result)
    comm.Allgatherv(sendbuf=np.ones(1), recvbuf=result)
    comm.Reduce_scatter_block(sendbuf=result, recvbuf=np.zeros(1), op=MPI.MAX)
    comm.Reduce_scatter(sendbuf=result, recvbuf=np.zeros(1), recvcounts=[1] * size, op=MPI.MAX)
    comm.Barrier()


# The vector forms -----------------------------------------------------------------------------------------------------


def _layouts(size: int) -> dict[str, tuple[list[int], list[int]]]:
    counts = [(3 * r + 2) % 5 for r in range(size)]
    packed = [sum(counts[:r]) for r in range(size)]
    return {
        "packed": (counts, packed),
        "gaps": (counts, [begin + 2 * r + 1 for r, begin in enumerate(packed)]),
        "backwards": (counts, [sum(counts[r + 1 :]) for r in range(size)]),
        "permuted": ([4] * size, [4 * ((r + 1) % size) for r in range(size)]),
        "one_gives_all": ([0] * (size - 1) + [9], [0] * size),
        "long": ([3000 + r for r in range(size)], [(3000 + size) * r + 5 for r in range(size)]),
        "nothing": ([0] * size, [0] * size),
    }


@pytest.mark.parametrize("layout", _layouts(2))
def test_allgatherv_layouts(comm: Intracomm, plain: MPI.Intracomm, layout: str) -> None:
    counts, displs = _layouts(comm.size)[layout]
    count, length = counts[comm.rank], max(map(int.__add__, counts, displs)) + 3
    specifications: list[Callable[[np.ndarray], Any]] = [
        lambda a: [a, (counts, displs)],
        lambda a: [a, (counts, displs), MPI.DOUBLE],
        lambda a: [a, counts, displs, MPI.DOUBLE],
        lambda a: [a, tuple(counts), tuple(displs), "d"],
        lambda a: [a, (np.array(counts), np.array(displs)), MPI.DOUBLE],
    ]
    if layout in ("packed", "one_gives_all"):
        specifications += [lambda a: [a, counts], lambda a: [a, counts, MPI.DOUBLE], lambda a: [a, (counts, None)]]
    for specify in specifications:

        def make(specify: Callable[[np.ndarray], Any] = specify) -> tuple:
            result = np.full(length, -1.0)
            return numbers(comm.rank, count), specify(result), result

        def in_place(specify: Callable[[np.ndarray], Any] = specify) -> tuple:
            result = np.full(length, -1.0)
            result[displs[comm.rank] : displs[comm.rank] + count] = numbers(comm.rank, count)
            return MPI.IN_PLACE, specify(result), result

        both(comm, plain, "Allgatherv", make)
        both(comm, plain, "Allgatherv", in_place)


def test_allgatherv_on_every_algorithm(comm: Intracomm, plain: MPI.Intracomm) -> None:
    counts, displs = _layouts(comm.size)["gaps"]
    length = max(map(int.__add__, counts, displs))

    def make() -> tuple:
        result = np.full(length, -1.0)
        return numbers(comm.rank, counts[comm.rank]), [result, (counts, displs)], result

    for algorithm in (*ALGORITHMS["allgather"], "native"):
        both(comm, plain, "Allgatherv", make, algorithm=algorithm)


@pytest.mark.parametrize("kind", ["even", "uneven", "zeros", "only_last", "nothing", "long"])
@pytest.mark.parametrize("told", [True, False], ids=["recvcounts", "from_recvbuf"])
def test_reduce_scatter_counts(comm: Intracomm, plain: MPI.Intracomm, kind: str, told: bool) -> None:
    size, rank = comm.size, comm.rank
    counts = {
        "even": [3] * size,
        "uneven": [2 * r + 1 for r in range(size)],
        "zeros": [4 * (r % 2) for r in range(size)],
        "only_last": [0] * (size - 1) + [11],
        "nothing": [0] * size,
        "long": [2000 + 7 * r for r in range(size)],
    }[kind]

    def make() -> tuple:
        result = np.full(counts[rank], -1.0)
        return numbers(rank, sum(counts)), result, *([counts] if told else []), result

    for algorithm in (None, *ALGORITHMS["reduce_scatter"], "native"):
        both(comm, plain, "Reduce_scatter", make, algorithm=algorithm)


def test_recvcounts_may_be_an_array_or_a_tuple(comm: Intracomm) -> None:
    for counts in (np.full(comm.size, 2), (2,) * comm.size, array.array("i", [2] * comm.size)):
        result = np.zeros(2)
        comm.Reduce_scatter(np.arange(2.0 * comm.size), result, counts)
        assert (result == comm.size * np.array([2 * comm.rank, 2 * comm.rank + 1])).all()


# What only the MPI library can do -------------------------------------------------------------------------------------


@pytest.fixture
def column():
    """Every third double of twelve."""
    made = MPI.DOUBLE.Create_vector(4, 1, 3).Commit()
    yield made
    made.Free()


@pytest.fixture
def pairs():
    made = MPI.DOUBLE.Create_contiguous(2).Commit()
    yield made
    made.Free()


def test_derived_datatypes(comm: Intracomm, plain: MPI.Intracomm, column: MPI.Datatype, pairs: MPI.Datatype) -> None:
    size, rank = comm.size, comm.rank

    def spread_column() -> tuple:
        data = numbers(rank, 12)
        return [data, 1, column], 1, data

    def spread_pairs() -> tuple:
        data = numbers(rank, 12)
        return [data, 6, pairs], 0, data

    def gather_pairs() -> tuple:
        result = np.zeros(4 * size)
        return [numbers(rank, 4), 2, pairs], [result, 2, pairs], result

    def gather_some() -> tuple:
        result = np.zeros(4 * size)
        return [numbers(rank, 4), 2, pairs], [result, [2] * size, None, pairs], result

    changed = np.frombuffer(both(comm, plain, "Bcast", spread_column))
    assert (changed[::3] == numbers(1, 12)[::3]).all()
    assert (changed[1::3] == numbers(rank, 12)[1::3]).all()
    both(comm, plain, "Bcast", spread_pairs)
    both(comm, plain, "Allgather", gather_pairs)
    both(comm, plain, "Allgatherv", gather_some)


def _sum_of_pairs(invec: Any, inoutvec: Any, datatype: MPI.Datatype) -> None:
    total = np.frombuffer(inoutvec)
    total += np.frombuffer(invec)


def _keep_left(invec: Any, inoutvec: Any, datatype: MPI.Datatype) -> None:
    np.frombuffer(inoutvec)[:] = np.frombuffer(invec)


@pytest.mark.parametrize("commutes", [True, False])
def test_operations_made_elsewhere(comm: Intracomm, plain: MPI.Intracomm, commutes: bool, pairs: MPI.Datatype) -> None:
    size, rank = comm.size, comm.rank
    op = MPI.Op.Create(_sum_of_pairs if commutes else _keep_left, commutes)

    def make(count: int, given: int, *extra: Any) -> Callable[[], tuple]:
        def form() -> tuple:
            result = np.zeros(count)
            return numbers(rank, given), result, *extra, op, owner(result)

        def owner(result: np.ndarray) -> np.ndarray:
            return result

        return form

    def derived() -> tuple:
        result = np.zeros(4)
        return [numbers(rank, 4), 2, pairs], [result, 2, pairs], op, result

    try:
        for count in (5, 2000):
            both(comm, plain, "Allreduce", make(count, count))
            both(comm, plain, "Reduce_scatter_block", make(count, count * size))
            both(comm, plain, "Reduce_scatter", make(count, count * size, [count] * size))
        both(comm, plain, "Allreduce", derived)
        for root in (0, size - 1):
            result = np.zeros(3)
            comm.Reduce(numbers(rank, 3), result, op, root)
            wanted = sum(numbers(r, 3) for r in range(size)) if commutes else numbers(0, 3)
            assert rank != root or (result == wanted).all()
        data = numbers(rank, 4)
        request = comm.Iallreduce(MPI.IN_PLACE, data, op)
        request.Wait()
        assert (data == (sum(numbers(r, 4) for r in range(size)) if commutes else numbers(0, 4))).all()
        kept = comm.Allreduce_init(MPI.IN_PLACE, data, op)
        for turn in range(3):
            data[:] = numbers(rank, 4) + turn
            kept.Start()
            kept.Wait()
            wanted = sum(numbers(r, 4) + turn for r in range(size)) if commutes else numbers(0, 4) + turn
            assert (data == wanted).all()
        kept.Free()
    finally:
        op.Free()


def test_maxloc_and_long_double(comm: Intracomm, plain: MPI.Intracomm) -> None:
    located = np.dtype([("value", np.float64), ("place", np.int32)], align=True)
    given = np.zeros(5, located)
    given["value"], given["place"] = numbers(comm.rank, 5), comm.rank

    def make() -> tuple:
        result = np.zeros(5, located)
        return [given, MPI.DOUBLE_INT], [result, MPI.DOUBLE_INT], MPI.MAXLOC, result

    both(comm, plain, "Allreduce", make)
    wide = numbers(comm.rank, 9, np.longdouble)
    result, wanted = np.zeros_like(wide), np.zeros_like(wide)
    comm.Allreduce(wide, result)
    plain.Allreduce(wide, wanted)
    assert (result == wanted).all()
    comm.Bcast(wide, 1)
    assert (wide == numbers(1, 9, np.longdouble)).all()


@pytest.mark.parametrize("code", ["b", "B", "h", "H", "i", "I", "l", "L", "q", "Q", "f", "d", "F", "D", "?", "g", "c"])
def test_type_codes(comm: Intracomm, code: str) -> None:
    datatype = MPI.Datatype.fromcode(code)
    for form in (code, datatype):
        data = np.full(6 * datatype.Get_size(), comm.rank == 1, np.uint8)
        comm.Bcast([data, form], 1)
        assert (data == 1).all()


def test_every_named_datatype_can_be_broadcast(comm: Intracomm) -> None:
    found = [getattr(MPI, name) for name in dir(MPI) if isinstance(getattr(MPI, name), MPI.Datatype)]
    named = [each for each in found if each != MPI.DATATYPE_NULL and each.Get_size() == each.Get_extent()[1] > 0]
    assert len(named) > 30
    for datatype in named:
        data = np.full(3 * datatype.Get_size(), comm.rank == 0, np.uint8)
        comm.Bcast([data, 3, datatype])
        assert (data == 1).all(), datatype.Get_name()


# Algorithms -----------------------------------------------------------------------------------------------------------


def _call_all(comm: Any, count: int = 24, **settings: Any) -> list[bytes]:
    """Make every blocking call once; return what it left."""
    size, rank = comm.size, comm.rank
    results = []

    def note(result: np.ndarray) -> None:
        results.append(result.tobytes())

    result = np.zeros(count)
    comm.Allreduce(numbers(rank, count), result, **settings)
    note(result)
    comm.Reduce(numbers(rank, count), result, MPI.MAX, 1, **settings)
    note(result)
    comm.Bcast(result, 1, **settings)
    note(result)
    part = np.zeros(count)
    comm.Reduce_scatter_block(numbers(rank, count * size), part, **settings)
    note(part)
    comm.Reduce_scatter(numbers(rank, count * size), part, [count] * size, **settings)
    note(part)
    every = np.zeros(count * size)
    comm.Allgather(numbers(rank, count), every, **settings)
    note(every)
    comm.Allgatherv(numbers(rank, count), [every, [count] * size], **settings)
    note(every)
    comm.Barrier(**settings)
    return results


@pytest.mark.parametrize("count", [24, 3000])
def test_the_mpi_library_as_an_algorithm(comm: Intracomm, plain: MPI.Intracomm, count: int) -> None:
    wanted = _call_all(plain, count)
    assert _call_all(comm, count, algorithm="native") == wanted
    assert _call_all(comm, count, algorithm="auto") == wanted
    assert _call_all(comm, count) == wanted


@pytest.mark.parametrize("name", ["auto", "native", "ring", "tree", "recursive_doubling", "dissemination"])
def test_the_default_algorithm_is_used_where_it_exists(plain: MPI.Intracomm, name: str) -> None:
    comm = Intracomm(plain, algorithm=name)
    assert comm.algorithm == name
    assert _call_all(comm) == _call_all(MPI.Intracomm(plain))
    result = np.zeros(3)
    comm.Allreduce(np.full(3, 1.0 + comm.rank), result, LEFT)
    assert (result == 1).all()


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_choices_can_be_asked_for(comm: Intracomm, collective: str) -> None:
    names = comm.algorithms(collective)
    together = comm._scope.channel.node is not None
    node = comm.channel.node
    single = node is not None and node.copies is not None and collective != "barrier"
    assert names == (*["shared"] * together, *["single_copy"] * single, *ALGORITHMS[collective], "native")
    assert (comm.choice(collective, 8) == "shared") == together
    for nbytes in (0, 8, 1 << 14, 1 << 20, 1 << 30):
        assert comm.choice(collective, nbytes) in names
        assert comm.choice(collective, nbytes, commutative=False) in names


@pytest.mark.parametrize(("nbytes", "kind"), [(-1, ValueError), (1.5, TypeError), ("1MB", TypeError)])
def test_wrong_sizes_of_messages_are_named(comm: Intracomm, nbytes: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=f"nbytes: .*{nbytes}"):
        comm.choice("allreduce", nbytes)


def test_unknown_collectives_are_named(comm: Intracomm) -> None:
    for ask in (comm.algorithms, lambda name: comm.choice(name, 8)):
        with pytest.raises(mpicoll.errors.UnknownAlgorithm, match="alltoallw"):
            ask("alltoallw")


# Operations made by mpicoll.op ----------------------------------------------------------------------------------------

LEFT = mpicoll.op(lambda a, b: a, commutative=False)
RIGHT = mpicoll.op(lambda a, b: b, commutative=False)
WITHOUT_CARRY = mpicoll.op(lambda a, b: (a + b) % 1000)
COMPOSE = mpicoll.op(
    # Two digits base 97 stand for x -> p x + q modulo 97; composition is associative and does not commute.
    lambda a, b: (a // 97 * (b // 97)) % 97 * 97 + (a % 97 * (b // 97) + b % 97) % 97,
    commutative=False,
)
REDUCING_ALGORITHMS = [
    (collective, name) for collective in ("allreduce", "reduce", "reduce_scatter") for name in ALGORITHMS[collective]
]


def _compose(a: int, b: int) -> int:
    (p, q), (r, s) = divmod(a, 97), divmod(b, 97)
    return p * r % 97 * 97 + (q * r + s) % 97


def _maps(rank: int, count: int) -> np.ndarray:
    index = np.arange(count)
    return (index + 2 * rank + 2) % 95 * 97 + 97 + (5 * index + 11 * rank) % 97


def _reduce_with(comm: Intracomm, collective: str, given: np.ndarray, op: Any, algorithm: str) -> np.ndarray | None:
    """Make the call; return the whole result where this rank has it."""
    size, rank = comm.size, comm.rank
    result = np.zeros_like(given)
    if collective == "allreduce":
        comm.Allreduce(given, result, op, algorithm=algorithm)
        return result
    if collective == "reduce":
        comm.Reduce(given, result, op, size // 2, algorithm=algorithm)
        return result if rank == size // 2 else None
    part = np.zeros(given.size // size, given.dtype)
    comm.Reduce_scatter_block(given, part, op, algorithm=algorithm)
    MPI.Intracomm(comm).Allgather(part, result)
    return result


@pytest.mark.parametrize(("collective", "algorithm"), REDUCING_ALGORITHMS)
def test_operations_from_functions(comm: Intracomm, collective: str, algorithm: str) -> None:
    size, rank = comm.size, comm.rank
    row = ALGORITHMS[collective][algorithm]
    for count in (size, 3 * size, 1000 * size):
        result = _reduce_with(comm, collective, numbers(rank, count) * 100, WITHOUT_CARRY, algorithm)
        assert result is None or (result == sum(numbers(r, count) * 100 for r in range(size)) % 1000).all()
        if not row.ordered:
            continue
        result = _reduce_with(comm, collective, numbers(rank, count), LEFT, algorithm)
        assert result is None or (result == numbers(0, count)).all()
        result = _reduce_with(comm, collective, numbers(rank, count), RIGHT, algorithm)
        assert result is None or (result == numbers(size - 1, count)).all()
    wanted = [int(value) for value in _maps(0, 2 * size)]
    for r in range(1, size):
        wanted = [_compose(a, int(b)) for a, b in zip(wanted, _maps(r, 2 * size), strict=True)]
    if row.ordered:
        result = _reduce_with(comm, collective, _maps(rank, 2 * size), COMPOSE, algorithm)
        assert result is None or result.tolist() == wanted
    else:
        with pytest.raises(ValueError, match=f"algorithm: '{algorithm}' combines operands out of rank order"):
            _reduce_with(comm, collective, _maps(rank, 2 * size), COMPOSE, algorithm)
    for choice in ("auto", "native"):
        result = _reduce_with(comm, collective, _maps(rank, 2 * size), COMPOSE, choice)
        assert result is None or result.tolist() == wanted, choice


def test_operations_from_functions_for_other_element_types(comm: Intracomm) -> None:
    largest = mpicoll.op(lambda a, b: a if a > b else b)
    for dtype in (np.float16, ml_dtypes.bfloat16, np.int8):
        result = np.zeros(50, dtype)
        comm.Allreduce(numbers(comm.rank, 50, dtype), result, largest)
        assert (result == np.max([numbers(r, 50, dtype) for r in range(comm.size)], axis=0)).all(), dtype


def _careful(a: float, b: float) -> float:
    if a + b > 6:
        raise ValueError("too large")
    return a + b


CAREFUL = mpicoll.op(_careful)


@pytest.mark.parametrize("count", [3, 3000])
@pytest.mark.parametrize("form", ["Allreduce", "Iallreduce", "Allreduce_init", "Reduce_scatter_block"])
def test_functions_that_raise_are_an_error_on_every_rank(form: str, count: int) -> None:
    plain = MPI.COMM_WORLD.Dup()
    comm = Intracomm(plain, timeout=10)
    data, result = np.full(count * (comm.size if "scatter" in form else 1), comm.rank + 4.0), np.zeros(count)

    def call() -> None:
        request = getattr(comm, form)(data, result, CAREFUL, algorithm="ring")
        if form.endswith("init"):
            request.Start()
        if request is not None:
            request.Wait()

    with pytest.raises((ValueError, mpicoll.errors.RemoteError), match=r"ValueError: too large|^too large$"):
        call()
    with pytest.raises(mpicoll.errors.CommunicatorBroken, match="too large"):
        comm.Barrier()
    plain.Free()


def test_functions_that_do_not_compile_are_named(comm: Intracomm) -> None:
    def opens_a_file(a: float, b: float) -> float:
        return open(a, b)  # noqa: PTH123

    op = mpicoll.op(opens_a_file)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"opens_a_file.*float64"):
            comm.Allreduce(np.zeros(3), np.zeros(3), op)
    result = np.zeros(1)
    comm.Allreduce(np.ones(1), result)
    assert result == comm.size
    with pytest.raises(TypeError, match="function: 3 is not callable"):
        mpicoll.op(3)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision(comm: Intracomm, dtype: Any) -> None:
    size, rank = comm.size, comm.rank
    for shape in ((7,), (3, 5), (5000,)):
        given = numbers(rank, int(np.prod(shape)), dtype).reshape(shape)
        wanted = sum(numbers(r, given.size, np.float32) for r in range(size)).astype(dtype).reshape(shape)
        for array_of in (np.copy, lambda a: np.array(a, order="F"), lambda a: np.repeat(a, 2, axis=-1)[..., ::2]):
            source = array_of(given)
            result = np.zeros_like(source)
            comm.Allreduce(source, result)
            assert result.dtype == dtype
            assert (result == wanted).all()
            comm.Allreduce(MPI.IN_PLACE, source)
            assert (source == wanted).all()
    parts = np.zeros((size, 3), dtype)
    comm.Allgather(np.full(3, rank, dtype), parts)
    assert (parts == np.arange(size)[:, None].astype(dtype)).all()
    near_the_end = np.full(3, 60000 / size, np.float16)
    comm.Allreduce(MPI.IN_PLACE, near_the_end)
    assert np.isfinite(near_the_end).all()


# The same call again and again ----------------------------------------------------------------------------------------

LENGTHS = pytest.mark.parametrize("count", [3, 1024, 1025, 5000])
"""On both sides of the length from which calls are told apart by address."""


@LENGTHS
def test_repeated_calls_see_the_present_data(comm: Intracomm, count: int) -> None:
    given, result = np.zeros(count), np.zeros(count)
    part, parts = np.zeros(count), np.zeros((comm.size, count))
    for turn in range(30):
        given[:] = numbers(comm.rank, count) + turn
        wanted = sum(numbers(r, count) + turn for r in range(comm.size))
        comm.Allreduce(given, result)
        assert (result == wanted).all()
        result[:] = given
        comm.Allreduce(MPI.IN_PLACE, result)
        assert (result == wanted).all()
        comm.Reduce(given, result, root=turn % 2)
        assert comm.rank != turn % 2 or (result == wanted).all()
        result[:] = given
        comm.Bcast(result, turn % 2)
        assert (result == numbers(turn % 2, count) + turn).all()
        comm.Allgather(given, parts)
        assert (parts == [numbers(r, count) + turn for r in range(comm.size)]).all()
        comm.Reduce_scatter_block(parts, part)
        assert (part == comm.size * (numbers(comm.rank, count) + turn)).all()


@LENGTHS
def test_repeated_calls_on_new_arrays(comm: Intracomm, count: int) -> None:
    kept = []
    for turn in range(40):
        given, result = numbers(comm.rank, count) + turn, np.full(count, -1.0)
        comm.Allreduce(given, result)
        assert (result == sum(numbers(r, count) + turn for r in range(comm.size))).all()
        assert (given == numbers(comm.rank, count) + turn).all()
        if turn % 3:
            kept.append((given, result))  # otherwise freed, so that the next ones may lie at the same address
    for turn, (given, result) in zip((t for t in range(40) if t % 3), kept, strict=True):
        assert (result == sum(numbers(r, count) + turn for r in range(comm.size))).all()
        assert (given == numbers(comm.rank, count) + turn).all()


@LENGTHS
def test_repeated_calls_of_other_kinds_in_the_same_memory(comm: Intracomm, count: int) -> None:
    """Equal lengths in bytes and equal addresses, but other element types, ops, roots, algorithms, shapes."""
    size, rank = comm.size, comm.rank
    given, result = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for _ in range(3):
        for dtype in (np.int64, np.uint64, np.float64, np.int32, np.float32):
            for op, reference in ((MPI.SUM, np.sum), (MPI.MAX, np.max), (MPI.PROD, np.prod)):
                source, target = given.view(dtype), result.view(dtype)
                source[:] = 1 + numbers(rank, source.size, dtype) % 3
                everybodys = [1 + numbers(r, source.size, dtype) % 3 for r in range(size)]
                comm.Allreduce(source, target, op)
                assert (target == reference(everybodys, axis=0)).all(), (dtype, op)
        source, target = given.view(np.float64), result.view(np.float64)
        for algorithm in (*ALGORITHMS["allreduce"], "native", None):
            source[:] = numbers(rank, count)
            comm.Allreduce(source, target, algorithm=algorithm)
            assert (target == sum(numbers(r, count) for r in range(size))).all(), algorithm
        for root in range(size):
            target[:] = rank
            comm.Bcast(target, root)
            assert (target == root).all()
    flat, square = np.full(36, 1.0), np.full((6, 6), 1.0)
    for _ in range(3):
        for shape in (flat, square, np.asfortranarray(square)):
            target = np.zeros_like(shape)
            comm.Allreduce(shape, target)
            assert (target == size).all()


@LENGTHS
def test_repeated_calls_still_refuse_what_has_become_wrong(comm: Intracomm, count: int) -> None:
    base = np.zeros(3 * count)
    given, result = base[:count], base[count : 2 * count]
    overlapping = base[count // 2 : count // 2 + count]
    own_given, own_result = np.ones(count), np.zeros(count)
    for _ in range(4):
        given[:] = 1
        comm.Allreduce(given, result)
        assert (result == comm.size).all()
        with pytest.raises(ValueError, match="overlap"):
            comm.Allreduce(given, overlapping)
        comm.Allreduce(own_given, own_result)
        assert (own_result == comm.size).all()
        with pytest.raises(ValueError, match="sendbuf has elements of float64, but recvbuf of float32"):
            comm.Allreduce(own_given, np.zeros(count, np.float32))
        with pytest.raises(ValueError, match=f"sendbuf has {count} elements, but recvbuf {count + 1}"):
            comm.Allreduce(own_given, np.zeros(count + 1))
        own_result.flags.writeable = False
        with pytest.raises(ValueError, match="recvbuf: the array is read-only"):
            comm.Allreduce(own_given, own_result)
        with pytest.raises(ValueError, match="recvbuf: the array is read-only"):
            comm.Allreduce(MPI.IN_PLACE, own_result)
        with pytest.raises(TypeError, match="op: 'sum'"):
            comm.Allreduce(own_given, np.zeros(count), "sum")
        own_result.flags.writeable = True
        comm.Bcast(own_given, 1)
        with pytest.raises(ValueError, match="root: "):
            comm.Bcast(own_given, comm.size)


def test_read_only_arrays_are_noticed_in_a_repeated_broadcast(comm: Intracomm) -> None:
    """The root only reads, so it may pass a read-only array, every time."""
    for count in (4, 4000):
        frozen = numbers(1, count)
        frozen.flags.writeable = False
        for _ in range(3):
            data = frozen if comm.rank == 1 else np.zeros(count)
            comm.Bcast(data, 1)
            assert (data == numbers(1, count)).all()


def test_views_that_hide_an_overlap_are_refused_in_repetition(comm: Intracomm) -> None:
    """Arrays that own their memory travel by the compiled path; views of them must not."""
    for count in (16, 5000):
        given, result = numbers(comm.rank, count), np.zeros(count)
        for _ in range(3):
            comm.Allreduce(given, result)
            comm.Allreduce(given[: count // 2], result[: count // 2])
            with pytest.raises(ValueError, match="overlap"):
                comm.Allreduce(given[1:], given[:-1])
            with pytest.raises(ValueError, match="overlap"):
                comm.Allreduce(given[: count - 3], given[3:])
        assert (result == sum(numbers(r, count) for r in range(comm.size))).all()


def test_more_different_calls_than_are_remembered(comm: Intracomm) -> None:
    for turn in range(2):
        for count in range(1, 700, 2):
            data = np.full(count, turn + 1.0)
            comm.Allreduce(MPI.IN_PLACE, data)
            assert data[0] == data[-1] == (turn + 1) * comm.size


def test_misaligned_sources_in_repetition(comm: Intracomm) -> None:
    for count in (9, 3000):
        raw = np.zeros(8 * count + 1, np.uint8)
        given = raw[1:].view(np.float64)
        aligned = np.zeros(count)
        for turn in range(3):
            given[:] = aligned[:] = numbers(comm.rank, count) + turn
            wanted = sum(numbers(r, count) + turn for r in range(comm.size))
            for source in (aligned, given):
                result = np.zeros(count)
                comm.Allreduce(source, result)
                assert (result == wanted).all()
