"""Every form of an argument leaves in memory, bit by bit, what it leaves with mpi4py's own communicator."""

from __future__ import annotations

import array
import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from mpi4py import MPI

from mpicoll import Intracomm

pytestmark = pytest.mark.mpi(min_size=2)

COUNT = 6


class Form(NamedTuple):
    """A specification, and the object whose memory it stands for."""

    spec: Any
    owner: Any


class Shown:
    """Memory that is shown by DLPack only, as that of a tensor; `versioned` since DLPack 1.0."""

    def __init__(self, owner: np.ndarray, versioned: bool = True) -> None:
        self.owner, self.versioned = owner, versioned

    def __dlpack__(self, **settings: Any) -> Any:
        if not self.versioned and "max_version" in settings:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        return self.owner.__dlpack__(**settings)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.owner.__dlpack_device__()


class ShownByInterface:
    """Memory that is shown by NumPy's array interface only, which mpi4py does not know."""

    def __init__(self, owner: np.ndarray) -> None:
        self.__array_interface__ = owner.__array_interface__
        self.owner = owner


class OnDevice:
    def __init__(self, kind: int = 2) -> None:
        self.kind = kind

    def __dlpack__(self, **settings: Any) -> Any:
        raise AssertionError("nobody may ask for it")

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0


class CudaArray:
    def __init__(self) -> None:
        place = {"shape": (COUNT,), "typestr": "<f8", "data": (4096, False), "strides": None}
        self.__cuda_array_interface__ = {**place, "version": 3}


class Root:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __index__(self) -> int:
        return self.rank

    __int__ = __index__  # mpi4py wants it

    def __repr__(self) -> str:
        return f"Root({self.rank})"


def _made(make: Callable[[np.ndarray], Any]) -> Callable[[np.ndarray], Form]:
    def form(data: np.ndarray) -> Form:
        spec = make(data)
        return Form(spec, spec)

    return form


def _around(make: Callable[[np.ndarray], Any]) -> Callable[[np.ndarray], Form]:
    return lambda data: Form(make(data), data)


def _vector(data: np.ndarray) -> Form:
    """Every second element."""
    wide = np.repeat(data, 2)
    return Form([wide, 1, MPI.DOUBLE.Create_vector(data.size, 1, 2).Commit()], wide)


def _absolute(data: np.ndarray) -> Form:
    places = [MPI.Get_address(data) + 8 * number for number in range(data.size)]
    return Form([MPI.BOTTOM, 1, MPI.DOUBLE.Create_hindexed_block(1, places).Commit()], data)


def _bytearray(data: np.ndarray) -> Form:
    made = bytearray(data.tobytes())
    return Form([made, MPI.DOUBLE], made)


WHOLE: dict[str, Callable[[np.ndarray], Form]] = {
    "array": _around(lambda a: a),
    "two dimensions": _around(lambda a: a.reshape(2, -1)),
    "type": _around(lambda a: [a, MPI.DOUBLE]),
    "code": _around(lambda a: [a, "d"]),
    "code of NumPy": _around(lambda a: [a, "f8"]),
    "tuple": _around(lambda a: (a, MPI.DOUBLE)),
    "no count, type": _around(lambda a: [a, None, MPI.DOUBLE]),
    "no count, no displacement": _around(lambda a: [a, None, None, "d"]),
    "array.array": _made(lambda a: array.array("d", a)),
    "memoryview": _around(memoryview),
    "memoryview of two dimensions": _around(lambda a: memoryview(a.reshape(2, -1))),
    "bytearray and type": _bytearray,
    "mpi4py buffer and type": _around(lambda a: [MPI.buffer.frombuffer(a), "d"]),
    "DLPack": _around(Shown),
    "old DLPack": _around(lambda a: Shown(a, versioned=False)),
    "DLPack of two dimensions": _around(lambda a: Shown(a.reshape(2, -1))),
    "DLPack and type": _around(lambda a: [Shown(a), MPI.DOUBLE]),
    "old DLPack and type": _around(lambda a: [Shown(a, versioned=False), "d"]),
    "vector": _vector,
    "absolute addresses": _absolute,
}
"""The whole vector, in any number of blocks."""
COUNTED: dict[str, Callable[[np.ndarray, int], Any]] = {
    "count": lambda a, n: [a, n],
    "count, type": lambda a, n: [a, n, MPI.DOUBLE],
    "count, code": lambda a, n: [a, n, "d"],
    "count with __index__": lambda a, n: [a, Root(n), "d"],
    "count, displacement, type": lambda a, n: [a, n, 2, MPI.DOUBLE],
    "pair": lambda a, n: [a, (n, 2)],
    "pair, type": lambda a, n: [a, (n, 2), MPI.DOUBLE],
    "pair of bytes, type": lambda a, n: [memoryview(a).cast("B"), (n, 2), "d"],
    "DLPack, count, type": lambda a, n: [Shown(a), n, "d"],
    "pointer, count, type": lambda a, n: [MPI.buffer.fromaddress(MPI.Get_address(a), 0), n, MPI.DOUBLE],
    "pointer and length, count, type": lambda a, n: [MPI.buffer.fromaddress(MPI.Get_address(a), 8), n, MPI.DOUBLE],
    "pointer, count, code": lambda a, n: [MPI.buffer.fromaddress(MPI.Get_address(a), 0), n, "d"],
}
"""A number of elements of each block."""


@pytest.fixture(scope="module")
def plain() -> Iterator[MPI.Intracomm]:
    made = MPI.COMM_WORLD.Dup()
    yield made
    made.Free()


def numbers(rank: int, count: int = COUNT) -> np.ndarray:
    return ((np.arange(count) * (rank + 3) + rank) % 13).astype(np.float64)


def memory(owner: Any) -> bytes:
    return np.asarray(owner).tobytes()


def both(comm: Intracomm, plain: MPI.Intracomm, name: str, make: Callable[[], tuple]) -> bytes:
    """Make the same call through both; `make` returns the arguments, and then whose memory to compare."""
    left = []
    for face in (plain, comm):
        *arguments, owner = make()
        getattr(face, name)(*arguments)
        left.append(memory(owner))
    assert left[0] == left[1], name
    return left[0]


MOVES: dict[str, tuple[int, int]] = {
    "Gather": (1, 0), "Scatter": (0, 1), "Allgather": (1, 0), "Alltoall": (0, 0),
    "Gatherv": (1, 0), "Scatterv": (0, 1), "Allgatherv": (1, 0), "Alltoallv": (0, 0),
}  # fmt: skip
"""Blocks of sendbuf and recvbuf; 0 for one a rank."""
REDUCTIONS = {"Allreduce": (1, 1), "Reduce": (1, 1), "Scan": (1, 1), "Exscan": (1, 1), "Reduce_scatter_block": (0, 1)}


def _arguments(name: str, comm: Any, send: Any, recv: Any) -> tuple:
    """Return the arguments of a call; rank 1 is the root."""
    at_root = comm.rank == 1
    if name.startswith("Gather") or name == "Reduce":
        return (send, recv if at_root else None, *([MPI.SUM] if name == "Reduce" else []), 1)
    return (send if at_root else None, recv, 1) if name.startswith("Scatter") else (send, recv)


@pytest.mark.parametrize("form", WHOLE)
def test_whole_vectors(comm: Intracomm, plain: MPI.Intracomm, form: str) -> None:
    size = comm.size
    if form in ("vector", "absolute addresses"):
        return  # MPI has no operations on such elements, and its counts are of entries: see test_type_signatures
    for name, blocks in {**MOVES, **REDUCTIONS}.items():
        for first, second in ((form, form), (form, "array"), ("array", form)):

            def call(
                name: str = name, blocks: Any = blocks, first: Callable = WHOLE[first], second: Callable = WHOLE[second]
            ) -> tuple:
                sends, takes = (COUNT * (each or size) for each in blocks)
                recv = second(np.full(takes, 7.0))
                return (*_arguments(name, comm, first(numbers(comm.rank, sends)).spec, recv.spec), recv.owner)

            both(comm, plain, name, call)


@pytest.mark.parametrize("form", WHOLE)
def test_bcast_and_roots(comm: Intracomm, plain: MPI.Intracomm, form: str) -> None:
    for root in (0, 1, np.int64(1), np.uint8(0), Root(1), True, np.array(1)):

        def call(root: Any = root) -> tuple:
            made = WHOLE[form](numbers(comm.rank))
            return made.spec, root, made.owner

        both(comm, plain, "Bcast", call)


@pytest.mark.parametrize("form", COUNTED)
@pytest.mark.parametrize("count", [0, 3, 1500])
def test_counts(comm: Intracomm, plain: MPI.Intracomm, form: str, count: int) -> None:
    rank, specify = comm.rank, COUNTED[form]
    for name, blocks in {"Bcast": (1, 1), **MOVES, **REDUCTIONS}.items():
        if name.endswith("v"):
            continue
        sends, takes = (count * (each or comm.size) for each in blocks)
        source = numbers(rank, sends + 5)

        def call(name: str = name, source: np.ndarray = source, takes: int = takes) -> tuple:
            result = numbers(rank + 5, takes + 5)
            if name == "Bcast":
                return specify(result, count), 1, result
            return (*_arguments(name, comm, specify(source, count), specify(result, count)), result)

        both(comm, plain, name, call)


PARTS: dict[str, Callable[[Any, list[int], list[int]], Any]] = {
    "counts": lambda a, n, d: [a, n],
    "pair": lambda a, n, d: [a, (n, d)],
    "pair, type": lambda a, n, d: [a, (n, d), MPI.DOUBLE],
    "counts, displacements, type": lambda a, n, d: [a, n, d, MPI.DOUBLE],
    "counts, displacements, code": lambda a, n, d: [a, np.array(n), tuple(d), "d"],
    "vectors, type": lambda a, n, d: [a, np.array(n, np.int32), np.array(d, np.int16), MPI.DOUBLE],
    "pair of vectors": lambda a, n, d: [a, (np.array(n, np.uint8), np.array(d))],
    "vector of counts": lambda a, n, d: [a, np.array(n)],
    "counts, no displacements, type": lambda a, n, d: [a, n, None, MPI.DOUBLE],
    "DLPack, pair, type": lambda a, n, d: [Shown(a), (n, d), "d"],
    "array.array": lambda a, n, d: [memoryview(a), (n, d), "d"],
    "pointer and length, pair, type": lambda a, n, d: [MPI.buffer.fromaddress(MPI.Get_address(a), 8), (n, d), "d"],
    "pointer, pair, type": lambda a, n, d: [MPI.buffer.fromaddress(MPI.Get_address(a), 0), (n, d), "d"],
}


@pytest.mark.parametrize("form", PARTS)
@pytest.mark.parametrize("name", ["Gatherv", "Scatterv", "Allgatherv", "Alltoallv"])
def test_counts_and_displacements(comm: Intracomm, plain: MPI.Intracomm, name: str, form: str) -> None:
    size, rank = comm.size, comm.rank
    whole = numbers(rank, 5 * size + 9)
    counts = [(2 * r + 1) % 4 for r in range(size)]
    displs = [5 * r + 1 for r in reversed(range(size))]
    if name == "Alltoallv":
        counts = [(r + rank) % 3 for r in range(size)]

    def call() -> tuple:
        result = numbers(rank + 5, 5 * size + 9)
        from_parts, into_parts = PARTS[form](whole, counts, displs), PARTS[form](result, counts, displs)
        send = whole[: counts[rank]] if MOVES[name][0] else from_parts
        recv = result[: counts[rank]] if MOVES[name][1] else into_parts
        return (*_arguments(name, comm, send, recv), result)

    both(comm, plain, name, call)


@pytest.mark.parametrize("none", [None, MPI.IN_PLACE, [MPI.IN_PLACE, 0, MPI.DOUBLE]], ids=["None", "IN_PLACE", "list"])
@pytest.mark.parametrize(
    "name", ["Allreduce", "Reduce", "Allgather", "Allgatherv", "Alltoall", "Gather", "Scatter", "Scan", "Exscan"]
)
def test_in_place(comm: Intracomm, plain: MPI.Intracomm, name: str, none: Any) -> None:
    if isinstance(none, list) and name != "Allgather":
        none = none[0]
    at_root = comm.rank == 1

    def call() -> tuple:
        data, part = numbers(comm.rank, COUNT * comm.size), numbers(comm.rank + 5)
        if name == "Gather":
            return (none, data, 1, data) if at_root else (part, None, 1, data)
        if name == "Scatter":
            return (data, none, 1, data) if at_root else (None, part, 1, part)
        if name == "Reduce":
            return (none, data, MPI.SUM, 1, data) if at_root else (data, None, MPI.SUM, 1, data)
        return none, data, data

    both(comm, plain, name, call)


def test_letters(comm: Intracomm, plain: MPI.Intracomm) -> None:
    for make in (lambda: np.array([b"a", b"b"]), lambda: np.array(["a", "\u1234"]), lambda: array.array("u", "xyz")):

        def call(make: Callable[[], Any] = make) -> tuple:
            data = make()
            if comm.rank != 1:
                view = data if isinstance(data, np.ndarray) else np.frombuffer(memoryview(data).cast("B"), np.uint8)
                view[...] = view[0]
            return data, 1, memoryview(data).cast("B") if isinstance(data, array.array) else data

        both(comm, plain, "Bcast", call)


def test_a_displacement_without_a_count(comm: Intracomm, plain: MPI.Intracomm) -> None:
    for specify in (lambda a: [a, (None, 2)], lambda a: [a, (None, 2), "d"], lambda a: [a, None, 2, "d"]):

        def call(specify: Callable[[np.ndarray], Any] = specify) -> tuple:
            data = numbers(comm.rank)
            return specify(data), 1, data

        both(comm, plain, "Bcast", call)


def test_the_array_interface(comm: Intracomm) -> None:
    data = numbers(comm.rank)
    comm.Bcast(ShownByInterface(data), 1)
    assert (data == numbers(1)).all()


def test_memory_of_cuda_that_the_processor_reads(comm: Intracomm, plain: MPI.Intracomm) -> None:
    class Managed:
        def __init__(self, owner: np.ndarray) -> None:
            self.__cuda_array_interface__ = {**owner.__array_interface__, "version": 3}

    def call() -> tuple:
        data = numbers(comm.rank)
        return Managed(data), 1, data

    both(comm, plain, "Bcast", call)


def test_dlpack_of_memory_that_is_not_contiguous_is_read(comm: Intracomm) -> None:
    got = np.zeros((comm.size, COUNT))
    comm.Allgather(Shown(np.repeat(numbers(comm.rank), 2)[::2], versioned=False), got)
    assert (got == [numbers(rank) for rank in range(comm.size)]).all()


@pytest.mark.parametrize("make", [OnDevice, CudaArray], ids=["DLPack", "CUDA"])
def test_memory_of_a_device_is_refused_by_name(comm: Intracomm, make: Callable[[], Any]) -> None:
    for call in (
        lambda: comm.Bcast(make(), 0),
        lambda: comm.Allreduce(make(), np.empty(COUNT)),
        lambda: comm.Allgather(np.empty(COUNT), [make(), COUNT, "d"]),
    ):
        with pytest.raises(TypeError, match=r"(buf|sendbuf|recvbuf): the memory of this .* belongs to a .*native"):
            call()
    data = numbers(comm.rank)
    comm.Bcast(data, 0)
    assert (data == numbers(0)).all()


def test_read_only_dlpack_is_refused(comm: Intracomm) -> None:
    data = numbers(comm.rank)
    data.flags.writeable = False
    with pytest.raises(TypeError, match=r"recvbuf: Shown cannot be communicated: .*readonly"):
        comm.Allreduce(numbers(comm.rank), Shown(data))


class Lent:
    """Memory that is shown by DLPack only, and is overwritten when nobody holds the object any more."""

    def __init__(self, owner: np.ndarray) -> None:
        self.owner = owner

    def __dlpack__(self, **settings: Any) -> Any:
        return self.owner.__dlpack__(**settings)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.owner.__dlpack_device__()

    def __del__(self) -> None:
        self.owner[...] = -1


def test_requests_keep_what_is_shown_by_dlpack(comm: Intracomm) -> None:
    got = np.zeros(COUNT)
    request = comm.Iallreduce(Lent(numbers(comm.rank)), got)
    gc.collect()
    request.Wait()
    assert (got == sum(map(numbers, range(comm.size)))).all()
    kept = comm.Allreduce_init(Lent(numbers(comm.rank)), got, info=MPI.INFO_NULL)
    for _ in range(2):
        gc.collect()
        got[:] = 0
        kept.Start()
        kept.Wait()
        assert (got == sum(map(numbers, range(comm.size)))).all()
    kept.Free()


def test_bytes_behind_the_elements_that_are_counted(comm: Intracomm) -> None:
    memory, size = bytearray(8 * comm.size + 4), comm.size
    comm.Allgatherv(np.full(1, float(comm.rank)), [memory, ([1] * size, [*range(size)]), MPI.DOUBLE])
    assert np.frombuffer(memory[: 8 * size]).tolist() == [*range(size)]


def test_persistent_blocks_of_a_strided_array_are_read_at_each_start(comm: Intracomm) -> None:
    size, whole, part = comm.size, np.arange(6.0 * comm.size), np.zeros(2)
    blocks = [whole[::2], ([2] * size, [3 * rank for rank in range(size)])]
    request = comm.Scatterv_init(blocks if comm.rank == 0 else None, part, 0)
    for turn in (0.0, 100.0):
        whole[:] = np.arange(6.0 * size) + turn
        request.Start()
        request.Wait()
        assert part.tolist() == [6.0 * comm.rank + turn, 6.0 * comm.rank + 2 + turn]
    request.Free()


def test_what_is_between_persistent_blocks_is_left_alone(comm: Intracomm) -> None:
    size, whole = comm.size, np.zeros(6 * comm.size)
    request = comm.Allgatherv_init(
        np.full(2, comm.rank + 1.0), [whole[::2], ([2] * size, [3 * rank for rank in range(size)])]
    )
    whole[:] = 9
    request.Start()
    request.Wait()
    request.Free()
    assert whole[::2].tolist() == [number for rank in range(size) for number in (rank + 1, rank + 1, 9)]
    assert (whole[1::2] == 9).all()


def test_blocks_without_elements_may_be_anywhere(comm: Intracomm, plain: MPI.Intracomm) -> None:
    size, rank = comm.size, comm.rank
    counts, displs = [int(peer > 0) for peer in range(size)], [peer - 1 for peer in range(size)]
    for each in (plain, comm):
        whole = np.full(size, -1.0)
        own = np.full(int(rank > 0), rank + 0.5)
        each.Gatherv(own, [whole, (counts, displs), MPI.DOUBLE] if rank == 0 else None)
        assert rank or whole.tolist() == [*(peer + 0.5 for peer in range(1, size)), -1]
        each.Allgatherv(own, [whole, (counts, displs), MPI.DOUBLE])
        assert whole.tolist() == [*(peer + 0.5 for peer in range(1, size)), -1]


def test_no_elements_overlap_nothing(comm: Intracomm, plain: MPI.Intracomm) -> None:
    """One rank has no part, and names a place in the array that the parts of the others go to."""
    counts = [int(peer > 0) for peer in range(comm.size)]
    for each in (plain, comm):
        whole = np.zeros(comm.size)
        own = [whole, (0, 0), MPI.DOUBLE] if comm.rank == 0 else np.full(1, comm.rank + 0.5)
        each.Allgatherv(own, [whole, counts, MPI.DOUBLE])
        assert whole.tolist() == [*(peer + 0.5 for peer in range(1, comm.size)), 0]


@pytest.mark.parametrize("name", ["Allreduce", "Reduce", "Scan", "Exscan"])
def test_the_same_array_twice_is_in_place_for_types_of_the_library_too(comm: Intracomm, name: str) -> None:
    values = np.full(3, 1, np.longdouble)
    getattr(comm, name)(values, values if name != "Reduce" or comm.rank == 0 else None)
    expected = {"Allreduce": comm.size, "Scan": comm.rank + 1, "Exscan": max(comm.rank, 1)}
    assert (values == expected.get(name, comm.size if comm.rank == 0 else 1)).all()


class _Pointed(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int), ("pointer", ctypes.c_void_p))


class _Bits(ctypes.Structure):
    _fields_ = (("a", ctypes.c_int, 3), ("b", ctypes.c_int, 5))


class _Either(ctypes.Union):
    _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_double))


@pytest.mark.parametrize("kind", [_Pointed, _Bits, _Either, ctypes.c_void_p * 2, ctypes.c_longdouble * 2])
@pytest.mark.filterwarnings("error")
def test_buffers_of_ctypes_that_numpy_does_not_read(comm: Intracomm, kind: Any) -> None:
    buffer = (kind * 3)() if issubclass(kind, (ctypes.Structure, ctypes.Union)) else kind()
    memory = MPI.buffer.frombuffer(buffer)
    memory[:] = bytes([comm.rank + 1]) * memory.nbytes
    comm.Bcast([buffer, MPI.BYTE])
    assert bytes(memory) == b"\1" * memory.nbytes


def test_numbers_of_ctypes_that_numpy_does_not_read_are_reduced(comm: Intracomm) -> None:
    for kind in (ctypes.c_longdouble, ctypes.c_void_p):
        x, y = (kind * 2)(3, comm.rank), (kind * 2)()
        comm.Allreduce(x, y)
        assert [float(each or 0) for each in y] == [3 * comm.size, comm.size * (comm.size - 1) // 2]
    with pytest.raises(TypeError, match="V16 cannot"):
        comm.Allreduce((_Pointed * 2)(), (_Pointed * 2)())


def test_characters_are_reduced(comm: Intracomm) -> None:
    for x in (np.array([b"a", bytes([98 + comm.rank])]), memoryview(bytes([97, 98 + comm.rank])).cast("c")):
        y = np.zeros(2, "S1")
        comm.Allreduce(x, y, MPI.MAX)
        assert y.tolist() == [b"a", bytes([97 + comm.size])]
