"""Collectives of Python objects: results as mpi4py's, in type and value, and errors on every rank."""

from __future__ import annotations

import math
import operator
import os
import pickle
import random
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicoll
from mpicoll.consensus import wait_politely
from mpicoll.errors import CollectiveTimeout, CommunicatorBroken, CorruptPayload, MismatchError, RemoteError
from mpicoll.kernels.object_words import HELD_COUNT, IN_USE, PICKLE_APART
from mpicoll.objects import records
from mpicoll.objects.encoding import IN_PLACE_NBYTES, encode
from mpicoll.shared_memory import segment
from tests import extent
from tests.objects import Unpicklable, Vector, differ, read_only, samples

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="needs several ranks")
SAMPLES = samples()
OPS = ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR", "MAXLOC", "MINLOC", "REPLACE",
       "NO_OP")  # fmt: skip
REDUCING = ("allreduce", "reduce", "scan", "exscan")


@pytest.fixture
def plain(comm: mpicoll.Intracomm) -> Any:
    """mpi4py's own communicator of the same ranks."""
    made = MPI.Intracomm(comm).Dup()
    yield made
    made.Free()


def of_rank(obj: Any, rank: int) -> Any:
    """Return an object that is another one on each rank, where that is easy."""
    if isinstance(obj, np.ndarray) and obj.dtype.kind in "iufc":
        changed = obj + np.asarray(rank, obj.dtype)
        return changed if type(changed) is np.ndarray else obj
    return obj + type(obj)(rank) if type(obj) in (int, float, complex) else obj


def reduced(comm: Any, name: str, obj: Any, op: Any) -> tuple[str, Any]:
    """Return the result of a reduction, or the type of the exception that `op` raises for such objects."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return "result", getattr(comm, name)(obj, op)
        except Exception as error:
            return "error", type(error)


def expected_of(comm: MPI.Intracomm, name: str, obj: Any, op: Any) -> tuple[str, Any]:
    """Return what mpi4py's reduction gives, made from its pickles: its own does not end where `op` raises."""
    objects = [MPI.pickle.loads(each) for each in comm.allgather(MPI.pickle.dumps(obj))]
    if name in ("scan", "exscan"):
        objects = objects[: comm.rank + (name == "scan")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            partial, step = objects, 1
            while step < len(partial):
                for place in range(0, len(partial) - step, 2 * step):
                    partial[place] = op(partial[place], partial[place + step])
                step *= 2
        except Exception as error:
            return "error", type(error)
    gets = partial and (name != "reduce" or comm.rank == 0)
    return "result", partial[0] if gets else None


@pytest.mark.parametrize("name", ["bcast", "gather", "scatter"])
def test_rooted_moves_from_every_root(comm: mpicoll.Intracomm, plain: MPI.Intracomm, name: str) -> None:
    for number, sample in enumerate(SAMPLES):
        root = number % comm.size
        obj = of_rank(sample, comm.rank)
        given = [of_rank(sample, rank) for rank in range(comm.size)] if name == "scatter" else obj
        given = given if name != "scatter" or comm.rank == root else None
        got, expected = getattr(comm, name)(given, root), getattr(plain, name)(given, root=root)
        assert differ(got, expected) == "", (number, sample)


@pytest.mark.parametrize("name", ["allgather", "alltoall"])
def test_moves_to_all(comm: mpicoll.Intracomm, plain: MPI.Intracomm, name: str) -> None:
    for number, sample in enumerate(SAMPLES):
        given = of_rank(sample, comm.rank)
        if name == "alltoall":
            given = [of_rank(sample, comm.rank + rank) for rank in range(comm.size)]
        got, expected = getattr(comm, name)(given), getattr(plain, name)(given)
        assert differ(got, expected) == "", (number, sample)


def test_ranks_may_give_objects_of_different_types(comm: mpicoll.Intracomm, plain: MPI.Intracomm) -> None:
    draws = random.Random(5)
    for turn in range(60):
        given = [draws.choice(SAMPLES) for _ in range(comm.size)]
        root = draws.randrange(comm.size)
        own = given[comm.rank]
        cases: list[tuple[str, tuple[Any, ...]]] = [
            ("bcast", (own, root)),
            ("gather", (own, root)),
            ("scatter", (given if comm.rank == root else None, root)),
            ("allgather", (own,)),
            ("alltoall", ((given * 2)[comm.rank :][: comm.size],)),
        ]
        for name, arguments in cases:
            got, expected = getattr(comm, name)(*arguments), getattr(plain, name)(*arguments)
            assert differ(got, expected) == "", (turn, name)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", REDUCING)
def test_reductions_of_all_objects_with_predefined_operations(
    comm: mpicoll.Intracomm, plain: MPI.Intracomm, name: str, op: str
) -> None:
    pairs = [(comm.rank % 3, comm.rank), (1.5, comm.rank)]
    wrong = []  # told at the end, since other ranks go on
    for number, sample in enumerate([*(SAMPLES if name == "allreduce" else SAMPLES[::5]), *pairs]):
        obj, operation = of_rank(sample, comm.rank), getattr(MPI, op)
        expected = expected_of(plain, name, obj, operation)
        got = reduced(comm, name, obj, operation)
        if got[0] == "error" and (expected[0] == "error" or name in ("scan", "exscan")):
            # Where the program's own code runs, all ranks of a scan fail if one does.
            right = name in ("scan", "exscan") or got[1] in (expected[1], RemoteError)
        else:
            right = differ(got, expected) == "" or close(got[1], expected[1], short=name in ("scan", "exscan"))
        wrong += [] if right else [(number, sample, got, expected)]
    assert not wrong


def close(got: Any, expected: Any, *, short: bool) -> bool:
    """Say whether numbers are equal but for the order of their reduction; if not `short`, of long arrays only."""
    if type(got) is not type(expected) or not isinstance(got, (float, complex, np.ndarray, np.generic)):
        return False
    long = isinstance(got, np.ndarray) and got.nbytes > 400
    alike = np.shape(got) == np.shape(expected) and np.asarray(got).dtype == np.asarray(expected).dtype
    inexact = alike and np.asarray(got).dtype.kind in "fc"
    return (long or short) and inexact and np.allclose(got, expected, rtol=1e-2, equal_nan=True)


@pytest.mark.parametrize("name", REDUCING)
def test_reductions_have_mpi4pys_bits(comm: mpicoll.Intracomm, plain: MPI.Intracomm, name: str) -> None:
    numbers = np.random.default_rng(comm.rank)
    for given in (
        numbers.random() * 10.0 ** numbers.integers(-9, 9),
        comm.rank - 2,
        2**62 + comm.rank,
        2**70 + comm.rank,
        complex(numbers.random(), comm.rank),
        np.float32(numbers.random()),
        numbers.random(7),
        numbers.random(1000).astype(np.float16),
        numbers.integers(-(2**62), 2**62, 5000),
        numbers.integers(-100, 100, 1000).astype(np.int8),
        "ab"[comm.rank % 2],
        "x" * (1000 + comm.rank),
        [comm.rank] * 400,
        Vector([comm.rank, 1]),
    ):
        for op in (MPI.SUM, operator.add, lambda a, b: a + b):
            got, expected = getattr(comm, name)(given, op), getattr(plain, name)(given, op)
            assert differ(got, expected) == "", given


@pytest.mark.parametrize("name", REDUCING)
def test_integers_do_not_overflow_and_types_may_differ(comm: mpicoll.Intracomm, name: str) -> None:
    result = getattr(comm, name)(2**63 - 1 if comm.rank % 2 else 1.0, MPI.SUM)
    if name == "allreduce":
        assert type(result) is float
    result = comm.allreduce(2**63 - 1)
    assert result == comm.size * (2**63 - 1)
    assert type(result) is int
    assert comm.allreduce(10**30 if comm.rank else 1) == 1 + 10**30 * (comm.size - 1)
    mixed = comm.allreduce(np.arange(1000) if comm.rank else 1)
    assert np.array_equal(mixed, 1 + (comm.size - 1) * np.arange(1000))


@pytest.mark.parametrize("root", range(MPI.COMM_WORLD.size))
def test_reduce_to_every_root(comm: mpicoll.Intracomm, plain: MPI.Intracomm, root: int) -> None:
    for given in (1.5, np.arange(3.0), np.arange(9000), (1, comm.rank), "x" * 900, {1: 2}):
        op = (lambda a, b: b) if isinstance(given, dict) else MPI.SUM
        got, expected = comm.reduce(given, op, root), plain.reduce(given, op, root)
        assert differ(got, expected) == ""
        assert (got is None) == (comm.rank != root)


def test_functions_as_operations(comm: mpicoll.Intracomm) -> None:
    def merged(a: dict[int, str], b: dict[int, str]) -> dict[int, str]:
        a.update(b)  # an operation may change its first operand
        return a

    for text in ("x", "x" * 3000):
        everything = dict.fromkeys(range(comm.size), text)
        assert comm.allreduce({comm.rank: text}, merged) == everything
        assert comm.scan({comm.rank: text}, merged) == dict.fromkeys(range(comm.rank + 1), text)
        before = comm.exscan({comm.rank: text}, merged)
        assert before == (dict.fromkeys(range(comm.rank), text) if comm.rank else None)
    made = MPI.Op.Create(lambda a, b, datatype: a + b)
    assert comm.allreduce(comm.rank, made) == sum(range(comm.size))
    made.Free()
    assert comm.allreduce([comm.rank], mpicoll.op(lambda a, b: a + b)) == list(range(comm.size))


def test_results_are_new_and_writable(comm: mpicoll.Intracomm) -> None:
    for given in (np.arange(4), np.arange(100_000), [1], {"a": np.zeros(100_000)}):
        results = [comm.bcast(given), *comm.allgather(given), comm.alltoall([given] * comm.size)[0]]
        assert all(each is not given for each in results)
        for each in results:
            array = each["a"] if isinstance(each, dict) else each
            array[0] = 77
        assert (given["a"] if isinstance(given, dict) else given)[0] != 77
        comm.barrier()


@pytest.mark.parametrize("nbytes", [480, 487, 488, 489, 4096, 65_536, 65_537, 262_143, 1_048_577, 9_000_001])
def test_lengths_around_the_limits(comm: mpicoll.Intracomm, nbytes: int) -> None:
    own = bytes([comm.rank]) * nbytes
    expected = [bytes([rank]) * nbytes for rank in range(comm.size)]
    assert comm.allgather(own) == expected
    assert comm.bcast(own, comm.size - 1) == expected[-1]
    assert comm.gather(own, 1) == (expected if comm.rank == 1 else None)
    assert comm.scatter(expected, 1) == own
    assert comm.alltoall(expected) == [own] * comm.size
    uneven = [bytes([rank]) * (nbytes // (rank + 1)) for rank in range(comm.size)]
    assert comm.allgather(uneven[comm.rank]) == uneven
    assert comm.gather(uneven[comm.rank]) == (uneven if comm.rank == 0 else None)
    assert comm.scatter(uneven) == uneven[comm.rank]
    assert comm.alltoall(uneven) == [uneven[comm.rank]] * comm.size


@pytest.mark.parametrize("count", [IN_PLACE_NBYTES // 8 - 1, IN_PLACE_NBYTES // 8, 300_000])
def test_long_buffers_that_a_broadcast_sends_from_where_they_lie(
    comm: mpicoll.Intracomm, plain: MPI.Intracomm, count: int
) -> None:
    array, short = np.arange(float(count)), np.arange(3.0)
    fixed, two = read_only(array.copy()), array[: count // 2 * 2].reshape(2, -1)
    for number, given in enumerate(
        (
            array, fixed, array[::-1], array.reshape(-1, 1).T, np.asfortranarray(two), array.astype(np.int8),
            (array, "a"), {"first": short, "last": array}, {"first": array, "last": short}, [array, array],
            (array, array + 1), (fixed, 1), (short, fixed), np.float32(array)[1:], array.view("V8"),
            bytearray(array.tobytes()), (array[::2], [array[1:]]), array.tobytes(),
        )
    ):  # fmt: skip
        root = number % comm.size
        got = comm.bcast(given if comm.rank == root else None, root)
        assert not differ(got, plain.bcast(given if comm.rank == root else None, root)), number
        assert got is not given
    got = comm.bcast((array, short))
    got[0][:] = -1
    comm.barrier()
    assert array[-1] == count - 1


def test_a_damaged_record_of_a_long_buffer_is_refused() -> None:
    memory = bytearray(records.NBYTES)
    payload = encode((np.zeros(IN_PLACE_NBYTES), 1))
    records.write(memoryview(memory), 0, records.call_word("bcast"), payload)
    assert records.read(bytes(memory), 0).in_place_nbytes == 8 * IN_PLACE_NBYTES
    records.write(memoryview(memory), 0, records.call_word("bcast"), payload._replace(shape=(payload.nbytes + 1,)))
    with pytest.raises(CorruptPayload, match="its last buffer"):
        records.read(bytes(memory), 0)


CALLS: dict[str, Callable[[mpicoll.Intracomm, Any], Any]] = {
    "bcast": lambda comm, obj: comm.bcast(obj, 1),
    "gather": lambda comm, obj: comm.gather(obj),
    "allgather": lambda comm, obj: comm.allgather(obj),
    "scatter": lambda comm, obj: comm.scatter([obj] * comm.size, 1),
    "alltoall": lambda comm, obj: comm.alltoall([obj] * comm.size),
    "reduce": lambda comm, obj: comm.reduce(obj),
    "allreduce": lambda comm, obj: comm.allreduce(obj),
    "scan": lambda comm, obj: comm.scan(obj),
    "exscan": lambda comm, obj: comm.exscan(obj),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_object_that_cannot_be_pickled_on_one_rank(comm: mpicoll.Intracomm, name: str) -> None:
    obj = Unpicklable() if comm.rank == 1 else 1
    for _ in range(3):
        with pytest.raises(ValueError if comm.rank == 1 else RemoteError, match="this object stays here"):
            CALLS[name](comm, obj)
        assert comm.allreduce(1) == comm.size


@pytest.mark.parametrize("kind", [KeyError, CollectiveTimeout])  # also an error of ours, from within the operation
@pytest.mark.parametrize("given", [1, "x" * 1000], ids=["short", "long"])
@pytest.mark.parametrize("name", REDUCING)
def test_an_operation_that_raises_on_one_rank(comm: mpicoll.Intracomm, name: str, given: Any, kind: Any) -> None:
    if name == "exscan" and comm.size == 2:
        pytest.skip("nothing is combined")
    culprit = comm.size - 1 if name in ("scan", "exscan") else 0

    def op(a: Any, b: Any) -> Any:
        if comm.rank == culprit:
            raise kind("not here")
        return a

    with pytest.raises(kind if comm.rank == culprit else RemoteError, match="not here"):
        getattr(comm, name)(given, op)
    assert comm.allgather(comm.rank) == list(range(comm.size))


def test_predefined_operations_raise_the_same_on_every_rank(comm: mpicoll.Intracomm) -> None:
    for given, op, error in (
        (np.arange(5), MPI.MAX, ValueError),
        (np.arange(50_000), MPI.MAX, ValueError),
        (np.arange(50_000.0), MPI.BAND, TypeError),
        (1.5, MPI.BAND, TypeError),
        (1, MPI.MAXLOC, TypeError),
        (None, MPI.SUM, TypeError),
    ):
        for name in REDUCING[:2]:
            with pytest.raises(error):
                getattr(comm, name)(given, op)
    assert comm.allreduce(1) == comm.size


def test_an_operation_that_cannot_be_called(comm: mpicoll.Intracomm) -> None:
    for obj in (1, [1]):
        with pytest.raises(TypeError, match="op: None is neither"):
            comm.allreduce(obj, None)  # type: ignore[arg-type]
        wrong = None if comm.rank == 0 else operator.add
        with pytest.raises(TypeError if comm.rank == 0 else RemoteError, match="op: None is neither"):
            comm.allreduce(obj, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["bcast", "gather", "scatter", "reduce"])
def test_wrong_roots(comm: mpicoll.Intracomm, name: str) -> None:
    call = getattr(comm, name)
    for root in (comm.size, -1, 10**12):
        with pytest.raises(MPI.Exception, match=f"root: {root} is not in") as caught:
            call([1] * comm.size, root=root)
        assert caught.value.Get_error_class() == MPI.ERR_ROOT
    for root in ("x", 0.5):
        with pytest.raises(TypeError, match=f"root: {root!r}"):
            call([1] * comm.size, root=root)
    call([1] * comm.size, root=0.0)  # mpi4py takes it
    assert comm.allreduce(1) == comm.size


def test_a_wrong_root_on_one_rank(comm: mpicoll.Intracomm) -> None:
    with pytest.raises(MPI.Exception if comm.rank == 0 else RemoteError, match="root: 99"):
        comm.reduce(1, MPI.SUM, 99 if comm.rank == 0 else 1)


@pytest.mark.parametrize("items", [0, 1, 99])
def test_sequences_of_the_wrong_length(comm: mpicoll.Intracomm, items: int) -> None:
    given = [1] * items if comm.rank == 1 else [1] * comm.size
    for call in (lambda: comm.scatter(given, 1), lambda: comm.alltoall(given)):
        with pytest.raises(ValueError if comm.rank == 1 else RemoteError, match=f"{comm.size} items, got {items}"):
            call()
    with pytest.raises(TypeError if comm.rank == 1 else RemoteError, match="not iterable"):
        comm.alltoall(5 if comm.rank == 1 else given)  # type: ignore[arg-type]
    assert comm.alltoall(None) == [None] * comm.size  # type: ignore[arg-type]
    assert comm.scatter(None) is None


@pytest.mark.parametrize("first", ["allgather", "reduce", "scan", "gather"])
def test_other_collectives_of_objects_are_a_mismatch_on_every_rank(comm: mpicoll.Intracomm, first: str) -> None:
    call = CALLS[first] if comm.rank == 0 else CALLS["allreduce"]
    with pytest.raises(MismatchError, match=rf"rank 0 called {first}\(.*allreduce\(SUM\)"):
        call(comm, [1])
    assert comm.allreduce(1) == comm.size


def test_other_operations_or_roots_are_a_mismatch_on_every_rank(comm: mpicoll.Intracomm) -> None:
    for obj in (1, [1], np.arange(1000)):
        with pytest.raises(MismatchError, match=r"rank 0 called allreduce\(MAX\)"):
            comm.allreduce(obj, MPI.SUM if comm.rank else MPI.MAX)
        with pytest.raises(MismatchError, match=r"rank 0 called reduce\(SUM, root=1\)"):
            comm.reduce(obj, MPI.SUM, 0 if comm.rank else 1)


@pytest.mark.parametrize("name", ["bcast", "scatter", "alltoall"])
def test_another_kind_of_collective_is_a_mismatch(comm: mpicoll.Intracomm, name: str) -> None:
    def calls() -> None:
        CALLS[name if comm.rank == 0 else "allreduce"](comm, 1)
        comm.barrier()
        comm.barrier()

    errors = (MismatchError, RemoteError, CommunicatorBroken)
    if comm.channel.cluster is not None:  # ranks of a node wait for each other before they hear of other nodes
        errors += (CollectiveTimeout,)
        comm = mpicoll.Intracomm(MPI.Intracomm(comm), timeout=2.0)
    with pytest.raises(errors) as caught:
        calls()
    assert (
        comm.rank or comm.channel.cluster is not None or "differs" in str(caught.value) or "called" in str(caught.value)
    )


AWAITED = ["bcast", "gather", "alltoall", "allreduce"]


@pytest.mark.parametrize("name", extent.first(4, [*AWAITED, *(name for name in CALLS if name not in AWAITED)]))
def test_a_rank_that_does_not_come_is_named(comm: mpicoll.Intracomm, name: str) -> None:
    impatient = mpicoll.Intracomm(MPI.Intracomm(comm), timeout=1.0)
    try:
        if comm.rank != 1:
            check_that_rank_1_is_named(comm, lambda: CALLS[name](impatient, "x"))
    finally:
        wait_politely(MPI.COMM_WORLD)  # rank 1 comes neither before the others give up nor after that


def check_that_rank_1_is_named(comm: mpicoll.Intracomm, call: Callable[[], Any]) -> None:
    # With several nodes, a rank may hear of one on its own way there that waits itself, or from one that has given up.
    nodes = comm.channel.cluster is not None
    with pytest.raises(
        (CollectiveTimeout, RemoteError) if nodes else CollectiveTimeout, match="did not arrive"
    ) as caught:
        call()
    if isinstance(caught.value, CollectiveTimeout) and not nodes:
        assert caught.value.missing_ranks == (1,)


class Gathering:
    """An object that makes a collective while it is pickled."""

    comm: mpicoll.Intracomm

    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return Gathering, (sum(self.comm.allgather(self.value)),)


def test_objects_may_make_collectives_while_they_are_pickled(comm: mpicoll.Intracomm) -> None:
    Gathering.comm = comm
    total = sum(range(comm.size))
    assert [each.value for each in comm.allgather(Gathering(comm.rank))] == [total] * comm.size
    result = comm.allreduce(Gathering(comm.rank), lambda a, b: getattr(a, "value", a) + getattr(b, "value", b))
    assert result == total * comm.size


@pytest.mark.parametrize("algorithm", ["native", "ring", "bruck"])
def test_default_algorithms_of_the_communicator(comm: mpicoll.Intracomm, algorithm: str) -> None:
    other = mpicoll.Intracomm(MPI.Intracomm(comm), algorithm=algorithm)
    for obj in (1.5, {"a": 1}, "x" * 3000, np.arange(30_000.0)):
        assert differ(other.allgather(obj), [obj] * comm.size) == ""
        assert differ(other.bcast(obj, 1), obj) == ""
        assert differ(other.alltoall([obj] * comm.size), [obj] * comm.size) == ""
        assert differ(other.scatter([obj] * comm.size, 1), obj) == ""
        gathered = other.gather(obj, 1)
        assert differ(gathered, [obj] * comm.size if comm.rank == 1 else None) == ""
    assert other.allreduce(1) == comm.size
    assert np.array_equal(other.allreduce(np.arange(30_000)), comm.size * np.arange(30_000))


def test_subcommunicators_of_every_size(subcomm: mpicoll.Intracomm) -> None:
    obj = {"rank": subcomm.rank}
    assert subcomm.allgather(obj) == [{"rank": rank} for rank in range(subcomm.size)]
    assert subcomm.allreduce(1.0) == subcomm.size
    assert subcomm.scan("x" * 600) == "x" * 600 * (subcomm.rank + 1)
    assert subcomm.alltoall(["x" * 700] * subcomm.size) == ["x" * 700] * subcomm.size


def made(kind: type, nbytes: int, rank: int) -> Any:
    """Return an object of a type, of about so many bytes, another one on each rank."""
    makers: dict[type, Callable[[], Any]] = {
        int: lambda: rank * nbytes,
        float: lambda: rank / (1 + nbytes),
        str: lambda: chr(97 + rank) * (nbytes // (1 + rank)),
        list: lambda: [rank] * (nbytes // 64),
        np.ndarray: lambda: np.arange(nbytes // 8) + rank,
    }
    return makers[kind]()


def test_a_mixture_of_calls_gives_what_mpi4py_gives(comm: mpicoll.Intracomm, plain: MPI.Intracomm) -> None:
    draws = random.Random(int(os.environ.get("MPICOLL_TEST_SEED", "11")))
    for turn in range(300):
        name, root = draws.choice(list(CALLS)), draws.randrange(comm.size)
        nbytes = int(2 ** draws.uniform(0, 18))
        kind = draws.choice([int, float, str, list, np.ndarray])
        own = made(kind, nbytes, comm.rank)
        arguments: tuple[Any, ...] = (own,)
        if name in ("scatter", "alltoall"):
            arguments = ([made(kind, nbytes, rank) for rank in range(comm.size)],)
        arguments += ((MPI.SUM,) if name in REDUCING else ()) + (
            (root,) if name in ("bcast", "gather", "scatter", "reduce") else ()
        )
        got, expected = getattr(comm, name)(*arguments), getattr(plain, name)(*arguments)
        assert differ(got, expected) == "", (turn, name, kind, nbytes)


def test_results_lie_in_ordinary_memory(comm: mpicoll.Intracomm) -> None:
    """A forked child would share them with its parent if they lay where ranks see each other's memory."""
    own, home = np.ones(50_000), segment.own()
    results = [
        comm.allreduce(own),
        comm.bcast(own),
        comm.allgather(own)[0],
        comm.scatter([own] * comm.size),
        comm.alltoall([own] * comm.size)[-1],
    ]
    for result in results:
        assert not home.address <= result.ctypes.data < home.address + home.nbytes


@pytest.mark.parametrize("length", [1, 100_000])
def test_a_function_that_differs_between_ranks_gives_one_result(comm: mpicoll.Intracomm, length: int) -> None:
    """As the order of sets of strings does."""
    result = comm.allreduce([0] * length, lambda a, b: [comm.rank + 1])
    assert comm.allgather(result) == [[1] if comm.size > 1 else [0] * length] * comm.size


class Calling:
    """A key of a dictionary that makes a collective call when it is pickled, and when it is unpickled."""

    comm: Any = None

    def __reduce__(self) -> Any:
        return _called, (self.comm.allreduce(1),)


def _called(size: int) -> int:
    return int(Calling.comm.allreduce(size))


def test_picklers_may_make_collective_calls(comm: mpicoll.Intracomm) -> None:
    """The records of the call that is being made are in use then."""
    Calling.comm, size = comm, comm.size
    for _ in range(3):
        assert comm.allgather({Calling(): comm.rank}) == [{size * size: rank} for rank in range(size)]
        assert comm.alltoall([{Calling(): comm.rank}] * size) == [{size * size: rank} for rank in range(size)]
    assert comm.allgather(comm.rank) == list(range(size))


def test_objects_may_be_exchanged_from_several_threads(comm: mpicoll.Intracomm) -> None:
    """One communicator each."""
    others = [comm.Dup() for _ in range(3)]

    def work(other: mpicoll.Intracomm) -> None:
        for step in range(200):
            assert other.allgather((step, other.rank)) == [(step, rank) for rank in range(other.size)]
            assert other.bcast({"a": step}, step % other.size) == {"a": step}

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, others))
    for other in others:
        other.Free()


def of_length(nbytes: int, choice: random.Random) -> Any:
    """Return an object of about so many bytes, of a type that travels in one way or another."""
    text = "".join(choice.choice("abcdefgh") for _ in range(min(nbytes, 50))) * (nbytes // 50 + 1)
    ways: list[Callable[[str], Any]] = [
        str, str.encode, lambda text: [text, 1], lambda text: {"a": text[: nbytes // 2], "b": [text[: nbytes // 2]]},
        lambda text: {1, text}, lambda text: np.frombuffer(text.encode(), np.uint8),
        lambda text: bytearray(text.encode()), lambda text: 1.5, lambda text: [1.5] * (len(text) // 16),
        lambda text: {"a": np.frombuffer(text.encode(), np.int8), "b": (np.float32(2), [None])},
        lambda text: Vector([len(text), text]), lambda text: [np.ones((len(text) // 80, 5, 2)), {"x": {2.5}}],
    ]  # fmt: skip
    return choice.choice(ways)(text[:nbytes])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mixed", [False, True])
def test_objects_of_any_length_arrive(comm: mpicoll.Intracomm, plain: Any, mixed: bool, seed: int) -> None:
    """The bytes of long ones follow their records, in compiled code or, where one needs it, on all ranks in Python."""
    common, size = random.Random(seed), comm.size
    lengths = [0, 400, 487, 488, 489, 500, 1000, 4096, 30_000, 65_535, 65_536, 65_537, 90_000, 300_000]
    for _ in range(40):
        each, root = [common.choice(lengths)] * size, common.randrange(size)
        if mixed:
            each = [common.choice(lengths) for _ in range(size)]
        given = [of_length(nbytes, common) for nbytes in each]
        own = given[comm.rank]
        for results in (
            [found.bcast(own, root) for found in (comm, plain)],
            [found.allgather(own) for found in (comm, plain)],
            [found.gather(own, root) for found in (comm, plain)],
        ):
            assert differ(*results) == "", (each, [type(found) for found in given])
        several = [given[(comm.rank + rank) % size] for rank in range(size)]
        for results in (
            [found.scatter(given if comm.rank == root else None, root) for found in (comm, plain)],
            [found.alltoall(several) for found in (comm, plain)],
        ):
            assert differ(*results) == "", (each, [type(found) for found in given])
    assert comm.allgather(comm.rank) == list(range(size))


class Counted:
    """An object that counts how often it is pickled."""

    def __init__(self, contents: Any) -> None:
        self.contents, self.count = contents, 0

    def __reduce__(self) -> Any:
        self.count += 1
        return Counted, (self.contents,)


@pytest.mark.parametrize("nbytes", [10, 1000, 30_000, 70_000, 300_000])
def test_no_object_is_pickled_twice(comm: mpicoll.Intracomm, nbytes: int) -> None:
    """Wherever it turns out that compiled code has to leave a call to Python."""
    size = comm.size
    others: list[Any] = ["x" * nbytes, np.zeros(nbytes // 8), [1.5] * (nbytes // 16), np.zeros((9, 8))[:, ::3], 5]
    for number in range(4 * len(others)):
        given: list[Any] = [Counted("y" * (nbytes if (number + rank) % 3 else 5)) for rank in range(size)]
        given[number % size] = others[number % len(others)]
        counted = [each for each in given if type(each) is Counted]
        received = comm.alltoall(given)
        assert [each.count for each in counted] == [1] * len(counted)
        assert [type(each) for each in received] == [type(given[comm.rank])] * size
        root = number % size
        comm.scatter(given if comm.rank == root else None, root)
        assert [each.count for each in counted] == [1 + (comm.rank == root)] * len(counted)
        own = Counted(["z" * nbytes, np.zeros(nbytes // 8)])
        assert type(comm.bcast(own, root)) is Counted
        assert own.count == (comm.rank == root)
        comm.allgather(own)
        comm.gather(own if comm.rank % 2 else 3, root)
        comm.allreduce(own, lambda a, b: a)
        assert own.count == (comm.rank == root) + comm.rank % 2 + 2
        counted = Counted(0)
        comm.bcast([counted, "x" * nbytes], root)
        assert counted.count == (comm.rank == root)


def test_a_pickler_that_knows_no_buffers(comm: mpicoll.Intracomm) -> None:
    """Programs compress their pickles so, with the newest protocol."""
    given = {"rank": comm.rank, "values": np.arange(50_000)}
    try:
        MPI.pickle.__init__(  # type: ignore[misc]
            lambda obj, protocol: zlib.compress(pickle.dumps(obj, protocol)),
            lambda data: pickle.loads(zlib.decompress(data)),
            pickle.HIGHEST_PROTOCOL,
        )
        gathered, found = comm.allgather(given), comm.bcast(given if comm.rank == 0 else None)
    finally:
        MPI.pickle.__init__()  # type: ignore[misc]
    assert [each["rank"] for each in gathered] == list(range(comm.size))
    np.testing.assert_array_equal(found["values"], given["values"])


@pytest.mark.parametrize("name", ["bcast", "allgather", "scatter", "alltoall", "allreduce"])
def test_a_pickler_that_returns_no_bytes_is_an_error_on_all_ranks(comm: mpicoll.Intracomm, name: str) -> None:
    own: Any = [Vector([1])] * comm.size if name in ("scatter", "alltoall") else Vector([1])
    getattr(comm, name)(own)
    if comm.rank == 0:
        MPI.pickle.__init__(lambda obj, protocol=None: None, None, 4)  # type: ignore[misc]
    try:
        with pytest.raises(RemoteError if comm.rank else TypeError):
            getattr(comm, name)(own)
    finally:
        MPI.pickle.__init__()  # type: ignore[misc]
    assert comm.allgather(Vector([comm.rank])) == [Vector([rank]) for rank in range(comm.size)]


def test_the_memory_of_compiled_code_is_free_after_an_interrupt(
    comm: mpicoll.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all later calls would take the general way."""
    comm.allgather(1)
    compiled = comm._objects.exchange.compiled

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(type(compiled), "taken", interrupted)
        with pytest.raises(KeyboardInterrupt):
            comm.allreduce({comm.rank})
        patched.setattr(type(compiled), "_payload", interrupted)
        patched.setattr(type(compiled), "_pickles", interrupted)
        with pytest.raises(KeyboardInterrupt):
            comm.alltoall([{"a"}, *[{"x" * 70_000}] * (comm.size - 1)])
    assert compiled._words[[IN_USE, HELD_COUNT, PICKLE_APART]].tolist() == [0, 0, 0]
    assert comm.alltoall([{comm.rank}] * comm.size) == [{rank} for rank in range(comm.size)]


@pytest.mark.parametrize("name", REDUCING)
def test_arrays_of_any_length_are_reduced_as_by_mpi4py(comm: mpicoll.Intracomm, plain: Any, name: str) -> None:
    """Equal long ones by the collective on arrays, others by Python's operators."""
    common = random.Random(5)
    shapes: list[Any] = [(), (1,), (60,), (61,), (62,), (3, 50), (8192,), (8193,), (100, 100), (40_000,), (2, 0)]
    for number in range(30):
        shape, char = common.choice(shapes), common.choice("dfilBD?")
        own = np.random.default_rng(number).integers(0, 3, shape).astype(char)
        if number % 3 == 0 and comm.rank == comm.size - 1:
            own = own.reshape((1, *shape))  # the sum of both has this shape
        if number % 5 == 0 and comm.rank == 0 and name.endswith("reduce"):
            own.flags.writeable = False
        for op in (MPI.SUM, MPI.PROD, MPI.BXOR, MPI.MAX):
            found, expected = reduced(comm, name, own, op), expected_of(plain, name, own, op)
            if "error" in (found[0], expected[0]):
                continue
            assert differ(found[1], expected[1]) == "", (shape, char)
            if isinstance(found[1], np.ndarray):
                assert found[1].flags.writeable == expected[1].flags.writeable
    assert comm.allgather(comm.rank) == list(range(comm.size))


@pytest.mark.parametrize("name", REDUCING)
def test_pairs_are_reduced_as_by_mpi4py(comm: mpicoll.Intracomm, plain: Any, name: str) -> None:
    common = random.Random(9)
    values: list[Any] = [0, 1, -5, 2**63 - 1, 2**64, 0.0, -0.0, 1.5, math.inf, math.nan, "a", True]
    for _ in range(150):
        kinds = common.choice([(int,), (float,), (float, int), (float, int, bool)])
        possible = [each for each in values if type(each) in kinds]
        pairs: list[Any] = [(common.choice(possible), common.choice([0, 1, 2, rank])) for rank in range(comm.size)]
        if common.random() < 0.2:
            pairs = list(map(list, pairs))
        for op in (MPI.MAXLOC, MPI.MINLOC):
            results = [getattr(each, name)(pairs[comm.rank], op) for each in (comm, plain)]
            assert differ(*results) == "", pairs


NUMBERS: list[Any] = [0, 1, -3, 2**31, 2**33 + 1, -(2**62), 2**62, 2**63 - 1, -(2**63), 2**63, 0.0, -0.0, 0.1, -2.5]
NUMBERS += [1e300, 1e-310, math.inf, -math.inf, math.nan, True]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", REDUCING)
def test_numbers_are_reduced_as_by_mpi4py(comm: mpicoll.Intracomm, plain: Any, name: str, seed: int) -> None:
    """Of one type in compiled code, unless the result has more than 64 bits; of several types in Python."""
    choice = random.Random(seed)
    kinds = (int,), (float,), (int, float, bool)
    for _ in range(40):
        possible = [each for each in NUMBERS if type(each) in choice.choice(kinds)]
        values = [choice.choice(possible) for _ in range(comm.size)]
        for op in (MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results = [getattr(each, name)(values[comm.rank], op) for each in (comm, plain)]
            assert differ(*results) == "", values


@pytest.mark.parametrize("shape", [(0, 1 << 31), (1 << 30, 8, 0)])
def test_empty_arrays_of_any_shape_arrive_in_containers(comm, shape):
    found = comm.bcast([np.empty(shape, np.uint8)])
    assert found[0].shape == shape
    assert [each[0].shape for each in comm.allgather([np.empty(shape, np.uint8)])] == [shape] * comm.size
