"""The compiled path takes plain calls, and leaves everything else to the general path, which gives the same results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from mpi4py.util import dtlib

import mpicoll
from mpicoll import Intracomm
from mpicoll.collectives import interrupted_calls
from mpicoll.collectives.interrupted_calls import refuse_if_running
from mpicoll.errors import RemoteError
from mpicoll.kernels import operation_words as words
from mpicoll.shared_memory import fast_dispatch
from tests.mpi.conftest import TIMEOUT
from tests.mpi.memory import HERE, KINDS, place, went_the_short_way

pytestmark = pytest.mark.mpi(min_size=2)
COUNT = 240
IN_PLACE = MPI.IN_PLACE


class Sub(np.ndarray):
    pass


def filled(comm: Intracomm, count: int = COUNT, dtype: Any = np.float64) -> np.ndarray:
    return (np.arange(count) % 7 + comm.rank).astype(dtype)


def total(comm: Intracomm, count: int = COUNT) -> np.ndarray:
    return comm.size * (np.arange(count) % 7) + comm.size * (comm.size - 1) // 2


def warm(comm: Intracomm) -> None:
    """Make a call of each kind on the general path; from the second on the compiled one is taken."""
    for _ in range(2):
        data, wide = filled(comm), np.zeros(COUNT * comm.size)
        comm.Allreduce(data, np.zeros(COUNT))
        comm.Reduce(data, np.zeros(COUNT))
        comm.Bcast(data)
        comm.Allgather(data, wide)
        comm.Reduce_scatter_block(wide, data)
        comm.Barrier()


def range_of(comm: Intracomm) -> list[int]:
    return [rank + 2 for rank in range(comm.size)]


def starts_of(comm: Intracomm) -> np.ndarray:
    return np.cumsum([0, *range_of(comm)])[:-1]


PLAIN: dict[str, Callable[[Intracomm], Any]] = {
    "two arrays": lambda c: c.Allreduce(filled(c), np.zeros(COUNT)),
    "keywords": lambda c: c.Allreduce(sendbuf=filled(c), recvbuf=np.zeros(COUNT), op=MPI.SUM),
    "auto": lambda c: c.Allreduce(filled(c), np.zeros(COUNT), algorithm="auto"),
    "asked for": lambda c: c.Allreduce(filled(c), np.zeros(COUNT), algorithm="shared"),
    "in place": lambda c: c.Allreduce(IN_PLACE, filled(c)),
    "the same array": lambda c: (lambda a: c.Allreduce(a, a))(filled(c)),
    "dimensions": lambda c: c.Allreduce(filled(c).reshape(4, -1), np.zeros((2, 3, COUNT // 6))),
    "slices": lambda c: c.Allreduce(filled(c, 2 * COUNT)[COUNT:], np.zeros(3 * COUNT)[9 : COUNT + 9]),
    "read-only source": lambda c: c.Allreduce(np.broadcast_to(filled(c), (1, COUNT))[0], np.zeros(COUNT)),
    "shared": lambda c: c.Allreduce(c.zeros(COUNT), c.empty(COUNT)),
    "long": lambda c: c.Allreduce(np.ones(200_000), np.ones(200_000)),
    "reduce": lambda c: c.Reduce(filled(c), np.zeros(COUNT) if c.rank == 0 else None),
    "bcast": lambda c: c.Bcast(filled(c)),
    "allgather": lambda c: c.Allgather(filled(c), np.zeros((c.size, COUNT))),
    "reduce_scatter_block": lambda c: c.Reduce_scatter_block(np.ones(COUNT * c.size), np.zeros(COUNT)),
    "barrier": lambda c: c.Barrier(),
    "lists": lambda c: c.Allreduce([filled(c), MPI.DOUBLE], [np.zeros(COUNT), MPI.DOUBLE]),
    "list and array": lambda c: c.Allreduce([filled(c), COUNT, MPI.DOUBLE], np.zeros(COUNT)),
    "subclass": lambda c: c.Allreduce(filled(c).view(Sub), np.zeros(COUNT).view(Sub)),
    "list of a subclass": lambda c: c.Allreduce([filled(c).view(Sub), MPI.DOUBLE], np.zeros(COUNT)),
    "scalar": lambda c: c.Allreduce(np.float64(c.rank), np.zeros(1)),
    "list of a scalar": lambda c: c.Allreduce([np.float64(c.rank), MPI.DOUBLE], [np.zeros(()), MPI.DOUBLE]),
    "list in place": lambda c: c.Allreduce(IN_PLACE, (filled(c), MPI.DOUBLE)),
    "list at the root": lambda c: c.Reduce(
        [filled(c), MPI.DOUBLE], [np.zeros(COUNT), COUNT, MPI.DOUBLE] if c.rank == 1 else None, MPI.SUM, 1
    ),
    "part of a list": lambda c: c.Allreduce([np.append(filled(c), 9.0), COUNT, MPI.DOUBLE], np.zeros(COUNT)),
    "list from a place": lambda c: c.Allreduce([np.append(9.0, filled(c)), (COUNT, 1), MPI.DOUBLE], np.zeros(COUNT)),
    "letter": lambda c: c.Allreduce([filled(c), "d"], np.zeros(COUNT)),
    "counts of blocks": lambda c: c.Allgather([filled(c), COUNT], [np.zeros(COUNT * c.size), COUNT, MPI.DOUBLE]),
    "allgatherv": lambda c: c.Allgatherv(np.ones(c.rank + 2), [np.zeros(99), range_of(c), MPI.DOUBLE]),
    "gatherv": lambda c: c.Gatherv(np.ones(c.rank + 2), [np.zeros(99), range_of(c)] if c.rank == 1 else None, 1),
    "scatterv": lambda c: c.Scatterv([np.ones(99), range_of(c), "d"] if c.rank == 1 else None, np.zeros(c.rank + 2), 1),
    "reduce_scatter": lambda c: c.Reduce_scatter(np.ones(sum(range_of(c))), np.zeros(c.rank + 2), range_of(c)),
    "allgather in place": lambda c: c.Allgather(IN_PLACE, np.ones((c.size, COUNT))),
    "allgather in place into a list": lambda c: c.Allgather(IN_PLACE, [np.ones((c.size, COUNT)), MPI.DOUBLE]),
    "allgatherv in place": lambda c: c.Allgatherv(IN_PLACE, [np.ones(99), range_of(c), MPI.DOUBLE]),
    "allgatherv into an array": lambda c: c.Allgatherv(filled(c), np.zeros((c.size, COUNT))),
    "allgatherv into an array and type": lambda c: c.Allgatherv(filled(c), [np.zeros(c.size * COUNT), MPI.DOUBLE]),
    "allgatherv with vectors": lambda c: c.Allgatherv(
        np.ones(c.rank + 2), [np.zeros(99), np.array(range_of(c), np.int32), starts_of(c), MPI.DOUBLE]
    ),
    "allgatherv with a pair of vectors": lambda c: c.Allgatherv(
        np.ones(c.rank + 2), [np.zeros(99), (np.array(range_of(c)), starts_of(c))]
    ),
    "gatherv with vectors": lambda c: c.Gatherv(
        np.ones(c.rank + 2), [np.zeros(99), np.array(range_of(c), np.uint8), starts_of(c), "d"] if c.rank == 0 else None
    ),
    "scatterv of an array": lambda c: c.Scatterv(np.ones(c.size * COUNT) if c.rank == 0 else None, np.zeros(COUNT)),
    "reduce_scatter with a vector": lambda c: c.Reduce_scatter(
        np.ones(sum(range_of(c))), np.zeros(c.rank + 2), np.array(range_of(c))
    ),
    "equal counts": lambda c: c.Allgatherv(filled(c), [np.zeros((c.size, COUNT)), [COUNT] * c.size]),
    "Fortran's order": lambda c: c.Allreduce(np.ones((COUNT, 2), order="F"), np.zeros((COUNT, 2), order="F")),
    "memoryviews": lambda c: c.Allreduce(memoryview(filled(c)), memoryview(np.zeros(COUNT))),
    "blocks apart": lambda c: c.Gatherv(
        np.ones(c.rank + 2), [np.zeros(199), range_of(c), 2 * starts_of(c), MPI.DOUBLE] if c.rank == 0 else None
    ),
    "one count": lambda c: c.Allgatherv(filled(c), [np.zeros((c.size, COUNT)), COUNT]),
    "bcast of a list": lambda c: c.Bcast([filled(c), COUNT, MPI.DOUBLE], root=1),
    "allgather of lists": lambda c: c.Allgather([filled(c), MPI.DOUBLE], [np.zeros(COUNT * c.size), MPI.DOUBLE]),
    "blocks of lists": lambda c: c.Reduce_scatter_block(
        [np.ones(COUNT * c.size), MPI.DOUBLE], [np.zeros(COUNT), MPI.DOUBLE]
    ),
    "bytes": lambda c: c.Allreduce([filled(c).view(np.uint8), MPI.DOUBLE], np.zeros(COUNT)),
    "long double": lambda c: c.Allgather([np.ones(3, "g"), MPI.LONG_DOUBLE], np.ones(3 * c.size, "g")),
    "records": lambda c: c.Bcast([np.ones(3, RECORD), RECORD_TYPE]),
    "records to one rank": lambda c: c.Gatherv(
        [np.ones(3, RECORD), RECORD_TYPE], [np.ones(3 * c.size, RECORD), [3] * c.size, RECORD_TYPE]
    ),
    "long doubles to one rank": lambda c: c.Gatherv(
        np.ones(c.rank + 2, "g"), [np.zeros(99, "g"), range_of(c)] if c.rank == 1 else None, 1
    ),
    "long doubles from one rank": lambda c: c.Scatterv(
        [np.zeros(99, "g"), range_of(c)] if c.rank == 1 else None, np.ones(c.rank + 2, "g"), 1
    ),
    "distance of blocks": lambda c: c.Allgatherv(np.ones(3), [np.zeros(9 * c.size), (3, 9)]),
    "nothing": lambda c: c.Allreduce(np.zeros(0), np.zeros(0)),
    "nothing of any type": lambda c: c.Bcast(np.zeros(0, "f8" if c.rank else "i4")),
    "nothing gathered": lambda c: c.Gatherv(np.zeros(0), [np.zeros(9), [0] * c.size] if c.rank == 1 else None, 1),
    "column": lambda c: c.Bcast([np.zeros(2 * COUNT), 1, COLUMN]),
    "column to a vector": lambda c: c.Allreduce([np.ones(2 * COUNT), 1, COLUMN], np.zeros(COUNT)),
    "gather of columns": lambda c: c.Gather([np.ones(2 * COUNT), 1, COLUMN], [np.ones((c.size, 2 * COUNT)), 1, COLUMN]),
    "gatherv of columns": lambda c: c.Gatherv(
        [np.ones(2 * COUNT), 1, COLUMN],
        [np.ones((c.size, 2 * COUNT)), [1] * c.size, COLUMN] if c.rank == 1 else None,
        1,
    ),
    "scatterv into columns": lambda c: c.Scatterv(
        [np.ones(COUNT * c.size), [COUNT] * c.size] if c.rank == 0 else None, [np.ones(2 * COUNT), 1, COLUMN]
    ),
}
RECORD = np.dtype([("number", "i4"), ("weights", "f8", 2)])
RECORD_TYPE = dtlib.from_numpy_dtype(RECORD).Commit()
COLUMN = MPI.DOUBLE.Create_vector(COUNT, 1, 2).Commit()
OP = mpicoll.op(lambda a, b: a + b)
LEFT_ALONE: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "strided": (lambda a: np.repeat(a, 2)[::2], lambda a: a, {}),
    "strided target": (lambda a: a, lambda a: np.repeat(a, 2)[::2], {}),
    "byte-swapped": (lambda a: a.astype(">f8"), lambda a: a.astype(">f8"), {}),
    "misaligned": (lambda a: np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view("f8"), lambda a: a, {}),
    "strided subclass": (lambda a: np.repeat(a, 2)[::2].view(Sub), lambda a: a, {}),
    "own operation": (lambda a: a, lambda a: a, {"op": OP}),
    "algorithm": (lambda a: a, lambda a: a, {"algorithm": "ring"}),
}


@pytest.mark.skipif(not HERE, reason="no shared memory")
@pytest.mark.parametrize("name", PLAIN)
def test_plain_calls_go_the_short_way(comm: Intracomm, name: str) -> None:
    if name == "long" and comm._scope.channel.shared_nbytes < 1 << 24:
        pytest.skip("only short vectors are done on shared memory here")
    warm(comm)
    PLAIN[name](comm)  # a bcast or reduce of this length is compared the first time
    PLAIN[name](comm)
    assert went_the_short_way(comm)


@pytest.mark.skipif(not HERE, reason="no shared memory")
@pytest.mark.parametrize("name", PLAIN)
def test_a_rank_on_the_long_way_makes_the_same_call(comm: Intracomm, name: str, monkeypatch: Any) -> None:
    """As where it has an argument that compiled code does not take, which a barrier cannot have."""
    if name == "long" and comm._scope.channel.shared_nbytes < 1 << 24:
        pytest.skip("only short vectors are done on shared memory here")
    warm(comm)
    for odd in range(comm.size):
        with monkeypatch.context() as patch:
            if comm.rank == odd:
                patch.setattr(comm, "_table", 0)
                patch.setattr(comm, "_auto_table", 0)
                patch.setattr(comm._vector_calls, "table", 0)
            for _ in range(3):
                PLAIN[name](comm)
        comm.Allreduce(filled(comm), result := np.zeros(COUNT))
        assert (result == total(comm)).all()


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_calls_go_the_long_way(comm: Intracomm, name: str, everywhere: bool) -> None:
    """On all ranks, or on one only, as far as it is a matter of that rank alone."""
    if not everywhere and name in ("own operation", "algorithm"):
        pytest.skip("that would be another call")
    warm(comm)
    one, other, settings = LEFT_ALONE[name]
    odd = everywhere or comm.rank == 1
    for _ in range(3):
        send, recv = filled(comm), np.zeros(COUNT)
        if odd:
            recv = other(recv)
            comm.Allreduce(one(send), recv, **settings)
        else:
            comm.Allreduce(send, recv)
        assert not HERE or went_the_short_way(comm) == (not odd)
        assert (np.asarray(recv).reshape(-1) == total(comm)[: np.size(recv)]).all()
        comm.Allreduce(filled(comm), result := np.zeros(COUNT))
        assert (result == total(comm)).all()
        assert not HERE or went_the_short_way(comm)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda c: c.Allreduce(np.zeros(3), np.zeros(4)), ValueError),
        (lambda c: c.Allreduce(np.zeros(3), np.zeros(3, np.float32)), ValueError),
        (lambda c: c.Allreduce(np.zeros(3, bool), np.zeros(3, bool)), (TypeError, MPI.Exception)),
        (lambda c: (lambda a: c.Allreduce(a[:6], a[3:9]))(np.zeros(9)), ValueError),
        (lambda c: (lambda a: c.Allreduce(a[:6], a[3:9]))(c.zeros(9)), ValueError),
        (lambda c: (lambda a: c.Allgather(a[:2], a[1 : 1 + 2 * c.size]))(c.zeros(99)), ValueError),
        (lambda c: c.Allreduce(IN_PLACE, np.broadcast_to(np.zeros(3), (3,))), ValueError),
        (lambda c: c.Allreduce(np.zeros(3), None), TypeError),
        (lambda c: c.Allreduce([np.zeros(3), MPI.DOUBLE], [np.zeros(4), MPI.DOUBLE]), ValueError),
        (lambda c: c.Allreduce(np.zeros(()), [np.float64(3), MPI.DOUBLE]), ValueError),
        (lambda c: c.Allreduce([np.zeros(3), 4, MPI.DOUBLE], np.zeros(3)), ValueError),
        (lambda c: c.Allgather(np.zeros(2), [np.zeros(2 * c.size), 2 * c.size, MPI.DOUBLE]), ValueError),
        (lambda c: c.Bcast(np.zeros(3), c.size), ValueError),
        (lambda c: c.Bcast(np.zeros(3), -1), ValueError),
        (lambda c: c.Reduce(np.zeros(3), np.zeros(3), root=1 << 70), (ValueError, TypeError)),
        (lambda c: c.Reduce_scatter_block(np.zeros(2 * c.size + 1), np.zeros(2)), ValueError),
        (lambda c: c.Allgather(np.zeros(2), np.zeros(2 * c.size + 1)), ValueError),
        (lambda c: c.Allreduce(IN_PLACE, np.zeros(3), "SUM"), TypeError),
    ],
)
def test_wrong_arguments_are_refused_as_ever(comm: Intracomm, call: Callable[[Intracomm], Any], error: Any) -> None:
    warm(comm)
    number = comm._scope.channel.dispatch.number
    with pytest.raises(error):
        call(comm)
    assert comm._scope.channel.dispatch.number <= number + 1
    comm.Allreduce(filled(comm), result := np.zeros(COUNT))
    assert (result == total(comm)).all()


def test_lists_give_the_results_of_arrays(comm: Intracomm) -> None:
    size, rank = comm.size, comm.rank
    warm(comm)
    for _ in range(3):
        data, result, wide = filled(comm), np.zeros((2, COUNT // 2)), np.zeros((size, COUNT))
        comm.Allreduce([data, MPI.DOUBLE], [result, MPI.DOUBLE])
        assert (result.reshape(-1) == total(comm)).all()
        comm.Allgather([data, MPI.DOUBLE], [wide, MPI.DOUBLE])
        comm.Bcast((data, COUNT, MPI.DOUBLE), 1)
        assert all((wide[other] == np.arange(COUNT) % 7 + other).all() for other in range(size))
        assert (data == np.arange(COUNT) % 7 + 1).all()
        comm.Reduce(data.view(Sub), result.view(Sub), root=0)
        assert (result.reshape(-1) == (size * (np.arange(COUNT) % 7 + 1) if rank == 0 else total(comm))).all()
        comm.Allreduce([np.float64(rank), MPI.DOUBLE], [highest := np.zeros(()), MPI.DOUBLE], MPI.MAX)
        assert highest == size - 1
        whole = [np.arange(2.0 * size), MPI.DOUBLE] if rank == 1 else None
        part, back = np.zeros(2), np.zeros(2 * size)
        comm.Scatter(whole, [part, MPI.DOUBLE], 1)
        comm.Gather([part, MPI.DOUBLE], [back, MPI.DOUBLE] if rank == 0 else None, 0)
        assert part.tolist() == [2 * rank, 2 * rank + 1]
        assert back.tolist() == (list(range(2 * size)) if rank == 0 else [0] * (2 * size))


@pytest.mark.parametrize("count", [1, 1000, 200_000])
def test_allgather_in_place_keeps_the_own_part(comm: Intracomm, count: int) -> None:
    size, rank, counts = comm.size, comm.rank, [count + other for other in range(comm.size)]
    warm(comm)
    for make in (np.zeros, comm.zeros):
        for _ in range(3):
            whole = make((size, count))
            whole[rank] = np.arange(count) + rank
            comm.Allgather(IN_PLACE, whole)
            assert all((whole[other] == np.arange(count) + other).all() for other in range(size))
            uneven = make(sum(counts) + 3)
            begin = sum(counts[:rank])
            uneven[begin : begin + counts[rank]] = rank + 1
            comm.Allgatherv(IN_PLACE, [uneven, counts])
            assert (uneven == np.repeat([*range(1, size + 1), 0], [*counts, 3])).all()


def test_lists_mean_flat_memory(comm: Intracomm) -> None:
    """In another order than C's, too."""
    warm(comm)
    data, result = np.arange(6.0).reshape(2, 3), np.zeros((3, 2), order="F")
    comm.Allreduce([data, MPI.DOUBLE], result)
    assert (result.T.reshape(-1) == comm.size * np.arange(6)).all()


@pytest.mark.parametrize("counts", [(1, 1, 1), (1,), (1, 2, 3, 4, 5)])
def test_a_tuple_that_is_no_pair_is_left_to_the_general_path(comm: Intracomm, counts: tuple[int, ...]) -> None:
    warm(comm)
    parts, whole = np.zeros(2), np.zeros(2 * comm.size)
    ignored = [whole, counts, MPI.DOUBLE]
    comm.Gather(parts, ignored if comm.rank != 0 else whole, 0)
    if len(counts) != comm.size:
        with pytest.raises((ValueError, TypeError, RemoteError)):
            comm.Allgatherv(parts, ignored if comm.rank == 1 else [whole, [2] * comm.size, MPI.DOUBLE])
        return
    comm.Allgatherv(np.zeros(counts[comm.rank]), [np.zeros(sum(counts)), counts, MPI.DOUBLE])


def test_three_items_without_a_datatype_are_refused(comm: Intracomm) -> None:
    warm(comm)
    with pytest.raises((TypeError, RemoteError)):
        comm.Allreduce([np.zeros(3), 2, 1] if comm.rank == 1 else np.zeros(2), np.zeros(2))


def test_overlap_is_seen_through_different_arrays(comm: Intracomm) -> None:
    """Two arrays over the same memory are in-place if they are the same elements, and refused if they only overlap."""
    warm(comm)
    for kind in KINDS:
        data = place(comm, kind, filled(comm))
        twin = np.frombuffer(data.data, np.float64)
        comm.Allreduce(data, data[:])
        assert (twin == total(comm)).all()
        data[:] = filled(comm)
        comm.Allreduce(twin, data)
        assert (data == total(comm)).all()
        with pytest.raises(ValueError, match="overlap"):
            comm.Allreduce(twin[:100], data[50:150])


def test_operands_are_combined_in_rank_order(comm: Intracomm) -> None:
    """Through slots, in shares, and through stages; also for operations that do not commute."""
    left = mpicoll.op(lambda a, b: a, commutative=False)
    right = mpicoll.op(lambda a, b: b, commutative=False)
    digits = mpicoll.op(lambda a, b: a * 3 + b * 1, commutative=False)  # not associative: only the order is looked at
    size, rank = comm.size, comm.rank
    weights = [3 ** (size - 1 - r) for r in range(size)]
    for count in (1, 300, 100_000):
        for kind in KINDS:
            for op, wanted in ((left, 1), (right, size), (digits, sum((r + 1) * w for r, w in enumerate(weights)))):
                send, recv = place(comm, kind, np.full(count, rank + 1)), np.zeros(count, np.int64)
                if op is digits and not (HERE and comm.choice("allreduce", send.nbytes) == "shared"):
                    continue
                comm.Allreduce(send, recv, op)
                assert (recv == wanted).all(), (count, kind)
                comm.Reduce(send, recv, op, size - 1)
                assert rank != size - 1 or (recv == wanted).all()
                part = np.zeros(count, np.int64)
                comm.Reduce_scatter_block(place(comm, kind, np.full(count * size, rank + 1)), part, op)
                assert (part == wanted).all()


def test_news_are_read_after_so_many_calls(comm: Intracomm) -> None:
    """Now and then a call takes the general path; ranks may do so at different times."""
    data, ways = filled(comm), []
    for turn in range(3 * fast_dispatch.NEWS_EVERY):
        recv = np.zeros(COUNT)
        comm.Allreduce([data, MPI.DOUBLE] if turn == 10 * comm.rank else data, recv)
        ways.append(went_the_short_way(comm))
        assert (recv == total(comm)).all()
    assert not HERE or 2 <= ways.count(False) <= 8


@pytest.mark.skipif(not HERE, reason="no shared memory")
def test_another_thread_is_refused_while_the_long_way_is_gone(comm: Intracomm) -> None:
    def refused() -> None:
        for call in PLAIN.values():
            with pytest.raises(RuntimeError, match="another collective is being called on this communicator"):
                call(comm)

    warm(comm)
    comm._scope.channel.alone.call(refused)
    warm(comm)
    assert went_the_short_way(comm)


@pytest.mark.skipif(not HERE, reason="no shared memory")
def test_no_call_is_made_while_compiled_code_makes_another(comm: Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    warm(comm)
    monkeypatch.setattr(interrupted_calls, "_is_being_made", lambda: True)
    comm.Iallreduce(filled(comm), np.zeros(COUNT)).Wait()
    job = comm._scope.channel.node.blocking
    job[words.STATE] = words.WORKING  # as in a long call of another thread
    try:
        calls = [*PLAIN.values(), lambda comm: comm.Iallreduce(filled(comm), np.zeros(COUNT))]
        for call in calls:
            with pytest.raises(RuntimeError, match="another collective is being called on this communicator"):
                call(comm)
    finally:
        job[words.STATE] = words.IDLE
    warm(comm)
    assert went_the_short_way(comm)


@pytest.mark.skipif(not HERE, reason="no shared memory")
def test_another_thread_is_refused_while_compiled_code_makes_a_long_call(comm: Intracomm) -> None:
    """Compiled code lets other threads run meanwhile."""
    data = np.ones(1 << 21)
    comm.Allreduce(MPI.IN_PLACE, data)
    refused, ended = [], threading.Event()

    def call() -> None:
        while not ended.is_set():
            job = comm._scope.channel.node.blocking
            if job[words.STATE] == words.IDLE:
                continue
            try:
                refuse_if_running(comm._scope.channel)
            except RuntimeError as error:
                refused.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    until = time.monotonic() + TIMEOUT
    here = np.zeros(1)
    while not here[0] and time.monotonic() < until:
        comm.Allreduce(MPI.IN_PLACE, data)
        here[0] = bool(refused)
        comm.Allreduce(MPI.IN_PLACE, here, MPI.MIN)
    ended.set()
    thread.join()
    assert here[0]
    assert "another collective is being called" in refused[0]
